"""Llama weights in a GGUF file: their names, the order of their rows, the config they imply."""

import dataclasses
import functools
import math
import re
from collections.abc import Iterator
from typing import Any

import numpy as np

from eagle3_jax.files.gguf_file import GgufFile
from eagle3_jax.files.source import FileError

CHUNK_ELEMENTS = 1 << 22
"""Elements dequantised at a time."""

LAYER_TENSORS = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
"""`blk.i.NAME` -> `model.layers.i.NAME`."""

ATTENTION = ("attn_q", "attn_k", "attn_v", "attn_output")
MLP = ("ffn_gate", "ffn_up", "ffn_down")

KNOWN_KEYS = {
    "vocab_size",
    "context_length",
    "embedding_length",
    "block_count",
    "feed_forward_length",
    "attention.head_count",
    "attention.head_count_kv",
    "attention.key_length",
    "attention.value_length",
    "attention.layer_norm_rms_epsilon",
    "rope.dimension_count",
    "rope.freq_base",
    "rope.scaling.type",
    "rope.scaling.original_context_length",
    "expert_count",
    "expert_used_count",
}
"""Every `llama.*` key that is understood; any other is refused, it may change the model."""

LLAMA3_LOW, LLAMA3_HIGH, LLAMA3_CONTEXT = 1.0, 4.0, 8192
"""The llama3 RoPE constants of every published Llama 3.1, 3.2 and 3.3; a GGUF file stores only
the divisors they give."""


@dataclasses.dataclass(frozen=True)
class Weight:
    """One tensor to write: its Hugging Face name and shape, and how to read it.

    `heads`: for query and key projections, whose rows GGUF stores in another order (`head_order`).
    """

    name: str
    shape: tuple[int, ...]
    tensor: Any
    heads: int | None = None

    def chunks(self) -> Iterator[np.ndarray]:
        """The values as float32, some rows at a time. Quantisation blocks lie within a row."""
        import gguf.quants

        data, kind = self.tensor.data, self.tensor.tensor_type
        rows = self.shape[0]
        order = np.arange(rows) if self.heads is None else head_order(rows, self.heads)
        if len(self.shape) == 1:
            yield gguf.quants.dequantize(data, kind).astype("<f4", copy=False)[order]
            return
        step = max(1, CHUNK_ELEMENTS // self.shape[1])
        for start in range(0, rows, step):
            part = np.ascontiguousarray(data[order[start : start + step]])
            yield gguf.quants.dequantize(part, kind).astype("<f4", copy=False)


def head_order(rows: int, heads: int) -> np.ndarray:
    """The GGUF row of each Hugging Face row of a query or key projection.

    Hugging Face rotates dimension i of a head with i + H/2, llama.cpp's llama graph rotates 2i with
    2i + 1. The pair (i, half) of a head therefore lies at row `half * H/2 + i` here and `2i + half`
    there.
    """
    pairs = np.arange(rows).reshape(heads, rows // heads // 2, 2)
    return pairs.transpose(0, 2, 1).reshape(rows)


@dataclasses.dataclass(frozen=True)
class GgufLlama:
    """A Llama as a GGUF file holds it: Hugging Face config keys and the weights in file order."""

    config: dict[str, Any]
    weights: tuple[Weight, ...]


def read_llama(file: GgufFile) -> GgufLlama:
    """Reads and checks config and tensors; nothing is dequantised yet.

    Raises:
      FileError: a key or tensor that is missing, unknown, of the wrong type or shape, or a
        feature that `LlamaForCausalLM` lacks (experts, partial or scaled RoPE other than llama3).
    """
    unknown = [
        key
        for key in file.fields
        if key.startswith("llama.") and key.removeprefix("llama.") not in KNOWN_KEYS
    ]
    if unknown:
        raise FileError(f"{file.path}: key {unknown[0]!r} is not supported")
    if file.optional("llama.expert_count", int, 0):
        raise FileError(f"{file.path}: llama.expert_count is not 0: experts are not supported")
    sizes = _Sizes.read(file)
    has = functools.partial(_has_biases, file)
    attention_bias, mlp_bias = has(ATTENTION, sizes.layers), has(MLP, sizes.layers)
    weights = _weights(file, sizes, attention_bias, mlp_bias)
    theta = _shortest(file.optional("llama.rope.freq_base", float, 10000.0))
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": sizes.hidden,
        "intermediate_size": sizes.mlp,
        "num_hidden_layers": sizes.layers,
        "num_attention_heads": sizes.heads,
        "num_key_value_heads": sizes.kv_heads,
        "head_dim": sizes.head_dim,
        "vocab_size": sizes.vocab,
        "max_position_embeddings": file.value("llama.context_length", int),
        "rms_norm_eps": _shortest(file.value("llama.attention.layer_norm_rms_epsilon", float)),
        "rope_theta": theta,
        "rope_scaling": _rope_scaling(file, theta, sizes.head_dim),
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "attention_bias": attention_bias,
        "mlp_bias": mlp_bias,
        "torch_dtype": "float32",
    }
    return GgufLlama(config, weights)


@dataclasses.dataclass(frozen=True)
class _Sizes:
    hidden: int
    mlp: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int

    @classmethod
    def read(cls, file: GgufFile) -> "_Sizes":
        hidden = file.value("llama.embedding_length", int)
        heads = file.value("llama.attention.head_count", int)
        kv_heads = file.optional("llama.attention.head_count_kv", int, heads)
        numbers = (hidden, heads, kv_heads)
        if min(numbers) < 1 or heads % kv_heads:
            raise FileError(f"{file.path}: width, heads and kv heads are {numbers}")
        head_dim = file.optional("llama.attention.key_length", int, hidden // heads)
        for key in ("attention.value_length", "rope.dimension_count"):
            found = file.optional(f"llama.{key}", int, head_dim)
            if found != head_dim:
                raise FileError(f"{file.path}: llama.{key} is {found}, expected {head_dim}")
        if head_dim % 2:
            raise FileError(f"{file.path}: heads of {head_dim} dimensions cannot be rotated")
        if "token_embd.weight" not in file.tensors:
            raise FileError(f"{file.path}: tensor 'token_embd.weight' is missing")
        vocab = int(file.tensors["token_embd.weight"].shape[-1])
        said = file.optional("llama.vocab_size", int, vocab)
        if said != vocab:
            raise FileError(f"{file.path}: llama.vocab_size is {said}, the embedding has {vocab}")
        return cls(
            hidden,
            file.value("llama.feed_forward_length", int),
            file.value("llama.block_count", int),
            heads,
            kv_heads,
            head_dim,
            vocab,
        )

    def shapes(self) -> dict[str, tuple[int, ...]]:
        q, kv = self.heads * self.head_dim, self.kv_heads * self.head_dim
        return {
            "attn_norm": (self.hidden,),
            "attn_q": (q, self.hidden),
            "attn_k": (kv, self.hidden),
            "attn_v": (kv, self.hidden),
            "attn_output": (self.hidden, q),
            "ffn_norm": (self.hidden,),
            "ffn_gate": (self.mlp, self.hidden),
            "ffn_up": (self.mlp, self.hidden),
            "ffn_down": (self.hidden, self.mlp),
        }


def _has_biases(file: GgufFile, modules: tuple[str, ...], layers: int) -> bool:
    names = [f"blk.{i}.{module}.bias" for i in range(layers) for module in modules]
    found = [name in file.tensors for name in names]
    if any(found) and not all(found):
        present, absent = names[found.index(True)], names[found.index(False)]
        raise FileError(
            f"{file.path}: tensor {present!r} is there and {absent!r} is not: "
            "LlamaForCausalLM has all of these biases or none"
        )
    return any(found)


def _weights(
    file: GgufFile, sizes: _Sizes, attention_bias: bool, mlp_bias: bool
) -> tuple[Weight, ...]:
    heads = {"attn_q": sizes.heads, "attn_k": sizes.kv_heads}
    expected = {
        "token_embd.weight": ("model.embed_tokens.weight", (sizes.vocab, sizes.hidden), None),
        "output_norm.weight": ("model.norm.weight", (sizes.hidden,), None),
    }
    if "output.weight" in file.tensors:
        expected["output.weight"] = ("lm_head.weight", (sizes.vocab, sizes.hidden), None)
    for i in range(sizes.layers):
        for module, shape in sizes.shapes().items():
            name = f"model.layers.{i}.{LAYER_TENSORS[module]}"
            rows = heads.get(module)
            expected[f"blk.{i}.{module}.weight"] = (f"{name}.weight", shape, rows)
            if (attention_bias and module in ATTENTION) or (mlp_bias and module in MLP):
                expected[f"blk.{i}.{module}.bias"] = (f"{name}.bias", shape[:1], rows)
    unknown = [
        name for name in file.tensors if name not in expected and name != "rope_freqs.weight"
    ]
    if unknown:
        raise FileError(f"{file.path}: tensor {unknown[0]!r} has no place in LlamaForCausalLM")
    weights = []
    for source, (name, shape, rows) in expected.items():
        if source not in file.tensors:
            raise FileError(f"{file.path}: tensor {source!r} is missing")
        tensor = file.tensors[source]
        found = tuple(int(n) for n in reversed(tensor.shape))
        if found != shape:
            raise FileError(f"{file.path}: tensor {source!r} is {found}, expected {shape}")
        weights.append(Weight(name, shape, tensor, rows))
    _check_quantisation(file, weights)
    return tuple(sorted(weights, key=lambda weight: _natural(weight.name)))


def _natural(name: str) -> list[tuple[bool, int, str]]:
    return [(p.isdigit(), int(p) if p.isdigit() else 0, p) for p in re.split(r"(\d+)", name)]


def _check_quantisation(file: GgufFile, weights: list[Weight]):
    import gguf.quants

    for kind, weight in {w.tensor.tensor_type: w for w in weights}.items():
        try:
            gguf.quants.dequantize(np.ascontiguousarray(weight.tensor.data[:1]), kind)
        except NotImplementedError:
            raise FileError(
                f"{file.path}: tensor {weight.tensor.name!r} is {kind.name}, which the gguf "
                "package cannot dequantise"
            ) from None


def _rope_scaling(file: GgufFile, theta: float, head_dim: int) -> dict[str, Any] | None:
    kind = file.optional("llama.rope.scaling.type", str, "none")
    if kind != "none":
        raise FileError(f"{file.path}: llama.rope.scaling.type is {kind!r}, supported: 'none'")
    if "rope_freqs.weight" not in file.tensors:
        return None
    tensor = file.tensors["rope_freqs.weight"]
    if tensor.data.dtype != np.float32 or tensor.data.shape != (head_dim // 2,):
        raise FileError(
            f"{file.path}: tensor 'rope_freqs.weight' is {tensor.data.dtype} "
            f"{tensor.data.shape}, expected float32 {(head_dim // 2,)}"
        )
    found = np.asarray(tensor.data, np.float64)
    context = file.optional("llama.rope.scaling.original_context_length", int, LLAMA3_CONTEXT)
    factor = float(found.max())
    expected = _llama3_divisors(theta, head_dim, factor, context)
    if not np.allclose(found, expected, rtol=1e-5, atol=0):
        raise FileError(
            f"{file.path}: tensor 'rope_freqs.weight' is not llama3 scaling with factor {factor}, "
            f"low {LLAMA3_LOW}, high {LLAMA3_HIGH} and original context {context}"
        )
    return {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": LLAMA3_LOW,
        "high_freq_factor": LLAMA3_HIGH,
        "original_max_position_embeddings": context,
    }


def _llama3_divisors(theta: float, head_dim: int, factor: float, context: int) -> np.ndarray:
    """What llama3 scaling divides each frequency by: `factor` for waves longer than
    context / low, nothing for those shorter than context / high, blended between.
    """
    turns = context * theta ** (-np.arange(0, head_dim, 2) / head_dim) / (2 * math.pi)
    kept = np.clip((turns - LLAMA3_LOW) / (LLAMA3_HIGH - LLAMA3_LOW), 0, 1)
    return 1 / (kept + (1 - kept) / factor)


def _shortest(value: float) -> float:
    """The shortest decimal that is the same float32: 1e-05, not 9.999999747378752e-06."""
    return float(str(np.float32(value)))

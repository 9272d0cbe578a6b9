"""A tiny Llama GGUF file with every part open to change, for test_gguf.py and test_tokenizer.py."""

import dataclasses
from pathlib import Path

import gguf
import numpy as np
from tokenizers.pre_tokenizers import ByteLevel

F32 = gguf.GGMLQuantizationType.F32
NORMAL, CONTROL, USER_DEFINED = 1, 3, 4
HIDDEN, MLP, LAYERS, HEADS, KV_HEADS, HEAD_DIM = 64, 96, 2, 4, 2, 16

MERGES = ["1 2", "12 3", "123 4", "' s", "' S", "h e", "Ġ he"]
SPECIAL = ["<|bos|>", "<|eos|>", "<|pad|>"]
LONE = "zebra"  # a token that no merge reaches


@dataclasses.dataclass
class TinyGguf:
    """Keys, tokens and tensors; `kinds` gives tensors another type than float32."""

    keys: dict[str, object]
    tokens: list[str]
    types: list[int]
    merges: list[str]
    tensors: dict[str, np.ndarray]
    kinds: dict[str, gguf.GGMLQuantizationType] = dataclasses.field(default_factory=dict)
    architecture: str = "llama"

    def write(self, path: Path) -> Path:
        writer = gguf.GGUFWriter(path, self.architecture)
        for key, value in self.keys.items():
            if isinstance(value, bool):
                writer.add_bool(key, value)
            elif isinstance(value, int):
                writer.add_uint32(key, value)
            elif isinstance(value, float):
                writer.add_float32(key, value)
            else:
                writer.add_string(key, str(value))
        writer.add_token_list(self.tokens)
        writer.add_token_types(self.types)
        if self.merges:
            writer.add_token_merges(self.merges)
        for name, value in self.tensors.items():
            kind = self.kinds.get(name, F32)
            writer.add_tensor(name, gguf.quants.quantize(value, kind), raw_dtype=kind)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return path


def tiny(*, tied: bool = True, attention_bias: bool = False, mlp_bias: bool = False) -> TinyGguf:
    """Two layers, grouped queries, a vocabulary of all bytes, seven merges and three specials."""
    random = np.random.default_rng(0)
    merged = ["".join(m.split(" ")) for m in MERGES]
    tokens = [*SPECIAL, *sorted(ByteLevel.alphabet()), *merged, LONE]
    types = [CONTROL] * len(SPECIAL) + [NORMAL] * (len(tokens) - len(SPECIAL))
    shapes: dict[str, tuple[int, ...]] = {"token_embd.weight": (len(tokens), HIDDEN)}
    q, kv = HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM
    for i in range(LAYERS):
        attention = {"attn_q": (q, HIDDEN), "attn_k": (kv, HIDDEN), "attn_v": (kv, HIDDEN)}
        attention["attn_output"] = (HIDDEN, q)
        mlp = {"ffn_gate": (MLP, HIDDEN), "ffn_up": (MLP, HIDDEN), "ffn_down": (HIDDEN, MLP)}
        for name, shape in (attention | mlp).items():
            shapes[f"blk.{i}.{name}.weight"] = shape
            if attention_bias if name in attention else mlp_bias:
                shapes[f"blk.{i}.{name}.bias"] = shape[:1]
        for name in ("attn_norm", "ffn_norm"):
            shapes[f"blk.{i}.{name}.weight"] = (HIDDEN,)
    shapes["output_norm.weight"] = (HIDDEN,)
    if not tied:
        shapes["output.weight"] = (len(tokens), HIDDEN)
    return TinyGguf(
        keys={
            "llama.context_length": 256,
            "llama.embedding_length": HIDDEN,
            "llama.feed_forward_length": MLP,
            "llama.block_count": LAYERS,
            "llama.attention.head_count": HEADS,
            "llama.attention.head_count_kv": KV_HEADS,
            "llama.attention.layer_norm_rms_epsilon": 1e-6,
            "llama.rope.freq_base": 5000.0,
            "llama.rope.dimension_count": HEAD_DIM,
            "llama.vocab_size": len(tokens),
            "tokenizer.ggml.model": "gpt2",
            "tokenizer.ggml.pre": "smollm",
            "tokenizer.ggml.bos_token_id": 0,
            "tokenizer.ggml.eos_token_id": 1,
            "tokenizer.ggml.padding_token_id": 2,
            "tokenizer.chat_template": "{% for m in messages %}{{ m.content }}{% endfor %}",
        },
        tokens=tokens,
        types=types,
        merges=list(MERGES),
        tensors={n: random.standard_normal(s).astype(np.float32) for n, s in shapes.items()},
    )

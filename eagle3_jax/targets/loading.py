"""From a Hugging Face folder to a target: config checked, every tensor used or known unused."""

import os
from pathlib import Path
from typing import Any

import numpy as np
from flax import nnx

from eagle3_jax.config import ConfigError, TargetConfig
from eagle3_jax.files.shards import open_weights, read_json
from eagle3_jax.modules import Folder, build
from eagle3_jax.precision import precision
from eagle3_jax.rope_config import read_rope
from eagle3_jax.source_config import SourceConfig
from eagle3_jax.targets.llama import LlamaTarget, checkpoint_name

ARCHITECTURES = {"LlamaForCausalLM": LlamaTarget}
UNUSED_SUFFIXES = ("rotary_emb.inv_freq", "rotary_emb.cos_cached", "rotary_emb.sin_cached")


def load_target(path: str | os.PathLike, *, dtype: str = "float32") -> LlamaTarget:
    """Loads a target from config.json and safetensors (one file or shards).

    Args:
      path: the folder.
      dtype: of weights and activations: float32, bfloat16, float16, or float64 with x64 on.

    Raises:
      ConfigError, FileError: an unsupported architecture, a missing, unknown or misshapen tensor;
        the message names file, tensor, found and expected.
    """
    precision(dtype)
    folder = Path(path)
    raw = read_json(folder / "config.json")
    architecture = _architecture(raw, folder)
    source = open_weights(folder)
    available = set(source.names())
    try:
        config = llama_config(raw, architecture, available, eos_token_ids(folder, raw))
    except (ConfigError, KeyError, TypeError) as error:
        what = f"key {error} is missing" if isinstance(error, KeyError) else error
        raise ConfigError(f"{folder / 'config.json'}: {what}") from None

    used: set[str] = set()

    def read(name: str) -> np.ndarray:
        used.add(checkpoint_name(name))
        return source.read(checkpoint_name(name))

    try:
        target = build(
            lambda: ARCHITECTURES[architecture](config, rngs=nnx.Rngs(0)),
            read,
            _Renamed(available),
            dtype,
        )
    except ConfigError as error:
        raise ConfigError(f"{folder}: {error}") from None
    unused = {n for n in available - used if not n.endswith(UNUSED_SUFFIXES)}
    if config.tie_word_embeddings:
        unused.discard("lm_head.weight")
    if unused:
        raise ConfigError(
            f"{folder}: {len(unused)} tensors have no place in {architecture}: "
            f"{', '.join(sorted(unused)[:4])}"
        )
    target.folder = Folder(folder)
    return target


class _Renamed(dict):
    """Membership of our names among the checkpoint's."""

    def __init__(self, available: set[str]):
        super().__init__()
        self._available = available

    def __contains__(self, name: object) -> bool:
        return checkpoint_name(str(name)) in self._available


def _architecture(raw: dict[str, Any], folder: Path) -> str:
    names = raw.get("architectures") or []
    for name in names:
        if name in ARCHITECTURES:
            return name
    raise ConfigError(
        f"{folder / 'config.json'}: architectures is {names}, supported as a target: "
        f"{', '.join(ARCHITECTURES)}"
    )


def eos_token_ids(folder: Path, raw: dict[str, Any]) -> tuple[int, ...]:
    """Stop ids: generation_config.json's when it has some, else config.json's."""
    value = None
    generation = folder / "generation_config.json"
    if generation.exists():
        value = read_json(generation).get("eos_token_id")
    if value is None:
        value = raw.get("eos_token_id")
    if value is None:
        return ()
    return tuple(value) if isinstance(value, list) else (value,)


def llama_config(
    raw: dict[str, Any], architecture: str, available: set[str], eos: tuple[int, ...]
) -> TargetConfig:
    """Hugging Face keys -> `TargetConfig`; biases and tying are decided by the tensors present.

    Raises:
      ConfigError, KeyError: a missing key, an activation other than silu, a scaled RoPE other than
        llama3, or a bias announced that no tensor has.
    """
    heads = raw["num_attention_heads"]
    activation = raw.get("hidden_act") or "silu"
    if activation not in ("silu", "swish"):
        raise ConfigError(f"hidden_act is {activation!r}, supported: silu")
    if raw.get("pretraining_tp") not in (None, 1):
        raise ConfigError(f"pretraining_tp is {raw['pretraining_tp']}, supported: 1")
    layer = "model.layers.0."
    biases = {
        "qkv_bias": f"{layer}self_attn.q_proj.bias",
        "output_bias": f"{layer}self_attn.o_proj.bias",
        "mlp_bias": f"{layer}mlp.gate_proj.bias",
    }
    found = {key: name in available for key, name in biases.items()}
    for key, names in (
        ("attention_bias", ("qkv_bias", "output_bias")),
        ("mlp_bias", ("mlp_bias",)),
    ):
        if raw.get(key) and not all(found[n] for n in names):
            raise ConfigError(f"{key} is true, but the weights have no such bias tensors")
    tied = bool(raw.get("tie_word_embeddings"))
    if not tied and "lm_head.weight" not in available:
        raise ConfigError("tie_word_embeddings is not true, but lm_head.weight is missing")
    return TargetConfig(
        architecture=architecture,
        hidden_size=raw["hidden_size"],
        intermediate_size=raw["intermediate_size"],
        num_layers=raw["num_hidden_layers"],
        num_heads=heads,
        num_kv_heads=raw.get("num_key_value_heads") or heads,
        head_dim=raw.get("head_dim") or raw["hidden_size"] // heads,
        vocab_size=raw["vocab_size"],
        rms_norm_eps=raw["rms_norm_eps"],
        rope=read_rope(SourceConfig(raw, "config.json")).effective,
        max_position_embeddings=raw["max_position_embeddings"],
        tie_word_embeddings=tied,
        eos_token_ids=eos,
        bos_token_id=raw.get("bos_token_id"),
        **found,
    )

"""From a Hugging Face folder to a target: config checked, every tensor used or known unused."""

import dataclasses
import os
import re
from collections.abc import Iterable
from pathlib import Path

import numpy as np
from flax import nnx

from eagle3_jax import memory
from eagle3_jax.config import ConfigError, TargetConfig
from eagle3_jax.files.shards import FileError, TensorSource, open_weights, read_json
from eagle3_jax.findings import ConvertError
from eagle3_jax.modules import Folder, build
from eagle3_jax.precision import precision
from eagle3_jax.rope_config import read_rope
from eagle3_jax.source_config import SourceConfig, shorten
from eagle3_jax.targets.llama import LlamaTarget, checkpoint_name, tensor_shapes

ARCHITECTURES = {"LlamaForCausalLM": LlamaTarget}
UNUSED_SUFFIXES = ("rotary_emb.inv_freq", "rotary_emb.cos_cached", "rotary_emb.sin_cached")
PLAIN_DTYPES = ("float32", "bfloat16", "float16", "float64")
BIASED = {
    "attention_bias": (
        "self_attn.q_proj",
        "self_attn.k_proj",
        "self_attn.v_proj",
        "self_attn.o_proj",
    ),
    "mlp_bias": ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"),
}


def load_target(path: str | os.PathLike, *, dtype: str = "float32") -> LlamaTarget:
    """Loads a target from config.json and safetensors (one file or shards).

    Args:
      path: the folder.
      dtype: of weights and activations: float32, bfloat16, float16, or float64 with x64 on.

    Raises:
      ConfigError, FileError: an unsupported architecture, a config that disagrees with the weights,
        a missing, unknown or misshapen tensor; the message names file, key or tensor, found and
        expected. Everything is checked before the first tensor is read.
      NotEnoughMemoryError: the weights exceed what is free, with both numbers.
    """
    precision(dtype)
    folder = Path(path)
    if not folder.is_dir():
        raise FileError(f"{folder}: no such folder, expected one with config.json and weights")
    file = folder / "config.json"
    raw = read_json(file)
    try:
        source_config = SourceConfig(raw, str(file))
        architecture = _architecture(source_config)
        source = open_weights(folder)
        config = llama_config(source_config, architecture)
        eos = eos_token_ids(folder, source_config, config.vocab_size)
    except ConvertError as error:
        # The converter's readers; their hints name flags that exist only there.
        raise ConfigError(re.sub(r"[;:] --[a-z-]+ [a-z ]+$", "", str(error))) from None
    config = dataclasses.replace(config, eos_token_ids=eos)
    _check_tensors(config, source, folder)
    memory.check_weights(str(folder), tensor_shapes(config).values(), dtype)
    target = build(
        lambda: ARCHITECTURES[architecture](config, rngs=nnx.Rngs(0)),
        lambda name: source.read(checkpoint_name(name)),
        _Renamed(source.names()),
        dtype,
    )
    target.folder = Folder(folder)
    return target


class _Renamed(dict):
    """Membership of our names among the checkpoint's."""

    def __init__(self, available: Iterable[str]):
        super().__init__()
        self._available = frozenset(available)

    def __contains__(self, name: object) -> bool:
        return checkpoint_name(str(name)) in self._available


def _architecture(config: SourceConfig) -> str:
    for name in config.architectures:
        if name in ARCHITECTURES:
            return name
    raise ConfigError(
        f"{config.where}: architectures is {shorten(config.raw.get('architectures'))}, supported "
        f"as a target: {', '.join(ARCHITECTURES)}"
    )


def eos_token_ids(folder: Path, config: SourceConfig, vocab_size: int) -> tuple[int, ...]:
    """Stop ids: generation_config.json's when it has some, else config.json's.

    Raises:
      ConvertError: something else than an id of the vocabulary, a list of them, or null.
    """
    generation = folder / "generation_config.json"
    places = [config]
    if generation.exists():
        places.insert(0, SourceConfig(read_json(generation), str(generation)))
    for place in places:
        field = place.top("eos_token_id")
        if field is None:
            continue
        ids = field.value if isinstance(field.value, list) else [field.value]
        if not all(type(i) is int and 0 <= i < vocab_size for i in ids):
            raise place.wrong(field, f"token ids in 0..{vocab_size - 1}")
        return tuple(ids)
    return ()


def llama_config(config: SourceConfig, architecture: str) -> TargetConfig:
    """Hugging Face keys -> `TargetConfig`, with the defaults of transformers' `LlamaConfig`.

    Raises:
      ConfigError, ConvertError: a missing key, a value of another type or range, an activation
        other than silu, a scaled RoPE other than llama3, quantised weights.
    """

    def size(key: str, default: int | None = None) -> int:
        value = config.integer(config.top(key))
        if value is None and default is None:
            raise ConfigError(f"{config.where}: {key} is missing, expected a positive integer")
        return default if value is None else value  # type: ignore[return-value]

    hidden, heads = size("hidden_size"), size("num_attention_heads")
    kv_heads = size("num_key_value_heads", heads)
    if heads % kv_heads:
        raise ConfigError(
            f"{config.where}: num_attention_heads is {heads}, expected a multiple of "
            f"num_key_value_heads {kv_heads}"
        )
    if config.top("head_dim") is None and hidden % heads:
        raise ConfigError(
            f"{config.where}: hidden_size is {hidden}, expected a multiple of num_attention_heads "
            f"{heads}, since there is no head_dim"
        )
    eps = config.number(config.top("rms_norm_eps"))
    if eps is None:
        raise ConfigError(f"{config.where}: rms_norm_eps is missing, expected a number above 0")
    activation = config.text(config.top("hidden_act"))
    if activation not in (None, "silu", "swish"):
        raise ConfigError(f"{config.where}: hidden_act is {activation!r}, supported: silu")
    for scaling in config.scalings():
        raise ConfigError(
            f"{config.where}: {scaling.key} is {shorten(scaling.value)}, which {architecture} "
            "does not have"
        )
    if size("pretraining_tp", 1) != 1:
        raise ConfigError(
            f"{config.where}: pretraining_tp is {config.raw['pretraining_tp']}, supported: 1"
        )
    if config.top("quantization_config") is not None:
        raise ConfigError(
            f"{config.where}: has a quantization_config, expected weights in "
            f"{', '.join(PLAIN_DTYPES)}"
        )
    attention_bias = config.flag(config.top("attention_bias")) or False
    try:
        return TargetConfig(
            architecture=architecture,
            hidden_size=hidden,
            intermediate_size=size("intermediate_size"),
            num_layers=size("num_hidden_layers"),
            num_heads=heads,
            num_kv_heads=kv_heads,
            head_dim=size("head_dim", hidden // heads),
            vocab_size=size("vocab_size"),
            rms_norm_eps=eps,
            rope=read_rope(config).effective,
            max_position_embeddings=size("max_position_embeddings"),
            tie_word_embeddings=config.flag(config.top("tie_word_embeddings")) or False,
            qkv_bias=attention_bias,
            output_bias=attention_bias,
            mlp_bias=config.flag(config.top("mlp_bias")) or False,
            bos_token_id=config.integer(config.top("bos_token_id"), least=0),
        )
    except ConfigError as error:
        named = str(error).startswith(config.where)
        raise error if named else ConfigError(f"{config.where}: {error}") from None


def _check_tensors(config: TargetConfig, source: TensorSource, folder: Path):
    """Every tensor is the one the config asks for, or known to be unused."""
    names = {n for n in source.names() if not n.endswith(UNUSED_SUFFIXES)}
    _check_blocks(config.num_layers, names, folder)
    flags = {"attention_bias": config.qkv_bias, "mlp_bias": config.mlp_bias}
    for key, modules in BIASED.items():
        pattern = re.compile(rf"model\.layers\.[0-9]+\.({'|'.join(modules)})\.bias")
        biases = sorted(filter(pattern.fullmatch, names))
        if flags[key] and not biases:
            raise ConfigError(
                f"{folder / 'config.json'}: {key} is true, but the weights have no such tensor: "
                f"expected model.layers.0.{modules[0]}.bias"
            )
        if biases and not flags[key]:
            raise ConfigError(
                f"{folder / 'config.json'}: {key} is not true, but the weights have {biases[0]}"
            )
    shapes = tensor_shapes(config)
    missing = [name for name in shapes if name not in names]
    if missing == ["lm_head.weight"]:
        raise ConfigError(
            f"{folder}: tie_word_embeddings is not true, but tensor lm_head.weight is missing"
        )
    if missing:
        raise ConfigError(
            f"{folder}: tensor {missing[0]} is missing, expected shape {list(shapes[missing[0]])}"
            f"{_others(missing)}"
        )
    unknown = sorted(names - shapes.keys())
    if config.tie_word_embeddings and "lm_head.weight" in unknown:
        unknown.remove("lm_head.weight")
        _check_tied(source)
    if unknown:
        raise ConfigError(
            f"{source.where(unknown[0])}: tensor {unknown[0]} has no place in "
            f"{config.architecture}{_others(unknown)}"
        )
    for name, shape in shapes.items():
        where = f"{source.where(name)}: tensor {name}"
        if source.shape(name) != shape:
            raise ConfigError(
                f"{where} has shape {list(source.shape(name))}, expected {list(shape)} by "
                "config.json"
            )
        if source.dtype(name) not in PLAIN_DTYPES:
            raise ConfigError(
                f"{where} is {source.dtype(name)}, expected {', '.join(PLAIN_DTYPES)}"
            )


def _check_blocks(layers: int, names: set[str], folder: Path):
    found = {int(m[1]) for n in names if (m := re.match(r"model\.layers\.([0-9]{1,9})\.", n))}
    if len(found) == layers and max(found) == layers - 1:
        return
    if not found:
        raise ConfigError(
            f"{folder}: no tensor is named model.layers.0..., found {shorten(sorted(names)[:3])}"
        )
    whole = max(found) == len(found) - 1
    blocks = f"0..{max(found)}" if whole else shorten(sorted(found))
    raise ConfigError(
        f"{folder / 'config.json'}: num_hidden_layers is {layers}, but the weights have the blocks "
        f"{blocks}"
    )


def _check_tied(source: TensorSource):
    """A head beside a tied embedding is its copy, or engines disagree on which of them runs."""
    head, embedding = "lm_head.weight", "model.embed_tokens.weight"
    if not np.array_equal(source.read(head), source.read(embedding)):
        raise ConfigError(
            f"{source.where(head)}: tie_word_embeddings is true, but {head} differs from "
            f"{embedding}"
        )


def _others(names: list[str]) -> str:
    return "" if len(names) == 1 else f" (and {len(names) - 1} more)"

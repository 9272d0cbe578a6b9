"""Every tensor of a target's folder is the one its config asks for, or passed over by name."""

import re
from collections import Counter
from pathlib import Path

import numpy as np

from eagle3_jax.config import ConfigError, TargetConfig
from eagle3_jax.files.shards import TensorSource
from eagle3_jax.source_config import shorten
from eagle3_jax.targets.families import Family
from eagle3_jax.targets.llama import Names, tensor_shapes
from eagle3_jax.targets.reading import PLAIN_DTYPES

UNUSED_SUFFIXES = ("rotary_emb.inv_freq", "rotary_emb.cos_cached", "rotary_emb.sin_cached")
FIRST_ROW = "layers.0.self_attn.q_proj.weight"
EMBEDDING = "embed_tokens.weight"
QKV = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
MLP = ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")


def find_names(source: TensorSource, folder: Path, wrapped: bool) -> tuple[Names, list[str]]:
    """Where the language model's tensors stand; notes name the parts that are passed over.

    A plain model's stand under `model.`. A wrapper's are found by structure: the one prefix that
    has both an embedding and a first attention layer (`language_model.model.`,
    `model.language_model.`, `model.`).

    Raises:
      ConfigError: a wrapper with no such prefix, or with several.
    """
    if not wrapped:
        return Names(), []
    names = set(source.names())
    stems = sorted(
        name.removesuffix(EMBEDDING)
        for name in names
        if name.endswith(f".{EMBEDDING}") and name.removesuffix(EMBEDDING) + FIRST_ROW in names
    )
    if len(stems) != 1:
        raise ConfigError(
            f"{folder}: expected one prefix with {EMBEDDING} and {FIRST_ROW}, the text part of a "
            f"vision model, found {shorten(stems) if stems else 'none'}"
        )
    stem = stems[0]
    outside = ".".join([*stem.split(".")[:-2], "lm_head.weight"])
    head = outside if outside in names else "lm_head.weight"
    others = frozenset(name for name in names if not name.startswith(stem) and name != head)
    parts = Counter(_part(name, stem) for name in others)
    notes = [f"{folder}: text only; the tensors are under {stem}"]
    notes += [
        f"{folder}: {part}: passed over, {count} tensors" for part, count in sorted(parts.items())
    ]
    return Names(stem, head, others), notes


def _part(name: str, stem: str) -> str:
    """The module a tensor beside the text part belongs to."""
    pieces = name.split(".")
    return ".".join(pieces[: 2 if pieces[0] == stem.split(".")[0] else 1])


def check_tensors(
    config: TargetConfig, family: Family, names: Names, source: TensorSource, folder: Path
):
    """Refuses a folder whose tensors are not exactly those the config asks for.

    Raises:
      ConfigError: a missing, unknown, misshapen or quantised tensor, biases that disagree with
        their keys, another number of blocks, a tied head that differs.
    """
    found = {n for n in source.names() if not n.endswith(UNUSED_SUFFIXES)} - names.beside
    _check_blocks(config.num_layers, found, names.stem, folder)
    _check_biases(config, family, found, names.stem, folder)
    shapes = {names.of(name): shape for name, shape in tensor_shapes(config).items()}
    missing = [name for name in shapes if name not in found]
    if missing == [names.head]:
        raise ConfigError(
            f"{folder}: tie_word_embeddings is not true, but tensor {names.head} is missing"
        )
    if missing:
        raise ConfigError(
            f"{folder}: tensor {missing[0]} is missing, expected shape {list(shapes[missing[0]])}"
            f"{_others(missing)}"
        )
    unknown = sorted(found - shapes.keys())
    if config.tie_word_embeddings and names.head in unknown:
        unknown.remove(names.head)
        _check_tied(source, names)
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


def _check_blocks(layers: int, names: set[str], stem: str, folder: Path):
    pattern = re.compile(re.escape(stem) + r"layers\.([0-9]{1,9})\.")
    found = {int(m[1]) for n in names if (m := pattern.match(n))}
    if len(found) == layers and max(found) == layers - 1:
        return
    if not found:
        raise ConfigError(
            f"{folder}: no tensor is named {stem}layers.0..., found {shorten(sorted(names)[:3])}"
        )
    whole = max(found) == len(found) - 1
    blocks = f"0..{max(found)}" if whole else shorten(sorted(found))
    raise ConfigError(
        f"{folder / 'config.json'}: num_hidden_layers is {layers}, but the weights have the blocks "
        f"{blocks}"
    )


def _check_biases(config: TargetConfig, family: Family, names: set[str], stem: str, folder: Path):
    """A bias that a key decides is there when the key says so, and only then."""
    rules = (
        (family.qkv_bias, config.qkv_bias, (*QKV, "self_attn.o_proj")),
        (family.mlp_bias, config.mlp_bias, MLP),
    )
    for key, asked, modules in rules:
        if not isinstance(key, str):
            continue
        pattern = re.compile(rf"{re.escape(stem)}layers\.[0-9]+\.({'|'.join(modules)})\.bias")
        biases = sorted(filter(pattern.fullmatch, names))
        if asked and not biases:
            raise ConfigError(
                f"{folder / 'config.json'}: {key} is true, but the weights have no such tensor: "
                f"expected {stem}layers.0.{modules[0]}.bias"
            )
        if biases and not asked:
            raise ConfigError(
                f"{folder / 'config.json'}: {key} is not true, but the weights have {biases[0]}"
            )


def _check_tied(source: TensorSource, names: Names):
    """A head beside a tied embedding is its copy, or engines disagree on which of them runs."""
    embedding = names.of("embed.weight")
    if not np.array_equal(source.read(names.head), source.read(embedding)):
        raise ConfigError(
            f"{source.where(names.head)}: tie_word_embeddings is true, but {names.head} differs "
            f"from {embedding}"
        )


def _others(names: list[str]) -> str:
    return "" if len(names) == 1 else f" (and {len(names) - 1} more)"

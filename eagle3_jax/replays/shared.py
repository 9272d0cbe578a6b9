"""The target's embedding and head for a replay: of a target of any family, nothing else is read."""

import os
from pathlib import Path

import jax.numpy as jnp
import numpy as np

from eagle3_jax.config import ConfigError, DraftConfig
from eagle3_jax.draft import Shared
from eagle3_jax.files.shards import FileError, open_weights, read_json
from eagle3_jax.files.source import TensorSource
from eagle3_jax.findings import Findings
from eagle3_jax.precision import precision
from eagle3_jax.source_config import TargetFacts
from eagle3_jax.target_match import find_target_tensors

FLOATS = ("float32", "bfloat16", "float16", "float64")


def read_shared(
    folder: str | os.PathLike, config: DraftConfig, *, dtype: str = "float32"
) -> Shared | None:
    """What a draft needs of its target, found by names and shapes, never by architecture.

    Args:
      folder: the target's, with config.json (composite ones too) and safetensors.
      config: the draft's; None is returned when it needs nothing, and a matrix it does not need is
        left empty.

    Raises:
      FileError, ConfigError: no such folder, no single tensor that could be the one, another width
        or fewer rows than the draft's vocabulary, quantised weights.
    """
    if config.embed == "draft" and config.head == "draft":
        return None
    folder = Path(folder)
    if not folder.is_dir():
        raise FileError(f"{folder}: no such folder, expected the target's")
    file = folder / "config.json"
    facts = TargetFacts.read(read_json(file), str(file))
    if facts.hidden_size != config.target_hidden_size:
        raise ConfigError(
            f"{file}: hidden_size is {facts.hidden_size}, the draft takes states of width "
            f"{config.target_hidden_size}: they are not a pair"
        )
    source = open_weights(folder)
    found = find_target_tensors(source, facts, Findings())
    compute = precision(dtype).compute
    empty = jnp.zeros((0, config.hidden_size), compute)
    embedding, head = empty, empty
    if config.embed == "target":
        embedding = _read(source, found.embed, "embedding", folder, config, compute)
    if config.head == "target":
        name = found.embed if found.tied else found.head
        head = _read(source, name, "head", folder, config, compute)
    return Shared(embedding, head)


def _read(
    source: TensorSource,
    name: str | None,
    what: str,
    folder: Path,
    config: DraftConfig,
    compute: np.dtype,
) -> jnp.ndarray:
    V, D = config.vocab_size, config.hidden_size
    if name is None:
        raise ConfigError(
            f"{folder}: no single tensor is the target's {what}, expected one of shape [>= {V}, "
            f"{D}] named such as model.embed_tokens.weight or lm_head.weight"
        )
    where = f"{source.where(name)}: tensor {name}"
    if source.dtype(name) not in FLOATS:
        raise ConfigError(f"{where} is {source.dtype(name)}, expected {', '.join(FLOATS)}")
    if source.shape(name)[0] < V:
        raise ConfigError(f"{where} has {source.shape(name)[0]} rows, the draft's vocabulary {V}")
    return jnp.asarray(source.read(name)[:V].astype(compute))

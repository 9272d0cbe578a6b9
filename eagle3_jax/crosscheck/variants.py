"""A draft with one thing wrong, to see whether that is what an engine computed."""

import dataclasses
from collections.abc import Iterator

import jax.numpy as jnp
import numpy as np
from flax import nnx

from eagle3_jax.config import ConfigError
from eagle3_jax.draft import Eagle3Draft
from eagle3_jax.draft_config import DraftConfig
from eagle3_jax.layers import RMSNorm


@dataclasses.dataclass(frozen=True)
class Variant:
    """A wrong draft. `maps` when only its vocabulary map differs."""

    code: str
    words: str
    draft: Eagle3Draft
    maps: bool = False


def with_map(draft: Eagle3Draft, ids: np.ndarray) -> Eagle3Draft:
    """The draft with another table of target ids; repeated ids are allowed here."""
    graphdef, state = nnx.split(draft)
    made: Eagle3Draft = nnx.merge(graphdef, state)
    made.draft_to_target = type(draft.draft_to_target)(jnp.asarray(ids, jnp.int32))
    return made


def with_config(draft: Eagle3Draft, config: DraftConfig) -> Eagle3Draft:
    """The draft with other switches; a norm it has no weights for gets ones."""
    graphdef, state = nnx.split(draft)
    made: Eagle3Draft = nnx.merge(graphdef, state)
    made.config = config
    for layer in made.layers:
        layer.config = config
    eps, shape = config.rms_norm_eps, (config.num_aux, config.target_hidden_size)
    dtype = draft.dtype
    if not config.fc_norm:
        made.fc_norm = nnx.data(None)
    elif made.fc_norm is None:
        made.fc_norm = nnx.data(_ones(shape, eps, dtype))
    if not config.norm_before_fc:
        made.input_norm = nnx.data(None)
    elif made.input_norm is None:
        made.input_norm = nnx.data(_ones((shape[0] * shape[1],), eps, dtype))
    if not config.final_norm:
        made.norm_final = nnx.data(None)
    return made


def _ones(shape: tuple[int, ...], eps: float, dtype: jnp.dtype) -> RMSNorm:
    made = RMSNorm(shape, eps)
    made.weight[...] = jnp.ones(shape, dtype)
    return made


def map_variants(draft: Eagle3Draft) -> Iterator[Variant]:
    """Wrong readings of d2t: its offsets as ids, the draft's ids as the target's, twice applied."""
    ids = np.asarray(draft.draft_to_target[...]).astype(np.int64)
    index = np.arange(len(ids))
    offsets = ids - index
    tables = {
        "VOCAB_MAP_OFFSETS_AS_IDS": (
            offsets,
            "d2t read as ids: its offsets were taken for target ids",
        ),
        "VOCAB_MAP_DROPPED": (index, "d2t dropped: draft ids were taken for target ids"),
        "VOCAB_MAP_TWICE": (ids + offsets, "d2t added twice: target ids were taken for offsets"),
    }
    for code, (table, words) in tables.items():
        if (table != ids).any():
            inside = np.clip(table, 0, draft.config.vocab_size - 1)
            yield Variant(code, words, with_map(draft, inside), maps=True)


def flag_variants(draft: Eagle3Draft) -> Iterator[Variant]:
    """One switch of the config the other way, where the tensors allow it."""
    config = draft.config
    other = "post_norm" if config.feedback == "pre_norm" else "pre_norm"
    changes = [
        ("norm_before_residual", not config.norm_before_residual, "NORM_RESIDUAL_SOURCE"),
        ("feedback", other, "NORM_FEEDBACK"),
        ("double_norm", not config.double_norm, "NORM_DOUBLE"),
        ("final_norm", False, "NORM_FINAL"),
        ("fc_norm", not config.fc_norm, "NORM_BEFORE_FC"),
        ("norm_before_fc", not config.norm_before_fc, "NORM_BEFORE_FC"),
    ]
    for name, value, code in changes:
        if getattr(config, name) == value:
            continue
        try:
            changed = dataclasses.replace(config, **{name: value})
        except ConfigError:
            continue
        shown = str(value).lower()
        words = f"norm flag flipped: {name}={shown}, the draft has {_shown(config, name)}"
        yield Variant(code, words, with_config(draft, changed))


def capture_variants(draft: Eagle3Draft, boundaries: tuple, layers: int) -> Iterator[Variant]:
    """Every boundary one layer early or late, slots in reverse order."""
    numbers = [b for b in boundaries if isinstance(b, int)]
    if len(numbers) != len(boundaries):
        return
    for step, word in ((-1, "early"), (1, "late")):
        moved = tuple(b + step for b in numbers)
        if min(moved) >= 0 and max(moved) <= layers:
            changed = dataclasses.replace(draft.config, aux_boundaries=moved)
            words = f"aux states one layer {word}: boundaries {moved} for {tuple(numbers)}"
            yield Variant("AUX_SHIFTED", words, with_config(draft, changed))
    if len(numbers) > 1:
        turned = tuple(reversed(numbers))
        changed = dataclasses.replace(draft.config, aux_boundaries=turned)
        words = f"aux states in another order: {turned} for {tuple(numbers)}"
        yield Variant("AUX_ORDER", words, with_config(draft, changed))


def _shown(config: DraftConfig, name: str) -> str:
    return str(getattr(config, name)).lower()

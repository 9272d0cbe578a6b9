"""Rotary embedding: frequencies of every kind of scaling, and the rotation itself."""

import jax
import jax.numpy as jnp
import numpy as np

from eagle3_jax.attention_config import ConfigError, RopeConfig
from eagle3_jax.precision import accum_dtype


def inverse_frequencies(rope: RopeConfig, head_dim: int) -> np.ndarray:
    """[head_dim / 2] float64 rotary frequencies, transformers' `modeling_rope_utils`.

    llama3: wavelengths longer than original/low_freq_factor are slowed by `factor`, shorter than
    original/high_freq_factor kept, those between interpolated. yarn: the same by the number of
    turns within the original length, `beta_fast` and more kept, `beta_slow` and fewer slowed, a
    ramp over the elements between. dynamic: those of positions within the original length.
    """
    frequency = rope.theta ** (-np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)
    if rope.kind == "linear":
        return frequency / rope.factor
    if rope.kind == "llama3":
        turns = rope.original_max_position_embeddings * frequency / (2 * np.pi)
        kept = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
        kept = np.clip(kept, 0.0, 1.0)
    elif rope.kind == "yarn":
        kept = _kept_by_yarn(rope, head_dim)
    else:
        return frequency
    return frequency * (kept + (1.0 - kept) / rope.factor)


def _kept_by_yarn(rope: RopeConfig, head_dim: int) -> np.ndarray:
    """[head_dim / 2] in 0..1: how much of each frequency stays unscaled."""

    def element(turns: float) -> float:
        length = rope.original_max_position_embeddings / (turns * 2 * np.pi)
        return head_dim * np.log(length) / (2 * np.log(rope.theta))

    low, high = element(rope.beta_fast), element(rope.beta_slow)
    if rope.truncate:
        low, high = np.floor(low), np.ceil(high)
    low, high = max(low, 0.0), min(high, head_dim - 1.0)
    if low == high:
        high += 0.001
    return 1.0 - np.clip((np.arange(head_dim // 2) - low) / (high - low), 0.0, 1.0)


def axes(rope: RopeConfig, head_dim: int) -> np.ndarray:
    """[head_dim / 2] which axis turns each pair: 0 time, 1 height, 2 width.

    transformers `Qwen2VLRotaryEmbedding` (a block for each axis) and `Qwen3VLTextRotaryEmbedding`
    (height at 1, 4, ... and width at 2, 5, ..., time at the rest); SGLang `MRotaryEmbedding` for
    both and for GLM's layout, where an axis that is used up is passed over.
    """
    pairs, sections = head_dim // 2, rope.mrope_section
    if rope.mrope_interleaved_glm:
        left, found = list(sections), []
        for pair in range(pairs):
            axis = next(a % 3 for a in range(pair, pair + 3) if left[a % 3])
            left[axis] -= 1
            found.append(axis)
        return np.array(found)
    if not rope.mrope_interleaved:
        return np.repeat(np.arange(3), sections)
    found = np.zeros(pairs, np.int64)
    for axis in (1, 2):
        found[axis : 3 * sections[axis] : 3] = axis
    return found


def rotations(
    rope: RopeConfig, head_dim: int, positions: jax.Array, dtype
) -> tuple[jax.Array, jax.Array]:
    """cos and sin [B, T, 1, H/2] in the accumulation dtype of `dtype`, for all heads.

    Positions are [B, T], the same on all axes, or [B, 3, T] for multi-axis rope.

    A `dynamic` base past the original length is that of a sequence which ends at the row's own
    position: what transformers uses row by row while decoding with a cache. It takes one base for
    all rows of a longer call; here a row does not depend on the rows computed with it.

    Raises:
      ConfigError: three axes, and a rope that has one.
    """
    accum = jnp.dtype(accum_dtype(dtype))
    if positions.ndim == 3:
        if not rope.mrope_section:
            raise ConfigError("positions on three axes: the rope has one (no mrope_section)")
        turned_by = positions[:, axes(rope, head_dim)]  # [B, H/2, T]
        at = jnp.swapaxes(turned_by, 1, 2)[:, :, None].astype(accum)
        farthest = jnp.max(positions, axis=1).astype(accum)[:, :, None, None]
    else:
        at = farthest = positions.astype(accum)[:, :, None, None]
    frequency = jnp.asarray(inverse_frequencies(rope, head_dim), accum)[None, None, None]
    if rope.kind == "dynamic":
        original = rope.original_max_position_embeddings
        length = jnp.maximum(farthest + 1.0, float(original))
        raised = rope.factor * length / original - (rope.factor - 1.0)
        power = np.arange(0, head_dim, 2, dtype=np.float64) / max(head_dim - 2, 1)
        frequency = frequency * raised ** jnp.asarray(-power, accum)[None, None, None]
    angles = at * frequency
    return jnp.cos(angles) * rope.amplitude, jnp.sin(angles) * rope.amplitude


def rotate(x: jax.Array, cos: jax.Array, sin: jax.Array, *, interleaved: bool = False) -> jax.Array:
    """Turns pairs of elements of each head of x [B, T, heads, H] against each other.

    A pair is elements i and i + H/2 (the "neox" form), or 2i and 2i + 1 when `interleaved`; that
    form's result has the first elements of all pairs before the second, as transformers' has.
    """
    wide = x.astype(cos.dtype)
    if interleaved:
        first, second = wide[..., 0::2], wide[..., 1::2]
    else:
        first, second = jnp.split(wide, 2, axis=-1)
    turned = jnp.concatenate((first * cos - second * sin, second * cos + first * sin), axis=-1)
    return turned.astype(x.dtype)

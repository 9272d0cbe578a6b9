"""Attention over a cache whose last rows form a tree. The einsum here is the oracle for kernels."""

import dataclasses

import jax
import jax.numpy as jnp

from eagle3_jax.precision import accum_dtype


@dataclasses.dataclass(frozen=True)
class Window:
    """A sliding window: a query sees keys less than `size` positions behind it.

    Positions, not slots: the nodes of a tree stand side by side in slots, level by level.
    """

    size: int
    queries: jax.Array  # [B, T] positions
    keys: jax.Array  # [B, S] positions

    def near(self) -> jax.Array:
        """[B, T, S] bool."""
        return self.queries[:, :, None] - self.keys[:, None, :] < self.size


def attend(
    q: jax.Array,  # [B, T, N, H]
    k: jax.Array,  # [B, S, K, H]
    v: jax.Array,  # [B, S, K, any width]
    lengths: jax.Array,  # [B] slots every query sees
    ancestors: jax.Array,  # [B, T, words] uint32; bit j of row i: query i sees slot length + j
    *,
    scale: float,
    window: Window | None = None,
) -> jax.Array:  # [B, T, N, width of v]
    """Query i of a sequence sees slots below its length and the slots its ancestor bits name.

    Scores and softmax are in float32 (float64 for float64); probabilities are rounded to q's dtype
    before they weigh the values, as flash kernels do. A row that sees nothing returns the mean of
    all values, never NaN; the loop has no such row.
    """
    seen = _visible(lengths, ancestors, k.shape[1])
    return _weigh(q, k, v, seen if window is None else seen & window.near(), scale)


def attend_causal(
    q: jax.Array, k: jax.Array, v: jax.Array, *, scale: float, window: int | None = None
) -> jax.Array:
    """Prefill from an empty cache: query t sees rows 0..t of k, v [B, T, K, H].

    `window`: of those only the last so many, for rows at positions 0, 1, 2 and so on.

    Right padding needs no mask: no real row sees a padded one. The same arithmetic as `attend`:
    `jax.nn.dot_product_attention` takes its softmax in float32 even for float64, and leaves float32
    products at the backend's default precision.
    """
    T = q.shape[1]
    seen = jnp.tril(jnp.ones((1, T, T), bool))
    if window is not None:
        seen &= ~jnp.tril(jnp.ones((1, T, T), bool), -window)
    return _weigh(q, k, v, seen, scale)


def _weigh(q: jax.Array, k: jax.Array, v: jax.Array, seen: jax.Array, scale: float) -> jax.Array:
    """Attention under a mask [B or 1, T, S].

    Heads go to the front first: on a CPU that moves q, and spares a transposed copy of the scores.
    """
    B, T, N, H = q.shape
    K = k.shape[2]
    accum = jnp.dtype(accum_dtype(q.dtype))
    scores = jnp.einsum(
        "bkgth,bskh->bkgts",
        q.reshape(B, T, K, N // K, H).transpose(0, 2, 3, 1, 4),
        k,
        precision="highest",
        preferred_element_type=accum,
    )
    scores = jnp.where(seen[:, None, None], scores * scale, jnp.finfo(accum).min)
    weights = jax.nn.softmax(scores, axis=-1).astype(q.dtype)
    out = jnp.einsum(
        "bkgts,bskh->bkgth", weights, v, precision="highest", preferred_element_type=accum
    )
    return out.transpose(0, 3, 1, 2, 4).reshape(B, T, N, v.shape[3]).astype(q.dtype)


def _visible(lengths: jax.Array, ancestors: jax.Array, slots: int) -> jax.Array:
    """[B, T, S] bool, the two conditions of `attend`."""
    B, T, words = ancestors.shape
    offset = jnp.arange(slots, dtype=jnp.int32)[None, :] - lengths[:, None]  # [B, S]
    word = jnp.clip(offset >> 5, 0, words - 1)
    bits = jnp.take_along_axis(ancestors, jnp.broadcast_to(word[:, None, :], (B, T, slots)), axis=2)
    bit = (bits >> (offset & 31).astype(jnp.uint32)[:, None, :]) & jnp.uint32(1)
    inside = (offset >= 0) & (offset < 32 * words)
    return ((offset < 0)[:, None, :]) | (inside[:, None, :] & (bit == 1))

"""Prefill in XLA without an array of T x T: blocks of rows against blocks of keys.

For what neither cuDNN nor the kernel takes: float64, very wide heads, a CPU's long prompts.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax

from eagle3_jax.precision import accum_dtype

SCORES = 32 * 2**20
"""Bytes of scores a block is cut to. It may hold more: four times as much is left uncut, and no
block has fewer than 64 rows, however many sequences and heads there are."""


def rows_of_a_block(q: jax.Array) -> int:
    """Rows and keys of a block for q [B, T, N, H]; T where one block is small enough.

    Short prompts are one block: the arithmetic of the reference, and the fewest operations.
    """
    B, T, N, _ = q.shape
    size = jnp.dtype(accum_dtype(q.dtype)).itemsize
    if T <= 256 or B * N * T * T * size <= 4 * SCORES:
        return T
    rows = 512
    while rows > 64 and B * N * rows * rows * size > SCORES:
        rows //= 2
    return rows


@functools.partial(jax.jit, static_argnames=("scale", "window", "softcap", "rows"))
def blockwise_causal(
    q: jax.Array,  # [B, T, N, H]
    k: jax.Array,  # [B, T, K, H]
    v: jax.Array,  # [B, T, K, any width]
    sinks: jax.Array | None,  # [N]
    scale: float,
    window: int | None,
    softcap: float | None,
    rows: int,
) -> jax.Array:  # [B, T, N, width of v]
    """`ops.attention.attend_causal`, block by block with a running softmax."""
    B, T, N, H = q.shape
    K = k.shape[2]
    G, blocks = N // K, -(-T // rows)
    accum = jnp.dtype(accum_dtype(q.dtype))
    pad = ((0, 0), (0, blocks * rows - T), (0, 0), (0, 0))
    q, k, v = (jnp.pad(x, pad) for x in (q, k, v))
    index = jnp.arange(rows, dtype=jnp.int32)

    def cut(x, block):
        return lax.dynamic_slice_in_dim(x, block * rows, rows, axis=1)

    def of_rows(block):
        mine = cut(q, block).reshape(B, rows, K, G, H).transpose(0, 2, 3, 1, 4)

        def step(other, state):
            m, total, o = state
            scores = _dot("bkgth,bskh->bkgts", mine, cut(k, other)) * scale
            if softcap is not None:
                scores = softcap * jnp.tanh(scores / softcap)
            behind = (block - other) * rows + index[:, None] - index[None]
            seen = behind >= 0 if window is None else (behind >= 0) & (behind < window)
            scores = jnp.where(seen[None, None, None], scores, -jnp.inf)
            top = jnp.maximum(m, jnp.max(scores, axis=-1))
            weights = jnp.exp(scores - top[..., None])
            shrink = jnp.exp(m - top)
            added = _dot("bkgts,bskh->bkgth", weights.astype(q.dtype), cut(v, other))
            total = total * shrink + jnp.sum(weights, axis=-1)
            return top, total, o * shrink[..., None] + added

        lowest = jnp.full((B, K, G, rows), jnp.finfo(accum).min, accum)
        state = (lowest, jnp.zeros_like(lowest), jnp.zeros((*lowest.shape, v.shape[3]), accum))
        first = jnp.int32(0)
        if window is not None:
            first = jnp.maximum(block * rows - (window - 1), 0) // rows
        m, total, o = lax.fori_loop(first, block + 1, step, state)
        if sinks is not None:
            sink = sinks.astype(accum).reshape(1, K, G, 1)
            top = jnp.maximum(m, sink)
            shrink = jnp.exp(m - top)
            total, o = total * shrink + jnp.exp(sink - top), o * shrink[..., None]
        out = (o / total[..., None]).transpose(0, 3, 1, 2, 4)
        return out.reshape(B, rows, N, -1).astype(q.dtype)

    found = lax.map(of_rows, jnp.arange(blocks, dtype=jnp.int32))  # [blocks, B, rows, N, width]
    return found.transpose(1, 0, 2, 3, 4).reshape(B, blocks * rows, N, -1)[:, :T]


def _dot(equation: str, x: jax.Array, y: jax.Array) -> jax.Array:
    accum = jnp.dtype(accum_dtype(x.dtype))
    return jnp.einsum(equation, x, y, precision="highest", preferred_element_type=accum)

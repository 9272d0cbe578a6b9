"""Prefill by the tree kernel: a prompt is cut into chunks, each a chain of rows over one cache."""

import functools

import jax
import jax.numpy as jnp

from eagle3_jax.ops.bits import chain_bits
from eagle3_jax.ops.kernel_plan import plan
from eagle3_jax.ops.tree_attention import run
from eagle3_jax.ops.tree_step import Sizes

ROWS = 64  # of a chunk


@functools.partial(jax.jit, static_argnames=("scale", "softcap", "window", "width", "interpret"))
def causal_attention(
    q: jax.Array,  # [B, T, N, H]
    k: jax.Array,  # [B, T, K, H]
    v: jax.Array | None,  # [B, T, K, any width]; None: the first `width` elements of the keys
    sinks: jax.Array | None = None,  # [N]
    *,
    scale: float,
    softcap: float | None = None,
    window: int | None = None,
    width: int | None = None,
    interpret: bool = False,
) -> jax.Array:  # [B, T, N, width of v]
    """`ops.attention.attend_causal` by the kernel; bfloat16, float16 or float32.

    A chunk's rows see all slots before the chunk by their length, and each other by their bits.
    """
    B, T, N, H = q.shape
    K = k.shape[2]
    value = v.shape[3] if v is not None else width
    assert value is not None
    chunks = -(-T // ROWS)
    rows = min(T, ROWS)
    q = jnp.pad(q, ((0, 0), (0, chunks * rows - T), (0, 0), (0, 0)))
    bits = chain_bits(rows)
    sizes = Sizes(
        rows, N // K, T, bits.shape[1], H, value, v is None, scale, softcap, window, chunks
    )
    reach = T if window is None else min(T, window + ROWS)
    cut = plan(B * chunks, K, rows * sizes.group, reach, H, q.dtype.itemsize)
    start = jnp.arange(chunks, dtype=jnp.int32) * rows
    inputs = [
        q.reshape(B * chunks, rows, K, N // K, H),
        k,
        jnp.tile(start, B),
        jnp.broadcast_to(jnp.asarray(bits)[None], (B * chunks, *bits.shape)),
    ]
    if v is not None:
        inputs.append(v)
    if window is not None:
        at = start[:, None] + jnp.arange(rows, dtype=jnp.int32)[None]
        near = jnp.maximum(start - (window - 1), 0)
        slots = jnp.broadcast_to(jnp.arange(T, dtype=jnp.int32)[None], (B, T))
        inputs += [jnp.tile(near, B), jnp.tile(at, (B, 1)), slots]
    if sinks is not None:
        inputs.append(sinks)
    out = run(sizes, cut, inputs, sinks, interpret)
    return out.reshape(B, chunks * rows, N, value)[:, :T]

"""The softmax of a row from those of the splits: a second, small kernel."""

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from eagle3_jax.ops.kernel_plan import power
from eagle3_jax.ops.pallas_backend import call, load, store

LOG2E = math.log2(math.e)
TILE = 4096  # partial results a program adds up at most


def merge(
    o: jax.Array,  # [splits, ..., N, width] float32, not normalised
    m: jax.Array,  # [splits, ..., N] float32, the largest score, base 2
    total: jax.Array,  # [splits, ..., N] float32, the sum of 2 ** (score - m)
    sinks: jax.Array | None,  # [N] logits
    dtype,
    *,
    interpret: bool = False,
) -> jax.Array:  # [..., N, width]
    """Adds up the splits in float32; zeros where none saw anything.

    One kernel: XLA makes three of these few lines, which at batch 1 is two launches a layer more.

    Raises:
      ValueError: 2**31 results or more, which the kernel could not count in int32. (Several splits
        are for small batches: `kernel_plan.plan` asks for a few million at most.)
    """
    splits, *shape, heads, width = o.shape
    rows = math.prod(shape) * heads
    if rows * width >= 2**31:
        raise ValueError(f"{rows} rows of {width} are more results than int32 counts")
    padded = power(splits)
    columns = max(16, TILE // padded)
    flat = [o.reshape(splits, rows * width), m.reshape(splits, rows), total.reshape(splits, rows)]
    if sinks is not None:
        flat.append(sinks)
    (out,) = call(
        _kernel(splits, padded, rows, width, heads, columns),
        grid=(-(-rows * width // columns),),
        in_specs=[_whole(x) for x in flat],
        out_specs=[pl.BlockSpec((rows * width,), lambda i: (0,))],
        out_shape=[jax.ShapeDtypeStruct((rows * width,), dtype)],
        warps=4,
        stages=1,
        interpret=interpret,
    )(*flat)
    return out.reshape(*shape, heads, width)


def _whole(x: jax.Array) -> pl.BlockSpec:
    zeros = (0,) * x.ndim
    return pl.BlockSpec(x.shape, lambda i: zeros)


def _kernel(splits: int, padded: int, rows: int, width: int, heads: int, columns: int) -> Callable:
    def tree_attention_merge(o_ref, m_ref, total_ref, *refs):
        *sinks_ref, out_ref = refs
        column = pl.program_id(0) * columns + lax.iota(jnp.int32, columns)
        row, inside = lax.div(column, jnp.int32(width)), column < rows * width
        split = lax.iota(jnp.int32, padded)[:, None]
        there = inside[None, :] & (split < splits)
        m = load(m_ref.at[split, row[None, :]], mask=there, other=-jnp.inf)
        total = load(total_ref.at[split, row[None, :]], mask=there, other=0.0)
        o = load(o_ref.at[split, column[None, :]], mask=there, other=0.0)
        top, sink = jnp.max(m, axis=0), None
        if sinks_ref:
            sink = load_sink(sinks_ref[0], lax.rem(row, jnp.int32(heads)), inside)
            top = jnp.maximum(top, sink)
        weight = jnp.where(there, jnp.exp2(m - top[None, :]), 0.0)
        below = jnp.sum(weight * total, axis=0)
        out = normalised(jnp.sum(weight * o, axis=0), below, top, sink)
        store(out_ref.at[column], out.astype(out_ref.dtype), mask=inside)

    return tree_attention_merge


def load_sink(ref, head: jax.Array, mask: jax.Array) -> jax.Array:
    """The sinks of these heads, base 2, float32."""
    return load(ref.at[head], mask=mask, other=0.0).astype(jnp.float32) * LOG2E


def normalised(o: jax.Array, total: jax.Array, top: jax.Array, sink: jax.Array | None) -> jax.Array:
    """`o / total`, the sink's share in the sum; zeros where nothing was seen. `top` is at least m
    and the sink."""
    if sink is not None:
        total = total + jnp.exp2(sink - top)
    return o / jnp.where(total > 0.0, total, 1.0)

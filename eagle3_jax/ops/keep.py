"""An accepted path moved to the front of its window, in many layers' caches at once.

XLA makes one launch an array, 64 for 32 layers, for half a megabyte.
"""

import functools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.sharding import PartitionSpec as P

from eagle3_jax.ops import which
from eagle3_jax.ops.append import put_rows
from eagle3_jax.ops.kernel_plan import power
from eagle3_jax.ops.over_mesh import axes_for, over_mesh
from eagle3_jax.ops.pallas_backend import barrier, call, load, store

COLUMNS = 128
HELD = 65536  # bytes one program holds between its loads and its stores: half its registers
MOST = 64  # buffers of one launch
DTYPES = (jnp.bfloat16, jnp.float16, jnp.float32)


def keep_rows(
    buffers: Sequence[jax.Array],  # each [B, S, K, H] or [B, S]
    path: jax.Array,  # [B, P] int32
    start: jax.Array,  # [B] int32
) -> list[jax.Array]:
    """Moves slots start + path[:, d] to start + d in every buffer. They need not be alike."""
    found = list(buffers)
    for shape, dtype in dict.fromkeys((x.shape, x.dtype) for x in buffers):
        alike = [i for i, x in enumerate(buffers) if (x.shape, x.dtype) == (shape, dtype)]
        if 0 in shape:
            continue
        most = buffers_at_once(path.shape[1], shape[-1], dtype.itemsize)
        for first in range(0, len(alike), most):
            some = alike[first : first + most]
            moved = _keep([buffers[i] for i in some], path, start)
            for i, buffer in zip(some, moved, strict=True):
                found[i] = buffer
    return found


def buffers_at_once(rows: int, width: int, itemsize: int) -> int:
    """How many buffers alike one launch takes, of a path of `rows` and heads `width` wide."""
    return max(1, min(MOST, HELD // (power(rows) * _columns(width) * itemsize)))


def _keep(buffers: list[jax.Array], path: jax.Array, start: jax.Array) -> Sequence[jax.Array]:
    """Of buffers alike."""

    def plain(path, start, *buffers):
        return tuple(_move(buffer, path, start) for buffer in buffers)

    if buffers[0].ndim != 4:  # positions of the slots
        return plain(path, start, *buffers)
    B, _, K, _ = buffers[0].shape

    def kernel(*arrays, interpret):
        def run(path, start, *buffers):
            return _by_kernel(path, start, *buffers, interpret=interpret)

        data, model = axes = axes_for(B, K)
        heads = (P(data, None, model),) * len(buffers)
        return over_mesh(run, arrays, axes, (P(data), P(data), *heads), heads)

    takes = buffers[0].dtype in DTYPES
    return which.run(plain, kernel, (path, start, *buffers), takes=takes)


def _move(buffer: jax.Array, path: jax.Array, start: jax.Array) -> jax.Array:
    slots = start[:, None] + path
    index = slots.reshape(*slots.shape, *[1] * (buffer.ndim - 2))
    return put_rows(buffer, jnp.take_along_axis(buffer, index, axis=1), start)


@functools.partial(jax.jit, static_argnames="interpret")
def _by_kernel(path, start, *buffers, interpret: bool):
    B, S, K, H = buffers[0].shape
    slots = pl.BlockSpec((None, S, None, H), lambda b, h, c: (b, 0, h, 0))
    row = pl.BlockSpec((None, path.shape[1]), lambda b, h, c: (b, 0))
    columns = _columns(H)
    return call(
        _kernel(path.shape[1], columns, len(buffers), interpret),
        grid=(B, K, H // columns),
        in_specs=[row, pl.BlockSpec((1,), lambda b, h, c: (b,)), *[slots] * len(buffers)],
        out_specs=[slots] * len(buffers),
        out_shape=[jax.ShapeDtypeStruct(x.shape, x.dtype) for x in buffers],
        warps=4,
        stages=1,
        interpret=interpret,
        aliases={i + 2: i for i in range(len(buffers))},
    )(path, start, *buffers)


def _kernel(rows: int, columns: int, count: int, interpret: bool) -> Callable:
    def keep_rows_kernel(path_ref, start_ref, *refs):
        # Past the last row that one again, to the same place: no mask.
        row = jnp.minimum(lax.iota(jnp.int32, power(rows)), rows - 1)
        column = (pl.program_id(2) * columns + lax.iota(jnp.int32, columns))[None]
        start = start_ref[0]
        at, to = (start + load(path_ref.at[row]))[:, None], (start + row)[:, None]
        # All warps have read before any writes: a path's slots overlap the front.
        held = [load(ref.at[at, column]) for ref in refs[:count]]
        if not interpret:
            barrier()
        for ref, x in zip(refs[count:], held, strict=True):
            store(ref.at[to, column], x)

    return keep_rows_kernel


def _columns(width: int) -> int:
    """Elements of a head that one program moves: a power of two that divides the width."""
    return min(COLUMNS, width & -width)

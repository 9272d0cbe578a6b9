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
from eagle3_jax.ops.over_mesh import axes_for, over_mesh
from eagle3_jax.ops.pallas_backend import call, load, store

COLUMNS = 128
HELD = 32768  # elements one program holds between its loads and its stores
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
        most = max(1, HELD // (COLUMNS * _power(path.shape[1])))
        for first in range(0, len(alike), most):
            some = alike[first : first + most]
            moved = _keep([buffers[i] for i in some], path, start)
            for i, buffer in zip(some, moved, strict=True):
                found[i] = buffer
    return found


def _keep(buffers: list[jax.Array], path: jax.Array, start: jax.Array) -> Sequence[jax.Array]:
    """Of buffers alike."""

    def plain(path, start, *buffers):
        return tuple(_move(buffer, path, start) for buffer in buffers)

    if buffers[0].ndim != 4:  # positions of the slots
        return plain(path, start, *buffers)
    B, _, K, H = buffers[0].shape

    def kernel(*arrays, interpret):
        def run(path, start, *buffers):
            return _by_kernel(path, start, *buffers, interpret=interpret)

        data, model = axes = axes_for(B, K)
        heads = (P(data, None, model),) * len(buffers)
        return over_mesh(run, arrays, axes, (P(data), P(data), *heads), heads)

    takes = H > 0 and buffers[0].dtype in DTYPES
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
    return call(
        _kernel(path.shape[1], H, len(buffers)),
        grid=(B, K, -(-H // COLUMNS)),
        in_specs=[row, pl.BlockSpec((1,), lambda b, h, c: (b,)), *[slots] * len(buffers)],
        out_specs=[slots] * len(buffers),
        out_shape=[jax.ShapeDtypeStruct(x.shape, x.dtype) for x in buffers],
        warps=4,
        stages=1,
        interpret=interpret,
        aliases={i + 2: i for i in range(len(buffers))},
    )(path, start, *buffers)


def _kernel(rows: int, width: int, count: int) -> Callable:
    def keep_rows_kernel(path_ref, start_ref, *refs):
        row = lax.iota(jnp.int32, _power(rows))
        column = pl.program_id(2) * COLUMNS + lax.iota(jnp.int32, COLUMNS)
        mask = (row < rows)[:, None] & (column < width)[None]
        at = start_ref[0] + load(path_ref.at[row], mask=row < rows, other=jnp.int32(0))
        # All are read before any is written: a path's slots overlap the front.
        held = [
            load(ref.at[at[:, None], column[None]], mask=mask, other=0.0) for ref in refs[:count]
        ]
        for ref, x in zip(refs[count:], held, strict=True):
            store(ref.at[(start_ref[0] + row)[:, None], column[None]], x, mask=mask)

    return keep_rows_kernel


def _power(n: int) -> int:
    return 1 << (n - 1).bit_length()

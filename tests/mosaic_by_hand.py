"""What a Mosaic GPU kernel's body does, program by program in NumPy, on a machine without a GPU.

jax's own interpreter (`mosaic_interpreted`) copies rows, not the tiles TMA does, and that of 0.10.2
knows no products. Copies arrive at once; that each is waited for exactly
once, and that no buffer is refilled before it was, is asserted.
"""

import functools
import itertools
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl

from eagle3_jax.ops import merge, mosaic_attention


class Ref:
    """A part of an array: `ref.at[index]`, read and written as `ref[...]`.

    `tile`: how many rows a tile of this buffer has.
    """

    def __init__(self, array: np.ndarray, index: tuple = (), tile: int = 1):
        self.array, self.index, self.tile = array, index, tile
        self.dtype = array.dtype

    @property
    def at(self):
        return _At(self)

    def __getitem__(self, index):
        return self.array[_plain(self.index if index is ... else _tuple(index))]

    def __setitem__(self, index, value):
        self.array[_plain(self.index if index is ... else _tuple(index))] = value

    def transpose(self, axes: tuple) -> np.ndarray:
        return self[...].transpose(axes)


class _At:
    def __init__(self, ref: Ref):
        self.ref = ref

    def __getitem__(self, index) -> Ref:
        return Ref(self.ref.array, (*self.ref.index, *_tuple(index)), self.ref.tile)


def _tuple(index) -> tuple:
    return index if isinstance(index, tuple) else (index,)


def _plain(index: tuple) -> tuple:
    return tuple(
        slice(int(i.start), int(i.start) + i.size) if isinstance(i, pl.Slice) else int(i)
        for i in index
    )


class Barriers:
    """How many copies arrived at each and were not waited for."""

    def __init__(self, num_barriers: int = 1):
        self.arrived = np.zeros(num_barriers, int)
        self.slot = 0

    @property
    def at(self):
        made = {}
        for slot in range(len(self.arrived)):
            made[slot] = part = Barriers.__new__(Barriers)
            part.arrived, part.slot = self.arrived, slot
        return _Slots(made)


class _Slots:
    def __init__(self, made: dict):
        self.made = made

    def __getitem__(self, slot) -> Barriers:
        return self.made[int(slot)]


def copy(source: Ref, target: Ref, barrier: Barriers) -> None:
    """By TMA, which is given the first row as a tile and a row of it (`TileTransform` of Mosaic).

    Each tile of the target takes the rows of one of the source from that row on: past the tile's
    end, as past the array's, there are zeros.
    """
    assert barrier.arrived[barrier.slot] == 0, "refilled before it was waited for"
    barrier.arrived[barrier.slot] += 1
    (axis,) = (i for i, x in enumerate(source.index) if isinstance(x, pl.Slice))
    rows, slots = source.index[axis], source.array.shape[axis]
    assert rows.size % target.tile == slots % target.tile == 0
    first, row = int(rows.start), np.arange(rows.size)
    there = (row % target.tile + first % target.tile < target.tile) & (first + row < slots)
    part = target.array[_plain(target.index)]
    part[...] = 0
    index = (first + row[there] if i is rows else int(i) for i in source.index)
    part[there] = source.array[tuple(index)]


def wait(barrier: Barriers) -> None:
    assert barrier.arrived[barrier.slot] == 1, "nothing to wait for: a deadlock"
    barrier.arrived[barrier.slot] -= 1


def multiply(total: Ref, a, b) -> None:
    a, b = (x[...] if isinstance(x, Ref) else x for x in (a, b))
    total[...] = total[...] + a.astype(np.float32) @ b.astype(np.float32)


class Accumulator:
    def __init__(self, shape: tuple, dtype):
        self.start = np.zeros(shape, dtype)

    @classmethod
    def init(cls, array: np.ndarray):
        made = cls((), np.float32)
        made.start = array.copy()
        return made


def run_scoped(function, accumulator: Accumulator):
    return function(Ref(accumulator.start))


def run_state(function):
    def run(accumulator: Accumulator) -> np.ndarray:
        ref = Ref(accumulator.start)
        function(ref)
        return ref[...]

    return run


def when(condition):
    return lambda function: function() if condition else None


def kernel(where: dict, body, *, out_type, grid, grid_names, scratch_types, compiler_params):
    del compiler_params

    def run(*inputs):
        outputs = [np.full(x.shape, np.nan, x.dtype) for x in out_type]
        for place in itertools.product(*map(range, grid)):
            where.update(zip(grid_names, map(np.int32, place), strict=True))
            scratch = [make() for make in scratch_types]
            body(*map(Ref, (*inputs, *outputs)), *scratch)
            for barrier in scratch:
                assert not isinstance(barrier, Barriers) or not barrier.arrived.any()
        return outputs

    return run


def loop(low, high, step, carry):
    for i in range(int(low), int(high)):
        carry = step(np.int32(i), carry)
    return carry


@pytest.fixture
def by_hand(monkeypatch):
    """`mosaic_attention` with every name of Pallas and jax its body uses put in NumPy."""
    where: dict = {}
    fakes = {
        "plgpu": types.SimpleNamespace(
            WGMMAAccumulatorRef=Accumulator,
            Barrier=lambda **options: functools.partial(Barriers, **options),
            CompilerParams=lambda **options: options,
            Layout=types.SimpleNamespace(WGMMA=None),
            LoweringSemantics=types.SimpleNamespace(Lane=None),
            SMEM=lambda shape, dtype, transforms: (
                lambda: Ref(np.full(shape, np.nan, dtype), tile=transforms[0][0])
            ),
            SwizzleTransform=lambda size: None,
            TilingTransform=lambda shape: shape,
            barrier_wait=wait,
            broadcasted_iota=lambda dtype, shape, axis, layout: np.indices(shape, dtype)[axis],
            copy_gmem_to_smem=copy,
            kernel=functools.partial(kernel, where),
            layout_cast=lambda x, layout: x,
            load=lambda ref, idx, layout, optimized: ref[idx],
            wgmma=multiply,
        ),
        "pl": types.SimpleNamespace(
            ds=pl.ds, run_scoped=run_scoped, run_state=run_state, when=when
        ),
        "lax": types.SimpleNamespace(
            axis_index=where.__getitem__,
            broadcast_in_dim=lambda x, shape, axes: np.broadcast_to(
                x[:, None] if axes else x, shape
            ),
            div=lambda a, b: a // b,
            fori_loop=loop,
            rem=lambda a, b: a % b,
            shift_left=lambda a, b: a << b,
            shift_right_logical=lambda a, b: a >> b,
        ),
        "jnp": np,
        "merge": lambda *parts: merge.merge(
            *(None if x is None else jnp.asarray(x) for x in parts[:4]), parts[4], interpret=True
        ),
    }
    for name, fake in fakes.items():
        monkeypatch.setattr(mosaic_attention, name, fake)

    def attend(q, k, v, lengths, ancestors, *, scale, softcap, sinks, window, width):
        assert (sinks, window, width) == (None, None, None)
        arrays = [np.asarray(x) for x in (q, k, v, lengths, ancestors)]
        run = mosaic_attention.mosaic_attention.__wrapped__
        return jax.device_get(run(*arrays, scale=scale, softcap=softcap))

    return attend

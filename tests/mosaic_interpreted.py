"""`mosaic_attention` by jax's own interpreter of Mosaic GPU kernels, which is there from jax 0.12.

It simulates threads, barriers and copies (of rows, not of tiles: that is `mosaic_by_hand`'s), and
knows neither `run_state` nor products whose left side is in registers: these two are put otherwise.
"""

import dataclasses
import functools
import types

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from eagle3_jax.ops import merge, mosaic_attention

needs_interpreter = pytest.mark.skipif(
    not hasattr(plgpu, "InterpretGPUParams"), reason="jax's interpreter has no wgmma"
)


@dataclasses.dataclass
class Accumulator:
    """One that starts at `start`: the interpreter's start at zeros."""

    start: jax.Array


class _AccumulatorRef:
    def __call__(self, shape: tuple, dtype):
        return plgpu.WGMMAAccumulatorRef(shape, dtype)

    init = Accumulator


def run_state(function):
    def run(accumulator: Accumulator) -> jax.Array:
        def added(ref):
            function(ref)
            return ref[...]

        ref = plgpu.WGMMAAccumulatorRef(accumulator.start.shape, jnp.float32)
        return accumulator.start + pl.run_scoped(added, ref)

    return run


def multiply(total, a, b) -> None:
    if not isinstance(a, jax.Array):
        plgpu.wgmma(total, a, b)
        return

    def from_memory(ref):
        ref[...] = a
        plgpu.wgmma(total, ref, b)

    pl.run_scoped(from_memory, plgpu.SMEM(a.shape, a.dtype))


@pytest.fixture
def interpreted(monkeypatch):
    """`attend` by the interpreter; a race raises."""
    names = {name: getattr(plgpu, name) for name in dir(plgpu) if not name.startswith("__")}
    how = plgpu.InterpretGPUParams(detect_races=True, on_race="raise")
    names |= {
        "WGMMAAccumulatorRef": _AccumulatorRef(),
        "wgmma": multiply,
        "kernel": functools.partial(plgpu.kernel, interpret=how),
    }
    monkeypatch.setattr(mosaic_attention, "plgpu", types.SimpleNamespace(**names))
    names = {name: getattr(pl, name) for name in ("ds", "run_scoped", "when")}
    fake = types.SimpleNamespace(**names, run_state=run_state)
    monkeypatch.setattr(mosaic_attention, "pl", fake)
    merged = functools.partial(merge.merge, interpret=True)
    monkeypatch.setattr(mosaic_attention, "merge", merged)

    def attend(*arrays, scale, softcap, sinks, window, width):
        assert (sinks, window, width) == (None, None, None)
        run = mosaic_attention.mosaic_attention.__wrapped__
        return jax.device_get(run(*arrays, scale=scale, softcap=softcap))

    return attend

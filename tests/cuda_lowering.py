"""Programs for a GPU, lowered on a machine that has none: what XLA would be given."""

import contextlib

import jax
from jax.sharding import AbstractDevice, AbstractMesh, AxisType


def an_h200() -> contextlib.AbstractContextManager:
    """A mesh of one H200 in scope: from jax 0.11 on, Triton's lowering asks for the device."""
    device = AbstractDevice(device_kind="NVIDIA H200", num_cores=None, platform="gpu")
    return jax.sharding.use_abstract_mesh(
        AbstractMesh((1,), ("x",), (AxisType.Auto,), abstract_device=device)
    )


def lowered(run, *args) -> str:
    """StableHLO of a jitted function for CUDA."""
    with an_h200():
        return run.trace(*args).lower(lowering_platforms=("cuda",)).as_text()

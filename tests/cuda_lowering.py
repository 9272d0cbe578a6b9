"""Programs for a GPU, lowered on a machine that has none: what XLA would be given."""

import contextlib
import functools
import re

import jax
from jax.sharding import AbstractDevice, AbstractMesh, AxisType

from eagle3_jax.ops.attention import Implementation, use_attention


def an_h200() -> contextlib.AbstractContextManager:
    """A mesh of one H200 in scope: from jax 0.11 on, Triton's lowering asks for the device."""
    device = AbstractDevice(device_kind="NVIDIA H200", num_cores=None, platform="gpu")
    return jax.sharding.use_abstract_mesh(
        AbstractMesh((1,), ("x",), (AxisType.Auto,), abstract_device=device)
    )


def lowered(run, *args, by: Implementation | None = "pallas") -> str:
    """StableHLO of a jitted function for CUDA, which this installation may not know.

    `by`: what `use_attention` says; of None the default is what `which` thinks possible here.
    """
    with an_h200(), use_attention(by):
        return run.trace(*args).lower(lowering_platforms=("cuda",)).as_text()


def times_run(text: str, what: str) -> int:
    """How often a pass through a StableHLO program meets `what`, in functions at each call."""
    parts = re.split(r"func\.func \w+ @([\w.]+)\(", text)
    bodies = dict(zip(parts[1::2], parts[2::2], strict=True))

    @functools.cache
    def count(name: str) -> int:
        body = bodies[name]
        calls = re.findall(r"\bcall @([\w.]+)\(", body)
        return body.count(what) + sum(map(count, calls))

    return count("main")

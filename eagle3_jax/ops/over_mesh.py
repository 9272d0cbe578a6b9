"""A kernel on several devices: XLA cannot partition one, so each runs it on its own heads."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

Axes = tuple[str | None, str | None]
"""The mesh axes, if any, that split sequences and KV heads."""


def axes_for(sequences: int, kv_heads: int) -> Axes:
    """Of the mesh in scope (`jax.set_mesh`): `data` and `model`, those of type Auto.

    An axis that does not divide its dimension is left out: those devices do the same work.
    """
    mesh = jax.sharding.get_abstract_mesh()
    auto = {
        name
        for name, kind in zip(mesh.axis_names, mesh.axis_types, strict=True)
        if kind == AxisType.Auto and mesh.shape[name] > 1
    }
    data = "data" if "data" in auto and sequences % mesh.shape["data"] == 0 else None
    model = "model" if "model" in auto and kv_heads % mesh.shape["model"] == 0 else None
    return data, model


def over_mesh(
    kernel: Callable, arrays: Sequence[Any], axes: Axes, specs: Sequence[P], out_specs: Any
) -> Any:
    """`kernel` of the arrays (None where there is none), each split as its spec says."""
    used = {name for name in axes if name is not None}
    if not used:
        return kernel(*arrays)
    here = tuple(None if array is None else spec for array, spec in zip(arrays, specs, strict=True))
    return jax.shard_map(
        kernel,
        mesh=jax.sharding.get_abstract_mesh(),
        in_specs=here,
        out_specs=out_specs,
        axis_names=used,
        check_vma=False,
    )(*arrays)

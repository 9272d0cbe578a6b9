"""A kernel on several devices: XLA cannot partition one, so each runs it on its own heads."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.sharding import AbstractMesh, AxisType
from jax.sharding import PartitionSpec as P

Axes = tuple[str | None, str | None]
"""The mesh axes, if any, that split sequences and KV heads."""


def axes_for(sequences: int, kv_heads: int) -> Axes:
    """Of the mesh in scope (`jax.set_mesh`): `data` and `model`, those of type Auto.

    An axis that does not divide its dimension is left out: those devices do the same work.
    """
    sizes = {
        name: size for name, size in auto_axes(jax.sharding.get_abstract_mesh()).items() if size > 1
    }
    data = "data" if "data" in sizes and sequences % sizes["data"] == 0 else None
    model = "model" if "model" in sizes and kv_heads % sizes["model"] == 0 else None
    return data, model


def auto_axes(mesh: AbstractMesh) -> dict[str, int]:
    """The axes XLA's partitioner may split over, and their sizes: those of type Auto."""
    kinds = zip(mesh.axis_names, mesh.axis_types, strict=True)
    return {name: mesh.shape[name] for name, kind in kinds if kind == AxisType.Auto}


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

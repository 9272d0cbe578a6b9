"""A kernel on several devices: XLA cannot partition one, so each runs it on its own heads."""

from collections.abc import Callable

import jax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P


def over_mesh(
    kernel: Callable,
    q: jax.Array,  # [B, T, N, H]
    k: jax.Array,  # [B, S, K, H]
    v: jax.Array | None,  # [B, S, K, width]
    lengths: jax.Array,  # [B]
    ancestors: jax.Array,  # [B, T, words]
    positions: tuple[jax.Array, jax.Array] | None,  # [B, T] and [B, S]
    sinks: jax.Array | None,  # [N]
) -> jax.Array:  # [B, T, N, width]
    """`kernel` of the arrays; sequences over the mesh's `data` axis, KV heads over `model`.

    The mesh is the one in scope (`jax.set_mesh`), its axes of type Auto. An axis that does not
    divide its dimension is left out: those devices do the same work.
    """
    arrays = (q, k, v, lengths, ancestors, positions, sinks)
    mesh = jax.sharding.get_abstract_mesh()
    auto = {
        name
        for name, kind in zip(mesh.axis_names, mesh.axis_types, strict=True)
        if kind == AxisType.Auto and mesh.shape[name] > 1
    }
    data = "data" if "data" in auto and k.shape[0] % mesh.shape["data"] == 0 else None
    model = "model" if "model" in auto and k.shape[2] % mesh.shape["model"] == 0 else None
    used = {name for name in (data, model) if name is not None}
    if not used:
        return kernel(*arrays)
    heads, sequences = P(data, None, model, None), P(data)
    specs = (heads, heads, heads, sequences, sequences, sequences, P(model))
    here = tuple(None if array is None else spec for array, spec in zip(arrays, specs, strict=True))
    return jax.shard_map(
        kernel, mesh=mesh, in_specs=here, out_specs=heads, axis_names=used, check_vma=False
    )(*arrays)

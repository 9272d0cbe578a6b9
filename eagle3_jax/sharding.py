"""Several devices: which axis of each tensor is split over a mesh with axes `data` and `model`.

Tensor parallelism as Megatron-LM splits it (arXiv 1909.08053, section 3): the first matrix of a
pair by its outputs, the second by its inputs, so that a block needs one sum after attention and one
after the MLP. Heads and their cache go together, sequences go over `data`. XLA's partitioner
(AxisType.Auto) inserts the communication.
"""

import dataclasses
from typing import Any

import jax
from flax import nnx
from jax.sharding import AbstractMesh, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from eagle3_jax.cache import KVCache
from eagle3_jax.config import ConfigError
from eagle3_jax.ops.over_mesh import auto_axes, axes_for
from eagle3_jax.state import LoopState

DATA, MODEL = "data", "model"
BY_OUTPUTS = ("qkv", "gate_up", "q", "q_b", "kv_b", "fc", "embed", "lm_head")
BY_INPUTS = ("o", "down")
"""Of the linear maps and tables; a module that is in neither list is whole on every device."""


def weight_specs(module: nnx.Module, model: int) -> tuple[P, ...]:
    """The split of each array of a target or a draft, in the order of `modules.take_apart`.

    The embedding and the heads are split by their rows. (Split by width, an embedding leaves the
    residual stream split too, and every block gathers and scatters it: three times the exchanges.)

    Args:
      model: devices along the mesh's `model` axis.

    Raises:
      ConfigError: an axis that does not divide by `model`; the message names the tensor.
    """
    flat = [
        (path, variable.replace(_weight(path, variable, model)))
        for path, variable in nnx.to_flat_state(nnx.state(module))
    ]
    return tuple(jax.tree.leaves(nnx.from_flat_state(flat), is_leaf=lambda x: isinstance(x, P)))


def _weight(path: tuple, variable: Any, model: int) -> P:
    *_, owner, kind = ("", *map(str, path))
    shape = variable.get_value().shape
    axis = None
    if owner in BY_OUTPUTS:
        axis = 0
    elif owner in BY_INPUTS and kind == "weight":
        axis = 1
    if axis is None:
        return P()
    if variable.get_metadata().get("transposed", False):
        axis = 1 - axis if len(shape) == 2 else axis
    if shape[axis] % model:
        raise ConfigError(
            f"{'.'.join(map(str, path))} has shape {list(shape)}: axis {axis} does not divide "
            f"by {model} devices"
        )
    return P(*[MODEL if i == axis else None for i in range(len(shape))])


def cache_specs(cache: KVCache, model: int) -> KVCache:
    """Sequences over `data`, heads over `model`; a single head (latent attention) stays whole."""

    def spec(buffer: jax.Array) -> P:
        if buffer.ndim < 4:  # positions of the slots
            return P(DATA)
        heads = buffer.shape[2]
        if heads > 1 and heads % model:
            raise ConfigError(f"{heads} key/value heads do not divide by {model} devices")
        return P(DATA, None, MODEL) if heads > 1 else P(DATA)

    return jax.tree.map(spec, cache)


def state_specs(state: LoopState, model: int) -> LoopState:
    """Every array of a state: caches as `cache_specs`, all else by its sequences.

    Raises:
      ConfigError: heads that do not divide by `model`.
    """
    batch = state.length.shape[0]

    def spec(x: jax.Array) -> P:
        return P(DATA) if x.ndim and x.shape[0] == batch else P()

    draft = state.draft_cache
    return dataclasses.replace(
        jax.tree.map(spec, dataclasses.replace(state, target_cache=None, draft_cache=None)),
        target_cache=cache_specs(state.target_cache, model),
        draft_cache=None if draft is None else cache_specs(draft, model),
        correct=P(None, DATA),
        log=None if state.log is None else jax.tree.map(lambda _: P(None, DATA), state.log),
    )


def pinned(state: LoopState) -> LoopState:
    """The state held to `state_specs` over the mesh in scope; the same where there is none.

    A program that returns its state so writes it where the old one lay. Left to itself XLA splits
    some arrays another way, and then copies and resends them every round.
    """
    mesh = jax.sharding.get_abstract_mesh()
    batch, heads = state.length.shape[0], state.target_cache.k[0].shape[2]
    if axes_for(batch, heads) == (None, None):
        return state
    specs = state_specs(state, 1)  # what does not divide is left whole below
    return jax.tree.map(
        lambda x, spec: jax.lax.with_sharding_constraint(x, _divided(x, spec, mesh)), state, specs
    )


def _divided(x: jax.Array, spec: P, mesh: AbstractMesh) -> P:
    """The spec without axes that do not divide their dimension, and of others than Auto ones: what
    the user holds (Explicit, Manual) or the mesh lacks."""
    sizes = auto_axes(mesh)

    def kept(name: str | None, size: int) -> str | None:
        return name if name in sizes and size % sizes[name] == 0 else None

    names = [*map(kept, spec, x.shape)]
    while names and names[-1] is None:  # as XLA spells what it returns: else jit compiles again
        names.pop()
    return P(*names)


def put(arrays: Any, specs: Any, mesh: Mesh) -> Any:
    """The arrays on the mesh, each split as its spec says."""
    return jax.tree.map(lambda x, spec: jax.device_put(x, NamedSharding(mesh, spec)), arrays, specs)

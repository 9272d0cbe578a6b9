"""Between nnx modules and flat arrays: build from named tensors, take apart for the loop."""

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from eagle3_jax.config import ConfigError
from eagle3_jax.precision import precision


@dataclasses.dataclass(frozen=True, eq=False)
class Folder:
    """Where a model came from. All compare equal, so that jit does not compile once a path."""

    path: Path | None = None
    notes: tuple[str, ...] = ()  # what the user should know though it loaded

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Folder)

    def __hash__(self) -> int:
        return hash(Folder)


M = TypeVar("M", bound=nnx.Module)


@dataclasses.dataclass(frozen=True)
class Structure:
    """A module without its arrays: hashable, so jit caches by it."""

    graphdef: Any
    treedef: Any

    def build(self, leaves: tuple[jax.Array, ...]) -> Any:
        """The module with these arrays, in the order `take_apart` gave them."""
        return nnx.merge(self.graphdef, jax.tree.unflatten(self.treedef, leaves))


def take_apart(module: nnx.Module) -> tuple[tuple[jax.Array, ...], Structure]:
    """Flat arrays and what puts them back; a jitted call takes them faster than a module."""
    graphdef, state = nnx.split(module)
    leaves, treedef = jax.tree.flatten(state)
    return tuple(leaves), Structure(graphdef, treedef)


def build(
    make: Callable[[], M], read: Callable[[str], np.ndarray], names: Mapping[str, Any], dtype: str
) -> M:
    """Fills an abstract module with tensors, one at a time, without allocating random weights.

    Args:
      make: constructs the module; only traced.
      read: gives the array of a dotted canonical name; floating arrays are cast to `dtype`.
      names: the names that exist, for the error message.

    Raises:
      ConfigError: a tensor is missing or has another shape than the module's.
    """
    compute = jnp.dtype(precision(dtype).compute)
    graphdef, state = nnx.split(nnx.eval_shape(make))
    flat = nnx.to_flat_state(state)
    filled = []
    for path, variable in flat:
        parts, groups, transposed = _stored(variable)
        shape = tuple(variable.get_value().shape)
        if transposed:
            shape = shape[::-1]
        if parts is None:
            array = _read(".".join(map(str, path)), shape, read, names)
        else:
            *block, _, kind = map(str, path)
            shares = [
                _read(".".join((*block, name, kind)), (rows, *shape[1:]), read, names).reshape(
                    groups, -1, *shape[1:]
                )
                for name, rows in parts
            ]
            array = np.concatenate(shares, axis=1).reshape(shape)
        if jnp.issubdtype(array.dtype, jnp.floating):
            array = array.astype(compute, copy=False)
        if transposed:
            array = np.ascontiguousarray(array.T)
        filled.append((path, variable.replace(jax.device_put(array))))
    return nnx.merge(graphdef, nnx.from_flat_state(filled))


def tensors_of(module: nnx.Module) -> dict[str, np.ndarray]:
    """The module's tensors as a checkpoint has them, by canonical name: the inverse of `build`."""
    tensors: dict[str, np.ndarray] = {}
    for path, variable in nnx.to_flat_state(nnx.state(module)):
        parts, groups, transposed = _stored(variable)
        array = np.asarray(variable.get_value())
        array = array.T if transposed else array
        if parts is None:
            tensors[".".join(map(str, path))] = array
            continue
        *block, _, kind = map(str, path)
        dealt = array.reshape(groups, -1, *array.shape[1:])
        ends = np.cumsum([rows // groups for _, rows in parts])
        for (name, rows), end in zip(parts, ends, strict=True):
            share = dealt[:, end - rows // groups : end]
            tensors[".".join((*block, name, kind))] = share.reshape(rows, *array.shape[1:])
    return tensors


def _stored(variable: Any) -> tuple[tuple[tuple[str, int], ...] | None, int, bool]:
    """How `layers.Linear` says its weight differs from the checkpoint's: parts, groups, turned."""
    metadata = variable.get_metadata()
    return metadata.get("parts"), metadata.get("groups", 1), metadata.get("transposed", False)


def _read(
    name: str, shape: tuple[int, ...], read: Callable[[str], np.ndarray], names: Mapping[str, Any]
) -> np.ndarray:
    if name not in names:
        raise ConfigError(f"tensor {name} is missing")
    array = read(name)
    if tuple(array.shape) != shape:
        raise ConfigError(f"tensor {name} has shape {list(array.shape)}, expected {list(shape)}")
    return array

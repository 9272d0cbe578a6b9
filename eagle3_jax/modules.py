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
        name = ".".join(map(str, path))
        if name not in names:
            raise ConfigError(f"tensor {name} is missing")
        array = read(name)
        shape = variable.get_value().shape
        if tuple(array.shape) != tuple(shape):
            raise ConfigError(
                f"tensor {name} has shape {list(array.shape)}, expected {list(shape)}"
            )
        if jnp.issubdtype(array.dtype, jnp.floating):
            array = array.astype(compute, copy=False)
        filled.append((path, variable.replace(jax.device_put(array))))
    return nnx.merge(graphdef, nnx.from_flat_state(filled))

"""What the loop asks of a target."""

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import jax

from eagle3_jax.cache import KVCache
from eagle3_jax.config import Boundary, TargetConfig
from eagle3_jax.draft import Shared
from eagle3_jax.layers import Rows
from eagle3_jax.modules import Folder


@runtime_checkable
class Target(Protocol):
    """A decoder-only language model as an nnx module."""

    config: TargetConfig
    folder: Folder  # for its tokenizer

    @property
    def dtype(self) -> jax.numpy.dtype:
        """Of weights and activations."""
        ...

    def new_cache(self, batch: int, slots: int) -> KVCache:
        """An empty cache."""
        ...

    def states(
        self, tokens: jax.Array, rows: Rows, cache: KVCache, boundaries: Sequence[Boundary] = ()
    ) -> tuple[jax.Array, jax.Array, KVCache]:
        """Runs tokens [B, T].

        Returns:
          The state after the final norm [B, T, E], the states at `boundaries` stacked in the order
          given [B, T, A, E], and the cache with the new rows.
        """
        ...

    def logits(self, states: jax.Array) -> jax.Array:
        """States after the final norm [..., E] -> [..., V], float32 at least."""
        ...

    def shared(self) -> Shared:
        """The embedding and the head, for drafts that have none of their own."""
        ...

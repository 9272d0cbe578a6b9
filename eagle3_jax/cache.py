"""Keys and values of one model: rows are appended at any slot, an accepted path is kept."""

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax

from eagle3_jax.ops.append import put_rows
from eagle3_jax.ops.keep import keep_rows


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class KVCache:
    """Per-layer buffers. How many slots are valid is the caller's business (`LoopState.length`).

    Latent attention keeps one head of keys whose first elements are the values: v has width 0.
    """

    k: tuple[jax.Array, ...]  # layers x [B, S, K, H]
    v: tuple[jax.Array, ...]  # layers x [B, S, K, H]
    positions: jax.Array | None = None  # [B, S] int32 of each slot, where a layer has a window

    @classmethod
    def zeros(cls, layers: int, batch: int, slots: int, kv_heads: int, head_dim: int, dtype):
        """An empty cache of `slots` rows per sequence, all layers alike."""
        heads = (kv_heads, head_dim)
        return cls.of([(heads, heads)] * layers, batch, slots, dtype)

    @classmethod
    def of(
        cls,
        layers: Sequence[tuple[tuple[int, int], tuple[int, int]]],
        batch: int,
        slots: int,
        dtype,
        *,
        positions: bool = False,
    ) -> "KVCache":
        """An empty cache; each layer gives heads and width of its keys and of its values."""
        k = tuple(jnp.zeros((batch, slots, *heads), dtype) for heads, _ in layers)
        v = tuple(jnp.zeros((batch, slots, *heads), dtype) for _, heads in layers)
        return cls(k, v, jnp.zeros((batch, slots), jnp.int32) if positions else None)

    def place(self, positions: jax.Array, start: jax.Array) -> "KVCache":
        """Puts the positions [B, T] of new rows for all layers, before these write them."""
        if self.positions is None:
            return self
        return dataclasses.replace(self, positions=put_rows(self.positions, positions, start))

    def write(self, layer: int, k: jax.Array, v: jax.Array, start: jax.Array) -> "KVCache":
        """Puts k, v [B, T, K, H] at slots start[b] .. start[b] + T - 1 of one layer.

        The caller guarantees that they fit: an update past the end would be moved, not refused.
        """
        k, v = put_rows(self.k[layer], k, start), put_rows(self.v[layer], v, start)
        return self.written(layer, k, v)

    def written(self, layer: int, k: jax.Array, v: jax.Array) -> "KVCache":
        """This cache with a layer's buffers replaced by whole ones [B, S, K, H], new rows in them.

        For who wrote the rows itself (`ops.append.append_rows`); `write` puts them and does this.
        """
        return KVCache(_set(self.k, layer, k), _set(self.v, layer, v), self.positions)

    def layer(self, index: int) -> "KVCache":
        """One layer's buffers as a cache of that layer alone."""
        return KVCache(self.k[index : index + 1], self.v[index : index + 1], self.positions)

    def keep(self, path: jax.Array, start: jax.Array) -> "KVCache":
        """Moves slots start + path[:, d] to start + d in every layer; path is [B, P]."""
        leaves, treedef = jax.tree.flatten(self)
        return jax.tree.unflatten(treedef, keep_rows(leaves, path, start))

    def first(self, slots: int) -> "KVCache":
        """The first `slots` slots."""
        return jax.tree.map(lambda x: x[:, :slots], self)

    def followed_by(self, other: "KVCache") -> "KVCache":
        """The slots of this cache, then those of another of the same model."""
        return jax.tree.map(lambda x, y: jnp.concatenate((x, y), axis=1), self, other)

    def rows(self, start: jax.Array, count: int) -> "KVCache":
        """`count` slots from `start` [] on."""
        return jax.tree.map(lambda x: lax.dynamic_slice_in_dim(x, start, count, axis=1), self)


def _set(buffers: tuple, index: int, value) -> tuple:
    return (*buffers[:index], value, *buffers[index + 1 :])

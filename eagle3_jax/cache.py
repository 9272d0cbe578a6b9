"""Keys and values of one model: rows are appended at any slot, an accepted path is kept."""

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class KVCache:
    """Per-layer buffers. How many slots are valid is the caller's business (`LoopState.length`)."""

    k: tuple[jax.Array, ...]  # layers x [B, S, K, H]
    v: tuple[jax.Array, ...]  # layers x [B, S, K, H]

    @classmethod
    def zeros(cls, layers: int, batch: int, slots: int, kv_heads: int, head_dim: int, dtype):
        """An empty cache of `slots` rows per sequence."""
        shape = (batch, slots, kv_heads, head_dim)
        return cls(
            tuple(jnp.zeros(shape, dtype) for _ in range(layers)),
            tuple(jnp.zeros(shape, dtype) for _ in range(layers)),
        )

    def write(self, layer: int, k: jax.Array, v: jax.Array, start: jax.Array) -> "KVCache":
        """Puts k, v [B, T, K, H] at slots start[b] .. start[b] + T - 1 of one layer.

        The caller guarantees that they fit: an update past the end would be moved, not refused.
        """
        return dataclasses.replace(
            self,
            k=_set(self.k, layer, _put(self.k[layer], k, start)),
            v=_set(self.v, layer, _put(self.v[layer], v, start)),
        )

    def keep(self, path: jax.Array, start: jax.Array) -> "KVCache":
        """Moves slots start + path[:, d] to start + d in every layer; path is [B, P]."""
        slots = start[:, None] + path

        def move(buffer):
            rows = jnp.take_along_axis(buffer, slots[:, :, None, None], axis=1)
            return _put(buffer, rows, start)

        return KVCache(tuple(map(move, self.k)), tuple(map(move, self.v)))


def _set(buffers: tuple, index: int, value) -> tuple:
    return (*buffers[:index], value, *buffers[index + 1 :])


def _put(buffer: jax.Array, rows: jax.Array, start: jax.Array) -> jax.Array:
    if buffer.shape[0] == 1:
        zero = jnp.zeros((), start.dtype)
        return lax.dynamic_update_slice(buffer, rows, (zero, start[0], zero, zero))
    return jax.vmap(lambda b, r, s: lax.dynamic_update_slice_in_dim(b, r, s, axis=0))(
        buffer, rows, start
    )

"""Rows land where they are written, and an accepted path moves to the front of its window."""

import jax.numpy as jnp
import numpy as np
import pytest

from eagle3_jax.cache import KVCache


@pytest.mark.parametrize("batch", [1, 3])
def test_write_then_keep(batch):
    rng = np.random.default_rng(batch)
    layers, S, K, H, T = 2, 12, 2, 4, 5
    cache = KVCache.zeros(layers, batch, S, K, H, jnp.float32)
    expected = {name: np.zeros((layers, batch, S, K, H), np.float32) for name in "kv"}
    start = rng.integers(0, S - T, batch).astype(np.int32)
    for layer in range(layers):
        rows = {name: rng.normal(size=(batch, T, K, H)).astype(np.float32) for name in "kv"}
        cache = cache.write(layer, *(jnp.asarray(rows[n]) for n in "kv"), jnp.asarray(start))
        for b in range(batch):
            for name in "kv":
                expected[name][layer, b, start[b] : start[b] + T] = rows[name][b]
    np.testing.assert_array_equal(np.stack(cache.k), expected["k"])
    np.testing.assert_array_equal(np.stack(cache.v), expected["v"])

    path = np.sort(rng.permuted(np.tile(np.arange(1, T), (batch, 1)), axis=1)[:, :2], axis=1)
    path = np.concatenate((np.zeros((batch, 1), int), path), axis=1).astype(np.int32)
    kept = cache.keep(jnp.asarray(path), jnp.asarray(start))
    for name, buffers in (("k", kept.k), ("v", kept.v)):
        moved = expected[name].copy()
        for b in range(batch):
            moved[:, b, start[b] : start[b] + 3] = expected[name][:, b, start[b] + path[b]]
        np.testing.assert_array_equal(np.stack(buffers), moved)

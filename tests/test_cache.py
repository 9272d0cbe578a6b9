"""Rows land where they are written, and an accepted path moves to the front of its window."""

import jax.numpy as jnp
import numpy as np
import pytest

from eagle3_jax.cache import KVCache


@pytest.mark.parametrize("batch", [1, 3])
def test_write_then_keep(batch):
    rng = np.random.default_rng(batch)
    layers, S, K, H, T = 2, 12, 2, 4, 5
    shapes = [((K, H), (K, H + 1))] * layers
    cache = KVCache.of(shapes, batch, S, jnp.float32, positions=True)
    widths = {"k": H, "v": H + 1}
    expected = {n: np.zeros((layers, batch, S, K, widths[n]), np.float32) for n in "kv"}
    positions = rng.integers(0, 99, (batch, T)).astype(np.int32)
    start = rng.integers(0, S - T, batch).astype(np.int32)
    cache = cache.place(jnp.asarray(positions), jnp.asarray(start))
    for layer in range(layers):
        rows = {n: rng.normal(size=(batch, T, K, widths[n])).astype(np.float32) for n in "kv"}
        given = (*(rows[n] for n in "kv"), start)
        cache = cache.write(layer, *map(jnp.asarray, given))
        for b in range(batch):
            for name in "kv":
                expected[name][layer, b, start[b] : start[b] + T] = rows[name][b]
    np.testing.assert_array_equal(np.stack(cache.k), expected["k"])
    np.testing.assert_array_equal(np.stack(cache.v), expected["v"])

    at = np.zeros((batch, S), np.int32)
    for b in range(batch):
        at[b, start[b] : start[b] + T] = positions[b]
    np.testing.assert_array_equal(cache.positions, at)

    path = np.sort(rng.permuted(np.tile(np.arange(1, T), (batch, 1)), axis=1)[:, :2], axis=1)
    path = np.concatenate((np.zeros((batch, 1), int), path), axis=1).astype(np.int32)
    kept = cache.keep(jnp.asarray(path), jnp.asarray(start))
    for name, buffers in (("k", kept.k), ("v", kept.v)):
        moved = expected[name].copy()
        for b in range(batch):
            moved[:, b, start[b] : start[b] + 3] = expected[name][:, b, start[b] + path[b]]
        np.testing.assert_array_equal(np.stack(buffers), moved)
    for b in range(batch):
        at[b, start[b] : start[b] + 3] = at[b, start[b] + path[b]]
    np.testing.assert_array_equal(kept.positions, at)
    assert KVCache.zeros(1, batch, S, K, H, jnp.float32).positions is None


def test_slots_of_two_caches():
    rng = np.random.default_rng(5)
    parts = [
        KVCache(
            (jnp.asarray(rng.normal(size=(1, slots, 2, 4))),),
            (jnp.asarray(rng.normal(size=(1, slots, 1, 3))),),
            jnp.asarray(rng.integers(0, 9, (1, slots))),
        )
        for slots in (6, 3)
    ]
    joined = parts[0].first(4).followed_by(parts[1])
    rows = joined.rows(jnp.asarray(2), 4)
    for whole, first, second in (
        (rows.k[0], parts[0].k[0], parts[1].k[0]),
        (rows.v[0], parts[0].v[0], parts[1].v[0]),
        (rows.positions, parts[0].positions, parts[1].positions),
    ):
        expected = np.concatenate((first[:, 2:4], second[:, :2]), axis=1)
        np.testing.assert_array_equal(whole, expected)

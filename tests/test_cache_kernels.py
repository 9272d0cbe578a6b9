"""Rows appended and paths kept by the interpreted kernels, against NumPy slot by slot."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_cases import DTYPES
from cuda_lowering import lowered
from selection import by_default

from eagle3_jax.cache import KVCache
from eagle3_jax.ops.append import append_rows
from eagle3_jax.ops.attention import use_attention

ATOL = {"float32": 1e-5, "bfloat16": 2**-6, "float16": 2**-9}


def naive_heads(x, cos, sin, weight, eps):
    """Heads [B, T, n, H] in float64; after the norm rounded, as the blocks round."""
    dtype, x = x.dtype, x.astype(np.float64)
    if weight is not None:
        x = x / np.sqrt((x * x).mean(-1, keepdims=True) + eps)
        x = (x.astype(dtype) * weight).astype(np.float64)
    half = x.shape[-1] // 2
    first, second = x[..., :half], x[..., half:]
    cos, sin = (np.asarray(a, np.float64) for a in (cos, sin))
    return np.concatenate((first * cos - second * sin, second * cos + first * sin), axis=-1)


APPENDED = [
    ((1, 1, 1, 1, 2), False, "float16"),
    ((2, 7, 2, 3, 6), True, "float32"),
    ((3, 4, 2, 5, 80), True, "bfloat16"),
    ((2, 3, 2, 4, 6), False, "float32"),
    ((1, 33, 1, 7, 64), True, "float32"),
    ((2, 3, 2, 4, 128), False, "float16"),
]


@pytest.mark.parametrize("which", by_default(APPENDED, lambda i, _: i < 4))
@pytest.mark.parametrize("implementation", ["xla", "interpret"])
def test_rows_are_normed_rotated_and_written(which, implementation):
    (B, T, K, G, H), normed, dtype = which
    S, eps = T + 9, 1e-5
    rng = np.random.default_rng(T)
    make = DTYPES[dtype]
    grouped = rng.normal(size=(B, T, K, G + 2, H)).astype(make)
    cos, sin = rng.normal(size=(2, B, T, 1, H // 2)).astype(np.float32)
    norms = tuple(rng.normal(size=(2, H)).astype(make)) if normed else None
    k, v = rng.normal(size=(2, B, S, K, H)).astype(make)
    start = rng.integers(0, S - T + 1, B).astype(np.int32)
    start[-1] = S - T

    @jax.jit
    def run(grouped, rotation, norms, k, v, start):
        with use_attention(implementation):
            return append_rows(grouped, rotation, norms, k, v, start, eps)

    given = (grouped, (cos, sin), norms, k, v, start)
    q, found_k, found_v = run(*jax.tree.map(jnp.asarray, given))
    weights = norms or (None, None)
    queries = naive_heads(grouped[:, :, :, :G].reshape(B, T, K * G, H), cos, sin, weights[0], eps)
    keys = naive_heads(grouped[:, :, :, G], cos, sin, weights[1], eps)
    expected_k, expected_v = k.astype(np.float64), v.copy()
    for b in range(B):
        expected_k[b, start[b] : start[b] + T] = keys[b]
        expected_v[b, start[b] : start[b] + T] = grouped[b, :, :, G + 1]
    assert (q.dtype, found_k.dtype) == (grouped.dtype, k.dtype)
    np.testing.assert_array_equal(found_v, expected_v)
    for found, expected in ((q, queries), (found_k, expected_k)):
        wide = np.asarray(found, np.float64)
        np.testing.assert_allclose(wide, expected, rtol=ATOL[dtype], atol=4 * ATOL[dtype])
    untouched = np.ones((B, S), bool)
    for b in range(B):
        untouched[b, start[b] : start[b] + T] = False
    np.testing.assert_array_equal(np.asarray(found_k)[untouched], k[untouched])


@pytest.mark.parametrize("implementation", ["xla", "interpret"])
@pytest.mark.parametrize(
    ("heads", "rows", "dtype"),
    [
        ([((2, 16), (2, 16))] * 3, 4, "bfloat16"),
        ([((1, 200), (1, 0))] * 2, 3, "float32"),  # latent attention: wide keys, no values
        ([((2, 6), (2, 5)), ((1, 6), (2, 6))], 5, "float32"),  # layers that differ
    ],
)
def test_a_path_moves_to_the_front(heads, rows, dtype, implementation):
    B, S = 2, 24
    rng = np.random.default_rng(rows)
    empty = KVCache.of(heads, B, S, jnp.dtype(DTYPES[dtype]), positions=True)
    leaves, treedef = jax.tree.flatten(empty)
    before = [rng.normal(size=x.shape, scale=9).astype(x.dtype) for x in leaves]
    start = np.array([0, S - 12], np.int32)
    path = np.sort(rng.permuted(np.tile(np.arange(1, 12), (B, 1)), axis=1)[:, : rows - 1], axis=1)
    path = np.concatenate((np.zeros((B, 1), int), path), axis=1).astype(np.int32)
    path[1, -1] = 0  # past the accepted ones a path holds 0

    @jax.jit
    def run(cache, path, start):
        with use_attention(implementation):
            return cache.keep(path, start)

    cache = jax.tree.unflatten(treedef, map(jnp.asarray, before))
    found = jax.tree.leaves(run(cache, jnp.asarray(path), jnp.asarray(start)))
    for mine, old in zip(found, before, strict=True):
        expected = old.copy()
        for b in range(B):
            expected[b, start[b] : start[b] + rows] = old[b, start[b] + path[b]]
        np.testing.assert_array_equal(mine, expected)


@pytest.mark.parametrize(("layers", "rows", "launches"), [(32, 4, 1), (32, 6, 2), (80, 4, 3)])
def test_many_layers_take_few_launches(layers, rows, launches):
    """Buffers alike go through one kernel as far as its registers reach."""
    cache = jax.eval_shape(lambda: KVCache.zeros(layers, 1, 64, 8, 128, jnp.bfloat16))
    path = jax.ShapeDtypeStruct((1, rows), jnp.int32)
    start = jax.ShapeDtypeStruct((1,), jnp.int32)
    text = lowered(jax.jit(KVCache.keep), cache, path, start)
    assert len(re.findall(r"call @_by_kernel", text)) == launches
    assert "dynamic_update_slice" not in text
    assert "debug_barrier" in text, "a warp may overwrite a row that another has yet to read"

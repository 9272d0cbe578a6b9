"""Attention against NumPy in float64, query by query, with visibility spelled out slot by slot."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from eagle3_jax.ops.attention import Window, attend, attend_causal

attend = jax.jit(attend, static_argnames="scale")
attend_causal = jax.jit(attend_causal, static_argnames="scale")

DTYPES = {"float32": np.float32, "float64": np.float64, "bfloat16": ml_dtypes.bfloat16}
# (B, T, S, K, G, H, words)
SHAPES = [
    (1, 1, 5, 1, 1, 2, 1),
    (3, 7, 24, 2, 2, 4, 1),
    (2, 33, 64, 3, 1, 6, 2),
    (2, 64, 97, 1, 5, 8, 2),
    (3, 70, 96, 2, 3, 4, 3),
    (1, 12, 20, 4, 2, 16, 3),
]


def naive(q, k, v, sees: np.ndarray, scale: float) -> tuple[np.ndarray, np.ndarray]:
    """Output, and the weighted sum of |v| that bounds its rounding; sees is [B, T, S] bool."""
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    B, T, N, _ = q.shape
    out, bound = np.zeros(q.shape), np.zeros(q.shape)
    for b in range(B):
        for t in range(T):
            slots = np.flatnonzero(sees[b, t])
            for n in range(N):
                head = n // (N // k.shape[2])
                scores = scale * (k[b, slots, head] @ q[b, t, n])
                weights = np.exp(scores - scores.max())
                weights /= weights.sum()
                out[b, t, n] = weights @ v[b, slots, head]
                bound[b, t, n] = weights @ np.abs(v[b, slots, head])
    return out, bound


def check(found, q, k, v, sees, scale, dtype: str):
    """bfloat16 inputs are exact here and sums are in float32: what is left is one rounding of each
    weight and one of the output, each at most 2^-8 of it."""
    assert found.dtype == q.dtype
    expected, bound = naive(q, k, v, sees, scale)
    allowed = {"float32": 1e-5, "float64": 1e-13, "bfloat16": 2**-7 + 1e-5}[dtype] * bound
    error = np.abs(np.asarray(found, np.float64) - expected)
    assert np.max(error / allowed) <= 1


def draw(rng, dtype: str, B, T, S, K, G, H):
    return (
        rng.normal(size=shape).astype(DTYPES[dtype])
        for shape in ((B, T, K * G, H), (B, S, K, H), (B, S, K, H))
    )


def draw_bits(rng, T: int, words: int, slots: int) -> list[int]:
    """One integer a row, any bits, but at least one that names one of the `slots` there are."""
    rows = [int.from_bytes(rng.bytes(4 * words), "little") for _ in range(T)]
    return [row | 1 << int(rng.integers(0, min(slots, 32 * words))) for row in rows]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
def test_attend(dtype, shape):
    B, T, S, K, G, H, words = shape
    rng = np.random.default_rng(S)
    with jax.enable_x64(dtype == "float64"):
        for draws in range(4):
            # an empty prefix, the last T slots of a full cache, and anything between
            lengths = rng.integers(0, S - T + 1, B)
            lengths[0] = (0, S - T, lengths[0], lengths[0])[draws]
            rows = [draw_bits(rng, T, words, S - n) for n in lengths]
            sees = np.zeros((B, T, S), bool)
            for b in range(B):
                for t in range(T):
                    for s in range(S):
                        j = s - int(lengths[b])
                        sees[b, t, s] = j < 0 or bool(rows[b][t] >> j & 1)
            packed = [
                [[row >> 32 * w & 0xFFFFFFFF for w in range(words)] for row in row_list]
                for row_list in rows
            ]
            q, k, v = draw(rng, dtype, B, T, S, K, G, H)
            found = attend(
                jnp.asarray(q),
                jnp.asarray(k),
                jnp.asarray(v),
                jnp.asarray(lengths, jnp.int32),
                jnp.asarray(np.array(packed, np.uint32)),
                scale=0.7,
            )
            check(found, q, k, v, sees, 0.7, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 1, 1, 1, 2), (2, 9, 2, 3, 4), (1, 70, 3, 2, 8)], ids=str)
def test_attend_causal(dtype, shape):
    B, T, K, G, H = shape
    q, k, v = draw(np.random.default_rng(T), dtype, B, T, T, K, G, H)
    with jax.enable_x64(dtype == "float64"):
        found = attend_causal(jnp.asarray(q), jnp.asarray(k), jnp.asarray(v), scale=0.7)
    sees = np.array([[[s <= t for s in range(T)] for t in range(T)] for _ in range(B)])
    check(found, q, k, v, sees, 0.7, dtype)


def test_large_scores_stay_finite():
    rng = np.random.default_rng(0)
    q, k, v = draw(rng, "float32", 2, 3, 8, 1, 2, 4)
    q *= 1e6
    bits = jnp.full((2, 3, 1), 0b111, jnp.uint32)
    lengths = jnp.asarray([0, 5], jnp.int32)
    found = attend(jnp.asarray(q), jnp.asarray(k), jnp.asarray(v), lengths, bits, scale=1.0)
    sees = np.array([[[0 <= s - n < 3 or s < n for s in range(8)]] * 3 for n in (0, 5)])
    check(found, q, k, v, sees, 1.0, "float32")


def test_a_row_that_sees_nothing_is_zeros():
    q, k, v = draw(np.random.default_rng(1), "float32", 1, 2, 6, 2, 1, 4)
    bits = jnp.asarray([[[0], [1]]], jnp.uint32)
    zero = jnp.zeros((1,), jnp.int32)
    found = attend(jnp.asarray(q), jnp.asarray(k), jnp.asarray(v), zero, bits, scale=0.5)
    assert np.all(found[0, 0] == 0)
    np.testing.assert_allclose(found[0, 1], v[0, 0], rtol=0, atol=1e-6)


def test_a_window_counts_positions_and_values_have_their_own_width():
    """Three nodes a level side by side in slots: positions repeat, slots do not."""
    rng = np.random.default_rng(2)
    B, T, S, K, G, H, wide, size = 2, 6, 20, 2, 2, 4, 3, 5
    q, k, _ = draw(rng, "float32", B, T, S, K, G, H)
    v = rng.normal(size=(B, S, K, wide)).astype(np.float32)
    lengths = np.array([7, 12])
    positions = np.array([[n, n, n, n + 1, n + 1, n + 1] for n in lengths])
    at = np.tile(np.arange(S), (B, 1))
    sees = np.zeros((B, T, S), bool)
    for b, n in enumerate(lengths):
        at[b, n : n + T] = positions[b]
        for t in range(T):
            for s in range(n + t + 1):
                parents = s < n or s == n + t or (t >= 3 and s == n + t - 3)
                sees[b, t, s] = parents and positions[b, t] - at[b, s] < size
    bits = jnp.asarray([[[1], [2], [4], [9], [18], [36]]] * B, jnp.uint32)
    window = Window(size, jnp.asarray(positions), jnp.asarray(at))
    plain = attend.__wrapped__
    found = plain(
        *map(jnp.asarray, (q, k, v)), jnp.asarray(lengths), bits, scale=0.7, window=window
    )
    assert found.shape == (B, T, K * G, wide)
    expected = np.zeros(found.shape)
    for b, t, n in np.ndindex(B, T, K * G):
        slots = np.flatnonzero(sees[b, t])
        weights = np.exp(0.7 * (k[b, slots, n // G] @ q[b, t, n]).astype(np.float64))
        expected[b, t, n] = weights / weights.sum() @ v[b, slots, n // G]
    np.testing.assert_allclose(found, expected, atol=1e-5)
    rows = [jnp.asarray(x) for x in (q, k[:, :T], v[:, :T])]
    causal = attend_causal.__wrapped__(*rows, scale=0.7, window=2)
    for b, t, n in np.ndindex(B, T, K * G):
        slots = np.arange(max(0, t - 1), t + 1)
        weights = np.exp(0.7 * (k[b, slots, n // G] @ q[b, t, n]).astype(np.float64))
        mixed = weights / weights.sum() @ v[b, slots, n // G]
        np.testing.assert_allclose(causal[b, t, n], mixed, atol=1e-5)

"""Large vocabularies, which are added up by blocks: cuts and draws against NumPy in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eagle3_jax import SamplingConfig
from eagle3_jax.sampling import BLOCK, SamplingPlan, SamplingValues, draw, probabilities
from eagle3_jax.sampling_config import AcceptRule

SIZES = [2 * BLOCK + 1, 3000]


@pytest.mark.parametrize("size", SIZES)
def test_a_draw_is_where_the_running_sum_passes_the_coin(size):
    rng = np.random.default_rng(size)
    weights = rng.random((40, size)).astype(np.float32)
    weights *= rng.random((40, size)) < 0.1  # many ids of no weight, blocks too
    weights[:, BLOCK : 2 * BLOCK] = 0
    coins = rng.random(40).astype(np.float32)
    coins[:2] = 0, np.nextafter(np.float32(1), np.float32(0))
    found = np.asarray(jax.jit(draw)(jnp.asarray(weights), jnp.asarray(coins)))
    total = np.cumsum(weights.astype(np.float64), axis=1)
    for row, token in enumerate(found):
        goal = coins[row] * total[row, -1]
        assert weights[row, token] > 0
        before = total[row, token] - weights[row, token]
        assert before - 1e-4 <= goal <= total[row, token] + 1e-4


def test_a_draw_of_one_id():
    weights = np.zeros((3, 1000), np.float32)
    for row, token in enumerate((0, 600, 999)):
        weights[row, token] = 1
    for coin in (0.0, 0.5, 0.99999994):
        found = draw(jnp.asarray(weights), jnp.full((3,), coin, jnp.float32))
        assert found.tolist() == [0, 600, 999]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("cuts", [{"top_k": 50}, {"top_p": 0.6}, {"top_k": 300, "top_p": 0.9}])
def test_cuts_keep_the_most_likely_and_of_equal_ones_the_lower_ids(size, cuts):
    rng = np.random.default_rng(size)
    # Sixteen values only: every cut falls among equals.
    logits = rng.integers(0, 16, (1, 3, size)).astype(np.float32) / 2
    config = SamplingConfig(1.0, **cuts)
    plan = SamplingPlan.of(config, AcceptRule())
    values = SamplingValues.of(config, 1, size, np.dtype(np.float32))
    found = jax.jit(probabilities, static_argnums=1)(jnp.asarray(logits), plan, values)
    for row, mine in zip(logits[0].astype(np.float64), np.asarray(found)[0], strict=True):
        p = np.exp(row - row.max())
        p /= p.sum()
        order = np.argsort(-p, kind="stable")
        kept = order[: config.top_k]
        p[np.setdiff1d(order, kept)] = 0
        p /= p.sum()
        before = np.cumsum(p[order]) - p[order]
        p[order[before >= config.top_p]] = 0
        p /= p.sum()
        assert abs(int((mine > 0).sum()) - int((p > 0).sum())) <= ("top_p" in cuts)
        both = (mine > 0) & (p > 0)
        np.testing.assert_allclose(mine[both], p[both], rtol=1e-2)
        if "top_p" not in cuts:
            np.testing.assert_array_equal(mine > 0, p > 0)
        number = int((mine > 0).sum())
        assert set(np.flatnonzero(mine)) == set(order[:number])
        assert abs(mine.sum() - 1) < 1e-5

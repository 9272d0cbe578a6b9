"""Sampled acceptance on trees, by exact enumeration over all coins in float64 (enumeration.py)."""

import jax
import numpy as np
import pytest
from enumeration import distance, random_tree, tree_round
from selection import by_default, every_other
from tiny_language import PROCESSORS, Language

from eagle3_jax.config import AcceptRule


@pytest.fixture(autouse=True)
def _float64():
    with jax.enable_x64(True):
        yield


@pytest.mark.parametrize("name", by_default(PROCESSORS, lambda _, name: name in ("none", "all")))
@pytest.mark.parametrize("rule", ["target_only", "rejection"])
def test_a_round_on_a_tree_emits_the_targets_own_distribution(rule, name):
    for seed in range(2):
        language = Language(seed, PROCESSORS[name])
        drawn = random_tree(np.random.default_rng([seed, 5]))
        emitted, mean, given = tree_round(AcceptRule(rule), language, drawn)
        assert distance(emitted, language) < 1e-12
        assert abs(mean - given) < 1e-12
        assert abs(sum(emitted.values()) - 1) < 1e-12


@pytest.mark.parametrize(
    "thresholds", every_other([(0.35, 0.7), (0.3, 1.0), (0.0, 0.0), (1.0, 0.6)]), ids=str
)
def test_thresholds_below_one_change_the_distribution_and_raise_the_accept_length(thresholds):
    single, acc = thresholds
    language = Language(4, PROCESSORS["none"])
    drawn = random_tree(np.random.default_rng(8))
    rule = AcceptRule("target_only", threshold_single=single, threshold_acc=acc)
    assert not rule.lossless
    emitted, mean, given = tree_round(rule, language, drawn)
    assert distance(emitted, language) > 1e-3
    assert abs(mean - given) < 1e-12
    assert mean > tree_round(AcceptRule(), language, drawn)[1] + 1e-3

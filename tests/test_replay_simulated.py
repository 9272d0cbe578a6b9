"""What replay expects of a rule at a temperature, against coins thrown in NumPy."""

import numpy as np
import pytest

from eagle3_jax import AcceptRule
from eagle3_jax.record import RecordSequence
from eagle3_jax.replays.temperature import expected_drafts

V, STEPS, COINS = 24, 4, 400_000
RULES = [
    AcceptRule(),
    AcceptRule("rejection"),
    AcceptRule(threshold_acc=0.4),
    AcceptRule(threshold_single=0.15),
    AcceptRule(threshold_single=0.3, threshold_acc=0.7),
]


@pytest.mark.parametrize("rule", RULES, ids=str)
def test_a_chain_is_accepted_as_often_as_expected(rule):
    """SGLang's rule one coin a level, on a record that goes on with what is drafted."""
    rng = np.random.default_rng(5)
    logits = rng.normal(size=(STEPS + 1, V)) * 2
    logprobs = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    order = np.argsort(-logprobs, axis=-1)
    proposed = order[:STEPS, 0].copy()
    proposed[2] = order[2, 1]  # a draft that is not the target's first choice
    sequence = RecordSequence(
        tokens=np.array([1, *proposed, 3], np.int32),
        prompt_length=1,
        aux=np.zeros((STEPS + 1, 1, 4), np.float32),
        top_ids=order.astype(np.int32),
        top_logprobs=np.take_along_axis(logprobs, order, axis=-1).astype(np.float32),
    )
    temperatures = (0.5, 1.0, 1.7)
    found = expected_drafts(sequence, 0, proposed, temperatures, V, rule)
    assert found is not None
    for temperature, expected in zip(temperatures, found, strict=True):
        going, accepted = np.ones(COINS, bool), np.zeros(COINS)
        for level in range(STEPS):
            p = np.exp(logits[level] / temperature)
            p = (p / p.sum())[proposed[level]]
            coins = rng.random(COINS)
            going &= (coins < p / rule.threshold_acc) | (p >= rule.threshold_single)
            accepted += going
        error = accepted.std() / np.sqrt(COINS)
        assert abs(accepted.mean() - expected) < 5 * error + 1e-6

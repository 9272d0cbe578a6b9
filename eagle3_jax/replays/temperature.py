"""Expected true drafts at a temperature, from the target's logprobs along a record."""

from collections.abc import Sequence

import numpy as np

from eagle3_jax.record import RecordSequence
from eagle3_jax.sampling_config import AcceptRule


def expected_drafts(
    sequence: RecordSequence,
    start: int,
    proposed: np.ndarray,
    temperatures: Sequence[float],
    vocab_size: int,
    rule: AcceptRule,
) -> tuple[float, ...] | None:
    """Of one chain, at each temperature.

    A drafted token y is accepted with the target's probability p_T(y): deterministic drafts leave
    nothing else to SGLang's `target_only` rule and to lossless rejection; thresholds below 1 raise
    it to p / threshold_acc, or to 1 from threshold_single on. The sum of products over
    the levels is exact as far as the drafts are the record's own tokens and one token past them;
    what an accepted other token would lead to is not in a greedy record and counts as nothing, so
    the number is a lower bound that grows loose as the temperature rises.

    Tokens outside the recorded best get as much weight as their mass can: evenly spread above a
    temperature of 1, below it as many as fit at the weight of the last recorded one.

    Args:
      proposed: the drafted ids [num_steps], -1 where the chain was not followed further.
    """
    ids, logprobs = sequence.top_ids, sequence.top_logprobs
    if ids is None or logprobs is None:
        return None
    found = []
    for temperature in temperatures:
        expected, path = 0.0, 1.0
        for level, token in enumerate(proposed.tolist()):
            row = start + level - sequence.first
            if token < 0 or row >= len(ids):
                break
            p = _probability(ids[row], logprobs[row], token, temperature, vocab_size)
            path *= _chance(p, rule)
            expected += path
        found.append(expected)
    return tuple(found)


def _chance(p: float, rule: AcceptRule) -> float:
    if rule.lossless or p == 0:
        return p
    return 1.0 if p >= rule.threshold_single else min(p / max(rule.threshold_acc, 1e-9), 1.0)


def _probability(
    ids: np.ndarray, logprobs: np.ndarray, token: int, temperature: float, vocab_size: int
) -> float:
    at = np.flatnonzero(ids == token)
    if not len(at):
        return 0.0
    known = np.asarray(logprobs, np.float64)
    high, low = known.max(), known.min()
    mass, others = max(1 - np.exp(known).sum(), 0.0), vocab_size - len(ids)
    if mass == 0 or others < 1:
        rest = 0.0
    elif temperature >= 1:
        rest = others * np.exp((np.log(mass / others) - high) / temperature)
    else:
        full = min(int(mass / np.exp(low)), others)
        left = mass - full * np.exp(low)
        rest = full * np.exp((low - high) / temperature)
        if left > 0 and full < others:
            rest += np.exp((min(np.log(left), low) - high) / temperature)
    weights = np.exp((known - high) / temperature)
    return float(weights[at[0]] / (weights.sum() + rest))

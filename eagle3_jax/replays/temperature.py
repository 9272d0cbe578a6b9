"""Expected true drafts at a temperature, from the target's logprobs along a record."""

from collections.abc import Sequence

import numpy as np

from eagle3_jax.record import RecordSequence


def expected_drafts(
    sequence: RecordSequence, start: int, proposed: np.ndarray, temperatures: Sequence[float]
) -> tuple[float, ...] | None:
    """Of one chain, at each temperature.

    A drafted token y is accepted with the target's probability p_T(y): deterministic drafts leave
    nothing else to SGLang's `target_only` rule and to lossless rejection. The sum of products over
    the levels is exact as far as the drafts are the record's own tokens and one token past them;
    what an accepted other token would lead to is not in a greedy record and counts as nothing, so
    the number is a lower bound that grows loose as the temperature rises.

    The recorded best tokens are sharpened among themselves, with what is left of the probability as
    one more token.

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
            path *= _probability(ids[row], logprobs[row], token, temperature)
            expected += path
        found.append(expected)
    return tuple(found)


def _probability(ids: np.ndarray, logprobs: np.ndarray, token: int, temperature: float) -> float:
    at = np.flatnonzero(ids == token)
    if not len(at):
        return 0.0
    known = np.asarray(logprobs, np.float64)
    rest = max(1 - np.exp(known).sum(), 1e-12)
    scaled = np.append(known, np.log(rest)) / temperature
    weights = np.exp(scaled - scaled.max())
    return float(weights[at[0]] / weights.sum())

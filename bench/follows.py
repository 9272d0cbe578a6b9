"""Do sampled texts follow the target? Chi-square tests, and what a family of them says together.

Every text is an independent draw given its prompt, and a token's place in its own distribution (the
mass of likelier tokens plus an even share of its own) is uniform and independent of the places
before it, for texts of the target and no others (Rosenblatt 1952). So places of all tokens may be
counted together, while the tokens themselves may be counted once a text only.
"""

from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np
from scipy import stats

CELLS = 100
LEAST = 5
"""Expected count of a cell below which chi-square is no good approximation: such are pooled."""


def uniform(places: np.ndarray) -> float:
    """p-value of places being uniform on [0, 1), over `CELLS` cells.

    Raises:
      ValueError: too few places for as many cells.
    """
    _check(len(places))
    return float(stats.chisquare(np.histogram(places, CELLS, (0, 1))[0]).pvalue)


def alike(places: np.ndarray, others: np.ndarray) -> float:
    """p-value of two samples of places having one distribution, over the same cells.

    Raises:
      ValueError: too few places for as many cells.
    """
    _check(min(len(places), len(others)))
    table = [np.histogram(x, CELLS, (0, 1))[0] for x in (places, others)]
    return float(stats.chi2_contingency(table, correction=False).pvalue)


def same_tokens(
    mine: Mapping[str, Sequence[tuple[int, ...]]], others: Mapping[str, Sequence[tuple[int, ...]]]
) -> tuple[float, int]:
    """p-value of two ways of writing beginning their texts alike, and its degrees of freedom.

    One beginning a text, so that all are independent; beginnings too rare for a cell of their own
    are one cell, and the prompts' statistics add up.

    Args:
      mine, others: beginnings by prompt.
    """
    total, freedom = 0.0, 0
    for prompt, found in mine.items():
        counts = Counter(found), Counter(others[prompt])
        sizes = [len(found), len(others[prompt])]
        share = min(sizes) / sum(sizes)
        common = [x for x, n in (counts[0] + counts[1]).items() if n * share >= LEAST]
        table = np.asarray([[c[x] for x in common] for c in counts]).reshape(2, -1)
        rest = np.asarray(sizes)[:, None] - table.sum(axis=1, keepdims=True)
        if rest.sum() * share >= LEAST:
            table = np.concatenate((table, rest), axis=1)
        if table.shape[1] < 2:
            continue
        one = stats.chi2_contingency(table, correction=False)
        total, freedom = total + one.statistic, freedom + one.dof
    return float(stats.chi2.sf(total, freedom)) if freedom else 1.0, freedom


def accepted(measured: np.ndarray, expected: np.ndarray) -> float:
    """p-value of the accepted drafts of rounds against their expectation before the coins fell.

    Each round's difference has mean 0 whatever came before, so their sum over the root of the sum
    of squares is a standard normal for many rounds.
    """
    off = measured - expected
    return float(2 * stats.norm.sf(abs(off.sum()) / np.sqrt((off**2).sum())))


def _check(count: int):
    if count < LEAST * CELLS:
        raise ValueError(f"{count} tokens, expected at least {LEAST * CELLS} for {CELLS} cells")

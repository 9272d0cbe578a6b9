"""Whether sampled tokens follow given distributions, and which other ones they follow better."""

import math

import numpy as np

TINY = 1e-12
"""A probability no token is sampled with: such a token counts as forbidden."""
REJECT = 1e-6
"""p-value below which a text does not follow the distribution."""
FEW = 50
"""Sampled tokens below which the test of the distribution is weak."""
SURE = 1e-3
"""Share of binomial counts left outside the interval, both sides together."""
MOVED = 0.03
"""By how much the mean chance over round starts may differ from that over all positions."""


def places(p: np.ndarray, likelier: np.ndarray, seed: int = 0) -> np.ndarray:
    """Each token's place in its own distribution, likely tokens first: uniform on [0, 1).

    The token's own probability is spread by a generator with a fixed seed, so the places are
    independent, for texts drawn from those distributions and no others.
    """
    spread = np.random.default_rng(seed).random(len(p))
    return np.clip(likelier + spread * p, 0.0, 1.0)


def uniform_p_value(where: np.ndarray) -> float:
    """Chi-square and Kolmogorov-Smirnov, the smaller p-value doubled; 1 for nothing."""
    n = len(where)
    if n == 0:
        return 1.0
    return min(1.0, 2 * min(_kolmogorov(np.sort(where)), _chi_square(where)))


def _kolmogorov(where: np.ndarray) -> float:
    """Asymptotic, with Stephens' correction for small n."""
    n = len(where)
    steps = np.arange(1, n + 1) / n
    furthest = float(max((steps - where).max(), (where - steps + 1 / n).max()))
    x = (math.sqrt(n) + 0.12 + 0.11 / math.sqrt(n)) * furthest
    if x < 0.2:
        return 1.0
    total = sum((-1) ** (k - 1) * math.exp(-2 * (k * x) ** 2) for k in range(1, 101))
    return min(1.0, max(0.0, 2 * total))


def _chi_square(where: np.ndarray) -> float:
    """An odd number of cells, at least ten tokens a cell: the tail of an even count is a sum."""
    n = len(where)
    cells = min(41, (n // 10 - 1) // 2 * 2 + 1)
    if cells < 3:
        return 1.0
    found = np.histogram(where, cells, (0.0, 1.0))[0]
    half = float(((found - n / cells) ** 2).sum() / (n / cells)) / 2
    if half == 0:
        return 1.0
    terms = [j * math.log(half) - math.lgamma(j + 1) - half for j in range((cells - 1) // 2)]
    return min(1.0, float(np.exp(np.logaddexp.reduce(terms))))


def favoured_p_value(hit: np.ndarray, chance: np.ndarray) -> float:
    """Whether tokens named in advance, such as drafts, come as often as they should.

    Freedman's inequality, both sides: it holds for any number of tokens.

    Args:
      hit: [R] whether it was that token. chance: [R] its probability.
    """
    off, spread = abs(float((hit - chance).sum())), float((chance * (1 - chance)).sum())
    if off < 1e-3:
        return 1.0
    return min(1.0, 2 * math.exp(-(off**2) / (2 * (spread + off / 3))))


def log_likelihood(p: np.ndarray) -> float:
    """Of tokens with these probabilities; a forbidden one counts as `TINY`."""
    return float(np.log(np.maximum(p, TINY)).sum())


def thresholds(
    p: np.ndarray, hit: np.ndarray, drafted: np.ndarray, verified: np.ndarray
) -> tuple[float, float, float]:
    """The best thresholds below 1 for `target_only`, by likelihood: single, acc, its log.

    A drafted token of probability d is then emitted with min(1, d / acc), or always from `single`
    on; what is left goes to the others in proportion. Not every place had a drafted token to
    verify, so the model is mixed with the target's own distribution.

    Args:
      p: [R] of each token. hit: [R] it is the one that was drafted. drafted: [R] that one's
        probability. verified: [R] not the prefill's token.
    """
    best = (1.0, 1.0, -math.inf)
    rest = np.where(hit, 0.0, p / np.maximum(1 - drafted, TINY))
    grid = [(s / 10, 1.0) for s in range(10)] + [(1.0, max(a / 10, 0.01)) for a in range(10)]
    for single, acc in grid:
        chance = np.where(drafted >= single, 1.0, np.minimum(1.0, drafted / acc))
        favoured = np.where(hit, chance, (1 - chance) * rest)
        for share in (1.0, 0.85, 0.6):
            mixed = np.where(verified, share * favoured + (1 - share) * p, p)
            value = log_likelihood(mixed)
            if value > best[2]:
                best = (single, acc, value)
    return best


def binomial_fits(successes: int, trials: int, chance: float) -> bool:
    """Whether a count is no surprise for some chance within `MOVED` of the one given."""
    low, high = max(0.0, chance - MOVED), min(1.0, chance + MOVED)
    return (
        _at_most(successes, trials, low) > SURE / 2
        and 1 - _at_most(successes - 1, trials, high) > SURE / 2
    )


def _at_most(k: int, n: int, chance: float) -> float:
    """P(X <= k) of a binomial, exactly."""
    if k < 0:
        return 0.0
    if k >= n or chance <= 0:
        return 1.0
    if chance >= 1:
        return 0.0
    i = np.arange(k + 1)
    log = [math.lgamma(n + 1) - math.lgamma(j + 1) - math.lgamma(n - j + 1) for j in i]
    terms = np.asarray(log) + i * math.log(chance) + (n - i) * math.log1p(-chance)
    return min(1.0, float(np.exp(np.logaddexp.reduce(terms))))

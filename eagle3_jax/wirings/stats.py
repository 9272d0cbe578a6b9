"""Is one wiring better than another, or is it noise? Paired differences over the same chains."""

import dataclasses
import math
from statistics import NormalDist

import numpy as np

TRIFLE = 1e-4
"""A mean difference of log loss or accept length below which two wirings are the same."""
RESAMPLES = 2000
LEVEL = 0.99


@dataclasses.dataclass(frozen=True)
class Paired:
    """Mean of a - b over the same chains; `z` is in standard errors, the interval holds 99%."""

    mean: float
    z: float
    low: float
    high: float


def blocks(difference: np.ndarray, size: int) -> np.ndarray:
    """Means of `size` neighbours: chains that share tokens are no independent witnesses."""
    count = max(len(difference) // size, 1)
    return np.array([part.mean() for part in np.array_split(difference, count)])


def z_score(difference: np.ndarray, size: int) -> float:
    """Mean of a paired difference in standard errors; 0 for a trifle or too few."""
    parts = blocks(difference, size)
    if len(parts) < 4 or abs(parts.mean()) < TRIFLE:
        return 0.0
    spread = parts.std(ddof=1)
    if spread == 0:
        return math.copysign(math.inf, parts.mean())
    return float(parts.mean() / spread * math.sqrt(len(parts)))


def paired(a: np.ndarray, b: np.ndarray, size: int) -> Paired:
    """Compares two rows of per-chain values; the interval is a bootstrap over blocks."""
    difference = np.asarray(a, np.float64) - np.asarray(b, np.float64)
    parts = blocks(difference, size)
    drawn = np.random.default_rng(0).integers(0, len(parts), (RESAMPLES, len(parts)))
    means = np.sort(parts[drawn].mean(axis=1))
    low, high = np.quantile(means, ((1 - LEVEL) / 2, (1 + LEVEL) / 2))
    return Paired(float(difference.mean()), z_score(difference, size), float(low), float(high))


def threshold(tried: int, level: float = 1e-3) -> float:
    """Standard errors that the best of `tried` wirings reaches by luck with chance `level`."""
    return NormalDist().inv_cdf(1 - level / max(tried, 1))

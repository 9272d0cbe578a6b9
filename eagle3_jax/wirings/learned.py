"""The vocabulary map the text itself shows, for a map that belongs to another head."""

import dataclasses

import numpy as np

CLEARLY, BY = 6.0, 0.1
"""Standard errors and share of places by which a learned map must beat chance and the given one."""


@dataclasses.dataclass(frozen=True)
class LearnedMap:
    """Which token follows where the draft proposes a row.

    Attributes:
      right: share of places where the row's other places foretell the token; given: where the
        checkpoint's map does; chance: with states of other tokens. places: how many.
      rows: draft row -> target id, those seen at least twice with one token in most of them.
    """

    right: float
    given: float
    chance: float
    places: int
    rows: dict[int, int]

    @property
    def clear(self) -> bool:
        """Whether the rows follow the text and the given map does not say how."""
        low = max(self.chance, self.given)
        error = np.sqrt(max(low * (1 - low), 1 / max(self.places, 1)) / max(self.places, 1))
        return self.right - low > max(CLEARLY * error, BY)


def learn(
    rows: np.ndarray, shuffled: np.ndarray, tokens: np.ndarray, targets: np.ndarray
) -> LearnedMap:
    """Leave-one-out over the first drafts of all chains.

    Args:
      rows: [chains] the draft's best row; shuffled: the same with states of other tokens.
      tokens: [chains] what the record has there. targets: [W] the checkpoint's map.
    """
    right, found = _foretold(rows, tokens)
    chance, _ = _foretold(shuffled, tokens)
    common = np.bincount(tokens).max() / len(tokens)
    given = float((targets[rows] == tokens).mean())
    return LearnedMap(right, given, max(chance, float(common)), len(tokens), found)


def _foretold(rows: np.ndarray, tokens: np.ndarray) -> tuple[float, dict[int, int]]:
    """Share of places foretold by the most common token of the row's other places; the map."""
    right, found = 0, {}
    for row in np.unique(rows):
        ids, counts = np.unique(tokens[rows == row], return_counts=True)
        for i, count in enumerate(counts):
            others = np.delete(counts, i)
            if count - 1 > (others.max() if len(others) else 0):
                right += int(count)
        best = int(counts.argmax())
        if counts[best] >= 2 and 2 * counts[best] > counts.sum():
            found[int(row)] = int(ids[best])
    return right / len(rows), found

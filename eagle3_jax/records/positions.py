"""Where a sequence's tokens stand on the three axes of multi-axis rope."""

import numpy as np

from eagle3_jax.records.types import RecordSequence


def placed(sequence: RecordSequence, first: int, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Rotary positions of tokens `first` .. `first + count - 1`: [3, count], and [count] the
    largest of the whole sequence up to each, after which text goes on.

    Tokens without positions of their own are counted.
    """
    own = sequence.positions
    if own is None:
        own = np.repeat(np.arange(first + count)[None], 3, axis=0)
    own = own[:, : first + count]
    return own[:, first:], np.maximum.accumulate(own.max(axis=0))[first:]

"""Ancestor bits: which of the slots after its sequence's length a row sees."""

import numpy as np


def chain_bits(rows: int) -> np.ndarray:
    """[rows, words] uint32: row i has bits 0..i."""
    return pack_bits(np.tril(np.ones((rows, rows), bool)))


def pack_bits(dense: np.ndarray) -> np.ndarray:
    """[..., n] bool -> [..., ceil(n / 32)] uint32, bit j of word w being entry 32 w + j."""
    n = dense.shape[-1]
    padded = np.zeros((*dense.shape[:-1], -(-n // 32) * 32), bool)
    padded[..., :n] = dense
    words = padded.reshape(*dense.shape[:-1], -1, 32).astype(np.uint32)
    return (words << np.arange(32, dtype=np.uint32)).sum(-1, dtype=np.uint32)

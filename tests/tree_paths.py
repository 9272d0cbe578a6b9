"""Trees given by their nodes' parents: paths, and ancestor bits by hand."""

import numpy as np


def bits(parents: list[int], words: int) -> np.ndarray:
    """[N, words] uint32: each node's own bit and its parent's row; parents[0] is -1."""
    rows: list[int] = []
    for node, parent in enumerate(parents):
        rows.append((rows[parent] if node else 0) | 1 << node)
    return np.array([[row >> 32 * w & 0xFFFFFFFF for w in range(words)] for row in rows], np.uint32)


def path_to(parents: list[int], node: int) -> list[int]:
    """Nodes from the root to this one."""
    path = [node]
    while parents[path[0]] >= 0:
        path.insert(0, parents[path[0]])
    return path

"""SGLang's arrays as views of ours: masks, retrieve arrays, parent lists, accept indices."""

import numpy as np

from eagle3_jax.config import TreeConfig


def ancestor_mask(ancestors: np.ndarray, nodes: int) -> np.ndarray:
    """[..., N, words] uint32 -> [..., N, N] bool: row i attends to node j."""
    words = np.asarray(ancestors, np.uint32)
    bits = (words[..., None] >> np.arange(32, dtype=np.uint32)) & np.uint32(1)
    return bits.reshape(*words.shape[:-1], -1)[..., :nodes].astype(bool)


def full_mask(mask: np.ndarray, seq_lens: np.ndarray) -> np.ndarray:
    """FULL_MASK: flat; each request's [N, seq_len + N], the prefix visible to all."""
    parts = []
    for rows, length in zip(mask, seq_lens, strict=True):
        prefix = np.ones((len(rows), int(length)), bool)
        parts.append(np.concatenate((prefix, rows), axis=1).reshape(-1))
    return np.concatenate(parts)


def qlen_only_mask(mask: np.ndarray) -> np.ndarray:
    """QLEN_ONLY: flat [B, N, N]."""
    return np.asarray(mask, bool).reshape(-1)


def retrieve_arrays(parents: list[int]) -> tuple[list[int], list[int], list[int]]:
    """Row ids of one request, first children, next siblings; children in ascending order."""
    nodes = len(parents)
    first = [-1] * nodes
    sibling = [-1] * nodes
    last: dict[int, int] = {}
    for node, parent in enumerate(parents):
        if parent < 0:
            continue
        if parent in last:
            sibling[last[parent]] = node
        else:
            first[parent] = node
        last[parent] = node
    return list(range(nodes)), first, sibling


def parent_list(candidate_parents: np.ndarray, tree: TreeConfig) -> np.ndarray:
    """The flat candidates that were expanded, level by level, -1 in front; empty for one level."""
    topk, square = tree.topk, tree.topk**2
    if tree.num_steps == 1:
        return np.zeros(0, int)
    drafted = np.asarray(candidate_parents)[topk:].reshape(tree.num_steps - 1, topk, topk)
    assert (drafted == drafted[..., :1]).all(), "children of one beam have one parent"
    assert drafted.size == (tree.num_steps - 1) * square
    return np.concatenate(([-1], drafted[..., 0].reshape(-1)))


def accept_index(accepted: list[int], num_steps: int) -> list[int]:
    """Accepted nodes, root first, filled with -1 to num_steps + 1."""
    return [*accepted, *[-1] * (num_steps + 1 - len(accepted))]

"""How one attention call is cut into programs: plain functions of static shapes.

The numbers are for an H100 or H200 (132 multiprocessors); `make check-gpu` compiles every entry and
fails on a register spill or too much shared memory.
"""

import dataclasses

MULTIPROCESSORS = 132
WORD = 32  # slots of one ancestor word, and the tree slots of one step


@dataclasses.dataclass(frozen=True)
class Plan:
    """How one call is cut.

    Attributes:
      rows: query rows (node and head of a group, folded) of one program, a power of two.
      row_blocks: programs that share the rows of one sequence and KV head.
      keys: prefix slots of one step.
      splits: programs that share the slots of one sequence and KV head. With more than one the
        last has the tree and the others the prefix.
      warps, stages: Triton's.
    """

    rows: int
    row_blocks: int
    keys: int
    splits: int
    warps: int
    stages: int


def plan(
    batch: int,
    kv_heads: int,
    rows: int,  # T * G
    slots: int,  # S, or what a window leaves of it
    width: int,  # of a key
    itemsize: int,
) -> Plan:
    """The plan of a call.

    Splits fill the multiprocessors about once: at batch 1 a model with 8 KV heads and 8 nodes gets
    15 programs a head for the prefix and one for the tree. More would read no faster and write
    more partial results; a batch that fills the card alone is not split. None gets less than one
    step of a full cache, nor fewer slots than twice its rows: the partial results, written and
    read once, must stay small beside the keys and values.
    """
    block = _block_rows(rows, width, itemsize)
    row_blocks = -(-rows // block)
    keys, warps, stages = _table(block, width, itemsize)
    splits = MULTIPROCESSORS // (batch * kv_heads * row_blocks)
    splits = min(splits, -(-slots // max(keys, 2 * block)) + 1)
    return Plan(block, row_blocks, keys, max(splits, 1), warps, stages)


def power(n: int) -> int:
    """The next power of two, as Triton's tiles are."""
    return 1 << (n - 1).bit_length()


def _block_rows(rows: int, width: int, itemsize: int) -> int:
    """Folded rows of one program: at least 16 (tensor cores), at most what registers hold."""
    most = 128 if width <= 128 else 64 if width <= 256 else 32
    if itemsize == 4:
        most = 16
    return min(max(16, power(rows)), most)


def _table(rows: int, width: int, itemsize: int) -> tuple[int, int, int]:
    """Keys of a step, warps, stages."""
    if itemsize == 4:  # without TF32 there are no tensor cores: sums of products, thread by thread
        return 32, 8, 2
    if width > 256:
        return 32, (8 if rows == 32 else 4), 2
    return (64 if width <= 128 else 32), (8 if rows == 128 else 4), 3


def pieces(width: int) -> tuple[tuple[int, int], ...]:
    """(start, size) of the powers of two, at least 16, that cover `width`: 80 is 64 and 16.

    Triton's tiles are powers of two. Where `width` is no multiple of 16 the last reaches past it.
    """
    left, start, found = -(-width // 16) * 16, 0, []
    while left:
        size = 1 << (left.bit_length() - 1)
        found.append((start, size))
        start, left = start + size, left - size
    return tuple(found)

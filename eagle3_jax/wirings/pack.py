"""A record's sequences side by side as one run of slots, with the chains to score."""

import dataclasses
from collections.abc import Sequence

import numpy as np

from eagle3_jax.record import EngineRound, Record, RecordError, RecordSequence
from eagle3_jax.records.positions import placed

RANKS = (2, 3, 4, 8)


@dataclasses.dataclass(frozen=True)
class Piece:
    """The part of one sequence that is scored: tokens `first` .. `first + length - 1`.

    Attributes:
      offset: its first slot. row: of the sequence's states that belongs to token `first`.
    """

    sequence: RecordSequence
    index: int
    first: int
    length: int
    offset: int
    row: int


@dataclasses.dataclass(frozen=True)
class Chain:
    """Where drafting starts: slot of its step 0, and the engine's round there if it is known."""

    slot: int
    sequence: int
    round: int | None = None
    engine: EngineRound | None = None


@dataclasses.dataclass(frozen=True)
class Pack:
    """All slots. Arrays are [T]; `chains` are in order.

    Attributes:
      axes: [3, T] rotary positions, None where no sequence has any of its own. farthest: the
        largest of a sequence up to each slot.
    """

    pieces: list[Piece]
    tokens: np.ndarray
    start: np.ndarray
    end: np.ndarray
    position: np.ndarray
    prompt: np.ndarray
    chains: list[Chain]
    steps: int
    pinned: bool
    axes: np.ndarray | None = None
    farthest: np.ndarray | None = None

    @property
    def block(self) -> int:
        """How many neighbouring chains to take as one witness."""
        return 2 if self.pinned else self.steps + 1

    def counted(self, chains: np.ndarray) -> np.ndarray:
        """[steps, chains] steps that say something about a wiring.

        At an engine's round: up to its first miss, a stopping rule that favours no wiring.
        """
        step = np.arange(self.steps)[:, None]
        upto = [self.steps if (e := self.chains[i].engine) is None else e.accepted for i in chains]
        return step <= np.array(upto)[None]

    def states(self, boundaries: Sequence[int], low: int, high: int) -> np.ndarray:
        """float32 states [slots, boundaries, E] of slots low .. high - 1, by boundary index."""
        parts = []
        for piece in self.pieces:
            a, b = max(low, piece.offset), min(high, piece.offset + piece.length)
            if a >= b:
                continue
            row = piece.row + a - piece.offset
            rows = piece.sequence.aux[row : row + b - a][:, list(boundaries)]
            rows = np.asarray(rows).astype(np.float32)
            good = np.isfinite(rows).all(axis=(1, 2))
            if not good.all():
                first = piece.first + a - piece.offset + int(np.argmin(good))
                raise RecordError(
                    f"sequence {piece.index}: the states of token {first} are not finite "
                    f"({int((~good).sum())} such rows here): the target or its capture overflowed"
                )
            missing = b - a - len(rows)  # the last token needs none
            parts.append(np.pad(rows, ((0, missing), (0, 0), (0, 0))))
        return np.concatenate(parts)


def pack(record: Record, *, steps: int, max_tokens: int) -> Pack:
    """Takes sequences in order until `max_tokens` slots are full.

    Chains start at the engine's rounds where the record has them, else at every slot whose next
    tokens are output.

    Raises:
      RecordError: no sequence has a place to start from.
    """
    pieces: list[Piece] = []
    used = 0
    for index, sequence in enumerate(record.sequences):
        first = sequence.first
        length = min(len(sequence.tokens) - first, len(sequence.aux) + 1)
        room = max_tokens - used
        output = max(sequence.prompt_length - 1 - first, 0)
        if length > room and output > room // 2:  # a long prompt: keep its end
            skip = output - room // 2
            first, length = first + skip, length - skip
        length = min(length, room)
        if length >= steps + 3:
            row = first - sequence.first
            pieces.append(Piece(sequence, index, first, length, used, row))
            used += length
        if used >= max_tokens - steps - 3:
            break
    pinned = any(p.sequence.rounds for p in pieces)
    chains = [chain for piece in pieces for chain in _chains(piece, steps, pinned)]
    if not chains:
        raise RecordError(
            f"no place to start {steps} drafts from in {len(record.sequences)} sequences: expected "
            f"at least {steps + 2} output tokens with their states"
        )
    tokens = [p.sequence.tokens[p.first : p.first + p.length] for p in pieces]
    return Pack(
        pieces,
        np.concatenate(tokens).astype(np.int32),
        np.concatenate([np.full(p.length, p.offset, np.int32) for p in pieces]),
        np.concatenate([np.full(p.length, p.offset + p.length, np.int32) for p in pieces]),
        np.concatenate([np.arange(p.first, p.first + p.length, dtype=np.int32) for p in pieces]),
        np.concatenate([np.full(p.length, p.sequence.prompt_length, np.int32) for p in pieces]),
        chains,
        steps,
        pinned,
        *_axes(pieces),
    )


def _axes(pieces: list[Piece]) -> tuple[np.ndarray | None, np.ndarray | None]:
    """[3, T] rotary positions and [T] the largest so far; nothing where text counts its tokens."""
    if all(p.sequence.positions is None for p in pieces):
        return None, None
    places, farthest = [], []
    for p in pieces:
        own, largest = placed(p.sequence, p.first, p.length)
        places.append(own)
        farthest.append(largest)
    return np.concatenate(places, axis=1), np.concatenate(farthest)


def _chains(piece: Piece, steps: int, pinned: bool) -> list[Chain]:
    """A chain at slot c drafts tokens c + 2 .. c + steps + 1, all of which must be there."""
    sequence, last = piece.sequence, piece.first + piece.length - steps - 2
    found = []
    if pinned:
        for number, item in enumerate(sequence.rounds or ()):
            c = item.start - 1
            if piece.first <= c <= last:
                slot = piece.offset + c - piece.first
                found.append(Chain(slot, piece.index, number, item))
        return found
    for c in range(max(piece.first, sequence.prompt_length - 1), last + 1):
        counted = sequence.loss_mask is None or sequence.loss_mask[c + 2 : c + 2 + steps].all()
        if counted:
            found.append(Chain(piece.offset + c - piece.first, piece.index))
    return found


def row_orders(packed: Pack) -> dict[str, np.ndarray]:
    """Name -> [T] slot at which the states of slot t may stand.

    "ranks n": written as n shards, row i at place i // n of shard i % n, as sequence parallelism
    leaves them. "shuffled" is no wiring: it says what an accept length without the states is.
    """
    T = len(packed.tokens)
    orders = {"in order": np.arange(T, dtype=np.int32)}
    whole = all(len(p.sequence.aux) <= p.length and p.row == 0 for p in packed.pieces)
    if whole:
        for n in RANKS:
            orders[f"as {n} shards"] = _by_piece(packed, lambda rows, n=n: _shard_place(rows, n))
            orders[f"out of {n} shards"] = _by_piece(
                packed, lambda rows, n=n: np.argsort(np.arange(rows) % n, kind="stable")
            )
    if len(packed.pieces) > 1:
        orders["of the next request"] = _of_other(packed, 1)
        if len(packed.pieces) > 2:
            orders["of the request before"] = _of_other(packed, -1)
    rng = np.random.default_rng(0)
    orders["shuffled"] = _by_piece(packed, rng.permutation)
    return orders


def _shard_place(rows: int, n: int) -> np.ndarray:
    place = np.empty(rows, np.int64)
    place[np.argsort(np.arange(rows) % n, kind="stable")] = np.arange(rows)
    return place


def _by_piece(packed: Pack, order) -> np.ndarray:
    result = np.arange(len(packed.tokens), dtype=np.int32)
    for piece in packed.pieces:
        rows = min(piece.length, len(piece.sequence.aux) - piece.row)
        result[piece.offset : piece.offset + rows] = piece.offset + order(rows)
    return result


def _of_other(packed: Pack, step: int) -> np.ndarray:
    result = np.arange(len(packed.tokens), dtype=np.int32)
    count = len(packed.pieces)
    for i, piece in enumerate(packed.pieces):
        other = packed.pieces[(i + step) % count]
        rows = min(piece.length, other.length)
        result[piece.offset : piece.offset + rows] = np.arange(other.offset, other.offset + rows)
    return result

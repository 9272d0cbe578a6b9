"""A record as rows for the draft: which tokens are judged, and several sequences side by side."""

import dataclasses
import functools
from collections.abc import Iterator, Sequence

import numpy as np

from eagle3_jax.record import RecordError, RecordSequence
from eagle3_jax.records.positions import placed


@dataclasses.dataclass(frozen=True)
class Run:
    """Tokens `begin` .. `end` - 1 of a sequence, written by the target in one go.

    The first round starts at length `begin`: token `begin` is its pending bonus token.
    """

    sequence: int
    index: int
    begin: int
    end: int


def judged_runs(sequence: RecordSequence, number: int) -> list[Run]:
    """The output: all tokens after the prompt, or what the loss mask marks.

    The first round needs the row before its bonus token, so nothing at or before position `first`
    starts one.
    """
    T = len(sequence.tokens)
    counted = np.zeros(T + 2, np.int8)
    if sequence.loss_mask is None:
        counted[1 + sequence.prompt_length : T + 1] = 1
    else:
        counted[1 : T + 1] = np.asarray(sequence.loss_mask, bool)
    counted[: sequence.first + 2] = 0
    change = np.diff(counted)
    begins, ends = np.flatnonzero(change == 1), np.flatnonzero(change == -1)
    pairs = zip(begins.tolist(), ends.tolist(), strict=True)
    return [Run(number, i, begin, end) for i, (begin, end) in enumerate(pairs)]


@dataclasses.dataclass
class Part:
    """One sequence in a bin; the row of position p is slot `slot + p - first`."""

    number: int
    sequence: RecordSequence
    slot: int
    runs: list[Run]

    def slot_of(self, start: int) -> int:
        """The row that seeds the round which starts at length `start`."""
        return self.slot + start - 1 - self.sequence.first


@dataclasses.dataclass
class Rows:
    """Rows of one bin, S of them; padding rows see themselves only.

    Attributes:
      tokens: [S + pad] the token after each row's state, -1 past a sequence's end.
      true: the same tokens as draft ids, -1 outside the draft vocabulary.
      positions, low: of each row; it sees slots low .. its own.
      axes: [3, S] rotary positions of each row, None where all axes count the tokens.
      judged: [S] tokens after the bonus token that a round seeded by this row can be judged on, 0
        where no round starts.
    """

    parts: list[Part]
    used: int
    tokens: np.ndarray
    true: np.ndarray
    positions: np.ndarray
    low: np.ndarray
    judged: np.ndarray
    axes: np.ndarray | None = None

    @functools.cached_property
    def farthest(self) -> np.ndarray:
        """[S] the largest rotary position up to each row of a sequence: text goes on after it."""
        assert self.axes is not None
        found = self.axes.max(axis=0)
        for part in self.parts:
            rows = len(part.sequence.tokens) - 1 - part.sequence.first
            _, largest = placed(part.sequence, part.sequence.first, rows)
            found[part.slot : part.slot + rows] = largest
        return found

    @property
    def slots(self) -> int:
        """S."""
        return len(self.positions)

    @property
    def runs(self) -> Iterator[tuple[Part, Run]]:
        """Every run with the part it belongs to."""
        return ((part, run) for part in self.parts for run in part.runs)

    def aux(self, start: int, stop: int, slots: Sequence[int]) -> np.ndarray:
        """States [stop - start, A, E] of rows `start` .. `stop` - 1, zeros where none is."""
        pieces = []
        for part in self.parts:
            rows = len(part.sequence.tokens) - 1 - part.sequence.first
            a, b = max(start, part.slot), min(stop, part.slot + rows)
            if a < b:
                pieces.append((a, part, a - part.slot, b - part.slot))
        sample = self.parts[0].sequence.aux
        made = np.zeros((stop - start, len(slots), sample.shape[2]), sample.dtype)
        for at, part, first, last in pieces:
            chosen = np.asarray(part.sequence.aux[first:last])[:, list(slots)]
            made[at - start : at - start + last - first] = chosen
        return made


def pack(
    sequences: Sequence[RecordSequence],
    to_draft: np.ndarray,
    *,
    steps: int,
    capacity: int,
    multiple: int,
    multi_axis: bool = False,
) -> Iterator[Rows]:
    """Sequences in their order, as many as fit into `capacity` rows; a longer one is alone.

    Args:
      to_draft: [V] draft id of each target id, -1 for none.
      steps: the most levels that will be asked for.
      multiple: what the number of slots is a multiple of.
      multi_axis: whether the draft's rope heeds positions on three axes.
    """

    def made(slots: int) -> Rows:
        return _rows(held, used, to_draft, steps, slots, multi_axis)

    held: list[Part] = []
    used = 0
    for number in range(len(sequences)):
        sequence = sequences[number]
        rows = len(sequence.tokens) - 1 - sequence.first
        if rows < 1:
            continue
        if held and used + rows > capacity:
            yield made(max(capacity, multiple))
            held, used = [], 0
        held.append(Part(number, sequence, used, judged_runs(sequence, number)))
        used += rows
        if used > capacity:
            yield made(_bucket(used, capacity, multiple))
            held, used = [], 0
    if held:
        yield made(max(capacity, multiple))


def _bucket(rows: int, capacity: int, multiple: int) -> int:
    """Capacities 1, 1.5, 2, 3, 4, 6 ... times `capacity`, so that few sizes compile."""
    size = capacity
    while size < rows:
        size *= 2
    size = 3 * size // 4 if rows <= 3 * size // 4 else size
    return -(-size // multiple) * multiple


def _rows(
    parts: list[Part], used: int, to_draft: np.ndarray, steps: int, slots: int, multi_axis: bool
) -> Rows:
    slots = max(slots, used)
    tokens = np.full(slots + steps + 2, -1, np.int32)
    positions = np.zeros(slots, np.int32)
    low = np.arange(slots, dtype=np.int32)
    judged = np.zeros(slots, np.int32)
    for part in parts:
        s = part.sequence
        rows = len(s.tokens) - 1 - s.first
        here = slice(part.slot, part.slot + rows)
        tokens[here] = np.asarray(s.tokens[s.first + 1 :], np.int32)
        positions[here] = np.arange(s.first, s.first + rows)
        low[here] = part.slot
        for run in part.runs:
            starts = np.arange(run.begin, run.end - 1)
            judged[part.slot_of(run.begin) + starts - run.begin] = run.end - 1 - starts
    true = np.where(tokens >= 0, to_draft[np.maximum(tokens, 0)], -1).astype(np.int32)
    axes = _axes(parts, positions) if multi_axis else None
    return Rows(parts, used, tokens, true, positions, low, judged, axes)


def _axes(parts: list[Part], positions: np.ndarray) -> np.ndarray | None:
    """[3, S] of rows at these positions, None when no part has any of its own."""
    if all(part.sequence.positions is None for part in parts):
        return None
    axes = np.repeat(positions[None], 3, axis=0)
    for part in parts:
        rows = len(part.sequence.tokens) - 1 - part.sequence.first
        axes[:, part.slot : part.slot + rows], _ = placed(part.sequence, part.sequence.first, rows)
    return axes


def check_finite(aux: np.ndarray, rows: Rows, start: int, boundaries: Sequence[object]) -> float:
    """The largest magnitude among states [C, A, E].

    Raises:
      RecordError: NaN or infinite values; names sequence, position and boundary of the first.
    """
    wide = aux.astype(np.float32)
    bad = ~np.isfinite(wide)
    if bad.any():
        row, slot = (int(i) for i in np.argwhere(bad.any(axis=2))[0])
        part = max((p for p in rows.parts if p.slot <= start + row), key=lambda p: p.slot)
        what = "NaN" if np.isnan(wide[row, slot]).any() else "Inf"
        position = part.sequence.first + start + row - part.slot
        raise RecordError(
            f"sequence {part.number}{_named(part.sequence)}: the state at boundary "
            f"{boundaries[slot]}, row {position} has {what}: the target or its capture overflowed"
        )
    return float(np.abs(wide).max(initial=0.0))


def _named(sequence: RecordSequence) -> str:
    return f" ({sequence.name})" if sequence.name else ""


def longest_repeat(tokens: np.ndarray, least: int = 8) -> tuple[int, int, int] | None:
    """The longest stretch of one id (an image's placeholders?): id, first and last position."""
    if len(tokens) < least:
        return None
    edges = np.flatnonzero(np.diff(tokens)) + 1
    begins = np.concatenate([[0], edges])
    ends = np.concatenate([edges, [len(tokens)]])
    best = int(np.argmax(ends - begins))
    if ends[best] - begins[best] < least:
        return None
    return int(tokens[begins[best]]), int(begins[best]), int(ends[best]) - 1


def committed_rows(part: Part, run: Run, *, slots: int, multi_axis: bool = False) -> Rows:
    """The rows before an output, to be committed in one go; the last of them seeds its rounds."""
    s = part.sequence
    used = run.begin - s.first
    tokens = np.full(slots + 2, -1, np.int32)
    tokens[:used] = s.tokens[s.first + 1 : run.begin + 1]
    positions = np.zeros(slots, np.int32)
    positions[:used] = np.arange(s.first, run.begin)
    low = np.arange(slots, dtype=np.int32)
    low[:used] = 0
    judged = np.zeros(slots, np.int32)
    judged[used - 1] = run.end - 1 - run.begin
    axes = _axes([part], positions) if multi_axis else None
    none = np.full(slots + 2, -1, np.int32)
    return Rows([part], used, tokens, none, positions, low, judged, axes)

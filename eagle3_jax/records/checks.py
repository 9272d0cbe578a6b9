"""What only the values of a record show: doubled BOS, empty masks, rows that hold no state."""

import dataclasses
from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from eagle3_jax.config import Boundary, DraftConfig
from eagle3_jax.records.last_state import FinalNorm
from eagle3_jax.records.structure import check_fields, check_sequence
from eagle3_jax.records.types import Kind, Record, RecordError, RecordSequence

CHUNK_BYTES = 16 << 20

ALLOWABLE = {
    "STATE_NOT_FINITE": "rows with NaN or infinity are kept as they are",
    "DATA_MASK_EMPTY": "a record in which no token is counted is written",
    "STATE_LAST_NORM": "a last state that is not what its boundary says is kept",
}
"""Codes that can be allowed, each with what happens then."""


def state_chunks(aux: np.ndarray) -> Iterator[tuple[int, np.ndarray]]:
    """The rows of states [R, A, E] some megabytes at a time, each with the first row's number."""
    row = max(1, aux[:1].nbytes)
    step = max(1, CHUNK_BYTES // row)
    for first in range(0, len(aux), step):
        yield first, np.asarray(aux[first : first + step])


@dataclasses.dataclass
class _Rows:
    """Where some fault was seen: how many rows, in how many sequences, the first place."""

    rows: int = 0
    sequences: int = 0
    example: str = ""

    def add(self, rows: int, example: str):
        self.rows += rows
        self.sequences += 1
        self.example = self.example or example


class Checks:
    """Looks at sequences one by one, their states in pieces; `finish` gives the findings.

    Warned of: a doubled BOS, some empty loss masks, rows that are all zero, a state that stands in
    two rows one after the other, greedy output that is not the best of its own `top_ids`.

    Args:
      boundaries, kind: of the record. bos_token_id, final_norm: of the target, where known; without
        `final_norm` the last state is taken as declared.

    Raises:
      RecordError: NaN or infinite states, no loss mask that counts a token, a state after the final
        norm at boundary L or the other way round; unless their codes are in `allow`.
    """

    def __init__(
        self,
        boundaries: Sequence[Boundary],
        kind: Kind,
        *,
        num_layers: int | None = None,
        bos_token_id: int | None = None,
        final_norm: FinalNorm | None = None,
        allow: Iterable[str] = (),
    ):
        self._boundaries, self._kind, self._layers = tuple(boundaries), kind, num_layers
        self._bos, self._norm = bos_token_id, final_norm
        self._allowed = frozenset(allow)
        unknown = sorted(self._allowed - ALLOWABLE.keys())
        if unknown:
            raise RecordError(f"{unknown[0]}: cannot be allowed, only {', '.join(ALLOWABLE)} can")
        self._count = self._masked = 0
        self._empty, self._doubled, self._equal = _Rows(), _Rows(), _Rows()
        self._bad, self._zero, self._same = _Rows(), _Rows(), _Rows()
        self._not_best, self._normed = _Rows(), _Rows()

    def check(self, sequence: RecordSequence, where: str):
        """One whole sequence."""
        self.open(sequence, where)
        for first, chunk in state_chunks(sequence.aux):
            self.add_rows(first, chunk)
        self.close()

    def open(self, sequence: RecordSequence, where: str):
        """Begins a sequence; `where` opens its messages."""
        self._count += 1
        self._where, self._first, self._tokens = where, sequence.first, sequence.tokens
        self._found: dict[str, list[int]] = {"bad": [], "zero": [], "same": []}
        self._previous: np.ndarray | None = None
        start = sequence.tokens[:2].tolist()
        if len(start) == 2 and start[0] == start[1]:
            if start[0] == self._bos:
                self._doubled.add(1, where)
            elif self._bos is None:
                self._equal.add(1, f"{where}, id {start[0]}")
        if sequence.loss_mask is not None:
            self._masked += 1
            if not sequence.loss_mask.any():
                self._empty.add(1, where)
        if self._kind == "greedy" and sequence.top_ids is not None:
            self._check_greedy(sequence, where)

    def add_rows(self, first: int, chunk: np.ndarray):
        """States [r, A, E] of the opened sequence from row `first` on."""
        flat = np.ascontiguousarray(chunk).reshape(len(chunk), -1)
        bits = flat.view(f"u{flat.dtype.itemsize}")
        finite, zero = _finite(bits, flat.dtype), ~bits.any(axis=1)
        before = bits[:1] if self._previous is None else self._previous
        same = (np.concatenate([before, bits[:-1]]) == bits).all(axis=1)
        if self._previous is None:
            same[0] = False
        self._previous = bits[-1:].copy()
        if first == 0:
            self._check_last(chunk)
        start = self._first + first
        for name, rows in (("bad", ~finite), ("zero", zero), ("same", same & ~zero)):
            self._found[name] += (start + np.flatnonzero(rows)).tolist()

    def close(self):
        """Ends a sequence."""
        bad = self._found["bad"]
        if bad:
            message = (
                f"{self._where}: {len(bad)} rows with NaN or infinity, at positions {spans(bad)}"
            )
            if "STATE_NOT_FINITE" not in self._allowed:
                raise RecordError(f"{message}; --allow STATE_NOT_FINITE keeps them")
            self._bad.add(len(bad), message)
        for rows, found in ((self._zero, "zero"), (self._same, "same")):
            places = self._found[found]
            if places:
                rows.add(len(places), f"{self._where}, positions {spans(places)}")

    def _check_greedy(self, sequence: RecordSequence, where: str):
        assert sequence.top_ids is not None
        start = max(sequence.prompt_length - 1, sequence.first)
        best = sequence.top_ids[start - sequence.first :, 0]
        output = sequence.tokens[start + 1 : start + 1 + len(best)]
        wrong = np.flatnonzero(output != best[: len(output)])
        if len(wrong):
            self._not_best.add(len(wrong), f"{where}, positions {spans(wrong + start + 1)}")

    def _check_last(self, chunk: np.ndarray):
        if self._norm is None or chunk.shape[2] != len(self._norm.weight):
            return
        for slot, boundary in enumerate(self._boundaries):
            if boundary == "final_norm":
                declared = "after"
            elif boundary == self._layers:
                declared = "before"
            else:
                continue
            found = self._norm.kind(chunk[:, slot])
            if found == declared or not np.isfinite(chunk[:, slot]).all():
                continue
            message = (
                f"{self._where}: the state at boundary {boundary} is the one {found} the final "
                f"norm ({self._norm.name}), expected the one {declared} it"
            )
            if "STATE_LAST_NORM" not in self._allowed:
                hint = "final_norm" if found == "after" else f"{self._layers or 'L'}"
                raise RecordError(f"{message}: name it {hint}, or --allow STATE_LAST_NORM")
            self._normed.add(1, message)

    def finish(self) -> tuple[str, ...]:
        """One line each, opened by its code."""
        lines = []
        if self._empty.sequences:
            share = f"{self._empty.sequences} of {self._masked} loss masks"
            percent = f"{100 * self._empty.sequences / self._masked:.0f}%"
            message = f"{share} ({percent}) count no token, first: {self._empty.example}"
            if self._empty.sequences == self._count and "DATA_MASK_EMPTY" not in self._allowed:
                raise RecordError(f"{message}; --allow DATA_MASK_EMPTY takes it")
            lines.append(f"DATA_MASK_EMPTY: {message}")
        if self._doubled.sequences:
            lines.append(
                f"TOKEN_DOUBLED_BOS: {self._doubled.sequences} of {self._count} sequences begin "
                f"with BOS (id {self._bos}) twice, first: {self._doubled.example}"
            )
        if self._equal.sequences:
            lines.append(
                f"TOKEN_DOUBLED_BOS: {self._equal.sequences} of {self._count} sequences begin with "
                f"the same id twice, a BOS perhaps; first: {self._equal.example}"
            )
        if self._bad.sequences:
            lines.append(f"STATE_NOT_FINITE: {self._bad.rows} rows; {self._bad.example}")
        if self._normed.sequences:
            lines.append(f"STATE_LAST_NORM: {self._normed.example}")
        if self._not_best.sequences:
            lines.append(
                f"KIND_NOT_GREEDY: {self._not_best.rows} output tokens in "
                f"{self._not_best.sequences} of {self._count} sequences are not the target's best: "
                f"sampled, or near ties; first: {self._not_best.example}"
            )
        if self._zero.sequences:
            lines.append(
                f"STATE_ALL_ZERO: {self._zero.rows} rows hold only zeros, never written perhaps; "
                f"first: {self._zero.example}"
            )
        if self._same.sequences:
            lines.append(
                f"STATE_REPEATED: {self._same.rows} rows equal the row before bit for bit; first: "
                f"{self._same.example}"
            )
        return tuple(lines)


def check_record(
    record: Record,
    *,
    bos_token_id: int | None = None,
    final_norm: FinalNorm | None = None,
    allow: Iterable[str] = (),
) -> tuple[str, ...]:
    """All checks on all sequences; reads every state once.

    Returns:
      The findings, one line each.

    Raises:
      RecordError: the first fault that makes the record unusable.
    """
    check_fields(record)
    checks = Checks(
        record.boundaries,
        record.kind,
        num_layers=record.num_layers,
        bos_token_id=bos_token_id,
        final_norm=final_norm,
        allow=allow,
    )
    for number, sequence in enumerate(record.sequences):
        where = f"sequence {number}" + (f" {sequence.name!r}" if sequence.name else "")
        check_sequence(sequence, record, where)
        checks.check(sequence, where)
    return checks.finish()


def check_fits(record: Record, draft: DraftConfig):
    """Whether every sequence's ids and widths are those of the draft's target.

    Raises:
      RecordError: an id outside the draft's vocabulary, states of another width.
    """
    if record.vocab_size is not None and record.vocab_size > draft.vocab_size:
        raise RecordError(
            f"the record's ids go up to {record.vocab_size - 1}, the draft's vocabulary to "
            f"{draft.vocab_size - 1}"
        )
    for number, sequence in enumerate(record.sequences):
        width = sequence.aux.shape[2]
        if width != draft.target_hidden_size:
            raise RecordError(
                f"sequence {number}: states are {width} wide, the draft takes "
                f"{draft.target_hidden_size}: another target's record"
            )
        top = int(sequence.tokens.max(initial=0))
        if top >= draft.vocab_size:
            raise RecordError(
                f"sequence {number}: id {top} is outside the draft's vocabulary "
                f"0..{draft.vocab_size - 1}: another target's record"
            )


def check_for_draft(record: Record, draft: DraftConfig) -> tuple[int, ...]:
    """Whether a record holds what a draft reads.

    Returns:
      The slot of the record's states for each of the draft's, in the draft's order.

    Raises:
      RecordError: too few states, another width, another vocabulary, a boundary that was not
        captured.
    """
    captured, slots = record.boundaries, len(record.boundaries)
    if slots < draft.num_aux:
        raise RecordError(
            f"the draft needs {draft.num_aux} states, got {slots} (boundaries {captured})"
        )
    check_fits(record, draft)
    if isinstance(draft.aux_boundaries, str):
        if record.num_layers is None:
            raise RecordError(
                f"the draft's boundaries are {draft.aux_boundaries} and the record does not know "
                "the target's depth L: say it with --num-layers"
            )
        draft = draft.resolve(record.num_layers)
    lacking = [b for b in draft.aux_boundaries if b not in captured]
    if lacking:
        raise RecordError(
            f"the draft reads boundaries {draft.aux_boundaries}, the record has {captured}: no "
            f"{lacking[0]}"
        )
    return tuple(captured.index(b) for b in draft.aux_boundaries)  # type: ignore[arg-type]


def _finite(bits: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """[r] which rows hold no NaN or infinity: no exponent of ones only. Faster than `isfinite`."""
    infinity = np.array(np.inf, dtype).view(bits.dtype)
    return ((bits & infinity) != infinity).all(axis=1)


def spans(numbers: Iterable[int], most: int = 4) -> str:
    """Ascending numbers as ranges: `3, 7..9`."""
    found: list[list[int]] = []
    for number in numbers:
        if found and number == found[-1][1] + 1:
            found[-1][1] = number
        else:
            found.append([number, number])
    shown = [str(a) if a == b else f"{a}..{b}" for a, b in found[:most]]
    return ", ".join(shown) + (f" and {len(found) - most} more" if len(found) > most else "")

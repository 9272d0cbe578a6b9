"""Whether a record's parts fit each other, by shapes, ids and counts; no state is read."""

import numpy as np

from eagle3_jax.config import ConfigError, check_boundaries
from eagle3_jax.records.types import KINDS, STATE_DTYPES, Record, RecordError, RecordSequence


def check_fields(record: Record, where: str = "record"):
    """Raises `RecordError` for boundaries, kind or sizes that no record can have."""
    if not record.boundaries:
        raise RecordError(f"{where}: names no boundaries, expected at least one")
    try:
        check_boundaries(record.boundaries, len(record.boundaries), record.num_layers)
    except ConfigError as error:
        raise RecordError(f"{where}: {error}") from None
    if record.kind not in KINDS:
        raise RecordError(f"{where}: kind is {record.kind!r}, expected one of {', '.join(KINDS)}")
    for name in ("vocab_size", "num_layers"):
        value = getattr(record, name)
        if value is not None and (type(value) is not int or value < 1):
            raise RecordError(f"{where}: {name} is {value!r}, expected a positive number or null")
    if type(record.partial_context) is not bool:
        raise RecordError(
            f"{where}: partial_context is {record.partial_context!r}, expected a bool"
        )


def check_sequence(sequence: RecordSequence, record: Record, where: str):
    """Whether one sequence fits its record by shapes, ids and counts; the states are not read.

    Raises:
      RecordError: opened by `where`; names rows, found and expected.
    """
    tokens, aux, first = sequence.tokens, sequence.aux, sequence.first
    if tokens.ndim != 1 or tokens.dtype.kind not in "iu" or not len(tokens):
        raise RecordError(f"{where}: tokens are {describe(tokens)}, expected integer ids [T]")
    total, slots = len(tokens), len(record.boundaries)
    if aux.ndim != 3 or aux.dtype.name not in STATE_DTYPES or 0 in aux.shape:
        raise RecordError(
            f"{where}: states are {describe(aux)}, expected floats [rows, {slots}, width]"
        )
    if aux.shape[1] != slots:
        names = ", ".join(map(str, record.boundaries))
        raise RecordError(
            f"{where}: rows hold {aux.shape[1]} states, expected {slots} (boundaries {names})"
        )
    if first < 0 or first >= total:
        raise RecordError(f"{where}: rows begin at position {first}, expected 0..{total - 1}")
    least, most, rows = total - first - 1, total - first, len(aux)
    if not least <= rows <= most:
        raise RecordError(
            f"{where}: {rows} rows of states from position {first} for {total} tokens, expected "
            f"{least} (the last token needs none) or {most}"
        )
    if first and not record.partial_context:
        raise RecordError(
            f"{where}: draft context incomplete: no states for positions 0..{first - 1} (a cached "
            "prefix, or chunks that an engine does not return); declare it with --partial-context, "
            "or capture without prefix cache and chunked prefill"
        )
    _check_ids(tokens, record.vocab_size, f"{where}: tokens")
    if not 0 <= sequence.prompt_length <= total:
        raise RecordError(
            f"{where}: prompt_length is {sequence.prompt_length}, expected 0..{total}"
        )
    mask = sequence.loss_mask
    if mask is not None and (mask.dtype != np.bool_ or mask.shape != (total,)):
        raise RecordError(f"{where}: loss_mask is {describe(mask)}, expected bool [{total}]")
    _check_positions(sequence, record, where)
    _check_top(sequence, record, where)
    _check_rounds(sequence, record, where)


def _check_ids(ids: np.ndarray, vocab_size: int | None, what: str):
    top = np.iinfo(np.int32).max + 1 if vocab_size is None else vocab_size
    wrong = np.argwhere((ids < 0) | (ids >= top))
    if len(wrong):
        place = tuple(int(i) for i in wrong[0])
        raise RecordError(
            f"{what}: id {ids[place]} at position {place[0]} is outside the vocabulary "
            f"0..{top - 1} ({len(wrong)} such ids)"
        )


def _check_positions(sequence: RecordSequence, record: Record, where: str):
    found, total = sequence.positions, len(sequence.tokens)
    if found is None:
        return
    if found.shape != (3, total) or found.dtype.kind not in "iu":
        flat = " (multi-axis rope of text alone needs none)" if found.ndim == 1 else ""
        raise RecordError(
            f"{where}: positions are {describe(found)}, expected integers [3, {total}], one row an "
            f"axis: time, height, width{flat}"
        )
    top = np.iinfo(np.int32).max
    if int(found.min()) < 0 or int(found.max()) > top:
        raise RecordError(
            f"{where}: positions span {found.min()}..{found.max()}, expected 0..{top}"
        )
    output = sequence.prompt_length
    if sequence.loss_mask is not None:
        output = max(output, 1)  # the mask says what is output
    if record.kind == "text" or not 0 < output < total:
        return
    farthest = np.maximum.accumulate(found.max(axis=0).astype(np.int64))
    wrong = (found[:, output:] != farthest[output - 1 : -1] + 1).any(axis=0)
    if sequence.loss_mask is not None:
        wrong &= sequence.loss_mask[output:]
    if wrong.any():
        token = output + int(np.argmax(wrong))
        raise RecordError(
            f"{where}: output token {token} is at positions {found[:, token].tolist()}, expected "
            f"{farthest[token - 1] + 1} on each axis: text goes on after the largest so far"
        )


def _check_top(sequence: RecordSequence, record: Record, where: str):
    ids, logprobs = sequence.top_ids, sequence.top_logprobs
    if ids is None and logprobs is None:
        return
    if ids is None or logprobs is None:
        lacking = "top_ids" if ids is None else "top_logprobs"
        raise RecordError(f"{where}: has no {lacking}, expected both or none")
    rows = len(sequence.aux)
    if ids.ndim != 2 or len(ids) != rows or ids.shape[1] < 1 or ids.dtype.kind not in "iu":
        raise RecordError(f"{where}: top_ids are {describe(ids)}, expected integer ids [{rows}, n]")
    if logprobs.shape != ids.shape or logprobs.dtype.kind != "f":
        raise RecordError(
            f"{where}: top_logprobs are {describe(logprobs)}, expected floats {list(ids.shape)}"
        )
    _check_ids(ids, record.vocab_size, f"{where}: top_ids")


def _check_rounds(sequence: RecordSequence, record: Record, where: str):
    start = 0
    for i, item in enumerate(sequence.rounds or ()):
        if not start <= item.start < len(sequence.tokens) or item.accepted < 0:
            raise RecordError(
                f"{where}: round {i} starts at {item.start} and accepts {item.accepted}, expected "
                f"a start in {start}..{len(sequence.tokens) - 1} and no negative count"
            )
        if item.proposed is not None and item.accepted > len(item.proposed):
            raise RecordError(
                f"{where}: round {i} accepts {item.accepted} of {len(item.proposed)} drafts"
            )
        ids = (*(item.proposed or ()), *(() if item.bonus is None else (item.bonus,)))
        _check_ids(np.array(ids, np.int64), record.vocab_size, f"{where}: round {i}")
        start = item.start + 1


def describe(array: np.ndarray) -> str:
    """dtype and shape, for messages."""
    return f"{array.dtype.name} {list(array.shape)}"

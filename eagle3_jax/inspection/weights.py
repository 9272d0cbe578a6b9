"""The values in a draft's tensors, and its embedding beside the target's."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from eagle3_jax.canonical_tensors import CHUNK
from eagle3_jax.files.shards import FileError, has_weights, open_weights
from eagle3_jax.findings import Findings
from eagle3_jax.inspection.subject import Line, Subject
from eagle3_jax.source_config import TargetFacts
from eagle3_jax.target_match import ROWS, find_target_tensors

HALF = 65504.0
"""The largest float16."""


def tensor_table(
    names: Sequence[str], read: Callable[[str], np.ndarray]
) -> tuple[list[dict[str, Any]], list[Line]]:
    """Dtype, shape, NaN, infinities and the largest finite value of each tensor."""
    rows: list[dict[str, Any]] = []
    lines: list[Line] = []
    for name in names:
        array = read(name)
        row: dict[str, Any] = {"name": name, "dtype": array.dtype.name, "shape": list(array.shape)}
        if array.dtype.kind in "fV":
            row |= _values(array)
        rows.append(row)
        if row.get("nan") or row.get("inf"):
            lines.append(
                Line(
                    "WEIGHT_NOT_FINITE",
                    "error",
                    f"{name}: {row['nan']} NaN and {row['inf']} infinite of {array.size} values",
                    "export the weights again",
                )
            )
        elif row.get("max_abs", 0.0) > HALF:
            lines.append(
                Line(
                    "NUMERIC_FP16_RANGE",
                    "warning",
                    f"{name}: values up to {row['max_abs']:g}, past float16's {HALF:g}",
                    "serve it in bfloat16 or float32",
                )
            )
    return rows, lines


def _values(array: np.ndarray) -> dict[str, Any]:
    flat = array.reshape(-1)
    nan = inf = 0
    largest = 0.0
    for start in range(0, flat.size, CHUNK):
        piece = flat[start : start + CHUNK]
        piece = np.abs(piece if piece.dtype == np.float64 else piece.astype(np.float32))
        lost = ~np.isfinite(piece)
        if lost.any():
            count = int(np.count_nonzero(np.isnan(piece)))
            nan, inf = nan + count, inf + int(np.count_nonzero(lost)) - count
            piece = piece[~lost]
        largest = max(largest, float(np.max(piece, initial=0.0)))
    return {"nan": nan, "inf": inf, "max_abs": largest}


def beside_target(
    subject: Subject, folder: Path | None, target: TargetFacts | None
) -> tuple[dict[str, Any], list[Line]]:
    """The target's own vocabulary rows, and whose rows the draft's embedding has.

    Whole tensors are compared, so the answer is one for all shards a server may cut them in.
    """
    if folder is None or target is None or not has_weights(folder):
        return {}, []
    try:
        weights = open_weights(folder)
    except FileError as error:
        return {}, [Line("WEIGHT_TARGET_KEY", "warning", f"target's weights not read: {error}")]
    name = find_target_tensors(weights, target, Findings()).embed
    if name is None:
        return {}, []
    found: dict[str, Any] = {"embed": name, "embed_rows": weights.shape(name)[0]}
    own = subject.embed
    if own is None:
        return found, []
    ours, theirs = subject.read(own), weights.read(name)
    if ours.shape[1] != theirs.shape[1]:
        return found, []
    ranges, rows = different_rows(ours, theirs), min(len(ours), len(theirs))
    found |= {"rows_compared": rows, "rows_different": ranges}
    if not ranges:
        return found, [
            Line(
                "BATCH_SHARD_EQUALITY",
                "note",
                f"own embedding: all {rows} rows are those of the target's {name}",
                "it may be left out of the file",
            )
        ]
    differ = sum(stop - start for start, stop in ranges)
    return found, [
        Line(
            "WEIGHT_OWNER",
            "warning",
            f"own embedding: {differ} of {rows} rows differ from the target's {name}: rows "
            f"{row_ranges(ranges)}; vLLM keeps the draft's, SGLang takes the target's",
            "a server that compares only its shard may decide otherwise on each rank",
        )
    ]


def different_rows(ours: np.ndarray, theirs: np.ndarray) -> list[tuple[int, int]]:
    """Ranges [start, stop) of rows that are not equal as float32, NaN unequal to everything."""
    rows = min(len(ours), len(theirs))
    wrong = np.zeros(rows + 2, np.int8)
    for start in range(0, rows, ROWS):
        stop = min(start + ROWS, rows)
        same = ours[start:stop].astype(np.float32) == theirs[start:stop].astype(np.float32)
        wrong[start + 1 : stop + 1] = ~same.all(axis=1)
    edges = np.flatnonzero(np.diff(wrong))
    return [(int(a), int(b)) for a, b in zip(edges[::2], edges[1::2], strict=True)]


def row_ranges(ranges: Sequence[tuple[int, int]], most: int = 4) -> str:
    """Ranges as text, the last row included."""
    shown = ", ".join(f"{a}..{b - 1}" for a, b in ranges[:most])
    return f"{shown} and {len(ranges) - most} more ranges" if len(ranges) > most else shown

"""Traces for a report: read from a file and checked, so that the page can rely on what it draws."""

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from eagle3_jax.findings import ConvertError
from eagle3_jax.trace import Round, Trace

UNKNOWN = -1
MAX_ID = 2**31
MAX_TREE = 2**16
PER_NODE = ("scores", "draft_probs", "positions", "predicted", "margins")


def read(path: Path) -> Trace:
    """One trace file.

    Raises:
      ConvertError: `TRACE`: not a trace, cut short, or rounds that contradict each other.
      OSError: it can't be opened.
    """
    try:
        trace = Trace.load(path)
    except UnicodeDecodeError:
        raise ConvertError("TRACE", f"{path}: not UTF-8 text, expected JSON lines") from None
    except KeyError as error:
        raise ConvertError("TRACE", f"{path}: the trace has no {error}") from None
    except (TypeError, AttributeError, RecursionError) as error:
        raise ConvertError("TRACE", f"{path}: not a trace: {error}") from None
    except ValueError as error:
        raise ConvertError("TRACE", str(error)) from None
    check(trace, str(path))
    return trace


def check(trace: Trace, where: str):
    """Refuses a trace whose rounds are no trees, or do not add up to its tokens.

    A list per node (scores, draft_probs, positions, predicted, margins) may be empty: not recorded.

    Raises:
      ConvertError: `TRACE`, with sequence, round and field.
    """
    if len(trace.prompts) != len(trace.tokens):
        raise ConvertError(
            "TRACE", f"{where}: {len(trace.prompts)} prompts and {len(trace.tokens)} outputs"
        )
    if not trace.prompts:
        raise ConvertError("TRACE", f"{where}: no sequences, there is nothing to show")
    if trace.stats and len(trace.stats) != len(trace.prompts):
        raise ConvertError(
            "TRACE", f"{where}: stats of {len(trace.stats)} of {len(trace.prompts)} sequences"
        )
    _header(trace, where)
    by_sequence: dict[int, list[Round]] = {i: [] for i in range(len(trace.prompts))}
    for item in trace.rounds:
        if not _whole(item.sequence) or item.sequence not in by_sequence:
            raise ConvertError(
                "TRACE",
                f"{where}: a round of sequence {item.sequence!r}, expected 0.."
                f"{len(trace.prompts) - 1}",
            )
        by_sequence[item.sequence].append(item)
    for i, rounds in by_sequence.items():
        here = f"{where}: sequence {i}"
        _ids(trace.prompts[i], f"{here}: prompt")
        _ids(trace.tokens[i], f"{here}: tokens")
        for number, item in enumerate(rounds):
            _round(item, f"{here}, round {number}")
        short = next(
            (n for n, r in enumerate(rounds[:-1]) if len(r.emitted) < len(r.accepted)), None
        )
        if short is not None:
            raise ConvertError(
                "TRACE", f"{here}, round {short}: writes less than it accepted, and is not the last"
            )
        written = trace.tokens[i][:1] + [t for item in rounds for t in item.emitted]
        if rounds and written != trace.tokens[i]:
            at = _first_difference(written, trace.tokens[i])
            raise ConvertError(
                "TRACE",
                f"{here}: its rounds do not write its tokens: {len(written)} and "
                f"{len(trace.tokens[i])} of them, first apart at token {at}",
            )


def _header(trace: Trace, where: str):
    triple = ("num_steps", "topk", "num_draft_tokens")
    if trace.tree is not None and not (
        isinstance(trace.tree, dict)
        and all(_whole(trace.tree.get(k)) and 0 < trace.tree[k] < MAX_TREE for k in triple)
    ):
        raise ConvertError("TRACE", f"{where}: tree is {trace.tree!r}, expected sizes of {triple}")
    for name in ("dtype", "versions"):
        value = getattr(trace, name)
        if not isinstance(value, dict):
            raise ConvertError("TRACE", f"{where}: {name} is {value!r}, expected an object")
    if not all(isinstance(s, dict) for s in trace.stats):
        raise ConvertError("TRACE", f"{where}: stats are no objects")


def _round(item: Round, where: str):
    _ids(item.tokens, f"{where}: tokens")
    _ids(item.emitted, f"{where}: emitted")
    _ids([item.bonus], f"{where}: bonus")
    count = len(item.tokens)
    if not count:
        raise ConvertError("TRACE", f"{where}: no nodes, expected at least the root")
    if not _whole(item.length) or not 0 <= item.length < MAX_ID:
        raise ConvertError("TRACE", f"{where}: length is {item.length!r}")
    for name in PER_NODE:
        values = getattr(item, name)
        if not isinstance(values, list) or len(values) not in (0, count):
            raise ConvertError("TRACE", f"{where}: {name} is not a list of its {count} nodes")
        if not all(_number(v) for v in values):
            raise ConvertError("TRACE", f"{where}: {name} holds what is no number")
    _ids(item.predicted, f"{where}: predicted")
    if not all(_whole(p) and 0 <= p < MAX_ID for p in item.positions):
        raise ConvertError("TRACE", f"{where}: positions holds what is no position")
    parents = item.parents
    if not isinstance(parents, list) or len(parents) != count or parents[0] != -1:
        raise ConvertError("TRACE", f"{where}: parents are not those of its {count} nodes")
    for node in range(1, count):
        if not _whole(parents[node]) or not 0 <= parents[node] < node:
            raise ConvertError(
                "TRACE",
                f"{where}: node {node} has parent {parents[node]!r}, expected one before it",
            )
    path = item.accepted
    if not isinstance(path, list) or not all(_whole(n) and 0 <= n < count for n in path):
        raise ConvertError("TRACE", f"{where}: accepted is {path!r}, expected nodes")
    if path[:1] != [0] or any(parents[node] != before for before, node in itertools.pairwise(path)):
        raise ConvertError("TRACE", f"{where}: accepted {path} is no path from the root")
    chosen = [*(item.tokens[n] for n in path[1:]), item.bonus]
    if item.emitted != chosen[: len(item.emitted)]:
        raise ConvertError(
            "TRACE", f"{where}: emitted {item.emitted}, the accepted path and bonus are {chosen}"
        )


def _ids(values: Any, where: str):
    if not isinstance(values, list):
        raise ConvertError("TRACE", f"{where}: not a list")
    for value in values:
        if not _whole(value) or not UNKNOWN <= value < MAX_ID:
            raise ConvertError("TRACE", f"{where}: {value!r} is no token id")


def _whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _number(value: Any) -> bool:
    return _whole(value) or isinstance(value, float)


def _first_difference(a: Sequence[int], b: Sequence[int]) -> int:
    pairs = enumerate(zip(a, b, strict=False))
    return next((i for i, (x, y) in pairs if x != y), min(len(a), len(b)))

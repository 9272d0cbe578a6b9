"""What the page's script draws from: rounds as compact JSON, safe inside an HTML script element."""

import dataclasses
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from eagle3_jax.reports.compare import KINDS, Difference, Pair, starts
from eagle3_jax.reports.counts import REASONS, stop_reason
from eagle3_jax.trace import Round, Trace

DIGITS = 4
"""Significant digits of scores, probabilities and margins."""

ROUND = (
    "length",
    "tokens",
    "parents",
    "scores",
    "probs",
    "predicted",
    "margins",
    "accepted",
    "bonus",
    "written",
    "reason",
    "positions",
)
"""Fields of a round in their order; 0 for a list that is not recorded, or that says nothing."""


def document(
    traces: Sequence[Trace], pairs: Sequence[Pair], names: Sequence[str], labels: Mapping[int, str]
) -> dict[str, Any]:
    """Everything the script knows."""
    return {
        "fields": ROUND,
        "reasons": REASONS,
        "kinds": KINDS,
        "names": list(names),
        "labels": {str(i): text for i, text in labels.items()},
        "traces": [
            {
                "steps": trace.tree["num_steps"] if trace.tree else 0,
                "chain": trace.tree is not None and trace.tree["topk"] == 1,
                "sequences": [_sequence(trace, i) for i in range(len(trace.prompts))],
            }
            for trace in traces
        ],
        "pairs": [
            {
                "sequences": [pair.a, pair.b][: len(traces)],
                "text": _difference(pair.text),
                "rounds": _difference(pair.rounds),
            }
            for pair in pairs
        ],
    }


def script_json(value: Any) -> str:
    """JSON that ends no script element and opens no comment in one."""
    text = json.dumps(value, separators=(",", ":"), ensure_ascii=True, allow_nan=False)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def token_ids(traces: Iterable[Trace]) -> set[int]:
    """Every id that a round shows."""
    found: set[int] = set()
    for trace in traces:
        for item in trace.rounds:
            found.update(item.tokens, item.predicted, [item.bonus], item.emitted)
        for tokens in trace.tokens:
            found.update(tokens)
    return found


def short(value: float) -> float | int | None:
    """A number of a few digits; None for what JSON has no number for."""
    if not math.isfinite(value):
        return None
    rounded = float(f"{value:.{DIGITS}g}")
    return int(rounded) if rounded.is_integer() else rounded


def _sequence(trace: Trace, sequence: int) -> dict[str, Any]:
    steps = trace.tree["num_steps"] if trace.tree else 0
    reason = (trace.stats[sequence] if trace.stats else {}).get("finish_reason")
    kind = reason.get("type") if isinstance(reason, dict) else None
    return {
        "tokens": trace.tokens[sequence],
        "starts": starts(trace, sequence),
        "finish": kind if isinstance(kind, str) else None,
        "rounds": [_round(item, steps, plain=trace.tree is None) for item in trace.of(sequence)],
    }


def _round(item: Round, steps: int, *, plain: bool) -> list[Any]:
    depths = [0] * len(item.tokens)
    for node in range(1, len(item.tokens)):
        depths[node] = depths[item.parents[node]] + 1
    usual = [item.length + depth for depth in depths]
    scored = any(score != 1 for score in item.scores)
    return [
        item.length,
        item.tokens,
        item.parents,
        [short(s) for s in item.scores] if scored else 0,
        [short(p) for p in item.draft_probs] or 0,
        item.predicted or 0,
        [short(m) for m in item.margins] or 0,
        item.accepted,
        item.bonus,
        len(item.emitted),
        "plain" if plain else stop_reason(item, steps),
        0 if item.positions in ([], usual) else item.positions,
    ]


def _difference(found: Difference | None) -> dict[str, Any] | None:
    if found is None:
        return None
    result = dataclasses.asdict(found)
    for side in ("a", "b"):
        for name in ("margin", "score"):
            value = result[side][name]
            result[side][name] = None if value is None else short(value)
    return result

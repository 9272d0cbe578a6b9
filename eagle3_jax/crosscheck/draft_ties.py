"""Drafted tokens that differ: rounding or not."""

import dataclasses
from collections.abc import Iterable

import numpy as np

from eagle3_jax.crosscheck.noise import Noise
from eagle3_jax.crosscheck.result import Kind, Tie
from eagle3_jax.crosscheck.types import DumpedRound

AFTER: dict[str, Kind] = {
    "candidate_tokens": "draft differs",
    "candidate_scores": "draft differs",
    "candidate_parents": "tree differs",
    "selected": "tree differs",
    "tokens": "tree differs",
    "parents": "tree differs",
    "positions": "tree differs",
    "mask": "tree differs",
    "scores": "tree differs",
    "target_aux": "target differs",
    "target_logits": "target differs",
    "accepted": "acceptance differs",
    "num_correct": "acceptance differs",
    "bonus": "acceptance differs",
    "extend_tokens": "acceptance differs",
    "extend_positions": "draft differs",
    "extend_aux": "draft differs",
    "extend_hidden": "draft differs",
    "extend_logits": "draft differs",
}
"""What follows the drafted levels, in the order of computing, and whose it is."""


@dataclasses.dataclass(frozen=True)
class Context:
    """What else is needed to tell a tie from a fault.

    Attributes:
      request: its number. topk: of the tree, None unknown.
      to_target: [W] target id of each draft id. logits: [W] the expected draft logits that seeded
        this round, None where unknown.
    """

    request: int
    topk: int | None
    to_target: np.ndarray | None
    logits: np.ndarray | None


def value_of(one: DumpedRound, name: str) -> np.ndarray | None:
    """A tensor or field as an array, None when not there."""
    if name in one.tensors:
        return np.asarray(one.tensors[name])
    if name in AFTER and hasattr(one, name):
        value = getattr(one, name)
        return None if value is None else np.asarray(value)
    return None


def draft_tie(
    name: str,
    theirs: np.ndarray,
    found: DumpedRound,
    expected: DumpedRound,
    noise: Noise,
    context: Context,
) -> Tie | None:
    """Whether drafted tokens differ by rounding alone."""
    if not name.startswith(("seed_ids", "draft_tokens", "candidate_", "selected", "tokens")):
        return None
    gap = (
        _chain_gap(name, theirs, expected, context)
        if context.topk in (None, 1)
        else _tree_gap(name, theirs, expected, context)
    )
    if gap is None:
        return None
    depth = sum(n.startswith("draft_tokens.") for n in expected.tensors) + 1
    levels = 1 if context.topk in (None, 1) else 2 * depth
    if not noise.tied(gap, levels):
        return None
    return Tie(
        request=context.request,
        round=found.index,
        detail=f"round {found.index}: {name} in another order",
        gap=gap,
        bound=noise.logit * levels,
    )


def _chain_gap(
    name: str, theirs: np.ndarray, expected: DumpedRound, context: Context
) -> float | None:
    """How far below the best the engine's token is, in the expected draft logits."""
    if context.to_target is None:
        return None
    flat = np.asarray(theirs).reshape(-1)
    chain = value_of(expected, "candidate_tokens")
    if chain is None:
        return None
    drafted = flat[1:] if name == "tokens" else flat
    first = 0
    if name.startswith("draft_tokens."):
        first = int(name.split(".")[1])
    for level, token in enumerate(drafted, first):
        if level >= len(chain) or token == chain[level]:
            continue
        logits = context.logits if level == 0 else expected.tensors.get(f"draft_logits.{level - 1}")
        if logits is None:
            return None
        row = np.asarray(logits, np.float64).reshape(-1)
        there = np.flatnonzero(context.to_target == token)
        return float(row.max() - row[there[0]]) if len(there) else None
    return None


def _tree_gap(
    name: str, theirs: np.ndarray, expected: DumpedRound, context: Context
) -> float | None:
    """The largest gap between logarithms of scores of candidates that changed places."""
    scores, tokens = (value_of(expected, f"candidate_{n}") for n in ("scores", "tokens"))
    if scores is None or tokens is None or context.topk is None:
        return None
    k = context.topk
    logs = np.log(np.maximum(scores.astype(np.float64), 1e-300))
    if name.startswith("draft_tokens."):
        level = int(name.split(".")[1])
        part = slice(0, k) if level == 0 else slice(k + (level - 1) * k * k, k + level * k * k)
        mine = value_of(expected, name)
        assert mine is not None
        return _reordered(theirs, mine, tokens[part], logs[part])
    if name in ("seed_ids",):
        mine = value_of(expected, name)
        assert mine is not None
        return _reordered(theirs, mine, tokens[:k], logs[:k])
    if name in ("tokens", "selected"):
        selected = value_of(expected, "selected")
        if selected is None:
            return None
        known = set(tokens.tolist())
        missing = {int(t) for t in theirs[1:] if int(t) not in known} if name == "tokens" else ()
        if missing:
            return _below_the_children(missing, expected, context)
        return _closest_decision(logs, k, len(selected))
    return None


def _below_the_children(
    missing: Iterable[int], expected: DumpedRound, context: Context
) -> float | None:
    """How far tokens that were never proposed are below the last child of the nearest node."""
    k, table = context.topk, context.to_target
    if table is None or k is None:
        return None
    rows = [] if context.logits is None else [np.asarray(context.logits).reshape(1, -1)]
    levels = sum(n.startswith("draft_tokens.") for n in expected.tensors)
    rows += [expected.tensors[f"draft_logits.{i}"] for i in range(levels)]
    if not rows:
        return None
    logits = np.concatenate(rows).astype(np.float64)
    last = np.sort(logits, axis=1)[:, -k]
    worst = 0.0
    for token in missing:
        there = np.flatnonzero(table == token)
        if not len(there):
            return None
        worst = max(worst, float(np.abs(last - logits[:, there[0]]).min()))
    return worst


def _closest_decision(logs: np.ndarray, k: int, kept: int) -> float:
    """The smallest gap between candidates that a level or the pruning put in an order."""
    gaps = []
    for first in range(k, len(logs), k * k):
        best = np.sort(logs[first : first + k * k])[::-1][: k + 1]
        gaps.append(float(-np.diff(best).max()))
    best = np.sort(logs)[::-1]
    if kept < len(best):
        gaps.append(float(best[kept - 1] - best[kept]))
    return min(gaps, default=np.inf)


def _reordered(
    theirs: np.ndarray, mine: np.ndarray, tokens: np.ndarray, logs: np.ndarray
) -> float | None:
    """Worst gap between what stands at a place and what should; None when a token is unknown."""
    worst = 0.0
    used: set[int] = set()
    for a, b in zip(theirs.tolist(), mine.tolist(), strict=True):
        here = [int(i) for i in np.flatnonzero(tokens == a) if int(i) not in used]
        there = np.flatnonzero(tokens == b)
        if not here or not len(there):
            return None
        best = min(here, key=lambda i: abs(logs[i] - logs[there[0]]))
        used.add(best)
        worst = max(worst, float(abs(logs[best] - logs[there].max())))
    return worst

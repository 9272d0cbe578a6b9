"""Accept lengths by where a round is, what it is about, and why it ended."""

import dataclasses
from collections.abc import Callable, Iterable

import numpy as np

from eagle3_jax.replays.result import REASONS, ReplayResult, ReplayRound, TreeReplay

RANKS = (1, 2, 3, 5, 10, 100)


@dataclasses.dataclass(frozen=True)
class Row:
    """Rounds that share a label."""

    label: str
    rounds: int
    accept_length: float
    marked: bool = False


def by_position(result: ReplayResult, t: TreeReplay) -> list[Row]:
    """By the length a round starts at; rows beyond the draft's window are marked."""
    top = max((r.start for r in t.rounds), default=0)
    edges = {0, *(1 << i for i in range(7, 40) if 1 << i <= top)}
    window = result.window
    if window is not None:
        edges.add(window)
    return _buckets(
        t, sorted(edges), lambda r: r.start, marked=lambda low: window is not None and low >= window
    )


def by_distance(result: ReplayResult, t: TreeReplay) -> list[Row]:
    """By tokens since the output's beginning; an output's first round is apart."""

    def distance(r: ReplayRound) -> int:
        return 0 if r.index == 0 else r.start - result.sequences[r.sequence].begins[r.run]

    rows = _buckets(t, [0, 1, 16, 64, 256, 1024, 4096, 16384], distance)
    return [
        dataclasses.replace(row, label="first round") if row.label == "0" else row for row in rows
    ]


def by_tag(result: ReplayResult, t: TreeReplay) -> list[Row]:
    """By the tags of a sequence; one with several counts in each."""
    groups: dict[str, list[int]] = {}
    for r in t.rounds:
        for tag in result.sequences[r.sequence].tags:
            groups.setdefault(tag, []).append(r.accepted)
    return [_row(tag, accepted) for tag, accepted in sorted(groups.items())]


def misses(t: TreeReplay) -> dict[str, int]:
    """Rounds by why they ended: `full`, or a `Reason`."""
    counts = {"full": sum(r.reason is None for r in t.rounds)}
    return counts | {reason: sum(r.reason == reason for r in t.rounds) for reason in REASONS}


def ranks(t: TreeReplay) -> list[Row]:
    """Misses inside the draft vocabulary by the true token's rank."""
    found = [r for r in t.rounds if r.rank is not None]
    if not found:
        return []
    return _group(found, list(RANKS), lambda r: r.rank or 0)


def _buckets(
    t: TreeReplay,
    edges: list[int],
    key: Callable[[ReplayRound], int],
    marked: Callable[[int], bool] = lambda low: False,
) -> list[Row]:
    return _group(t.rounds, edges, key, marked)


def _group(
    rounds: Iterable[ReplayRound],
    edges: list[int],
    key: Callable[[ReplayRound], int],
    marked: Callable[[int], bool] = lambda low: False,
) -> list[Row]:
    groups: dict[int, list[int]] = {}
    for r in rounds:
        groups.setdefault(int(np.searchsorted(edges, key(r), side="right")) - 1, []).append(
            r.accepted
        )
    rows = []
    for at, accepted in sorted(groups.items()):
        low = edges[at]
        high = edges[at + 1] - 1 if at + 1 < len(edges) else None
        label = f"{low}.." if high is None else str(low) if high == low else f"{low}..{high}"
        rows.append(_row(label, accepted, marked(low)))
    return rows


def _row(label: str, accepted: list[int], marked: bool = False) -> Row:
    return Row(label, len(accepted), float(np.mean(accepted)) + 1, marked)

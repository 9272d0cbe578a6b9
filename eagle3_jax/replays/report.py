"""A replay's numbers for machines and for people."""

import dataclasses
import math
from collections.abc import Iterable, Sequence
from typing import Any

from eagle3_jax.replays.cost import Cost, Priced, priced
from eagle3_jax.replays.result import ReplayResult, TreeReplay
from eagle3_jax.replays.tables import Row, by_distance, by_position, by_tag, misses, ranks

FORMULAS = {
    "accepted_per_round": "accepted drafts / rounds (0 .. num_steps)",
    "accept_length": "1 + accepted_per_round: tokens per verification, the bonus token included",
    "tokens_per_verify": "completion tokens / rounds: SGLang's spec_accept_length, which counts "
    "the prompt pass's token too",
    "accept_rate": "accepted drafts / drafted tokens verified (num_draft_tokens - 1 a round)",
    "cumulative": "share of rounds whose first i drafts were accepted; accept_length = 1 + its sum",
    "conditional": "share of the rounds with i - 1 accepted drafts that accepted the i-th",
    "simulated": "products of the accuracies over every position: what trainers' metrics promise",
}


def as_json(result: ReplayResult, cost: Cost | None = None) -> dict[str, Any]:
    """Everything, by name; `formulas` says what each name counts."""
    found = {
        "mode": result.mode,
        "kind": result.kind,
        "exact": result.kind == "greedy",
        "refresh": result.refresh,
        "draft_attention": result.draft_attention,
        "dtype": result.dtype,
        "sequences": len(result.sequences),
        "window": result.window,
        "trees": [_tree_json(result, t) for t in result.trees],
        "vocabulary": dataclasses.asdict(result.vocabulary) | {"share": result.vocabulary.share},
        "norms": None if result.norms is None else dataclasses.asdict(result.norms),
        "findings": [dataclasses.asdict(f) for f in result.findings],
        "formulas": FORMULAS,
    }
    if cost is not None:
        found["priced"] = [
            {
                "tree": dataclasses.asdict(p.tree),
                "accept_length": p.accept_length,
                "break_even": p.break_even,
                "speedup": p.speedup,
                "flags": p.flags,
            }
            for p in priced(result.trees, cost)
        ]
    return found


def _tree_json(result: ReplayResult, t: TreeReplay) -> dict[str, Any]:
    equal = t.engine_equal
    return {
        "tree": dataclasses.asdict(t.tree),
        "rounds": len(t.rounds),
        "censored": t.censored,
        "accepted_per_round": None if t.accept_length is None else t.accept_length - 1,
        "accept_length": t.accept_length,
        "tokens_per_verify": t.tokens_per_verify,
        "accept_rate": t.accept_rate,
        "cumulative": t.cumulative,
        "conditional": t.conditional,
        "accuracies": t.accuracies,
        "simulated": t.simulated,
        "bound": t.bound,
        "misses": misses(t),
        "ranks": _rows_json(ranks(t)),
        "by_position": _rows_json(by_position(result, t)),
        "by_distance": _rows_json(by_distance(result, t)),
        "by_tag": _rows_json(by_tag(result, t)),
        "engine": None if equal is None else {"equal": equal[0], "compared": equal[1]},
        "expected": expected(result, t),
        "accept_lengths": t.accept_lengths,
        "stats": t.stats(),
    }


def expected(result: ReplayResult, t: TreeReplay) -> dict[str, float] | None:
    """Expected accept length by temperature, None where logprobs or temperatures lack."""
    rows = [r.expected for r in t.rounds if r.expected is not None]
    if not rows or not result.temperatures:
        return None
    means = (math.fsum(column) / len(rows) for column in zip(*rows, strict=True))
    return {str(T): 1 + mean for T, mean in zip(result.temperatures, means, strict=True)}


def _rows_json(rows: Sequence[Row]) -> list[dict[str, Any]]:
    return [dataclasses.asdict(row) for row in rows]


def lines(result: ReplayResult, cost: Cost | None = None, *, best: bool = False) -> list[str]:
    """A page: one row a tree, the first (or the best) in detail, findings, what pays."""
    found = [_headline(result), ""]
    found += _table(
        ("tree", "rounds", "cut", "accepted", "accept length", "tok/verify", "rate", "bound"),
        [
            (
                str(t.tree),
                str(len(t.rounds)),
                str(t.censored),
                _number(None if t.accept_length is None else t.accept_length - 1),
                _number(t.accept_length),
                _number(t.tokens_per_verify),
                _number(t.accept_rate),
                _number(t.bound),
            )
            for t in result.trees
        ],
    )
    found.append(
        "accepted: drafts a round; accept length: + the bonus token; tok/verify: completion "
        "tokens / rounds; bound: the draft vocabulary's"
    )
    some = [t for t in result.trees if t.rounds]
    if some:
        one = max(some, key=lambda t: t.accept_length or 0) if best else some[0]
        found += ["", f"{one.tree} in detail", *_detail(result, one)]
    found += _norms(result)
    found += [f"[{f.code}] {f.message}" for f in result.findings]
    if cost is not None:
        found += ["", *_pays(priced(result.trees, cost))]
    return found


def _headline(result: ReplayResult) -> str:
    what = "the target's greedy output" if result.kind == "greedy" else f"{result.kind} tokens"
    mode = "free run" if result.mode == "free" else "pinned to the record's round starts"
    kept = "" if result.refresh else ", draft KV kept from drafting"
    return (
        f"{len(result.sequences)} sequences of {what}, {mode}{kept}, {result.dtype}, "
        f"draft attention {result.draft_attention}"
    )


def _detail(result: ReplayResult, t: TreeReplay) -> list[str]:
    levels = [str(i) for i in range(1, t.tree.num_steps + 1)]
    rows = [
        ("cumulative", *map(_number, t.cumulative)),
        ("conditional", *map(_number, t.conditional)),
    ]
    if t.accuracies is not None:
        rows.append(("at every position", *map(_number, t.accuracies)))
    if t.simulated is not None:
        rows.append(("simulated from those", *map(_number, t.simulated)))
    found = _table(("acceptance at draft", *levels), rows)
    counts = {name.replace("_", " "): n for name, n in misses(t).items() if n}
    found.append("rounds ended: " + ", ".join(f"{name} {n}" for name, n in counts.items()))
    inside = ranks(t)
    if inside:
        ranked = ", ".join(f"{row.label}: {row.rounds}" for row in inside)
        found.append(f"rank of the true token at a miss: {ranked}")
    if t.engine_equal is not None:
        found.append("rounds equal to the engine's: {} of {}".format(*t.engine_equal))
    values = expected(result, t)
    if values is not None:
        shown = ", ".join(f"{_number(v)} at {T}" for T, v in values.items())
        found.append(
            f"expected accept length by temperature: {shown} (a lower bound: what an accepted "
            "token off the record's path would lead to is not in it)"
        )
    for title, table in (
        ("by position", by_position(result, t)),
        ("by distance from the prompt", by_distance(result, t)),
        ("by tag", by_tag(result, t)),
    ):
        if table:
            found += _table(
                (title, "rounds", "accept length"),
                [
                    (
                        row.label
                        + (f" beyond max_position_embeddings={result.window}" * row.marked),
                        str(row.rounds),
                        _number(row.accept_length),
                    )
                    for row in table
                ],
            )
    return found


def _norms(result: ReplayResult) -> list[str]:
    norms = result.norms
    if norms is None:
        return []
    slots = ", ".join(f"{_number(v)} at {name}" for name, v in norms.aux.items())
    found = [f"norm of the aux states: {slots}; of what fc makes of them {_number(norms.fused)}"]
    if len(norms.ratio) > 1:
        steps = ", ".join(map(_number, norms.ratio))
        found.append(f"norm of the state going into step 0, 1, ..., relative: {steps}")
    return found


def _pays(found: Sequence[Priced]) -> list[str]:
    if not found:
        return ["no rounds, nothing to price"]
    rows = [
        (str(p.tree), _number(p.accept_length), _number(p.break_even), f"{p.speedup:.2f}x")
        for p in found[:8]
    ]
    best = found[0]
    said = _table(("tree", "accept length", "break-even", "speed-up"), rows)
    if best.speedup <= 1:
        return [*said, f"none pays: the best, {best.tree}, is at {best.speedup:.2f}x"]
    return [*said, f"best: {best.flags}"]


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}" if value < 1000 else f"{value:.4g}"


def _table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    table = [list(header), *map(list, rows)]
    widths = [max(len(row[i]) for row in table) for i in range(len(header))]
    return [
        "  ".join(
            cell.ljust(width) if i == 0 else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in table
    ]

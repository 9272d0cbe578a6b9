"""An engine's counts beside those of our rounds on the same texts."""

from collections.abc import Sequence
from typing import Any

from eagle3_jax.config import TreeConfig
from eagle3_jax.crosscheck.noise import Noise
from eagle3_jax.crosscheck.result import Divergence, Tie
from eagle3_jax.crosscheck.stats import impossible, of_rounds
from eagle3_jax.crosscheck.types import EngineRequest, EngineRun
from eagle3_jax.trace import Round
from eagle3_jax.wirings.engine import ROUNDING

COUNTED = ("spec_verify_ct", "spec_num_correct_drafts", "spec_correct_drafts_histogram")


def check_counts(
    number: int, request: EngineRequest, rounds: Sequence[Round], tree: TreeConfig
) -> list[Divergence]:
    """One request's statistics: what contradicts itself, else the first count that is another."""
    nodes, stats = tree.num_draft_tokens, request.stats
    common: dict[str, Any] = {"kind": "statistics differ", "request": number}
    wrong = impossible(stats, nodes=nodes, steps=tree.num_steps, output=len(request.output))
    if wrong:
        return [
            Divergence(
                tensor="statistics",
                detail=wrong[0],
                cause="the engine's own numbers contradict each other",
                code="METRIC_INVARIANT",
                order=(10**6, 0),
                **common,
            )
        ]
    correct = [r.num_correct_drafts for r in rounds]
    mine = of_rounds(len(request.prompt), len(request.output), correct, nodes)
    for name in COUNTED:
        if name in stats and stats[name] != mine.get(name):
            detail = f"{name} is {stats[name]}, on the same text {mine.get(name)}"
            return [Divergence(tensor=name, detail=detail, order=(10**6, 1), **common)]
    return []


def check_totals(
    run: EngineRun, rounds: Sequence[Sequence[Round]], tree: TreeConfig | None
) -> list[Divergence]:
    """Counters over all requests, where no single one is counted."""
    if not run.stats or tree is None:
        return []
    correct = [r.num_correct_drafts for one in rounds for r in one]
    mine = of_rounds(0, 0, correct, tree.num_draft_tokens)
    for name in COUNTED:
        if name in run.stats and run.stats[name] != mine.get(name):
            found, ours = run.stats[name], mine.get(name)
            detail = f"{name} over all requests is {found}, on the same texts {ours}"
            order = (10**6, 2)
            return [Divergence("statistics differ", 0, detail, tensor=name, order=order)]
    return []


def rounded_counts(
    found: list[Divergence],
    requests: Sequence[EngineRequest],
    rounds: Sequence[Sequence[Round]],
    noise: Noise,
) -> tuple[list[Divergence], list[Tie]]:
    """Half types flip a draft in about one of fifty rounds: counts so far apart are ties.

    Only where nothing but counts differs, and by no more than `ROUNDING` of all rounds.
    """
    half = noise.dtype in ("bfloat16", "float16")
    if not half or not found or any(d.kind != "statistics differ" or d.code for d in found):
        return found, []
    off, total = 0, 0
    for request, own in zip(requests, rounds, strict=True):
        theirs = request.stats.get("spec_verify_ct")
        if theirs is not None:
            off += abs(theirs - len(own))
            total += len(own)
    bound = max(1.0, ROUNDING * total)
    if off > bound:
        return found, []
    detail = f"{len(found)} requests with other counts, {off} of {total} rounds"
    return [], [Tie(found[0].request, detail, float(off), bound)]

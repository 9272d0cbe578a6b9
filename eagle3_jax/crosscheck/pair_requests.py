"""One request of two runs: its text, logprobs, states, rounds and counts."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from eagle3_jax.comparison import NEAR_TIE, first_difference
from eagle3_jax.crosscheck.counts import COUNTED
from eagle3_jax.crosscheck.metrics import distance
from eagle3_jax.crosscheck.noise import Noise
from eagle3_jax.crosscheck.result import Divergence, Line, Tie
from eagle3_jax.crosscheck.rounds import Context, Seen, compare_round
from eagle3_jax.crosscheck.stats import impossible
from eagle3_jax.crosscheck.types import EngineRequest, EngineRun


@dataclasses.dataclass(frozen=True)
class Pair:
    """The same request `a` of one run and `b` of the other."""

    number: int
    a: EngineRequest
    b: EngineRequest
    run: EngineRun
    other: EngineRun
    noise: Noise


def compare_requests(pair: Pair) -> tuple[list[Divergence], list[Tie], Line, list[str]]:
    """Faults, ties, the line of the table, and what cannot be told."""
    number, a, b, noise = pair.number, pair.a, pair.b, pair.noise
    faults: list[Divergence] = []
    ties: list[Tie] = []
    undecided: list[str] = []
    at = first_difference(a.output, b.output)
    did = ["tokens"] if a.output or b.output else []
    if at is not None:
        gap = _gap(pair, at)
        shown = [r.output[at] if at < len(r.output) else "the end" for r in (a, b)]
        where = f"token {at} is {shown[0]}, in the other {shown[1]}"
        ended = "the end" in shown
        if ended and _asked_for_less(a, b, at):
            did.append(f"their first {at}")
        elif ended:
            faults.append(_token(number, at, f"{where}: one text is shorter", "LOSSLESS_LENGTH"))
        elif gap is None:
            undecided.append(
                f"request {number}: {where}, without logprobs of both tokens no tie can be told: "
                "record with top logprobs, or compare with --target"
            )
        elif noise.tied(gap):
            ties.append(Tie(number, f"{where}: near tie", abs(gap), noise.logit, position=at))
        else:
            detail = f"{where}; their logprobs are {abs(gap):.3g} apart: no near tie"
            faults.append(_token(number, at, detail, "LOSSLESS_LOGIC_ERROR"))
    same = at is None
    faults += _values(pair, len(a.output) if same else at or 0, did)
    if a.rounds and b.rounds:
        faults += _rounds(pair, ties, did)
    known = [n for n in COUNTED if n in a.stats and n in b.stats]
    if known:
        did.append("statistics")
        faults += _statistics(pair, known, same)
    line = Line(
        name=a.name,
        tokens=len(a.output),
        equal_until=len(a.output) if at is None else at,
        rounds=(_count(a), _count(b)),
        accept_length=(a.stats.get("spec_accept_length"), b.stats.get("spec_accept_length")),
        checked=tuple(did),
    )
    return faults, ties, line, undecided


def _values(pair: Pair, upto: int, did: list[str]) -> list[Divergence]:
    """Logprobs and states of the text that both share."""
    number, a, b, noise = pair.number, pair.a, pair.b, pair.noise
    found = []
    cap = NEAR_TIE[noise.dtype]
    if a.output_logprobs is not None and b.output_logprobs is not None:
        off = np.abs(a.output_logprobs[:upto] - b.output_logprobs[:upto])
        far = np.flatnonzero(~(off <= cap))
        if len(far):
            i = int(far[0])
            found.append(
                Divergence(
                    kind="target differs",
                    request=number,
                    position=i,
                    tensor="output_logprobs",
                    detail=f"the logprob of token {i} is {a.output_logprobs[i]:.6g}, in the other "
                    f"{b.output_logprobs[i]:.6g}",
                    order=(10**5, i),
                )
            )
    if a.aux is None or b.aux is None or a.aux.shape[1:] != b.aux.shape[1:]:
        return found
    did.append("states")
    for position in range(max(a.first, b.first), len(a.prompt) + max(upto, 1) - 1):
        rows = a.aux[position - a.first], b.aux[position - b.first]
        apart = distance(*rows)
        if not noise.same(apart.rel_l2, apart.finite):
            detail = f"the state of position {position} is another: {apart}"
            found.append(
                Divergence(
                    kind="target differs",
                    request=number,
                    node=position,
                    tensor="states",
                    distance=apart,
                    detail=detail,
                    order=(10**5, position - len(a.prompt)),
                )
            )
            break
    return found


def _count(request: EngineRequest) -> int | None:
    found = request.stats.get("spec_verify_ct")
    return len(request.rounds) if found is None and request.rounds else found


def _token(number: int, at: int, detail: str, code: str) -> Divergence:
    return Divergence(
        kind="target differs",
        request=number,
        position=at,
        tensor="output_ids",
        detail=detail,
        code=code,
        order=(10**5, at),
    )


def _asked_for_less(a: EngineRequest, b: EngineRequest, at: int) -> bool:
    """Whether the text that ends at `at` is as long as was asked for, the other's limit more."""
    short, long = (a, b) if at == len(a.output) else (b, a)
    return short.max_new_tokens == at and long.max_new_tokens not in (None, at)


def _gap(pair: Pair, at: int) -> float | None:
    """How far apart the two tokens are in either run's own logprobs, the smaller.

    A token that is not listed is below the last one listed: that tells no tie, only that there is
    none.
    """
    gaps = []
    for mine, theirs in ((pair.a, pair.b), (pair.b, pair.a)):
        if at >= len(mine.output) or at >= len(theirs.output):
            return None
        if mine.output_top is None or at >= len(mine.output_top):
            continue
        listed = dict(mine.output_top[at])
        if mine.output[at] in listed and theirs.output[at] in listed:
            gaps.append(listed[mine.output[at]] - listed[theirs.output[at]])
        elif mine.output[at] in listed and listed:
            least = listed[mine.output[at]] - min(listed.values())
            if not pair.noise.tied(least):
                gaps.append(least)
    return min(gaps, key=abs) if gaps else None


def _rounds(pair: Pair, ties: list[Tie], did: list[str]) -> list[Divergence]:
    """Round by round from the same starts; what follows another text is not compared."""
    a, b = pair.a, pair.b
    tree = pair.run.settings.tree or pair.other.settings.tree
    seen = Seen()
    starts = {r.length: r for r in b.rounds or ()}
    for theirs in a.rounds or ():
        mine = starts.get(theirs.length)
        upto = theirs.length - len(a.prompt) + 1
        if mine is None or a.output[:upto] != b.output[:upto]:
            continue
        context = Context(pair.number, tree.topk if tree else None, None, None)
        fault = compare_round(theirs, mine, pair.noise, context, seen)
        if fault is not None:
            did.append("rounds")
            return [_named(fault, theirs.tensors, pair.run, pair.other)]
    did += ["rounds"] if seen.compared else []
    ties += seen.ties
    return []


def _named(
    fault: Divergence, tensors: dict[str, np.ndarray], run: EngineRun, other: EngineRun
) -> Divergence:
    """What two runs alone can say: whose page size differs, which branch and positions."""
    name = fault.tensor or ""
    pages = run.settings.page_size, other.settings.page_size
    if name.startswith(("draft_hidden", "draft_logits", "draft_tokens", "draft_input")):
        level = name.split(".")[-1]
        positions = tensors.get(f"draft_positions.{level}")
        branch = fault.node
        if branch is None or positions is None:
            return fault
        spot = f"branch {branch} at position {np.asarray(positions).reshape(-1)[branch]}"
        if pages[0] != pages[1] and None not in pages:
            return dataclasses.replace(
                fault,
                code="TREE_PAGED_COPY",
                cause=f"{spot}, page size {pages[0]} beside {pages[1]}: branches that share a page "
                "need a copy of it",
            )
        return dataclasses.replace(fault, cause=spot)
    return fault


def _statistics(pair: Pair, known: Sequence[str], same: bool) -> list[Divergence]:
    a, b, tree = pair.a, pair.b, pair.run.settings.tree
    common: dict[str, Any] = {"kind": "statistics differ", "request": pair.number}
    common["order"] = (10**6, 0)
    wrong = impossible(
        a.stats,
        nodes=tree.num_draft_tokens if tree else None,
        steps=tree.num_steps if tree else None,
        output=len(a.output),
    )
    if wrong:
        code, cause = "METRIC_INVARIANT", "the engine's own numbers contradict each other"
        return [Divergence(tensor="statistics", detail=wrong[0], code=code, cause=cause, **common)]
    if not same:
        return []
    for name in known:
        if a.stats[name] != b.stats[name]:
            more, less = a.stats.get("spec_verify_ct", 0), b.stats.get("spec_verify_ct", 0)
            word = "accepts less" if more > less else "accepts more" if more < less else "differs"
            detail = f"{name} is {a.stats[name]}, in the other {b.stats[name]}: it {word}"
            return [Divergence(tensor=name, detail=detail, **common)]
    return []

"""Rounds and counts of a sampled run, and which rule accepted its drafts."""

import dataclasses
from collections.abc import Sequence

import numpy as np

from eagle3_jax.config import TreeConfig
from eagle3_jax.crosscheck.counts import COUNTED, check_counts
from eagle3_jax.crosscheck.emitted import Emitted
from eagle3_jax.crosscheck.goodness import binomial_fits
from eagle3_jax.crosscheck.result import Divergence
from eagle3_jax.crosscheck.sampled_causes import Group
from eagle3_jax.crosscheck.types import EngineRequest, EngineRun, Settings
from eagle3_jax.trace import Round

RULES = {
    "strict": "strict (drawn from q, must be the token the target draws)",
    "one_hot": "one-hot (the draft's argmax, accepted with p)",
    "full": "full q (drawn from q, accepted with min(1, p/q))",
}
HISTOGRAM = "spec_correct_drafts_histogram"


@dataclasses.dataclass(frozen=True)
class RuleFound:
    """What counts say of the rule.

    Attributes:
      faults: what stays of the counts' differences, or the rule that is another.
      said: for the verdict of an equal run. notes: for the others.
    """

    faults: list[Divergence]
    said: str = ""
    notes: tuple[str, ...] = ()


def said_rule(settings: Settings) -> str | None:
    """The rule an engine says it runs, SGLang's default where it says nothing; None unknown."""
    rule = settings.other.get("rule")
    if isinstance(rule, dict):
        return "full" if rule.get("sampled_drafts") else "one_hot"
    if settings.engine == "sglang":
        drawn = settings.other.get("speculative_use_rejection_sampling")
        return "full" if drawn else "one_hot"
    return None


def judge_rule(
    run: EngineRun,
    requests: Sequence[EngineRequest],
    groups: Sequence[Group],
    wrong: list[Divergence],
    emitted: Sequence[Emitted],
    chain: bool = True,
) -> RuleFound:
    """Counts of sampled requests beside the rules of `acceptance_by_rule`.

    A draft's argmax is accepted exactly where the text goes on with it, so counts equal to those of
    our rounds on the text need no statistics: the rule is one-hot. Drafts drawn from q leave counts
    that no text tells; the share of rounds with an accepted draft does.

    Args:
      groups: with `Placed.strict` and the others. wrong: counts that differ. chain: a tree's first
        drafts are several, for which these rules do not speak.
    """
    accepted, rounds = _measured(run, requests, groups)
    expected = _expected(groups, emitted) if chain else None
    if not rounds:
        return RuleFound(wrong)
    measured = f"the first draft was accepted in {accepted / rounds:.1%} of {rounds} rounds"
    if expected is None:
        said = "" if wrong else "drafts accepted where the text goes on with them"
        return RuleFound(wrong, said)
    listed = ", ".join(f"{n.replace('_', '-')} {v:.1%}" for n, v in expected.items())
    numbers = f"{measured}, expected by rule: {listed}"
    if not wrong:
        return RuleFound([], f"rule one-hot: {numbers}")
    fits = [n for n, v in expected.items() if binomial_fits(accepted, rounds, v)]
    said = said_rule(run.settings)
    if said in fits and said != "one_hot":
        return RuleFound([], f"rule {said.replace('_', '-')} q: {numbers}")
    if "one_hot" in fits or not fits:
        which = ", ".join(RULES[n] for n in fits) or "none"
        return RuleFound(wrong, notes=(f"{numbers}; rules that fit: {which}",))
    words = " or ".join(RULES[n] for n in fits)
    if said is None:
        return RuleFound([], f"SAMPLING_RULE: {words}: {numbers}")
    fault = Divergence(
        kind="statistics differ",
        request=0 if len(requests) == 1 else -1,
        detail=numbers,
        tensor=HISTOGRAM,
        code="SAMPLING_RULE",
        cause=f"the rule is {words}, where the engine's settings say {RULES[said]}",
        order=(10**6, 0),
    )
    return RuleFound([fault])


def _measured(
    run: EngineRun, requests: Sequence[EngineRequest], groups: Sequence[Group]
) -> tuple[int, int]:
    """Rounds with an accepted draft, and all rounds, of the requests in groups."""
    numbers = sorted({int(i) for g in groups for i in g.texts.owner})
    histograms = [requests[i].stats.get(HISTOGRAM) for i in numbers]
    if len(numbers) == len(requests) and not any(histograms):
        histograms = [run.stats.get(HISTOGRAM)]
    rounds = sum(sum(h) for h in histograms if h)
    return rounds - sum(h[0] for h in histograms if h), rounds


def _expected(groups: Sequence[Group], emitted: Sequence[Emitted]) -> dict[str, float] | None:
    """Mean chance by rule where rounds began, or after every token where that is not known."""
    if not groups or any(g.placed.strict is None for g in groups):
        return None
    chosen = []
    for g in groups:
        rows = g.texts.index > 0
        owners = set(g.texts.owner.tolist())
        begun = {(n, at + 1) for n in owners for _, at, _ in emitted[n].rounds}
        starts = [
            one in begun for one in zip(g.texts.owner.tolist(), g.texts.index.tolist(), strict=True)
        ]
        known = all(emitted[n].rounds for n in owners)
        chosen.append(np.asarray(starts) if known else rows)
    means = {}
    for name in RULES:
        values = [getattr(g.placed, name)[rows] for g, rows in zip(groups, chosen, strict=True)]
        whole = np.concatenate(values)
        if not len(whole):
            return None
        means[name] = float(whole.mean())
    return means


def uncut_counts(
    number: int, request: EngineRequest, rounds: Sequence[Round], tree: TreeConfig
) -> list[Divergence]:
    """`check_counts`; what the last round accepted past the end of a sampled text is not known."""
    found = check_counts(number, request, rounds, tree)
    if not rounds or not found or found[0].code:
        return found
    last = rounds[-1]
    left = len(request.output) - (last.length - len(request.prompt)) - 1
    if last.num_correct_drafts < left:
        return found
    for correct in range(left, tree.num_steps + 1):
        cut = dataclasses.replace(last, accepted=list(range(correct + 1)))
        if not check_counts(number, request, [*rounds[:-1], cut], tree):
            return []
    return found


def rounds_trusted(
    number: int, request: EngineRequest, rounds: Sequence[Round], tree: TreeConfig | None
) -> bool:
    """Whether our rounds on a sampled text are the engine's: it has counts, and they agree."""
    if tree is None or not any(name in request.stats for name in COUNTED):
        return False
    return not uncut_counts(number, request, rounds, tree)


def whole_rounds(request: EngineRequest) -> EngineRequest:
    """Without a dumped last round that the end of the text cut, likewise."""
    rounds = request.rounds or []
    if not rounds or rounds[-1].num_correct is None:
        return request
    left = len(request.output) - (rounds[-1].length - len(request.prompt)) - 1
    cut = rounds[-1].num_correct >= left
    return dataclasses.replace(request, rounds=rounds[:-1] if cut else rounds)

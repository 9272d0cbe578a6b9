"""Statistics without rounds: which single fault of ours gives the engine's numbers?"""

import dataclasses
from collections.abc import Iterator, Sequence

import numpy as np

from eagle3_jax.config import TreeConfig
from eagle3_jax.crosscheck.counts import COUNTED
from eagle3_jax.crosscheck.ours import Ours
from eagle3_jax.crosscheck.result import Divergence
from eagle3_jax.crosscheck.stats import of_rounds
from eagle3_jax.crosscheck.types import EngineRequest, EngineRun
from eagle3_jax.crosscheck.variants import Variant, capture_variants, flag_variants, map_variants

MOST_ROUNDS = 64
"""Rounds tried one by one for a single one that accepted less."""
ENOUGH = 8
"""Requests a suspect is tried on."""


def explain_statistics(
    first: Divergence,
    run: EngineRun,
    requests: Sequence[EngineRequest],
    ours: Ours,
    notes: list[str],
) -> Divergence:
    """The divergence with the one suspect that explains every request's counts, if one does."""
    counted = [r for r in requests if any(name in r.stats for name in COUNTED)][:ENOUGH]
    if not counted:
        notes.append("counters over all requests only: no single suspect can be told from another")
        return first
    explains = [(v.code, v.words) for v in _variants(ours) if _gives(v, counted, ours)]
    explains += _one_less(counted, ours)
    nothing = not any(r.stats.get("spec_num_correct_drafts", 1) for r in counted)
    if nothing:
        notes.append("no draft was accepted at all: counts alone do not tell why")
    if len(explains) == 1:
        words = (
            f"a suspect: {explains[0][1]}: of the wirings tried it alone explains the counts of "
            f"all {len(counted)} requests; a dump of the rounds decides"
        )
        code = "SUSPECTS" if nothing else explains[0][0]
        return dataclasses.replace(first, code=code, cause=words)
    if explains:
        listed = "; ".join(words for _, words in explains)
        families = {code.split("_")[0] for code, _ in explains}
        code = explains[0][0] if len(families) == 1 else "SUSPECTS"
        cause = f"suspects that each explain the counts: {listed}"
        return dataclasses.replace(first, code=code, cause=cause)
    notes.append(
        "no single wiring tried here explains the counts; what else differs cannot be decided "
        "without the engine's rounds (a folder of its dumper)"
    )
    return first


def _variants(ours: Ours) -> Iterator[Variant]:
    assert ours.draft is not None
    yield from map_variants(ours.draft)
    if not ours.recorded:
        layers = ours.target.config.num_layers
        yield from capture_variants(ours.draft, ours.boundaries, layers)
    yield from flag_variants(ours.draft)


def _gives(variant: Variant, requests: Sequence[EngineRequest], ours: Ours) -> bool:
    """Whether its rounds on the engine's texts have the engine's counts."""
    changed = ours.with_draft(variant.draft)
    plain = [dataclasses.replace(r, rounds=None) for r in requests]
    assert ours.tree is not None
    for request, rounds in zip(plain, changed.free(plain), strict=True):
        correct = [r.num_correct_drafts for r in rounds]
        if not _counts(request, correct, ours.tree.num_draft_tokens):
            return False
    return True


def _one_less(requests: Sequence[EngineRequest], ours: Ours) -> list[tuple[str, str]]:
    """One round of one request that accepted fewer drafts than matched."""
    assert ours.tree is not None
    nodes = ours.tree.num_draft_tokens
    wrong = []
    for request in requests:
        known: dict[int, int] = {}
        walk = ours.accepts_from(request, len(request.prompt), known)
        if not _counts(request, [k for _, k in walk], nodes):
            wrong.append((request, walk, known))
    if len(wrong) != 1:
        return []
    request, walk, known = wrong[0]
    for i, (start, k) in enumerate(walk[:MOST_ROUNDS]):
        for fewer in range(k):
            after = ours.accepts_from(request, start + fewer + 1, known)
            correct = [*(k for _, k in walk[:i]), fewer, *(k for _, k in after)]
            if _counts(request, correct, nodes):
                words = (
                    f"one round accepted fewer drafts than matched, such as round {i} at {start}: "
                    f"{fewer} of {k}"
                )
                return [("UNDER_ACCEPTED", words)]
    return []


def _counts(request: EngineRequest, correct: list[int], nodes: int) -> bool:
    """Whether rounds with these accepted drafts have the engine's counts."""
    mine = of_rounds(len(request.prompt), len(request.output), correct, nodes)
    return all(request.stats.get(n, mine.get(n)) == mine.get(n) for n in COUNTED)


def pinned_at_maximum(
    requests: Sequence[EngineRequest], tree: TreeConfig
) -> tuple[str, str] | None:
    """Every round accepts all it can and the text is one token: a code and words, or None."""
    histograms = [r.stats.get("spec_correct_drafts_histogram") for r in requests]
    known = [h for h in histograms if h]
    steps = tree.num_steps
    if not known or len(known) < len(requests):
        return None
    longest = max(steps + 1, *map(len, known))
    total = np.sum([np.pad(h, (0, longest - len(h))) for h in known], axis=0)
    tokens = {t for r in requests for t in r.output[1:]}
    if len(total) == steps + 1 and total[:-1].sum() == 0 and len(tokens) == 1:
        token = tokens.pop()
        return (
            "NUMERIC_NAN",
            f"accept length pinned at its maximum with a single token ({token}): the argmax of NaN "
            "logits on both sides",
        )
    return None

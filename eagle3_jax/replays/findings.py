"""What a replay shows beside its numbers, each with a code."""

import dataclasses
import math

import numpy as np

from eagle3_jax.record import Record
from eagle3_jax.replays.result import Finding, ReplayResult, TreeReplay

LARGEST_HALF = 65504.0
COVERAGE, DRIFT = 0.1, 1.5


@dataclasses.dataclass(frozen=True)
class Seen:
    """What was met on the way: the largest state, some judged ids (all, if one), the record.

    Attributes:
      placed: sequences with positions on three axes. multi_axis: whether the draft heeds them.
    """

    largest: float
    ids: set[int]
    record: Record
    placed: int = 0
    multi_axis: bool = False


def findings(result: ReplayResult, seen: Seen) -> list[Finding]:
    """In the order of weight."""
    found = []
    if result.kind != "greedy":
        found.append(
            Finding(
                "RECORD_NOT_GREEDY",
                f"the record's tokens are {result.kind}, not the target's greedy output: these "
                "numbers say how often the draft meets its tokens, not what serving accepts",
            )
        )
    for line in seen.record.findings:
        code, _, message = line.partition(": ")
        found.append(Finding(code, message or line))
    late = [i for i, s in enumerate(seen.record.sequences) if s.first]
    if late:
        first = seen.record.sequences[late[0]].first
        found.append(
            Finding(
                "KV_PREFIX_NOT_FILLED",
                f"partial context: {len(late)} of {len(result.sequences)} sequences have no states "
                f"before some position (sequence {late[0]}: 0..{first - 1}); the draft sees "
                "nothing of them, as in an engine that reuses a prefix without its draft KV",
            )
        )
    if result.norms is not None and not _finite(result.norms.fused, *result.norms.ratio):
        found.append(
            Finding(
                "NUMERIC_NAN",
                f"states reach {seen.largest:.3g}: the draft's own states are no longer finite in "
                f"{result.dtype}, and nothing it proposes means anything",
            )
        )
    if seen.largest > LARGEST_HALF:
        found.append(
            Finding(
                "NUMERIC_FP16_RANGE",
                f"states reach {seen.largest:.3g}, above 65504: infinite in float16",
            )
        )
    found += _no_rounds(result)
    found += _pinned_at_most(result, seen)
    found += _vocabulary(result)
    found += _drift(result)
    found += _window(result)
    found += _placeholders(result)
    found += _axes(result, seen)
    return found


def _finite(*values: float) -> bool:
    return all(map(math.isfinite, values))


def _no_rounds(result: ReplayResult) -> list[Finding]:
    empty = [t for t in result.trees if not t.rounds]
    if not empty:
        return []
    cut = sum(t.censored for t in empty)
    why = f"the record's end cuts all {cut}" if cut else "no sequence has output to draft"
    return [
        Finding(
            "REPLAY_NO_ROUNDS",
            f"no whole round under {', '.join(str(t.tree) for t in empty)}: {why}; record more "
            "tokens",
        )
    ]


def _pinned_at_most(result: ReplayResult, seen: Seen) -> list[Finding]:
    for t in result.trees:
        full = len(t.rounds) > 1 and bool((t.accepted == t.tree.num_steps).all())
        if full and len(seen.ids) == 1:
            return [
                Finding(
                    "NUMERIC_NAN",
                    f"accept length pinned at its maximum {t.tree.num_steps + 1} in all "
                    f"{len(t.rounds)} rounds, and the output is the single token "
                    f"{next(iter(seen.ids))}: logits of NaN look like this (argmax is the first id "
                    "on both sides)",
                )
            ]
    return []


def _vocabulary(result: ReplayResult) -> list[Finding]:
    share = result.vocabulary.share
    best = next((t for t in result.trees if t.bound is not None and t.rounds), None)
    if share < COVERAGE or best is None:
        return []
    message = (
        f"{share:.0%} of the output lies outside the draft vocabulary: no draft of it can exceed "
        f"accept length {best.bound:.2f} at num_steps={best.tree.num_steps}"
    )
    misses = [r for r in best.rounds if r.reason is not None]
    outside = sum(r.reason == "outside_vocabulary" for r in misses)
    if misses and outside == len(misses):
        message += "; every miss is such a token: the vocabulary, not the wiring"
    return [Finding("VOCAB_COVERAGE", message)]


def _drift(result: ReplayResult) -> list[Finding]:
    norms = result.norms
    if norms is None or len(norms.ratio) < 3:
        return []
    largest = max(norms.ratio[2:])
    if largest <= DRIFT * norms.ratio[1]:
        return []
    at = norms.ratio.index(largest)
    return [
        Finding(
            "POS_DRIFT_REPORT",
            f"the state fed back grows: {norms.ratio[1]:.2f} times the fused one at step 1, "
            f"{largest:.2f} times at step {at}; deeper drafts lean on states larger than any the "
            "first step saw",
        )
    ]


def _window(result: ReplayResult) -> list[Finding]:
    if result.window is None:
        return []
    for t in result.trees:
        inside, beyond = split_at_window(t, result.window)
        if inside is not None and beyond is not None and beyond < inside - 0.2:
            return [
                Finding(
                    "POS_WINDOW_DEGRADES",
                    f"accept length {inside:.2f} before position {result.window} and {beyond:.2f} "
                    f"after it, the draft's max_position_embeddings={result.window}",
                )
            ]
    return []


def split_at_window(t: TreeReplay, window: int) -> tuple[float | None, float | None]:
    """Accept lengths of rounds that start before and at or after a position."""
    starts, accepted = np.array([r.start for r in t.rounds]), t.accepted
    sides = [accepted[starts < window], accepted[starts >= window]] if len(accepted) else [[], []]
    before, after = (float(np.mean(a)) + 1 if len(a) else None for a in sides)
    return before, after


def _placeholders(result: ReplayResult) -> list[Finding]:
    marked = {i for i, s in enumerate(result.sequences) if s.repeated is not None}
    found = []
    for t in result.trees[:1]:
        with_, without = (
            [r.accepted + 1 for r in t.rounds if (r.sequence in marked) is side]
            for side in (True, False)
        )
        if not with_ or not without:
            continue
        a, b = float(np.mean(with_)), float(np.mean(without))
        number = min(marked)
        repeated = result.sequences[number].repeated
        assert repeated is not None
        token, first, last = repeated
        if a < b - 0.2:
            found.append(
                Finding(
                    "FEATURE_MM_SPLIT",
                    f"accept length {a:.2f} after prompts with a stretch of one id (sequence "
                    f"{number}: id {token} at positions {first}..{last}, image placeholders "
                    f"perhaps), {b:.2f} after the others: the draft embeds the placeholder, not "
                    "the image",
                )
            )
    return found


def _axes(result: ReplayResult, seen: Seen) -> list[Finding]:
    marked = [i for i, s in enumerate(result.sequences) if s.repeated is not None]
    message = ""
    if seen.placed and not seen.multi_axis:
        message = (
            f"{seen.placed} sequences have positions on three axes, the draft's rope has one (no "
            "mrope_section in its config): it counts tokens, as an engine does with it"
        )
    elif seen.multi_axis and not seen.placed and marked:
        repeated = result.sequences[marked[0]].repeated
        assert repeated is not None
        message = (
            f"the draft's rope has three axes and the record no positions: replayed as text; if id "
            f"{repeated[0]} at {repeated[1]}..{repeated[2]} of sequence {marked[0]} stands for an "
            "image, record positions [3, T]"
        )
    return [Finding("FEATURE_MROPE", message)] if message else []

"""Statistics of engines under one set of names, and what they must satisfy by themselves."""

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from eagle3_jax.trace import sglang_stats

OLDER = {
    "spec_accept_token_num": "spec_num_correct_drafts",
    "spec_draft_token_num": "spec_num_proposed_drafts",
    "spec_accept_histogram": "spec_correct_drafts_histogram",
}
"""SGLang's names up to 0.5.10 -> those of 0.5.23."""

VLLM = {
    "num_drafts": "spec_verify_ct",
    "num_draft_tokens": "spec_num_proposed_drafts",
    "num_accepted_tokens": "spec_num_correct_drafts",
}
"""vLLM's counters (`vllm:spec_decode_*`); per position they are cumulative acceptances."""

SPEC = (
    "spec_verify_ct",
    "spec_num_correct_drafts",
    "spec_num_proposed_drafts",
    "spec_accept_rate",
    "spec_accept_length",
    "spec_correct_drafts_histogram",
)
USUAL = ("finish_reason", "prompt_tokens", "completion_tokens")


def translate(meta: Mapping[str, Any]) -> tuple[dict[str, Any], tuple[str, ...]]:
    """SGLang's `meta_info` of any version -> statistics under 0.5.23's names, and missing ones.

    The spec_* names count as missing only when some are there: without rounds all are absent.
    """
    renamed = {OLDER.get(name, name): value for name, value in meta.items()}
    stats = {name: renamed[name] for name in (*USUAL, *SPEC) if renamed.get(name) is not None}
    wanted: list[str] = list(USUAL)
    if any(name.startswith("spec_") for name in renamed):
        wanted += SPEC
    return stats, tuple(name for name in wanted if name not in stats)


def from_vllm(counters: Mapping[str, Any]) -> dict[str, Any]:
    """vLLM's counters -> SGLang's names; per-position counts become a histogram of rounds."""
    plain = {k.removeprefix("vllm:").removeprefix("spec_decode_"): v for k, v in counters.items()}
    plain = {k.removesuffix("_total"): v for k, v in plain.items()}
    stats: dict[str, Any] = {VLLM[k]: int(plain[k]) for k in VLLM if plain.get(k) is not None}
    rounds = stats.get("spec_verify_ct")
    reached = plain.get("num_accepted_tokens_per_pos")
    if isinstance(reached, Sequence) and not isinstance(reached, str) and rounds is not None:
        steps = [rounds, *map(int, reached), 0]
        histogram = [a - b for a, b in itertools.pairwise(steps)]
        while len(histogram) > 1 and histogram[-1] == 0:
            histogram.pop()
        stats["spec_correct_drafts_histogram"] = histogram
    if stats.get("spec_num_proposed_drafts"):
        stats["spec_accept_rate"] = (
            stats.get("spec_num_correct_drafts", 0) / stats["spec_num_proposed_drafts"]
        )
    return stats


def of_rounds(
    prompt: int, output: int, correct: Sequence[int], nodes: int | None
) -> dict[str, Any]:
    """SGLang's statistics of known rounds."""
    return sglang_stats(prompt, output, correct, nodes)


def impossible(
    stats: Mapping[str, Any], *, nodes: int | None, steps: int | None, output: int | None
) -> list[str]:
    """What in one request's statistics contradicts itself, one line each (SGLang's formulas).

    Args:
      nodes, steps: of the tree; None leaves out what needs them. output: number of new tokens.
    """
    found: list[str] = []
    rounds, correct = stats.get("spec_verify_ct"), stats.get("spec_num_correct_drafts")
    proposed, histogram = (
        stats.get("spec_num_proposed_drafts"),
        stats.get("spec_correct_drafts_histogram"),
    )
    completion = stats.get("completion_tokens", output)
    if output is not None and completion != output:
        found.append(f"completion_tokens is {completion}, the output has {output} ids")
    if histogram is not None and any(not isinstance(n, int) or n < 0 for n in histogram):
        return [*found, f"spec_correct_drafts_histogram holds no counts: {histogram}"]
    if histogram is not None and rounds is not None and sum(histogram) != rounds:
        found.append(
            f"the histogram {histogram} counts {sum(histogram)} rounds, spec_verify_ct says "
            f"{rounds}: cut or not counted to its end"
        )
    if histogram is not None and correct is not None:
        total = sum(k * n for k, n in enumerate(histogram))
        if total != correct:
            found.append(
                f"the histogram {histogram} holds {total} accepted drafts, "
                f"spec_num_correct_drafts says {correct}"
            )
    if histogram is not None and steps is not None and len(histogram) > steps + 1:
        found.append(f"the histogram has rounds with more than {steps} accepted drafts")
    if rounds and proposed is not None and nodes is not None and proposed != rounds * (nodes - 1):
        found.append(
            f"spec_num_proposed_drafts is {proposed}, {rounds} rounds of {nodes - 1} drafts make "
            f"{rounds * (nodes - 1)}"
        )
    if correct is not None and rounds is not None and completion is not None:
        over = 1 + correct + rounds - completion
        most = steps if steps is not None else None
        if over < 0 or (most is not None and over > most):
            found.append(
                f"{rounds} rounds with {correct} accepted drafts commit {1 + correct + rounds} "
                f"tokens, the output has {completion}: "
                + ("more than that" if over < 0 else "no single cut explains the rest")
            )
    found += _ratios(stats, rounds, correct, proposed, completion)
    return found


def _ratios(
    stats: Mapping[str, Any],
    rounds: int | None,
    correct: int | None,
    proposed: int | None,
    completion: int | None,
) -> list[str]:
    found = []
    checks = (
        ("spec_accept_rate", correct, proposed, "accepted / proposed drafts"),
        ("spec_accept_length", completion, rounds, "completion_tokens / spec_verify_ct"),
    )
    for name, above, below, formula in checks:
        value = stats.get(name)
        if value is None or above is None or not below:
            continue
        if not abs(float(value) - above / below) <= 1e-6:  # NaN too
            found.append(f"{name} is {value:.6g}, {formula} is {above / below:.6g}")
    return found


def match_rates(rounds: Sequence[Sequence[int]]) -> dict[str, Any]:
    """Two rates of match vectors (1 where a drafted token is the target's), which differ.

    `prefix` counts up to the first miss, what verification accepts; `raw` counts every match, as
    some tools do (vllm-project/vllm#9565).
    """
    total = sum(map(len, rounds))
    prefix = sum(next((i for i, m in enumerate(r) if not m), len(r)) for r in rounds)
    raw = sum(map(sum, rounds))
    return {
        "prefix": prefix,
        "raw": raw,
        "drafted": total,
        "prefix_rate": prefix / total if total else None,
        "raw_rate": raw / total if total else None,
    }


def metric_names(correct: Sequence[int], completion: int, nodes: int) -> dict[str, Any]:
    """The three numbers called accept length, by their formulas, and the rate.

    Args:
      correct: accepted drafts by round, before any cut. completion: new tokens.
    """
    rounds = len(correct)
    if not rounds:
        return {}
    return {
        "accepted per round": sum(correct) / rounds,
        "tokens per verification": 1 + sum(correct) / rounds,
        "completion tokens / verifications": completion / rounds,
        "accepted / drafted": sum(correct) / (rounds * (nodes - 1)),
    }

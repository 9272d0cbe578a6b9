"""What a trace's rounds add up to: accept lengths, acceptance by position, why rounds ended."""

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any

from eagle3_jax.reports.reading import UNKNOWN
from eagle3_jax.trace import Round, Trace, sglang_stats

REASONS = {
    "full": "accepted to the last level drafted",
    "refused": "the target chose a token that was not drafted there",
    "bare": "nothing was drafted there: the tree has no node below",
    "unknown": "the target's token is not recorded",
    "broken": "the target's token was drafted there and not accepted",
}
"""Why a round accepts no more, by code."""


@dataclasses.dataclass(frozen=True)
class Counts:
    """Of one sequence, or of all of them together; plain decoding has no rounds to count.

    Attributes:
      accept_lengths: per round, bonus included, before any cut.
      num_steps: positions a round drafts. proposed: draft tokens of a round.
      tokens: new tokens. reasons: rounds by code of `REASONS`.
    """

    accept_lengths: list[int]
    num_steps: int
    proposed: int
    tokens: int
    reasons: dict[str, int]

    @property
    def mean_accept_length(self) -> float | None:
        """Tokens committed per round before any cut; None without rounds."""
        lengths = self.accept_lengths
        return sum(lengths) / len(lengths) if lengths else None

    @property
    def spec_accept_length(self) -> float | None:
        """SGLang's: new tokens / rounds, the prefill's token and the cut included."""
        return self.tokens / len(self.accept_lengths) if self.accept_lengths else None

    @property
    def spec_accept_rate(self) -> float | None:
        """Accepted draft tokens / proposed ones."""
        proposed = self.proposed * len(self.accept_lengths)
        accepted = sum(self.accept_lengths) - len(self.accept_lengths)
        return accepted / proposed if proposed else None

    @property
    def histogram(self) -> list[int]:
        """Rounds of accept length 1, 2, ... num_steps + 1."""
        longest = max([self.num_steps + 1, *self.accept_lengths])
        return [self.accept_lengths.count(k) for k in range(1, longest + 1)]

    @property
    def reached(self) -> list[int]:
        """Rounds that accepted at least 0, 1, ... num_steps drafts."""
        histogram = self.histogram
        return [sum(histogram[i:]) for i in range(len(histogram))]

    @property
    def cumulative(self) -> list[float | None]:
        """Position i = 1..: share of rounds whose first i drafts were all accepted."""
        first, *rest = self.reached
        return [n / first if first else None for n in rest]

    @property
    def conditional(self) -> list[float | None]:
        """Position i: share of the rounds that accepted i - 1 drafts which accepted i."""
        reached = self.reached
        return [b / a if a else None for a, b in itertools.pairwise(reached)]


def count(trace: Trace, sequences: Sequence[int]) -> Counts:
    """The counts of some of a trace's sequences."""
    rounds = [r for i in sequences for r in trace.of(i)] if trace.tree else []
    steps, nodes = (
        (trace.tree["num_steps"], trace.tree["num_draft_tokens"]) if trace.tree else (0, 1)
    )
    reasons = dict.fromkeys(REASONS, 0)
    for item in rounds:
        reasons[stop_reason(item, steps)] += 1
    return Counts(
        accept_lengths=[r.accept_length for r in rounds],
        num_steps=steps,
        proposed=nodes - 1,
        tokens=sum(len(trace.tokens[i]) for i in sequences),
        reasons=reasons,
    )


def stop_reason(item: Round, num_steps: int) -> str:
    """Code of `REASONS`: why the accepted path goes no further."""
    last = item.accepted[item.num_correct_drafts]
    if item.num_correct_drafts >= num_steps:
        return "full"
    below = [item.tokens[n] for n in range(len(item.tokens)) if item.parents[n] == last]
    if not below:
        return "bare"
    if item.bonus == UNKNOWN:
        return "unknown"
    return "broken" if item.bonus in below else "refused"


def stats_of(trace: Trace, sequence: int) -> tuple[dict[str, Any], list[str]]:
    """SGLang's statistics as recorded, else from the rounds; and the keys where both disagree."""
    rounds = trace.of(sequence)
    nodes = trace.tree["num_draft_tokens"] if trace.tree else None
    prompt, new = len(trace.prompts[sequence]), len(trace.tokens[sequence])
    computed = sglang_stats(prompt, new, [r.num_correct_drafts for r in rounds], nodes)
    recorded = trace.stats[sequence] if trace.stats else {}
    if not recorded:
        return computed, []
    return recorded, [k for k, v in computed.items() if not _same(recorded.get(k), v)]


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, (int, float)) and isinstance(b, float):
        return abs(a - b) <= 1e-9 * max(1.0, abs(b))
    return a == b

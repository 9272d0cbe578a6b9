"""What a replay found: rounds, and everything counted from them."""

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np

from eagle3_jax.config import TreeConfig
from eagle3_jax.record import Kind
from eagle3_jax.trace import Trace, sglang_stats

Mode = Literal["free", "pinned"]
MODES: tuple[Mode, ...] = ("free", "pinned")

Reason = Literal["outside_vocabulary", "ranked", "not_selected", "not_expanded"]
"""Why a round ended before its last level: the draft vocabulary lacks the true token; the draft
ranks it below topk; it was a candidate that pruning left out; its parent was no beam."""
REASONS: tuple[Reason, ...] = ("outside_vocabulary", "ranked", "not_selected", "not_expanded")


@dataclasses.dataclass(frozen=True, slots=True)
class ReplayRound:
    """One round of one sequence.

    Attributes:
      run: which of the sequence's outputs; 0 unless a loss mask marks several.
      index: of the round in its run.
      start: slots that hold target KV (SGLang's `seq_len`); token `start` is the bonus token.
      accepted: true drafts, the bonus not counted.
      reason, rank: of the miss, None after a full accept; rank 1 is the draft's best token, None
        outside the draft vocabulary or where the draft was not asked.
      engine: what the record's engine accepted in this round, None when free.
      expected: expected true drafts at each temperature asked for, None where it is unknown.
    """

    sequence: int
    run: int
    index: int
    start: int
    accepted: int
    reason: Reason | None = None
    rank: int | None = None
    engine: int | None = None
    expected: tuple[float, ...] | None = None


@dataclasses.dataclass(frozen=True)
class ReplayedSequence:
    """What is needed to name and group a sequence's rounds."""

    name: str
    tags: tuple[str, ...]
    num_tokens: int
    begins: tuple[int, ...]  # by run: the length at which its first round starts
    ends: tuple[int, ...]
    repeated: tuple[int, int, int] | None = None  # id, first and last position of a long repeat


@dataclasses.dataclass(frozen=True)
class TreeReplay:
    """A record's rounds under one tree.

    Attributes:
      rounds: in the order of sequences; those the record's end cut are not among them.
      censored: how many it cut.
      bound: accept length if every token of the draft vocabulary were accepted, None without
        rounds.
      accuracies: of a chain in a free run, per level: how often the draft is right over every
        position that could start a round, given that it was right so far; what trainers report.
      trace: every round with its whole tree when asked for.
    """

    tree: TreeConfig
    rounds: list[ReplayRound]
    censored: int
    bound: float | None
    num_sequences: int
    accuracies: list[float | None] | None = None
    trace: Trace | None = dataclasses.field(default=None, repr=False)

    @property
    def accepted(self) -> np.ndarray:
        """[R] true drafts of every round."""
        return np.array([r.accepted for r in self.rounds], np.int64)

    @property
    def accept_lengths(self) -> list[list[int]]:
        """Tokens committed by each round of each sequence, bonus included."""
        found: list[list[int]] = [[] for _ in range(self.num_sequences)]
        for r in self.rounds:
            found[r.sequence].append(r.accepted + 1)
        return found

    @property
    def accept_length(self) -> float | None:
        """Mean tokens per verification, bonus included; None without rounds."""
        return float(self.accepted.mean()) + 1 if self.rounds else None

    @property
    def accept_rate(self) -> float | None:
        """Accepted drafts / drafted tokens verified."""
        drafted = len(self.rounds) * (self.tree.num_draft_tokens - 1)
        return int(self.accepted.sum()) / drafted if drafted else None

    @property
    def cumulative(self) -> list[float]:
        """Share of rounds whose first i drafts were true, i = 1 .. num_steps; sums to AL - 1."""
        a = self.accepted
        return [float((a >= i).mean()) for i in range(1, self.tree.num_steps + 1)] if len(a) else []

    @property
    def conditional(self) -> list[float | None]:
        """Share of the rounds with i - 1 true drafts that have i; None where no round has i - 1."""
        a = self.accepted
        reached = [int((a >= i).sum()) for i in range(self.tree.num_steps + 1)]
        return [n / m if m else None for m, n in itertools.pairwise(reached)]

    @property
    def simulated(self) -> list[float] | None:
        """Products of `accuracies`: the cumulative acceptance one would expect from them."""
        if self.accuracies is None or any(a is None for a in self.accuracies):
            return None
        return np.cumprod(np.array(self.accuracies, np.float64)).tolist()

    @property
    def tokens_per_verify(self) -> float | None:
        """SGLang's `spec_accept_length` over all sequences: completion tokens / rounds."""
        stats = [s for s in self.stats() if "spec_verify_ct" in s]
        rounds = sum(s["spec_verify_ct"] for s in stats)
        return sum(s["completion_tokens"] for s in stats) / rounds if rounds else None

    @property
    def engine_equal(self) -> tuple[int, int] | None:
        """Rounds that accept what the record's engine did, and all compared; None when free."""
        pairs = [(r.accepted, r.engine) for r in self.rounds if r.engine is not None]
        return (sum(a == b for a, b in pairs), len(pairs)) if pairs else None

    def stats(self) -> list[dict[str, Any]]:
        """SGLang's statistics of each sequence, as if it ended with its last whole round.

        Several runs of a sequence are added up: each begins with a token of its own prompt pass.
        """
        found = []
        for number in range(self.num_sequences):
            mine = [r for r in self.rounds if r.sequence == number]
            runs = len({r.run for r in mine})
            prompt = min((r.start for r in mine), default=0)
            new = runs + sum(r.accepted + 1 for r in mine)
            counts = [r.accepted for r in mine]
            found.append(sglang_stats(prompt, new, counts, self.tree.num_draft_tokens))
        return found


@dataclasses.dataclass(frozen=True)
class Vocabulary:
    """How many of the judged tokens the draft vocabulary has."""

    tokens: int
    outside: int

    @property
    def share(self) -> float:
        """Outside, of all."""
        return self.outside / self.tokens if self.tokens else 0.0


@dataclasses.dataclass(frozen=True)
class Norms:
    """Sizes of states.

    Attributes:
      aux: mean norm of each aux slot, in the draft's order; fused: of what `fuse` makes of them.
      ratio: of the state that goes into step j to the one that went into step 0, mean over the
        rows that got so far; rows: how many did.
    """

    aux: dict[str, float]
    fused: float
    ratio: list[float]
    rows: list[int]


@dataclasses.dataclass(frozen=True)
class Finding:
    """Something to tell beside the numbers."""

    code: str
    message: str


@dataclasses.dataclass(frozen=True)
class ReplayResult:
    """What `replay` returns.

    Attributes:
      trees: one entry per tree asked for, in that order.
      mode: `"free"`, or `"pinned"` to the record's own round starts.
      kind: the record's; only for `"greedy"` are the numbers those of serving.
      sequences: names, tags, where output begins. findings: what else was seen.
      window: the draft's max_position_embeddings where known.
      temperatures: those of `ReplayRound.expected`.
    """

    trees: list[TreeReplay]
    mode: Mode
    kind: Kind
    refresh: bool
    draft_attention: str
    dtype: str
    sequences: Sequence[ReplayedSequence]
    vocabulary: Vocabulary
    norms: Norms | None
    findings: list[Finding]
    window: int | None = None
    temperatures: tuple[float, ...] = ()

    def of(self, tree: TreeConfig) -> TreeReplay:
        """The entry of one tree."""
        return next(t for t in self.trees if t.tree == tree)

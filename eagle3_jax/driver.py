"""Drives a command's generations: batch by batch, round by round where Ctrl-C must keep them."""

import dataclasses
import signal
from collections.abc import Callable, Iterator, Sequence
from types import FrameType
from typing import Any

from eagle3_jax.checks import check_draft_attention
from eagle3_jax.config import TreeConfig
from eagle3_jax.draft import Eagle3Draft
from eagle3_jax.generation import generate, rounds, speculate
from eagle3_jax.run import Generation, describe, versions
from eagle3_jax.sampling_config import AcceptRule, SamplingConfig, accept_rule
from eagle3_jax.targets.base import Target
from eagle3_jax.trace import Round, Trace, sglang_stats
from eagle3_jax.tree import DraftAttention


@dataclasses.dataclass(frozen=True)
class Job:
    """The arguments every call of a command shares; draft and tree are None for plain decoding.

    Prompt i of the command is sampled with `sampling`'s one seed plus i.
    """

    target: Target
    draft: Eagle3Draft | None
    tree: TreeConfig | None
    max_new_tokens: int
    stop_token_ids: tuple[int, ...]
    draft_attention: DraftAttention | None = None
    sampling: SamplingConfig | None = None
    rule: AcceptRule | None = None

    def call(self, ids: Sequence[Sequence[int]], trace: bool = False, first: int = 0) -> Generation:
        """`speculate` or `generate`, as the job says; `first` counts the prompts before these."""
        if self.draft is None or self.tree is None:
            return self.plain(ids, trace, first)
        return speculate(
            self.target,
            self.draft,
            ids,
            max_new_tokens=self.max_new_tokens,
            tree=self.tree,
            draft_attention=self.draft_attention,
            stop_token_ids=self.stop_token_ids,
            sampling=self.sampling_of(ids, first),
            rule=self.rule,
            trace=trace,
        )

    def plain(
        self, ids: Sequence[Sequence[int]], trace: bool = False, first: int = 0
    ) -> Generation:
        """`generate`, whatever the draft."""
        return generate(
            self.target,
            ids,
            max_new_tokens=self.max_new_tokens,
            stop_token_ids=self.stop_token_ids,
            sampling=self.sampling_of(ids, first),
            trace=trace,
        )

    def rounds(self, ids: Sequence[Sequence[int]], first: int = 0) -> Iterator[Round]:
        """The same generation as `call`, one round after the other."""
        return rounds(
            self.target,
            self.draft,
            ids,
            max_new_tokens=self.max_new_tokens,
            tree=self.tree,
            draft_attention=self.draft_attention,
            stop_token_ids=self.stop_token_ids,
            sampling=self.sampling_of(ids, first),
            rule=self.rule if self.draft is not None else None,
        )

    @property
    def accept_rule(self) -> AcceptRule:
        """The rule that runs."""
        return accept_rule(self.rule, self.sampling, 1 if self.tree is None else self.tree.topk)

    def first_token(self, ids: Sequence[int], index: int) -> int:
        """The prefill's token of prompt `index`."""
        sampling = self.sampling_of([ids], index)
        return generate(self.target, [ids], max_new_tokens=1, sampling=sampling).tokens[0][0]

    def sampling_of(self, ids: Sequence[Sequence[int]], first: int) -> SamplingConfig | None:
        """`sampling` with the seeds of the prompts from `first` on."""
        if self.sampling is None:
            return None
        assert isinstance(self.sampling.seed, int)
        start = self.sampling.seed + first
        return self.sampling.with_seed(tuple(s % 2**32 for s in range(start, start + len(ids))))


class Outcome:
    """What there is so far, one entry per prompt.

    Attributes:
      tokens, accept_lengths: as in `Generation`. rounds: those driven one by one.
      interrupted: Ctrl-C ended it before its time.
    """

    def __init__(self, job: Job, prompts: list[list[int]]):
        self.job, self.prompts = job, prompts
        self.tokens: list[list[int]] = [[] for _ in prompts]
        self.accept_lengths: list[list[int]] = [[] for _ in prompts]
        self.rounds: list[Round] = []
        self.interrupted = False

    def add(self, item: Round):
        """Takes one round of the sequence it names."""
        tokens = self.tokens[item.sequence]
        if not tokens:
            tokens.append(item.tokens[0])
        tokens += item.emitted
        self.rounds.append(item)
        if self.job.tree is not None:
            self.accept_lengths[item.sequence].append(item.accept_length)

    def put(self, first: int, generation: Generation):
        """Takes a whole batch that starts at prompt `first`."""
        end = first + len(generation.tokens)
        self.tokens[first:end] = generation.tokens
        self.accept_lengths[first:end] = generation.accept_lengths

    def is_done(self, sequence: int) -> bool:
        """Whether a prompt got all its tokens."""
        return self._reason(sequence)["type"] != "abort"

    @property
    def stats(self) -> list[dict[str, Any]]:
        """`Generation.stats`; the finish reason of an interrupted one is SGLang's `abort`."""
        nodes = None if self.job.tree is None else self.job.tree.num_draft_tokens
        return [
            sglang_stats(len(prompt), len(tokens), [a - 1 for a in accept], nodes)
            | {"finish_reason": self._reason(i)}
            for i, (prompt, tokens, accept) in enumerate(
                zip(self.prompts, self.tokens, self.accept_lengths, strict=True)
            )
        ]

    def trace(self) -> Trace:
        """The rounds driven one by one, as `speculate(trace=True)` would have recorded them."""
        job = self.job
        dtype, attention = {"target": str(job.target.dtype)}, None
        rule = job.accept_rule
        if job.draft is not None:
            dtype["draft"] = str(job.draft.dtype)
            attention = check_draft_attention(job.draft, job.draft_attention)
        return Trace(
            prompts=self.prompts,
            tokens=self.tokens,
            rounds=self.rounds,
            tree=None if job.tree is None else dataclasses.asdict(job.tree),
            rule=rule.name,
            sampling=None if job.sampling is None else describe(job.sampling, rule),
            draft_attention=attention,
            dtype=dtype,
            engine=None if job.draft is None else job.draft.engine,
            versions=versions(),
            stats=self.stats,
        )

    def _reason(self, sequence: int) -> dict[str, Any]:
        tokens = self.tokens[sequence]
        if tokens and tokens[-1] in self.job.stop_token_ids:
            return {"type": "stop", "matched": tokens[-1]}
        if len(tokens) == self.job.max_new_tokens:
            return {"type": "length", "length": len(tokens)}
        return {"type": "abort"}


def drive(
    job: Job,
    prompts: list[list[int]],
    *,
    batch_size: int,
    by_round: bool,
    on_round: Callable[[Round], None] = lambda item: None,
    on_batch: Callable[[Outcome, int], None] = lambda outcome, done: None,
) -> Outcome:
    """Runs all prompts, `batch_size` a call; Ctrl-C ends it with what there is.

    Args:
      by_round: keep every round, so that Ctrl-C is answered at the end of the running one and the
        tokens so far are kept; else a whole batch is one program.
      on_round: called with each round, `Round.sequence` counted over all prompts.
      on_batch: called after each batch with the number of prompts done.
    """
    outcome = Outcome(job, prompts)
    with _CtrlC() as ctrl_c:
        try:
            for first in range(0, len(prompts), batch_size):
                ids = prompts[first : first + batch_size]
                if by_round:
                    _follow(outcome, first, ids, on_round, ctrl_c)
                else:
                    outcome.put(first, job.call(ids, first=first))
                on_batch(outcome, first + len(ids))
        except KeyboardInterrupt:
            outcome.interrupted = True
    return outcome


def _follow(
    outcome: Outcome,
    first: int,
    ids: list[list[int]],
    on_round: Callable[[Round], None],
    ctrl_c: "_CtrlC",
):
    ctrl_c.wait_for_round = False
    for item in outcome.job.rounds(ids, first):
        ctrl_c.wait_for_round = True
        moved = dataclasses.replace(item, sequence=first + item.sequence)
        outcome.add(moved)
        on_round(moved)
        if ctrl_c.asked:
            raise KeyboardInterrupt
    ended = [i for i in range(first, first + len(ids)) if not outcome.tokens[i]]
    for i in ended:  # by the prefill's token, which no round carries
        outcome.tokens[i].append(outcome.job.first_token(outcome.prompts[i], i))


class _CtrlC:
    """Ctrl-C is noted while a round runs and raised otherwise; the second one is always raised."""

    def __init__(self):
        self.asked = False
        self.wait_for_round = False

    def __enter__(self) -> "_CtrlC":
        self._before = signal.signal(signal.SIGINT, self._handle)
        return self

    def __exit__(self, *_: object):
        signal.signal(signal.SIGINT, self._before)

    def _handle(self, number: int, frame: FrameType | None):
        if self.asked or not self.wait_for_round:
            raise KeyboardInterrupt
        self.asked = True

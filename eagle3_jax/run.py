"""One checked call: on the host what is refused, bucketed and read back; on the device the loop."""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from eagle3_jax import loop, memory
from eagle3_jax.checks import (
    Prompts,
    check_draft_attention,
    check_models,
    check_pair,
    check_prompts,
    check_stop_ids,
    encode_prompts,
)
from eagle3_jax.config import Boundary, ConfigError, SamplingConfig, TreeConfig, whole_number
from eagle3_jax.draft import Eagle3Draft
from eagle3_jax.modules import take_apart
from eagle3_jax.precision import accum_dtype
from eagle3_jax.sampling import SamplingPlan, SamplingValues
from eagle3_jax.sampling_config import AcceptRule, accept_rule
from eagle3_jax.state import Limits, Program, RoundRecord, Weights
from eagle3_jax.targets.base import Target
from eagle3_jax.trace import Round, Trace, sglang_stats
from eagle3_jax.tree import DraftAttention
from eagle3_jax.version import installed


@dataclasses.dataclass(frozen=True)
class Generation:
    """What a call returned, one entry per prompt.

    Attributes:
      tokens: new token ids only; a stop token is the last of them.
      stats: SGLang 0.5.23's names and formulas (`trace.sglang_stats`) and `finish_reason`.
      accept_lengths: tokens committed by each round, bonus included, before any cut.
      trace: every round in full when asked for, else None.
      texts: `tokens` as text when the prompts were texts, else None.
    """

    tokens: list[list[int]]
    stats: list[dict[str, Any]]
    accept_lengths: list[list[int]]
    trace: Trace | None = dataclasses.field(default=None, repr=False)
    texts: list[str] | None = None


class Run:
    """One checked call."""

    def __init__(
        self,
        target: Target,
        draft: Eagle3Draft | None,
        prompts: Prompts,
        *,
        max_new_tokens: int,
        tree: TreeConfig | None = None,
        draft_attention: DraftAttention | None = None,
        stop_token_ids: Sequence[int] | None = None,
        trace: bool = False,
        tensors: bool = False,
        sampling: SamplingConfig | None = None,
        rule: str | AcceptRule | None = None,
    ):
        check_models(target, draft, tree)
        self.target, self.draft, self.tree = target, draft, tree
        ids, self.tokenizer = encode_prompts(prompts, target)
        self.prompts = check_prompts(ids, target.config.vocab_size)
        max_new_tokens = whole_number(max_new_tokens, "max_new_tokens")
        if max_new_tokens < 1:
            raise ConfigError(f"max_new_tokens is {max_new_tokens}, expected at least 1")
        self.max_new_tokens = max_new_tokens
        self.stop_ids = check_stop_ids(
            target.config.eos_token_ids if stop_token_ids is None else stop_token_ids
        )
        self.draft_attention: DraftAttention = "ancestors"
        boundaries: tuple[Boundary, ...] = ()
        if draft is not None:
            assert tree is not None
            self.draft_attention = check_draft_attention(draft, draft_attention)
            boundaries = check_pair(target, draft, tree)
        if sampling is not None and not isinstance(sampling, SamplingConfig):
            raise ConfigError(f"sampling is {sampling!r}, expected a SamplingConfig")
        self.sampling = sampling
        self.rule = accept_rule(rule, sampling, 1 if tree is None else tree.topk)
        longest = max(map(len, self.prompts))
        self.padded = _bucket(longest)
        self.capacity = _bucket(max_new_tokens)
        window = 1 if tree is None else tree.window
        self.slots = _round_up(self.padded + self.capacity + window, 32)
        self._check_fits(longest)
        target_leaves, target_structure = take_apart(target)  # type: ignore[arg-type]
        draft_leaves, draft_structure = ((), None) if draft is None else take_apart(draft)
        self.weights = Weights(target_leaves, draft_leaves)
        self.program = Program(
            target_structure,
            draft_structure,
            tree,
            boundaries,
            self.draft_attention,
            trace=trace,
            tensors=tensors,
            sampling=None if sampling is None else SamplingPlan.of(sampling, self.rule),
        )
        values = None
        if sampling is not None:
            vocab_size, accum = target.config.vocab_size, accum_dtype(target.dtype)
            values = SamplingValues.of(sampling, len(self.prompts), vocab_size, accum)
        self.limits = Limits(
            jnp.asarray(max_new_tokens, jnp.int32),
            jnp.asarray(_padded_stop_ids(self.stop_ids), jnp.int32),
            sampling=values,
        )

    def follow(self, outputs: Sequence[Sequence[int]]):
        """Takes the target's choices from these tokens as far as they go.

        Raises:
          ConfigError: not one list a prompt, or an id outside the vocabulary; or tokens are
            sampled, which a text to follow leaves no room for.
        """
        if self.program.samples:
            raise ConfigError("follow needs greedy decoding, found a temperature above 0")
        if len(outputs) != len(self.prompts):
            raise ConfigError(f"{len(outputs)} texts to follow for {len(self.prompts)} prompts")
        forced = np.full((len(self.prompts), self.slots), -1, np.int32)
        size = self.target.config.vocab_size
        for row, prompt, given in zip(forced, self.prompts, outputs, strict=True):
            wrong = next((t for t in given if not 0 <= t < size), None)
            if wrong is not None:
                raise ConfigError(f"id {wrong} of a text to follow is outside 0..{size - 1}")
            part = np.asarray(given, np.int32)[: len(row) - len(prompt)]
            row[len(prompt) : len(prompt) + len(part)] = part
        self.limits = dataclasses.replace(self.limits, forced=jnp.asarray(forced))

    def _check_fits(self, longest: int):
        config = self.target.config
        limit = config.max_position_embeddings
        asked = self._need(len(self.prompts))
        if longest + self.max_new_tokens > limit:
            raise ConfigError(
                f"a prompt of {longest} tokens and max_new_tokens={self.max_new_tokens} make "
                f"{longest + self.max_new_tokens} positions, the target has {limit}; the caches "
                f"would take {asked.caches / memory.MIB:.1f} MiB"
            )
        memory.check_need(asked, memory.free_bytes(), self._need(1).total, len(self.prompts))

    def _need(self, batch: int) -> memory.Need:
        draft = self.draft
        return memory.need(
            memory.Shape(batch, self.padded, self.slots),
            self.target.config,
            self.target.dtype.itemsize,
            None if draft is None else draft.config,
            0 if draft is None else draft.dtype.itemsize,
            self.tree,
            sampled=self.sampling is not None,
        )

    def _start(self, trace: bool):
        padded = np.zeros((len(self.prompts), self.padded), np.int32)
        for row, prompt in zip(padded, self.prompts, strict=True):
            row[: len(prompt)] = prompt
        lengths = np.asarray([len(p) for p in self.prompts], np.int32)
        return loop.start_jit(
            dataclasses.replace(self.program, trace=trace),
            self.weights,
            padded,
            lengths,
            self.limits,
            slots=self.slots,
            capacity=self.capacity,
        )

    def finish(self) -> Generation:
        """The whole generation in one program."""
        state, _ = self._start(self.program.trace)
        if self.max_new_tokens > 1:  # else the prompt's pass has done it all
            state = loop.finish_jit(self.program, self.weights, state, self.limits)
        out, num_new, correct, log, count = jax.device_get(
            (state.out, state.num_new, state.correct, state.log, state.rounds)
        )
        tokens = [row[:n].tolist() for row, n in zip(out, num_new, strict=True)]
        correct = [column[column >= 0].tolist() for column in correct.T]
        stats = self._stats(tokens, correct)
        trace = None
        if log is not None:
            found = []
            for index in range(count):
                found += self._rounds(index, jax.tree.map(lambda x, i=index: x[i], log), {})
            trace = self._trace(tokens, found, stats)
        accept = [[k + 1 for k in column] for column in correct]
        accept = accept if self.tree else [[] for _ in accept]
        texts = None if self.tokenizer is None else [self.tokenizer.decode(t) for t in tokens]
        return Generation(tokens, stats, accept, trace, texts)

    def stream(self) -> Iterator[Round]:
        """Round after round, each sequence's as it ends."""
        state, first = self._start(False)
        first = {f"prefill.{name}": value for name, value in first.items()}
        index = 0
        while not bool(np.all(state.done)):
            state, record, tensors = loop.round_jit(self.program, self.weights, state, self.limits)
            if self.program.tensors:
                tensors = jax.device_get(tensors | (first if index == 0 else {}))
            yield from self._rounds(index, jax.device_get(record), tensors)
            index += 1

    def _rounds(
        self, index: int, record: RoundRecord, tensors: dict[str, np.ndarray]
    ) -> Iterator[Round]:
        tree = record.tree
        for b in range(len(self.prompts)):
            if not record.active[b]:
                continue
            path = record.path[b, : record.num_correct[b] + 1]
            predicted = record.predicted[b]
            yield Round(
                sequence=b,
                index=index,
                length=int(record.length[b]),
                tokens=tree.tokens[b].tolist(),
                parents=[-1, *tree.parents[b, 1:].tolist()],
                scores=tree.scores[b].tolist(),
                draft_probs=tree.probs[b].tolist(),
                positions=record.positions[b].tolist(),
                predicted=predicted.tolist(),
                margins=[] if self.program.samples else record.margins[b].tolist(),
                target_probs=record.target_probs[b].tolist() if self.program.samples else [],
                expected_drafts=float(record.expected_drafts[b]) if self.program.samples else None,
                accepted=path.tolist(),
                bonus=int(predicted[path[-1]]),
                emitted=predicted[path][: record.kept[b]].tolist(),
                tensors={k: v[b] for k, v in tensors.items()} if self.program.tensors else None,
            )

    def _stats(self, tokens: list[list[int]], correct: list[list[int]]) -> list[dict[str, Any]]:
        nodes = None if self.tree is None else self.tree.num_draft_tokens
        result = []
        for prompt, new, k in zip(self.prompts, tokens, correct, strict=True):
            if new[-1] in self.stop_ids:
                reason: dict[str, Any] = {"type": "stop", "matched": new[-1]}
            else:
                reason = {"type": "length", "length": len(new)}
            result.append(sglang_stats(len(prompt), len(new), k, nodes) | {"finish_reason": reason})
        return result

    def _trace(self, tokens: list[list[int]], found: list[Round], stats: list) -> Trace:
        dtype = {"target": str(self.target.dtype)}
        if self.draft is not None:
            dtype["draft"] = str(self.draft.dtype)
        return Trace(
            prompts=self.prompts,
            tokens=tokens,
            rounds=found,
            tree=dataclasses.asdict(self.tree) if self.tree else None,
            rule=self.rule.name,
            sampling=None if self.sampling is None else describe(self.sampling, self.rule),
            draft_attention=self.draft_attention if self.tree else None,
            dtype=dtype,
            engine=self.draft.engine if self.draft is not None else None,
            versions=versions(),
            stats=stats,
        )


def describe(sampling: SamplingConfig, rule: AcceptRule) -> dict[str, Any]:
    """What a trace says of how its tokens were sampled."""
    return sampling.json() | {"rule": rule.json()}


def versions() -> dict[str, str]:
    """Of this package and those it computes with."""
    return installed("jax", "jaxlib", "flax", "numpy")


def _bucket(n: int) -> int:
    """Sizes share compilations: powers of two from 16 to 64, then multiples of 64."""
    if n > 64:
        return _round_up(n, 64)
    return max(16, 1 << (n - 1).bit_length())


def _round_up(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple


def _padded_stop_ids(ids: tuple[int, ...]) -> list[int]:
    return [*ids, *[-1] * (_round_up(max(len(ids), 1), 8) - len(ids))]

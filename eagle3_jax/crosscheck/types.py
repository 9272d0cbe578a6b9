"""What an engine produced, in one form for every engine and file format."""

import dataclasses
from typing import Any

import numpy as np

from eagle3_jax.config import TreeConfig
from eagle3_jax.findings import ConvertError

Top = tuple[tuple[int, float], ...]
"""The best tokens at one place: (id, logprob), best first."""


class CrosscheckError(ConvertError):
    """Results that cannot be read or compared: says where, found, expected."""

    def __init__(self, message: str):
        super().__init__("CROSSCHECK", message)


@dataclasses.dataclass(frozen=True)
class Settings:
    """What the engine ran with; None where the results do not say.

    Attributes:
      engine: `"sglang"`, `"vllm"`, `"openai"`, `"eagle3_jax"`. version: its own words.
      tree: the triple; a chain of plain decoding has None too, see `speculative`.
      speculative: False when the engine says that it ran without a draft.
      dtype: of weights and activations (`"float32"`, `"bfloat16"`, ...).
      target, draft: the models' names or folders as the engine was given them.
      temperature, max_new_tokens, ignore_eos, stop_token_ids: of the requests, when all share them.
      other: everything else that was said (server info, arguments), under its own names.
    """

    engine: str = "sglang"
    version: str | None = None
    tree: TreeConfig | None = None
    speculative: bool | None = None
    dtype: str | None = None
    target: str | None = None
    draft: str | None = None
    page_size: int | None = None
    tp_size: int | None = None
    temperature: float | None = None
    max_new_tokens: int | None = None
    ignore_eos: bool | None = None
    stop_token_ids: tuple[int, ...] | None = None
    other: dict[str, Any] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class DumpedRound:
    """One draft and one verification as dumped; None or a missing key for what was not dumped.

    Nodes are numbered as verified, the root (the pending bonus token) first.

    Attributes:
      index: number of the round in its request, from 0.
      length: slots with target KV when it starts (SGLang's `seq_len`).
      tokens: [N] target ids of the verified nodes, root first.
      parents: [N] parent node of each, -1 for the root.
      positions: [N] RoPE positions. scores: [N - 1] of the nodes after the root.
      mask: [N, N] bool, node i attends to node j of the window.
      accepted: nodes of the accepted path, root first. bonus: the token after it.
      num_correct: accepted draft tokens, before any cut, also where the path is not known.
      tensors: arrays under the names of `eagle3_jax.rounds(tensors=True)`: `seed_probs`,
        `seed_ids`, `seed_hidden`, `draft_tokens.i`, `draft_positions.i`, `draft_input.i` (states
        that went in), `draft_logits.i`, `draft_hidden.i`, `candidate_tokens`, `candidate_scores`,
        `candidate_parents`, `selected`, `target_logits` [N, V], `target_aux` [N, A, E],
        `extend_tokens`, `extend_positions`, `extend_aux` (as `fc` gets them, after its norm) [rows,
        A, E], `extend_hidden` (as fed back), `extend_logits` [W]; only accepted rows count. Of
        round 0 also `prefill.target_aux`, `prefill.target_logits` [V], `prefill.extend_tokens`,
        `prefill.extend_positions`, `prefill.extend_aux`, `prefill.fused`, `prefill.extend_hidden`,
        `prefill.extend_logits` [W].
        Names that have no counterpart there are kept as dumped, after a `raw.`.
    """

    index: int
    length: int
    tokens: list[int] | None = None
    parents: list[int] | None = None
    positions: list[int] | None = None
    scores: np.ndarray | None = None
    mask: np.ndarray | None = None
    accepted: list[int] | None = None
    bonus: int | None = None
    num_correct: int | None = None
    tensors: dict[str, np.ndarray] = dataclasses.field(default_factory=dict, repr=False)


@dataclasses.dataclass(frozen=True)
class EngineRequest:
    """One request and its answer.

    Attributes:
      name: the engine's id, or the place in the file.
      prompt: token ids. output: the new ids, the prefill's token first.
      stats: under SGLang 0.5.23's names (`prompt_tokens`, `completion_tokens`, `spec_*`,
        `finish_reason`); older names and vLLM's counters are translated.
      original: the answer's own fields as they were, unknown ones too, without states and logprobs.
      missing: names of `stats` that this kind of answer should have and lacks.
      cached_tokens: prompt tokens whose KV came from a cache.
      output_logprobs: of each output token. output_top: best tokens at each output place.
      input_logprobs: of prompt tokens from 1 on (`[0]` is NaN).
      aux: [R, A * E] states of tokens `first` .. (the prompt's and every output's but the last);
        `hidden_kind` says what they are: `"aux"`, or `"last"` after the final norm, None unknown.
      accepts: correct drafts of each round, where the answer tells them one by one.
      rounds: dumped rounds, in order; None without a dump.
      partial: no complete text: a dump that begins or ends inside a request.
      temperature, max_new_tokens, ignore_eos, stop_token_ids: of this request, None unknown.
      sampling: all sampling parameters, as they were given; None where they are not known.
    """

    name: str
    prompt: list[int]
    output: list[int]
    stats: dict[str, Any] = dataclasses.field(default_factory=dict)
    original: dict[str, Any] = dataclasses.field(default_factory=dict, repr=False)
    missing: tuple[str, ...] = ()
    cached_tokens: int = 0
    output_logprobs: np.ndarray | None = None
    output_top: list[Top] | None = None
    input_logprobs: np.ndarray | None = None
    aux: np.ndarray | None = dataclasses.field(default=None, repr=False)
    first: int = 0
    hidden_kind: str | None = None
    accepts: list[int] | None = None
    rounds: list[DumpedRound] | None = dataclasses.field(default=None, repr=False)
    partial: bool = False
    temperature: float | None = None
    max_new_tokens: int | None = None
    ignore_eos: bool | None = None
    stop_token_ids: tuple[int, ...] | None = None
    sampling: dict[str, Any] | None = None

    @property
    def finish_reason(self) -> str | None:
        """`"stop"`, `"length"`, ...; None when not said."""
        found = self.stats.get("finish_reason")
        return found.get("type") if isinstance(found, dict) else found


@dataclasses.dataclass(frozen=True)
class EngineRun:
    """Requests of one engine under one set of settings.

    Attributes:
      source: the file or folder they were read from, for messages.
      notes: what reading found worth saying (untold settings, unknown formats of old versions).
      stats: counters over all requests, under the names of `EngineRequest.stats`, for engines that
        count no single request (vLLM).
    """

    source: str
    settings: Settings
    requests: list[EngineRequest]
    notes: tuple[str, ...] = ()
    stats: dict[str, Any] = dataclasses.field(default_factory=dict)

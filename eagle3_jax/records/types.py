"""What a record holds: tokens, the target's states beside them, and what an engine did."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np

from eagle3_jax.config import Boundary, ConfigError

Kind = Literal["greedy", "sampled", "text"]
"""Whose tokens: the target's own greedy output, its samples, or some other text."""
KINDS: tuple[Kind, ...] = ("greedy", "sampled", "text")

STATE_DTYPES = ("bfloat16", "float16", "float32", "float64")


class RecordError(ConfigError):
    """A record that cannot be what it says; the message names sequence, rows, found, expected."""


@dataclasses.dataclass(frozen=True)
class EngineRound:
    """What an engine did in one round of one sequence.

    Attributes:
      start: slots that held target KV when it began (SGLang's `seq_len`); the pending bonus token
        is token `start` of the sequence.
      accepted: draft tokens accepted.
      proposed: a chain's draft tokens as target ids, None where the engine does not tell.
      bonus: the target's token after the accepted ones, None where the engine does not tell.
    """

    start: int
    accepted: int
    proposed: tuple[int, ...] | None = None
    bonus: int | None = None


@dataclasses.dataclass(frozen=True)
class RecordSequence:
    """One request.

    Attributes:
      tokens: [T] int32 target ids, prompt and output.
      aux: [R, A, E] states of tokens `first` .. `first + R - 1`, a memory map where it came from a
        file; bfloat16 as `ml_dtypes.bfloat16`. R >= T - first - 1: the last token needs none.
      prompt_length: tokens before the output; 0 when all is text.
      first: position of the first row of `aux`; above 0 the context is partial (a cached prefix).
      loss_mask: [T] bool, tokens to count; None for all of the output.
      top_ids, top_logprobs: [R, n] the target's best next tokens after each row, best first.
      positions: [3, T] rotary positions by time, height and width, for drafts with multi-axis rope
        (Qwen-VL's `get_rope_index`); None for text, where all three count the tokens.
      rounds: what the engine did, if known.
      name: of the request, for messages. tags: its groups, for tables.
    """

    tokens: np.ndarray
    aux: np.ndarray
    prompt_length: int
    first: int = 0
    loss_mask: np.ndarray | None = None
    top_ids: np.ndarray | None = None
    top_logprobs: np.ndarray | None = None
    positions: np.ndarray | None = None
    rounds: tuple[EngineRound, ...] | None = None
    name: str = ""
    tags: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class Record:
    """Sequences of one target, captured at the same boundaries.

    Attributes:
      boundaries: what each aux slot holds, in slot order.
      kind: whose tokens they are; replay is exact for `"greedy"`.
      sequences: read lazily from files; indexing gives a `RecordSequence`.
      vocab_size, num_layers: of the target, None where unknown.
      embedding: the folder whose embedding (and head, for drafts without one) replay reads.
      provenance: who wrote it, from what, versions.
      partial_context: declares that rows may begin after position 0, as a prefix cache leaves them.
      findings: what the writer's checks saw and did not refuse, one line each.
    """

    boundaries: tuple[Boundary, ...]
    kind: Kind
    sequences: Sequence[RecordSequence]
    vocab_size: int | None = None
    num_layers: int | None = None
    embedding: Path | None = None
    provenance: dict[str, Any] = dataclasses.field(default_factory=dict)
    partial_context: bool = False
    findings: tuple[str, ...] = ()

"""What a generation is compiled for, what it is given, and what changes from round to round."""

import dataclasses

import jax

from eagle3_jax.cache import KVCache
from eagle3_jax.config import Boundary, TreeConfig
from eagle3_jax.modules import Structure
from eagle3_jax.sampling import SamplingPlan, SamplingValues
from eagle3_jax.tree import DraftAttention, Seed, Tree


@dataclasses.dataclass(frozen=True)
class Program:
    """Everything about a generation that is compiled in. No draft and no tree: plain decoding."""

    target: Structure
    draft: Structure | None
    tree: TreeConfig | None
    boundaries: tuple[Boundary, ...]
    draft_attention: DraftAttention
    trace: bool = False
    tensors: bool = False
    sampling: SamplingPlan | None = None  # None: greedy on the target's own logits

    @property
    def rows(self) -> int:
        """Tokens a round can commit at most."""
        return 1 if self.tree is None else self.tree.num_steps + 1

    @property
    def samples(self) -> bool:
        """Whether tokens are drawn rather than the most likely ones taken."""
        return self.sampling is not None and self.sampling.rule.name != "greedy"


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Weights:
    """Flat arrays of target and draft, in the order their structures expect."""

    target: tuple[jax.Array, ...]
    draft: tuple[jax.Array, ...]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Limits:
    """When a sequence ends, and which tokens are not the target's to choose."""

    max_new_tokens: jax.Array  # [] int32
    stop_ids: jax.Array  # [n] int32, -1 where unused
    forced: jax.Array | None = None  # [B, slots] int32 by position, -1 where the target chooses
    sampling: SamplingValues | None = None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class RoundRecord:
    """What one round did, for every sequence of the batch."""

    active: jax.Array  # [B] bool, false for sequences that had ended before
    length: jax.Array  # [B] at the start
    tree: Tree
    positions: jax.Array  # [B, N]
    predicted: jax.Array  # [B, N]
    margins: jax.Array  # [B, N], zeros unless traced
    target_probs: jax.Array  # [B, N], zeros unless traced and sampled
    expected_drafts: jax.Array  # [B], zeros unless traced and sampled
    path: jax.Array  # [B, rows]
    num_correct: jax.Array  # [B]
    kept: jax.Array  # [B] tokens added to the output, after the cut


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class LoopState:
    """All that changes from round to round; donated to each."""

    target_cache: KVCache
    draft_cache: KVCache | None
    length: jax.Array  # [B] int32
    bonus: jax.Array  # [B] int32, the pending token
    seed: Seed | None  # level 0 of the next tree
    out: jax.Array  # [B, capacity + rows] int32 new tokens, valid below num_new
    num_new: jax.Array  # [B] int32
    done: jax.Array  # [B] bool
    rounds: jax.Array  # [] int32 rounds run
    correct: jax.Array  # [capacity, B] int32 accepted drafts by round, -1 where none ran
    counts: jax.Array | None  # [B, V] int32 new tokens so far, where penalties read them
    log: RoundRecord | None  # every leaf [capacity, B, ...], when tracing

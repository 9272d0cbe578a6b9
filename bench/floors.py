"""Bytes a step must move at least, from sizes alone: docs/gpu.md has the formulas in words."""

import dataclasses
from typing import Any

from models import Pair

from eagle3_jax.config import DraftConfig, TargetConfig, TreeConfig


@dataclasses.dataclass(frozen=True)
class Floor:
    """Bytes of one pass: weights once, keys and values that are read once, new ones written."""

    weights: int
    cache: int
    written: int

    @property
    def total(self) -> int:
        return self.weights + self.cache + self.written

    def __add__(self, other: "Floor") -> "Floor":
        return Floor(
            self.weights + other.weights, self.cache + other.cache, self.written + other.written
        )

    def times(self, count: int) -> "Floor":
        return Floor(self.weights * count, self.cache * count, self.written * count)


def _attention(config: Any, input_size: int) -> int:
    """Weights of one layer's attention."""
    heads = config.num_heads * config.head_dim
    kv = config.num_kv_heads * config.head_dim
    return input_size * (heads + 2 * kv) + heads * config.hidden_size


def _mlp(config: Any) -> int:
    return 3 * config.hidden_size * config.intermediate_size


def target_pass(config: TargetConfig, rows: int, batch: int, context: int, item: int = 2) -> Floor:
    """`rows` tokens of each sequence after `context` slots: layers and head, all caches once."""
    layer = _attention(config, config.hidden_size) + _mlp(config)
    weights = config.num_layers * layer + config.vocab_size * config.hidden_size
    slot = 2 * config.num_kv_heads * config.head_dim * config.num_layers
    embedded = batch * rows * config.hidden_size
    return Floor(
        item * (weights + embedded), item * slot * batch * context, item * slot * batch * rows
    )


def draft_pass(
    config: DraftConfig,
    rows: int,
    batch: int,
    context: int,
    item: int = 2,
    *,
    fused: bool = False,
) -> Floor:
    """One draft forward with its head; `fused`: of target states, through `fc`."""
    layer = _attention(config, 2 * config.hidden_size) + _mlp(config)
    weights = config.num_layers * layer + config.draft_vocab_size * config.hidden_size
    if fused:
        weights += config.num_aux * config.target_hidden_size * config.hidden_size
    slot = 2 * config.num_kv_heads * config.head_dim * config.num_layers
    embedded = batch * rows * config.hidden_size
    return Floor(
        item * (weights + embedded), item * slot * batch * context, item * slot * batch * rows
    )


def round_parts(
    pair: Pair, tree: TreeConfig | None, batch: int, context: int, item: int = 2
) -> dict[str, Floor]:
    """The floor of each forward of a round and of the whole round; of one decode step without."""
    if tree is None:
        return {"decode": target_pass(pair.target, 1, batch, context, item)}
    level = draft_pass(pair.draft, tree.topk, batch, context, item)
    verify = target_pass(pair.target, tree.num_draft_tokens, batch, context, item)
    extend = draft_pass(pair.draft, tree.num_steps + 1, batch, context, item, fused=True)
    return {
        "draft level": level,
        "verify": verify,
        "extend": extend,
        "round": level.times(tree.num_steps - 1) + verify + extend,
    }

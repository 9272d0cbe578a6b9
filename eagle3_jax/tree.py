"""The drafted tree: grown level by level, pruned to its best nodes, described by bits."""

import dataclasses
from collections.abc import Callable
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from eagle3_jax.config import TreeConfig
from eagle3_jax.ops.bits import pack_bits

DraftAttention = Literal["ancestors", "beam_slots"]
DRAFT_ATTENTIONS: tuple[DraftAttention, ...] = ("ancestors", "beam_slots")


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Seed:
    """What the draft's last row over target states leaves for the next round: level 0."""

    probs: jax.Array  # [B, topk] draft probabilities over the draft vocabulary
    tokens: jax.Array  # [B, topk] int32 target ids
    hidden: jax.Array  # [B, D] the state to feed back
    drawn_from: jax.Array | None = None  # [B, W] the distribution of a sampled draft's token


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Candidates:
    """Every proposed node, in SGLang's flat order: topk of level 0, then beam * topk + child."""

    tokens: jax.Array  # [B, C] int32 target ids
    probs: jax.Array  # [B, C] of the token given its parent
    scores: jax.Array  # [B, C] product of probs along the path; all 1 in a chain
    parents: jax.Array  # [B, C] int32 candidate index, -1 for the root


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Tree:
    """The nodes to verify; node 0 is the root, parents come before children."""

    tokens: jax.Array  # [B, N] int32 target ids
    parents: jax.Array  # [B, N] int32, 0 for the root itself
    depths: jax.Array  # [B, N] int32, 0 for the root
    scores: jax.Array  # [B, N]
    probs: jax.Array  # [B, N]
    ancestors: jax.Array  # [B, N, words] uint32: bit j of row i, node i sees node j (itself too)

    @classmethod
    def root(cls, tokens: jax.Array, dtype) -> "Tree":
        """The tree of plain decoding: tokens [B] and nothing drafted."""
        B = tokens.shape[0]
        zeros = jnp.zeros((B, 1), jnp.int32)
        ones = jnp.ones((B, 1), dtype)
        return cls(tokens[:, None], zeros, zeros, ones, ones, jnp.ones((B, 1, 1), jnp.uint32))


def top_probabilities(logits: jax.Array, topk: int) -> tuple[jax.Array, jax.Array]:
    """The topk best draft ids of logits [..., W] and their softmax probabilities, best first.

    Equal logits keep their order. Probabilities are over the whole draft vocabulary at
    temperature 1, whatever the request's temperature (SGLang `eagle_worker_v2`).
    """
    if topk == 1:
        ids = jnp.argmax(logits, axis=-1, keepdims=True).astype(jnp.int32)
        top = best = jnp.max(logits, axis=-1, keepdims=True)
    else:
        best, ids = lax.top_k(logits, topk)
        # The barrier keeps this slice apart from the one within top_k: else XLA sees no top-k on a
        # CPU and sorts, 40 times slower.
        top = lax.optimization_barrier(best)[..., :1]
    # The largest is known: a logsumexp would look for it again.
    total = jnp.log(jnp.sum(jnp.exp(logits - top), axis=-1, keepdims=True)) + top
    return jnp.exp(best - total), ids.astype(jnp.int32)


DraftForward = Callable[[int, jax.Array, jax.Array, jax.Array], tuple[jax.Array, jax.Array]]
"""(level, tokens [B, topk], hidden [B, topk, D], bits [B, topk, words]) -> logits [B, topk, W] and
the states to feed back [B, topk, D]; the new rows go to window slots level * topk + beam."""


Propose = Callable[[int, jax.Array], tuple[jax.Array, jax.Array]]
"""(level, logits [B, topk, W]) -> probabilities and draft ids [B, topk, topk] of that level."""


def grow(
    seed: Seed,
    forward: DraftForward,
    to_target: Callable[[jax.Array], jax.Array],
    config: TreeConfig,
    draft_attention: DraftAttention,
    propose: Propose | None = None,
) -> Candidates:
    """Drafts num_steps levels with num_steps - 1 draft forwards.

    Each level keeps the topk candidates with the best products of probabilities (EAGLE-2 paper,
    section 4.1; SGLang `select_top_k_tokens`). What a beam sees of the drafted rows: `"ancestors"`,
    its own path (SafeAILab/EAGLE `topK_genrate`); `"beam_slots"`, the rows written at its own beam
    number, whichever path they belonged to (SGLang's KV slots). With topk = 1 or fewer than three
    levels the two are the same.

    `propose`: how a level's tokens come from the draft's logits; None for `top_probabilities`.
    """
    k = config.topk
    B = seed.tokens.shape[0]
    words = max(1, -(-k * (config.num_steps - 1) // 32))
    beams = jnp.broadcast_to(jnp.arange(k, dtype=jnp.int32), (B, k))  # candidate index of each beam
    tokens = seed.tokens
    scores = seed.probs if k > 1 else jnp.ones_like(seed.probs)
    hidden = jnp.broadcast_to(seed.hidden[:, None], (B, k, seed.hidden.shape[-1]))
    seen = jnp.zeros((B, k, words), jnp.uint32)
    levels = [Candidates(tokens, seed.probs, scores, jnp.full((B, k), -1, jnp.int32))]
    for level in range(config.num_steps - 1):
        seen = seen | jnp.asarray(_own_bits(level, k, words))[None]
        logits, hidden = forward(level, tokens, hidden, seen)
        probs, ids = top_probabilities(logits, k) if propose is None else propose(level + 1, logits)
        child_scores = scores[:, :, None] * probs if k > 1 else jnp.ones_like(probs)
        proposed = Candidates(
            to_target(ids).reshape(B, k * k),
            probs.reshape(B, k * k),
            child_scores.reshape(B, k * k),
            jnp.repeat(beams, k, axis=1),
        )
        levels.append(proposed)
        if level == config.num_steps - 2:
            break
        scores, index = lax.top_k(proposed.scores, k)
        index = index.astype(jnp.int32)
        tokens = jnp.take_along_axis(proposed.tokens, index, axis=1)
        parent_beam = (index // k)[:, :, None]
        hidden = jnp.take_along_axis(hidden, parent_beam, axis=1)
        if draft_attention == "ancestors":
            seen = jnp.take_along_axis(seen, parent_beam, axis=1)
        beams = k + level * k * k + index
    return jax.tree.map(lambda *parts: jnp.concatenate(parts, axis=1), *levels)


def select(candidates: Candidates, root: jax.Array, config: TreeConfig) -> tuple[Tree, jax.Array]:
    """Keeps the num_draft_tokens - 1 best candidates under a root [B].

    A parent never scores below its child and comes first among equals, so the kept nodes form a
    tree; sorted by candidate index, parents come first (SGLang `organize_draft_results`).

    Returns:
      The tree and the kept candidate indices [B, N - 1], ascending.
    """
    kept = config.num_draft_tokens - 1
    B = root.shape[0]
    _, best = lax.top_k(candidates.scores, kept)
    selected = jnp.sort(best.astype(jnp.int32), axis=1)

    def pick(values):
        return jnp.take_along_axis(values, selected, axis=1)

    parents = pick(candidates.parents)
    found = parents[:, :, None] == selected[:, None, :]  # [B, N - 1, N - 1]
    node = jnp.argmax(found, axis=2).astype(jnp.int32) + 1
    node = jnp.where(parents < 0, 0, node)
    zero = jnp.zeros((B, 1), jnp.int32)
    one = jnp.ones((B, 1), candidates.scores.dtype)
    parents = jnp.concatenate((zero, node), axis=1)
    ancestors, depths = _ancestors(parents, config.num_steps)
    tree = Tree(
        tokens=jnp.concatenate((root[:, None], pick(candidates.tokens)), axis=1),
        parents=parents,
        depths=depths,
        scores=jnp.concatenate((one, pick(candidates.scores)), axis=1),
        probs=jnp.concatenate((one, pick(candidates.probs)), axis=1),
        ancestors=_pack(ancestors),
    )
    return tree, selected


def _own_bits(level: int, topk: int, words: int) -> np.ndarray:
    """[topk, words] uint32: beam b's bit for the row it writes at this level."""
    dense = np.zeros((topk, words * 32), bool)
    dense[np.arange(topk), level * topk + np.arange(topk)] = True
    return pack_bits(dense)


def _ancestors(parents: jax.Array, max_depth: int) -> tuple[jax.Array, jax.Array]:
    """[B, N, N] bool reachability towards the root and [B, N] depths."""
    N = parents.shape[1]
    nodes = jnp.arange(N, dtype=jnp.int32)
    current = jnp.broadcast_to(nodes, parents.shape)
    reach = current[:, :, None] == nodes[None, None, :]
    depths = jnp.zeros_like(parents)
    for _ in range(max_depth):
        depths = depths + (current > 0).astype(jnp.int32)
        current = jnp.take_along_axis(parents, current, axis=1)
        reach = reach | (current[:, :, None] == nodes[None, None, :])
    return reach, depths


def _pack(dense: jax.Array) -> jax.Array:
    """[B, N, n] bool -> [B, N, words] uint32."""
    B, N, n = dense.shape
    words = -(-n // 32)
    padded = jnp.pad(dense, ((0, 0), (0, 0), (0, words * 32 - n)))
    shifted = padded.reshape(B, N, words, 32).astype(jnp.uint32) << jnp.arange(
        32, dtype=jnp.uint32
    ).reshape(1, 1, 1, 32)
    return shifted.sum(axis=-1, dtype=jnp.uint32)


def unpack(bits: jax.Array, n: int) -> jax.Array:
    """[B, N, words] uint32 -> [B, N, n] bool."""
    shifts = jnp.arange(32, dtype=jnp.uint32).reshape(1, 1, 1, 32)
    dense = (bits[..., None] >> shifts) & jnp.uint32(1)
    return dense.reshape(*bits.shape[:2], -1)[:, :, :n] == 1

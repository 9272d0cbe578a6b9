"""What the target chooses and the draft proposes, from logits: greedy or sampled."""

import dataclasses

import jax
import jax.numpy as jnp

from eagle3_jax import sampling, verify
from eagle3_jax.expected import expected_drafts
from eagle3_jax.state import Limits, LoopState, Program
from eagle3_jax.tree import Tree, top_probabilities


@dataclasses.dataclass(frozen=True)
class Verified:
    """One round's verification."""

    accepted: verify.Accepted
    predicted: jax.Array  # [B, N] the target's token after each node; on the path the one chosen
    margins: jax.Array  # [B, N] of greedy choices, when traced; else zeros
    target_probs: jax.Array  # [B, N] of each node's token, when sampled and traced; else zeros
    expected_drafts: jax.Array  # [B] of the rule, when sampled and traced; else zeros


def first_token(
    program: Program, logits: jax.Array, lengths: jax.Array, limits: Limits
) -> jax.Array:
    """[B] the token after prompts of `lengths` [B], from their last logits [B, V]."""
    logits = logits[:, None]
    plan, values = program.sampling, limits.sampling
    if plan is not None:
        assert values is not None
        counts = jnp.zeros(logits.shape, jnp.int32) if plan.penalties else None
        logits = sampling.adjust(logits, counts, plan, values)
    if not program.samples:
        return _choose(logits, lengths[:, None] - 1, limits)[:, 0]
    assert plan is not None
    assert values is not None
    probs = sampling.probabilities(logits, plan, values)[:, 0]
    coin = sampling.coins(values.keys, lengths - 1, (), sampling.FINAL, probs.dtype)
    return sampling.draw(probs, coin)


def verified(
    program: Program,
    tree: Tree,
    logits: jax.Array,
    positions: jax.Array,
    state: LoopState,
    limits: Limits,
    draft_probs: jax.Array | None,
) -> Verified:
    """Verifies a round's tree by the program's rule.

    Args:
      logits: [B, N, V] of the target after each node. positions: [B, N].
      draft_probs: [B, num_steps, V] what a chain's levels were drawn from, for sampled drafts.
    """
    plan, values, steps = program.sampling, limits.sampling, program.rows - 1
    if plan is not None:
        assert values is not None
        counts = None if state.counts is None else sampling.path_counts(tree, state.counts)
        logits = sampling.adjust(logits, counts, plan, values)
    zeros = jnp.zeros_like(tree.scores)
    none = zeros[:, 0]
    if not program.samples:
        predicted = _choose(logits, positions, limits)
        margins = _margins(logits, predicted) if program.trace else zeros
        return Verified(verify.greedy(tree, predicted, steps), predicted, margins, zeros, none)
    assert plan is not None
    assert values is not None
    probs = sampling.probabilities(logits, plan, values)
    B, N, _ = probs.shape
    final = sampling.coins(values.keys, state.length, (), sampling.FINAL, probs.dtype)
    nodes = sampling.coins(values.keys, state.length, (N,), sampling.NODES, probs.dtype)
    accepted = verify.sampled(plan.rule, tree, probs, draft_probs, nodes, final, steps)
    batch = jnp.arange(B, dtype=jnp.int32)[:, None]
    predicted = jnp.argmax(probs, axis=-1).astype(jnp.int32)
    on_path = jnp.arange(steps + 1, dtype=jnp.int32)[None] <= accepted.num_correct[:, None]
    place = jnp.where(on_path, accepted.path, N)  # N is dropped
    predicted = predicted.at[batch, place].set(accepted.tokens, mode="drop")
    if not program.trace:
        return Verified(accepted, predicted, zeros, zeros, none)
    given = verify.node_probs(tree, probs).at[:, 0].set(1).astype(zeros.dtype)
    expected = expected_drafts(plan.rule, tree, probs, draft_probs, steps)
    return Verified(accepted, predicted, zeros, given, expected.astype(zeros.dtype))


def propose(
    program: Program, limits: Limits, length: jax.Array, level: int, logits: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array | None]:
    """The draft's next tokens from logits [B, k, W] or [B, W]: the most likely, or one drawn.

    Args:
      length: [B] of the round the tokens are for. level: of the tree.

    Returns:
      probabilities and draft ids [..., topk], best first; and for sampled drafts the distribution
      [B, W] the one token was drawn from: softmax at the request's temperature (SGLang
      `sample_draft_proposal`), over the draft's own vocabulary.
    """
    assert program.tree is not None
    if program.sampling is None or not program.sampling.rule.sampled_drafts:
        return *top_probabilities(logits, program.tree.topk), None
    values = limits.sampling
    assert values is not None
    flat = logits.reshape(logits.shape[0], -1)  # a chain: one row
    probs = jax.nn.softmax(flat.astype(values.temperature.dtype) / values.temperature, axis=-1)
    coins = sampling.coins(
        values.keys, length, (program.tree.num_steps,), sampling.DRAFTS, probs.dtype
    )
    ids = sampling.draw(probs, coins[:, level])[:, None]
    chosen = jnp.take_along_axis(probs, ids, axis=1).astype(logits.dtype)
    shape = (*logits.shape[:-1], 1)
    return chosen.reshape(shape), ids.reshape(shape), probs


def cut(
    tokens: jax.Array, num_correct: jax.Array, state: LoopState, limits: Limits
) -> tuple[jax.Array, jax.Array]:
    """How many of a round's tokens [B, rows] are kept, and whether the last is a stop id."""
    rows = tokens.shape[1]
    index = jnp.arange(rows, dtype=jnp.int32)[None]
    is_stop = jnp.any(tokens[:, :, None] == limits.stop_ids[None, None], axis=2)
    first_stop = jnp.min(jnp.where(is_stop, index, rows), axis=1)
    room = limits.max_new_tokens - state.num_new
    kept = jnp.minimum(jnp.minimum(num_correct + 1, first_stop + 1), room)
    kept = jnp.where(state.done, 0, kept)
    return kept, kept == first_stop + 1


def _choose(logits: jax.Array, positions: jax.Array, limits: Limits) -> jax.Array:
    """The target's token after rows at positions [B, T]: the text's where one is given."""
    predicted = jnp.argmax(logits, axis=-1).astype(jnp.int32)
    if limits.forced is None:
        return predicted
    given = jnp.take_along_axis(limits.forced, positions + 1, axis=1, mode="clip")
    return jnp.where(given >= 0, given, predicted)


def _margins(logits: jax.Array, predicted: jax.Array) -> jax.Array:
    """The chosen logit minus the best of the others; below 0 where a text chose another."""
    taken = jnp.arange(logits.shape[-1], dtype=jnp.int32)[None, None] == predicted[:, :, None]
    chosen = jnp.max(jnp.where(taken, logits, -jnp.inf), axis=-1)
    return (chosen - jnp.max(jnp.where(taken, -jnp.inf, logits), axis=-1)).astype(jnp.float32)

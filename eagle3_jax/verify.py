"""Which drafted tokens are accepted, and the token that follows them, by named rules.

Every rule is a function of the tree, what the target says after each node, and coins in [0, 1)
given by the caller; nothing here draws a random number.
"""

import dataclasses

import jax
import jax.numpy as jnp

from eagle3_jax.sampling import draw
from eagle3_jax.sampling_config import AcceptRule
from eagle3_jax.tree import Tree, unpack


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Accepted:
    """The path a round keeps; entries past the accepted ones mean nothing."""

    path: jax.Array  # [B, num_steps + 1] int32 the node at each depth, 0 past the accepted ones
    num_correct: jax.Array  # [B] int32 accepted draft tokens
    tokens: jax.Array  # [B, num_steps + 1] int32 the token that follows each node of the path


def greedy(tree: Tree, predicted: jax.Array, num_steps: int) -> Accepted:
    """The longest path from the root on which every token is the target's argmax.

    No walk is needed: a node is good iff it and its ancestors match what the target predicted after
    their parents, and siblings hold different tokens, so one good node at most exists per depth
    (SGLang `verify_tree_greedy` walks to the same one).

    Args:
      predicted: [B, N] the target's argmax after each node.
      num_steps: the greatest depth.
    """
    N = predicted.shape[1]
    expected = jnp.take_along_axis(predicted, tree.parents, axis=1)
    matched = (tree.tokens == expected) | (jnp.arange(N, dtype=jnp.int32) == 0)[None]
    ancestors = unpack(tree.ancestors, N)
    good = jnp.all(~ancestors | matched[:, None, :], axis=2)
    reached = jnp.where(good, tree.depths, -1)
    best = jnp.argmax(reached, axis=1)
    num_correct = jnp.max(reached, axis=1)
    on_path = jnp.take_along_axis(ancestors, best[:, None, None], axis=1)[:, 0]  # [B, N]
    depth = jnp.arange(num_steps + 1, dtype=jnp.int32)
    at_depth = on_path[:, None, :] & (tree.depths[:, None, :] == depth[None, :, None])
    path = jnp.argmax(at_depth, axis=2).astype(jnp.int32)
    return Accepted(path, num_correct, jnp.take_along_axis(predicted, path, axis=1))


def sampled(
    rule: AcceptRule,
    tree: Tree,
    probs: jax.Array,
    draft_probs: jax.Array | None,
    coins: jax.Array,
    final_coins: jax.Array,
    num_steps: int,
) -> Accepted:
    """The rule named, on the target's distributions.

    Args:
      probs: [B, N, V] after each node, as sampling without a draft would have them.
      draft_probs: [B, num_steps, V] what each level of a chain was drawn from, for sampled drafts.
      coins: [B, N] one a node. final_coins: [B] for the token after the last accepted node.
    """
    if rule.name == "target_only":
        return target_only(
            tree,
            probs,
            coins,
            final_coins,
            num_steps,
            threshold_single=rule.threshold_single,
            threshold_acc=rule.threshold_acc,
        )
    if not rule.sampled_drafts:
        return one_hot(tree, probs, coins, final_coins, num_steps)
    assert draft_probs is not None
    verify = block if rule.block else token_wise
    return verify(tree, probs, draft_probs, coins, final_coins)


def target_only(
    tree: Tree,
    probs: jax.Array,
    coins: jax.Array,
    final_coins: jax.Array,
    num_steps: int,
    *,
    threshold_single: float = 1.0,
    threshold_acc: float = 1.0,
) -> Accepted:
    """SGLang's `tree_speculative_sampling_target_only`.

    At each node one coin is held against the running sum of its children's target probabilities,
    in node order; the first child that lifts the sum over the coin is accepted, if it has any
    probability. The last token comes from what the rejected children leave of the last accepted
    node's distribution. With both thresholds at 1 that is sampling from the target.

    Args:
      probs: [B, N, V]. coins: [B, N], of which an accepted or root node's is read for its children.
      final_coins: [B]. Thresholds: see `AcceptRule`; SGLang floors `threshold_acc` at 1e-9.
    """

    def accepts(child: jax.Array, before: jax.Array, node: jax.Array) -> jax.Array:
        coin = jnp.take_along_axis(coins, node[:, None], axis=1)
        reached = coin < (before + child) / max(threshold_acc, 1e-9)
        return (child > 0) & (reached | (child >= threshold_single))

    return _walk(tree, probs, accepts, final_coins, num_steps)


def one_hot(
    tree: Tree, probs: jax.Array, coins: jax.Array, final_coins: jax.Array, num_steps: int
) -> Accepted:
    """Lossless rejection for proposals that are certain (SafeAILab/EAGLE `evaluate_posterior`).

    Children are tried in node order, each with its own coin against its probability among what the
    rejected ones before it left.

    Args:
      probs: [B, N, V]. coins: [B, N], each read for its own node. final_coins: [B].
    """

    def accepts(child: jax.Array, before: jax.Array, node: jax.Array) -> jax.Array:
        del node
        return (child > 0) & (coins * (1 - before) < child)

    return _walk(tree, probs, accepts, final_coins, num_steps)


def node_probs(tree: Tree, probs: jax.Array) -> jax.Array:
    """[B, N] of each node's token after its parent, from probs [B, N, V]; nothing for the root."""
    batch = jnp.arange(tree.tokens.shape[0], dtype=jnp.int32)[:, None]
    return probs[batch, tree.parents, tree.tokens]


def _walk(tree: Tree, probs: jax.Array, accepts, final_coins: jax.Array, num_steps: int):
    """From the root down: the first child that `accepts` takes, until none is taken."""
    B, N, _ = probs.shape
    batch = jnp.arange(B, dtype=jnp.int32)
    child = node_probs(tree, probs)
    is_root = (jnp.arange(N, dtype=jnp.int32) == 0)[None]
    node = jnp.zeros((B,), jnp.int32)
    num_correct = jnp.zeros((B,), jnp.int32)
    path = [node]
    for _ in range(num_steps):
        siblings = (tree.parents == node[:, None]) & ~is_root
        mine = jnp.where(siblings, child, 0)
        before = jnp.cumsum(mine, axis=1) - mine
        taken = siblings & accepts(mine, before, node)  # once none is, none is any more
        going = jnp.any(taken, axis=1)
        node = jnp.where(going, jnp.argmax(taken, axis=1).astype(jnp.int32), node)
        path.append(jnp.where(going, node, 0))
        num_correct = num_correct + going.astype(jnp.int32)
    left = probs[batch, node]  # [B, V]
    rejected = (tree.parents == node[:, None]) & ~is_root
    left = left.at[batch[:, None], tree.tokens].multiply(
        jnp.where(rejected, 0, 1).astype(left.dtype)
    )
    return _end(tree, jnp.stack(path, axis=1), num_correct, left, probs[batch, node], final_coins)


def token_wise(
    tree: Tree, probs: jax.Array, draft_probs: jax.Array, coins: jax.Array, final_coins: jax.Array
) -> Accepted:
    """Speculative sampling of a chain (Leviathan et al. 2023, algorithm 1).

    A token drawn from q is accepted with min(1, p/q); the first rejected one is replaced by a draw
    from the positive part of p - q (SGLang `chain_speculative_sampling_triton`, whose guards on q
    these are).

    Args:
      tree: a chain. probs: [B, num_steps + 1, V]. draft_probs: [B, num_steps, V].
      coins: [B, num_steps + 1], level i's at i. final_coins: [B].
    """
    p, q = drafted_probs(tree, probs, draft_probs)
    valid = (q > 0) & (q <= 1)
    accepted = valid & (coins[:, :-1] * q < p)
    going = jnp.cumprod(accepted.astype(jnp.int32), axis=1)
    num_correct = jnp.sum(going, axis=1, dtype=jnp.int32)
    return _chain_end(
        tree, probs, draft_probs, num_correct, jnp.ones_like(final_coins), final_coins
    )


def block(
    tree: Tree, probs: jax.Array, draft_probs: jax.Array, coins: jax.Array, final_coins: jax.Array
) -> Accepted:
    """Block verification of a chain (Sun et al. 2024, algorithm 2): the longest prefix accepted.

    The prefix of i tokens has weight r_i = min(1, r_(i-1) p_i / q_i) and is accepted, longest
    first, with probability h_i = m_i / (m_i + 1 - r_i), m_i the mass of the positive part of
    r_i p_(i+1) - q_(i+1); the whole chain with r. It accepts at least as many tokens as
    `token_wise`, and what follows is a draw from that positive part.

    Args: as for `token_wise`.
    """
    p, q = drafted_probs(tree, probs, draft_probs)
    weights = block_weights(p, q)
    chances = block_chances(weights, probs, draft_probs)
    accepted = coins[:, :-1] < chances
    steps = jnp.arange(1, accepted.shape[1] + 1, dtype=jnp.int32)[None]
    num_correct = jnp.max(jnp.where(accepted, steps, 0), axis=1)
    weights = jnp.concatenate((jnp.ones_like(weights[:, :1]), weights), axis=1)
    scale = jnp.take_along_axis(weights, num_correct[:, None], axis=1)[:, 0]
    return _chain_end(tree, probs, draft_probs, num_correct, scale, final_coins)


def block_weights(p: jax.Array, q: jax.Array) -> jax.Array:
    """r [B, num_steps] from the probabilities of the drafted tokens."""
    weight = jnp.ones_like(p[:, 0])
    weights = []
    for level in range(p.shape[1]):
        valid = (q[:, level] > 0) & (q[:, level] <= 1)
        ratio = p[:, level] / jnp.where(valid, q[:, level], 1)
        weight = jnp.where(valid, jnp.minimum(weight * ratio, 1), 0)
        weights.append(weight)
    return jnp.stack(weights, axis=1)


def block_chances(weights: jax.Array, probs: jax.Array, draft_probs: jax.Array) -> jax.Array:
    """h [B, num_steps]: with what probability each prefix is accepted when no longer one was."""
    inner = weights[:, :-1]
    mass = jnp.sum(jnp.maximum(inner[..., None] * probs[:, 1:-1] - draft_probs[:, 1:], 0), axis=-1)
    whole = mass + 1 - inner
    chance = jnp.where(inner < 1, mass / jnp.where(whole > 0, whole, 1), 1)
    return jnp.concatenate((jnp.where(inner > 0, chance, 0), weights[:, -1:]), axis=1)


def drafted_probs(
    tree: Tree, probs: jax.Array, draft_probs: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """p and q [B, num_steps] of the drafted tokens of a chain."""
    drafted = tree.tokens[:, 1:, None]
    p = jnp.take_along_axis(probs[:, :-1], drafted, axis=2)[..., 0]
    q = jnp.take_along_axis(draft_probs, drafted, axis=2)[..., 0]
    return p, q


def _chain_end(
    tree: Tree,
    probs: jax.Array,
    draft_probs: jax.Array,
    num_correct: jax.Array,
    scale: jax.Array,
    final_coins: jax.Array,
) -> Accepted:
    """The token after the accepted: from the positive part of scale x p - q, from p at the end."""
    steps = draft_probs.shape[1]
    depth = jnp.arange(steps + 1, dtype=jnp.int32)[None]
    path = jnp.where(depth <= num_correct[:, None], depth, 0)
    at = num_correct[:, None, None]
    p = jnp.take_along_axis(probs, at, axis=1)[:, 0]
    q = jnp.take_along_axis(draft_probs, jnp.minimum(at, steps - 1), axis=1)[:, 0]
    q = jnp.where((q >= 0) & (q <= 1) & (num_correct < steps)[:, None], q, 0)
    left = jnp.maximum(jnp.where((num_correct < steps)[:, None], scale[:, None], 1) * p - q, 0)
    return _end(tree, path, num_correct, left, p, final_coins)


def _end(
    tree: Tree,
    path: jax.Array,
    num_correct: jax.Array,
    left: jax.Array,
    probs: jax.Array,
    final_coins: jax.Array,
) -> Accepted:
    """Draws the last token from `left` [B, V]; from `probs` when rounding left nothing.

    (SGLang takes the last id of the vocabulary then.)
    """
    nothing = jnp.sum(left, axis=-1, keepdims=True) <= 0
    last = draw(jnp.where(nothing, probs, left), final_coins)
    following = jnp.concatenate((path[:, 1:], path[:, :1]), axis=1)
    tokens = jnp.take_along_axis(tree.tokens, following, axis=1)
    at_end = jnp.arange(path.shape[1], dtype=jnp.int32)[None] == num_correct[:, None]
    return Accepted(path, num_correct, jnp.where(at_end, last[:, None], tokens))

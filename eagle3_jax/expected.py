"""How many drafted tokens a rule accepts on average over its coins, in closed form."""

import jax
import jax.numpy as jnp

from eagle3_jax.sampling_config import AcceptRule
from eagle3_jax.tree import Tree
from eagle3_jax.verify import block_chances, block_weights, drafted_probs, node_probs


def expected_drafts(
    rule: AcceptRule, tree: Tree, probs: jax.Array, draft_probs: jax.Array | None, num_steps: int
) -> jax.Array:
    """[B] how many drafted tokens the rule accepts on average over the coins, in closed form.

    The drafted tokens are given; for sampled drafts the mean over them is the mean over rounds. The
    expected accept length is one more: the last token.

    Args: as for `verify.sampled`.
    """
    if rule.sampled_drafts:
        assert draft_probs is not None
        p, q = drafted_probs(tree, probs, draft_probs)
        if not rule.block:
            valid = (q > 0) & (q <= 1)
            chance = jnp.where(valid, jnp.minimum(p / jnp.where(valid, q, 1), 1), 0)
            return jnp.sum(jnp.cumprod(chance, axis=1), axis=1)
        chances = block_chances(block_weights(p, q), probs, draft_probs)
        none_longer = jnp.cumprod((1 - chances)[:, ::-1], axis=1)[:, ::-1]
        return jnp.sum(1 - none_longer, axis=1)
    chance = _child_chances(rule, tree, probs)
    reached = chance
    total = jnp.sum(jnp.where(tree.depths == 1, reached, 0), axis=1)
    for depth in range(2, num_steps + 1):
        reached = jnp.take_along_axis(reached, tree.parents, axis=1) * chance
        total = total + jnp.sum(jnp.where(tree.depths == depth, reached, 0), axis=1)
    return total


def _child_chances(rule: AcceptRule, tree: Tree, probs: jax.Array) -> jax.Array:
    """[B, N] with what probability a node is accepted when its parent was; siblings add up.

    A coin falls to the first sibling whose reach lies above it, so each has what its reach adds to
    the largest before it; certain proposals under `rejection` have their own probability.
    """
    N = probs.shape[1]
    child = node_probs(tree, probs)
    if rule.name == "rejection" or rule.lossless:
        return child
    node = jnp.arange(N, dtype=jnp.int32)
    same = (tree.parents[:, :, None] == tree.parents[:, None, :]) & (node > 0)[None, None]
    upto = same & (node[None, :] <= node[:, None])[None]  # [B, i, j]: sibling j not after i
    reach = jnp.sum(jnp.where(upto, child[:, None, :], 0), axis=2) / max(rule.threshold_acc, 1e-9)
    reach = jnp.where(child >= rule.threshold_single, 1, jnp.minimum(reach, 1))
    reach = jnp.where(child > 0, reach, 0)
    most = jnp.max(jnp.where(upto, reach[:, None, :], 0), axis=2)
    earlier = upto & (node[None, :] < node[:, None])[None]
    before = jnp.max(jnp.where(earlier, reach[:, None, :], 0), axis=2)
    return most - before

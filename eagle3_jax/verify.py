"""Which drafted tokens the target accepts."""

import jax
import jax.numpy as jnp

from eagle3_jax.tree import Tree, unpack


def greedy(tree: Tree, predicted: jax.Array, num_steps: int) -> tuple[jax.Array, jax.Array]:
    """The longest path from the root on which every token is the target's argmax.

    No walk is needed: a node is good iff it and its ancestors match what the target predicted after
    their parents, and siblings hold different tokens, so one good node at most exists per depth
    (SGLang `verify_tree_greedy` walks to the same one).

    Args:
      predicted: [B, N] the target's argmax after each node.
      num_steps: the greatest depth.

    Returns:
      path [B, num_steps + 1]: the node at each depth, 0 past the accepted ones;
      num_correct [B]: accepted draft tokens.
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
    return path, num_correct

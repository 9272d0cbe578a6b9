"""SGLang's own expansion, pruning, tree building and greedy verification, function by function."""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import sglang_views as views

from eagle3_jax import tree as trees
from eagle3_jax import verify
from eagle3_jax.config import TreeConfig

FOLDER = Path(__file__).parent / "data/sglang/unit"
CASES = json.loads((FOLDER / "tree_cases.json").read_text())
VOCABULARY = 50


@pytest.fixture(scope="module")
def arrays():
    with np.load(FOLDER / "tree_cases.npz") as file:
        return dict(file)


def names(case: dict) -> str:
    return f"bs{case['bs']}-{case['steps']}/{case['topk']}/{case['num_draft_tokens']}"


@pytest.fixture(scope="module", params=CASES, ids=names)
def case(request, arrays):
    number = request.param["case"]
    prefix = f"c{number}/"
    own = {k.removeprefix(prefix): v for k, v in arrays.items() if k.startswith(prefix)}
    config = TreeConfig(
        request.param["steps"], request.param["topk"], request.param["num_draft_tokens"]
    )
    return own, config, request.param["bs"]


def logits_with(probs: np.ndarray, ids: np.ndarray) -> np.ndarray:
    """[..., V] float32 whose best softmax probabilities are `probs` at `ids`."""
    rest = (1.0 - probs.sum(-1, keepdims=True)) / (VOCABULARY - probs.shape[-1])
    assert (rest < probs.min(-1, keepdims=True)).all()
    full = np.repeat(np.log(rest), VOCABULARY, axis=-1)
    np.put_along_axis(full, ids, np.log(probs), axis=-1)
    return full.astype(np.float32)


def recorded_candidates(own, config: TreeConfig, bs: int) -> trees.Candidates:
    """The candidates as SGLang's lists have them."""
    steps = range(config.num_steps)
    k = config.topk

    def flat(name: str) -> np.ndarray:
        return np.concatenate([own[f"step{i}.{name}"].reshape(bs, -1) for i in steps], axis=1)

    parents = [np.full((bs, k), -1)]
    for i in steps[:-1]:
        expanded = own[f"step{i}.parents"][:, -k:]
        parents.append(np.repeat(expanded, k, axis=1))
    return trees.Candidates(
        tokens=jnp.asarray(flat("token_list"), jnp.int32),
        probs=jnp.asarray(flat("in_topk_p")),
        scores=jnp.asarray(flat("score_list")),
        parents=jnp.asarray(np.concatenate(parents, axis=1), jnp.int32),
    )


def test_growing_expands_the_nodes_sglang_expands(case):
    own, config, bs = case
    k = config.topk
    seen_levels = []

    def forward(level, tokens, hidden, seen):
        np.testing.assert_array_equal(
            np.asarray(tokens).reshape(-1), own[f"step{level}.out_input_ids"]
        )
        np.testing.assert_array_equal(
            np.asarray(hidden).reshape(bs * k, -1), own[f"step{level}.out_hidden"]
        )
        seen_levels.append(level)
        following = f"step{level + 1}"
        logits = logits_with(
            own[f"{following}.in_topk_p"].astype(np.float64), own[f"{following}.in_topk_index"]
        )
        states = own[f"{following}.in_hidden"]
        return jnp.asarray(logits).reshape(bs, k, -1), jnp.asarray(states).reshape(bs, k, -1)

    seed = trees.Seed(
        probs=jnp.asarray(own["step0.in_topk_p"]),
        tokens=jnp.asarray(own["step0.in_topk_index"], jnp.int32),
        hidden=jnp.asarray(own["step0.in_hidden"]),
    )
    grown = trees.grow(seed, forward, lambda ids: ids, config, "beam_slots")
    assert seen_levels == list(range(config.num_steps - 1))
    recorded = recorded_candidates(own, config, bs)
    np.testing.assert_array_equal(grown.tokens, recorded.tokens)
    np.testing.assert_array_equal(grown.parents, recorded.parents)
    if k > 1:
        np.testing.assert_allclose(grown.scores, recorded.scores, rtol=0, atol=1e-5)
    else:
        np.testing.assert_array_equal(grown.scores, np.ones_like(grown.scores))


@pytest.fixture(scope="module")
def pruned(case) -> tuple[trees.Tree, np.ndarray]:
    """Our tree and selected indices over the recorded candidates."""
    own, config, bs = case
    candidates = recorded_candidates(own, config, bs)
    root = jnp.asarray(own["bonus_tokens"], jnp.int32)
    tree, selected = jax.jit(trees.select, static_argnums=2)(candidates, root, config)
    return tree, np.asarray(selected)


def test_selected_nodes_and_their_order(case, pruned):
    own, config, bs = case
    tree, selected = pruned
    np.testing.assert_array_equal(selected, own["top_scores_index"])
    np.testing.assert_array_equal(tree.tokens[:, 1:], own["draft_tokens"])
    np.testing.assert_array_equal(np.asarray(tree.tokens).reshape(-1), own["draft_token"])
    candidates = recorded_candidates(own, config, bs)
    for row, parents in enumerate(np.asarray(candidates.parents)):
        np.testing.assert_array_equal(views.parent_list(parents, config), own["parent_list"][row])


def test_positions_masks_and_retrieve_arrays(case, pruned):
    own, config, bs = case
    tree, _ = pruned
    nodes = config.num_draft_tokens
    positions = own["seq_lens"][:, None] + np.asarray(tree.depths)
    np.testing.assert_array_equal(positions.reshape(-1), own["positions"])
    mask = views.ancestor_mask(np.asarray(tree.ancestors), nodes)
    np.testing.assert_array_equal(
        views.full_mask(mask, own["seq_lens"]), own["tree_mask.FULL_MASK"].reshape(-1)
    )
    np.testing.assert_array_equal(
        views.qlen_only_mask(mask), own["tree_mask.QLEN_ONLY"].reshape(-1)
    )
    for row in range(bs):
        parents = [-1, *np.asarray(tree.parents)[row, 1:].tolist()]
        index, first, sibling = views.retrieve_arrays(parents)
        assert [row * nodes + i for i in index] == own["retrieve_index"][row].tolist()
        assert first == own["retrieve_next_token"][row].tolist()
        assert sibling == own["retrieve_next_sibling"][row].tolist()


@pytest.mark.parametrize("number", range(4))
def test_greedy_verification(case, pruned, number):
    own, config, bs = case
    tree, _ = pruned
    nodes = config.num_draft_tokens
    predicted = own[f"verify{number}.target_predict"]
    found = verify.greedy(tree, jnp.asarray(predicted, jnp.int32), config.num_steps)
    path, num_correct = found.path, found.num_correct
    np.testing.assert_array_equal(num_correct, own[f"verify{number}.num_correct_drafts"])
    for row in range(bs):
        accepted = np.asarray(path)[row, : int(num_correct[row]) + 1].tolist()
        expected = own[f"verify{number}.accept_index"][row]
        shifted = np.where(expected < 0, -1, expected - row * nodes)
        assert views.accept_index(accepted, config.num_steps) == shifted.tolist()
        through = own[f"verify{number}.predict"][expected[expected >= 0]]
        np.testing.assert_array_equal(predicted[row, accepted], through)


def test_verification_cases_accept_something(arrays):
    """The recorded cases reach from nothing accepted to whole paths."""
    counts = np.concatenate([v for k, v in arrays.items() if k.endswith("num_correct_drafts")])
    assert counts.min() == 0
    assert counts.max() == 4

"""Growth, pruning, bits and acceptance against plain Python that walks paths one by one."""

import dataclasses
import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eagle3_jax import verify
from eagle3_jax.config import ConfigError, TreeConfig
from eagle3_jax.ops.bits import chain_bits, pack_bits
from eagle3_jax.tree import Candidates, Seed, Tree, grow, select, top_probabilities, unpack

W = 11
TREES = [(1, 1, 2), (4, 1, 5), (1, 3, 3), (2, 2, 4), (3, 4, 8), (3, 4, 37), (4, 6, 64), (6, 5, 40)]


def path_logits(path: tuple[int, ...]) -> np.ndarray:
    """Logits after a path of draft ids: any fixed function of the path will do."""
    seed = 7
    for token in path:
        seed = seed * 31 + token + 1
    return np.random.default_rng(seed).normal(size=W) * 2


def softmax(logits: np.ndarray) -> np.ndarray:
    p = np.exp(logits - logits.max())
    return p / p.sum()


@dataclasses.dataclass
class Node:
    path: tuple[int, ...]
    score: float
    parent: "Node | None"
    beam_slot: int = -1


def brute_force(config: TreeConfig) -> tuple[list[Node], list[list[Node]]]:
    """Candidates in flat order and the beams of each level, straight from the EAGLE-2 rule."""
    k = config.topk

    def children(parent: Node | None) -> list[Node]:
        path, score = ((), 1.0) if parent is None else (parent.path, parent.score)
        p = softmax(path_logits(path))
        best = np.argsort(-p, kind="stable")[:k]
        return [Node((*path, int(t)), score * p[t] if k > 1 else 1.0, parent) for t in best]

    level = children(None)
    candidates, beams = list(level), [level]
    for _ in range(config.num_steps - 1):
        proposed = [child for beam in beams[-1] for child in children(beam)]
        candidates += proposed
        beams.append(sorted(proposed, key=lambda n: -n.score)[:k])
    return candidates, beams


def run_grow(config: TreeConfig, mode: str):
    """`grow` with a draft whose fed-back state numbers the paths, and what each forward saw."""
    paths: list[tuple[int, ...]] = [()]
    calls = []

    def number(path):
        if path not in paths:
            paths.append(path)
        return paths.index(path)

    p = softmax(path_logits(()))
    first = np.argsort(-p, kind="stable")[: config.topk]
    seed = Seed(
        jnp.asarray(p[first][None], jnp.float32),
        jnp.asarray(first[None] + 100, jnp.int32),
        jnp.zeros((1, 1)),
    )

    def forward(level, tokens, hidden, bits):
        ids = np.asarray(tokens)[0] - 100
        here = [
            (*paths[int(h)], int(t)) for h, t in zip(np.asarray(hidden)[0, :, 0], ids, strict=True)
        ]
        calls.append((level, here, np.asarray(bits)[0]))
        logits = np.stack([path_logits(p) for p in here])
        states = np.array([[number(p)] for p in here], np.float32)
        return jnp.asarray(logits[None], jnp.float32), jnp.asarray(states[None])

    return grow(seed, forward, lambda ids: ids + 100, config, mode), calls


@pytest.mark.parametrize("triple", TREES)
def test_grow_is_the_beam_rule(triple):
    config = TreeConfig(*triple)
    found, calls = run_grow(config, "ancestors")
    expected, beams = brute_force(config)
    assert len(calls) == config.num_steps - 1
    for (level, here, _), beam in zip(calls, beams, strict=False):
        assert here == [n.path for n in beam], f"level {level}"
    assert found.tokens[0].tolist() == [n.path[-1] + 100 for n in expected]
    np.testing.assert_allclose(found.scores[0], [n.score for n in expected], rtol=1e-5)
    index = {n.path: i for i, n in enumerate(expected)}
    parents = [-1 if n.parent is None else index[n.parent.path] for n in expected]
    assert found.parents[0].tolist() == parents


@pytest.mark.parametrize("triple", TREES)
@pytest.mark.parametrize("mode", ["ancestors", "beam_slots"])
def test_what_a_beam_sees(triple, mode):
    config = TreeConfig(*triple)
    k = config.topk
    _, calls = run_grow(config, mode)
    slot_of = {}
    for level, here, bits in calls:
        dense = unpack(jnp.asarray(bits[None]), bits.shape[1] * 32)[0]
        for beam, path in enumerate(here):
            slot_of[path] = level * k + beam
            if mode == "ancestors":
                want = {slot_of[path[: n + 1]] for n in range(len(path))}
            else:
                want = {i * k + beam for i in range(level + 1)}
            assert set(np.flatnonzero(dense[beam])) == want, (level, beam)


@pytest.mark.parametrize("triple", TREES)
def test_select_keeps_the_best_and_parents(triple):
    config = TreeConfig(*triple)
    candidates, _ = run_grow(config, "ancestors")
    tree, selected = select(candidates, jnp.asarray([55], jnp.int32), config)
    expected, _ = brute_force(config)
    order = sorted(range(len(expected)), key=lambda i: (-expected[i].score, i))
    kept = sorted(order[: config.num_draft_tokens - 1])
    assert selected[0].tolist() == kept
    nodes = [expected[i] for i in kept]
    place = {n.path: i + 1 for i, n in enumerate(nodes)} | {(): 0}
    assert tree.tokens[0].tolist() == [55, *(n.path[-1] + 100 for n in nodes)]
    assert tree.parents[0].tolist() == [0, *(place[n.path[:-1]] for n in nodes)]
    assert tree.depths[0].tolist() == [0, *(len(n.path) for n in nodes)]
    dense = unpack(tree.ancestors, config.num_draft_tokens)[0]
    for i, node in enumerate([Node((), 1, None), *nodes]):
        want = {place[node.path[:d]] for d in range(len(node.path) + 1)}
        assert set(np.flatnonzero(dense[i])) == want


def every_tree(nodes: int):
    """Parent lists of all labelled rooted trees in which parents come first."""
    return itertools.product(*(range(i) for i in range(1, nodes)))


def as_tree(parents: list[int], tokens: list[int]) -> Tree:
    n = len(parents)
    depths, dense = [0] * n, np.eye(n, dtype=bool)
    for i in range(1, n):
        depths[i] = depths[parents[i]] + 1
        dense[i] |= dense[parents[i]]
    ones = jnp.ones((1, n))
    return Tree(
        jnp.asarray([tokens], jnp.int32),
        jnp.asarray([parents], jnp.int32),
        jnp.asarray([depths], jnp.int32),
        ones,
        ones,
        jnp.asarray(pack_bits(dense)[None]),
    )


def walk(parents: list[int], tokens: list[int], predicted: list[int]) -> list[int]:
    """SGLang's rule: from the root, step to the first child that holds the predicted token."""
    path = [0]
    while True:
        for child in range(1, len(parents)):
            if parents[child] == path[-1] and tokens[child] == predicted[path[-1]]:
                path.append(child)
                break
        else:
            return path


@pytest.mark.parametrize("nodes", range(1, 7))
def test_greedy_on_every_tree_is_the_walk(nodes):
    accept = jax.jit(verify.greedy, static_argnums=2)
    rng = np.random.default_rng(nodes)
    seen = set()
    for rest in every_tree(nodes):
        parents = [0, *rest]
        for _ in range(3 if nodes > 3 else 30):
            tokens = [9, *np.zeros(nodes - 1, int).tolist()]
            for parent in range(nodes):  # siblings hold different tokens
                children = [c for c in range(1, nodes) if parents[c] == parent]
                for c, t in zip(children, rng.permutation(6), strict=False):
                    tokens[c] = int(t)
            predicted = rng.integers(0, 3, nodes).tolist()
            expected = walk(parents, tokens, predicted)
            found = accept(as_tree(parents, tokens), jnp.asarray([predicted], jnp.int32), nodes)
            path, correct = found.path, found.num_correct
            assert int(correct[0]) == len(expected) - 1
            assert path[0, : len(expected)].tolist() == expected
            assert path[0, len(expected) :].tolist() == [0] * (nodes + 1 - len(expected))
            seen.add(len(expected))
    assert len(seen) > 1 or nodes == 1


@pytest.mark.parametrize("n", [1, 31, 32, 33, 64, 70])
def test_bits_round_trip(n):
    dense = np.random.default_rng(n).random((2, 5, n)) < 0.5
    bits = pack_bits(dense)
    assert bits.shape == (2, 5, math.ceil(n / 32))
    np.testing.assert_array_equal(unpack(jnp.asarray(bits), n), dense)
    np.testing.assert_array_equal(
        unpack(jnp.asarray(chain_bits(n)[None]), n)[0], np.tril(np.ones((n, n), bool))
    )


@pytest.mark.parametrize("topk", [1, 3])
def test_top_probabilities(topk):
    logits = np.random.default_rng(0).normal(size=(2, 4, W)).astype(np.float32) * 3
    probs, ids = top_probabilities(jnp.asarray(logits), topk)
    p = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    order = np.argsort(-logits, axis=-1)[..., :topk]
    np.testing.assert_array_equal(ids, order)
    np.testing.assert_allclose(probs, np.take_along_axis(p, order, -1), rtol=1e-5)


def test_a_vocabulary_is_not_sorted():
    """A top-k is a sort to StableHLO; XLA has to see it to look at each value once."""
    logits = jax.ShapeDtypeStruct((1, 3, 512), jnp.float32)
    run = jax.jit(lambda values: top_probabilities(values, 2))
    text = run.lower(logits).compile().as_text()
    assert "TopK" in text
    assert " sort(" not in text


def test_equal_scores_keep_parents():
    """A certain child ties with its parent: the parent is the lower index and must win."""
    config = TreeConfig(2, 2, 3)
    candidates = Candidates(
        tokens=jnp.asarray([[1, 2, 3, 4, 5, 6]], jnp.int32),
        probs=jnp.ones((1, 6)),
        scores=jnp.asarray([[1.0, 0.0, 1.0, 0.0, 0.0, 0.0]]),
        parents=jnp.asarray([[-1, -1, 0, 0, 1, 1]], jnp.int32),
    )
    tree, selected = select(candidates, jnp.asarray([9], jnp.int32), config)
    assert selected.tolist() == [[0, 2]]
    assert tree.parents.tolist() == [[0, 0, 1]]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((0,), "num_steps is 0, expected a positive integer"),
        ((3, 1, 8), "a chain of num_steps=3 has num_draft_tokens=4, found 8"),
        ((3, 4), "num_draft_tokens is required for a tree"),
        ((1, 4, 6), "asks for 5 drafted nodes, but num_steps=1, topk=4 makes 4"),
        ((2, 2, 8), "asks for 7 drafted nodes, but num_steps=2, topk=2 makes 6"),
        ((2, 2, 1), "drafts nothing"),
        ((2, 0, 3), "topk is 0"),
        ((2.0, 1), "num_steps is 2.0"),
    ],
)
def test_bad_trees(arguments, message):
    with pytest.raises(ConfigError, match=message):
        TreeConfig(*arguments)


def test_tree_config_defaults():
    assert TreeConfig(4).num_draft_tokens == 5
    assert TreeConfig(3, 4, 37).num_candidates == 36
    assert TreeConfig(6, 10, 60).window == 60
    assert TreeConfig(7, 10, 60).window == 60
    assert TreeConfig(8, 10, 60).window == 70
    assert str(TreeConfig(5, 8, 32)) == "5/8/32"

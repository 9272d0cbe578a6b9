"""Every coin of a round, exactly, in float64: what rules on trees and drawn chains emit.

Nothing here draws a coin. A rule compares coins with thresholds; the thresholds are worked out
anew in plain Python, one coin is put on either side of each, and every outcome counts with the
length of its interval. So the distribution of what a round emits is exact.
"""

import dataclasses
import itertools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from tiny_language import Language, V

from eagle3_jax import expected, sampling, verify
from eagle3_jax.config import AcceptRule
from eagle3_jax.sampling import SamplingPlan, SamplingValues
from eagle3_jax.tree import Tree

STEPS, NODES = 3, 8
EPS = 1e-9


@dataclasses.dataclass
class Drawn:
    """A tree in plain Python."""

    parents: list[int]
    tokens: list[int]

    def path(self, node: int) -> tuple[int, ...]:
        return () if node == 0 else (*self.path(self.parents[node]), self.tokens[node])

    def children(self, node: int) -> list[int]:
        return [c for c in range(1, len(self.parents)) if self.parents[c] == node]

    def arrays(self, batch: int) -> Tree:
        n = len(self.parents)
        depths = [len(self.path(i)) for i in range(n)]
        bits = []
        for i in range(n):
            word, at = 1, i
            while at:
                word, at = word | 1 << at, self.parents[at]
            bits.append([word])

        def many(values, dtype=jnp.int32):
            values = jnp.asarray(values, dtype)
            return jnp.broadcast_to(values, (batch, *values.shape))

        ones = many([1.0] * n, jnp.float64)
        ancestors = many(bits, jnp.uint32)
        return Tree(many(self.tokens), many(self.parents), many(depths), ones, ones, ancestors)


def random_tree(rng: np.random.Generator) -> Drawn:
    """NODES nodes, at most 3 children each and STEPS deep; siblings hold different tokens."""
    while True:
        drawn = Drawn([0], [0])
        for _ in range(NODES - 1):
            open_ = [
                i
                for i in range(len(drawn.parents))
                if len(drawn.path(i)) < STEPS and len(drawn.children(i)) < 3
            ]
            parent = int(rng.choice(open_))
            taken = [drawn.tokens[c] for c in drawn.children(parent)]
            drawn.parents.append(parent)
            drawn.tokens.append(int(rng.choice([t for t in range(V) if t not in taken])))
        if any(len(drawn.children(i)) > 1 for i in range(NODES)):
            return drawn


def tree_probs(language: Language, drawn: Drawn, batch: int) -> jax.Array:
    """[batch, N, V] by the code under test, all processors on the whole tree at once."""
    config = language.config
    plan = SamplingPlan.of(config, AcceptRule())
    values = SamplingValues.of(config, 1, language.size, np.dtype(np.float64))
    tree = drawn.arrays(1)
    n = len(drawn.parents)
    logits = jnp.asarray([[language.logits(drawn.path(i)) for i in range(n)]])
    counts = jnp.asarray(language.counts[None], jnp.int32)
    probs = CODE.probs(logits, tree, counts, plan, values)
    return jnp.broadcast_to(probs, (batch, *probs.shape[1:]))


def sides(breaks) -> list[tuple[list[float], float]]:
    """Intervals between break points of [0, 1): coins just inside both ends, and the length."""
    edges = [0.0, *sorted({float(b) for b in breaks if 0 < b < 1}), 1.0]
    return [
        ([low + (high - low) * EPS, high - (high - low) * EPS], high - low)
        for low, high in itertools.pairwise(edges)
        if high - low > 1e-14
    ]


@dataclasses.dataclass(frozen=True)
class Code:
    """The functions that are enumerated.

    Attributes:
      run: `verify.sampled`. expected: `expected.expected_drafts`. probs: logits [1, N, V] of a
        tree, counts [1, V] of tokens before it, plan and values -> distributions [1, N, V].
    """

    run: Callable
    expected: Callable
    probs: Callable

    @classmethod
    def of(cls, verify, expected, sampling) -> "Code":
        """Of these three modules, run as they are written."""

        def probs(logits, tree, counts, plan, values):
            counts = sampling.path_counts(tree, counts)
            return sampling.probabilities(
                sampling.adjust(logits, counts, plan, values), plan, values
            )

        return cls(verify.sampled, expected.expected_drafts, probs)

    def compiled(self) -> "Code":
        return Code(
            jax.jit(self.run, static_argnums=(0, 6)),
            jax.jit(self.expected, static_argnums=(0, 4)),
            jax.jit(self.probs, static_argnums=3),
        )


CODE = Code.of(verify, expected, sampling).compiled()
"""Under test; tests of mistakes replace it."""


def outcomes(rule, tree_of, probs, draft_probs, coins, finals):
    """(path, num_correct, tokens) rows for many coins at once, padded to one compiled size."""
    count = len(coins)
    size = max(1 << (count - 1).bit_length(), 64)
    pick = np.arange(size) % count
    found = CODE.run(
        rule,
        tree_of(size),
        jnp.broadcast_to(probs, (size, *probs.shape[1:])) if len(probs) == 1 else probs[pick],
        None if draft_probs is None else draft_probs[pick],
        jnp.asarray(coins)[pick],
        jnp.asarray(finals, jnp.float64)[pick],
        STEPS,
    )
    rows = zip(
        np.asarray(found.path), np.asarray(found.num_correct), np.asarray(found.tokens), strict=True
    )
    return [(tuple(p[: n + 1]), tuple(t[: n + 1].tolist())) for p, n, t in rows][:count]


def add_last(rule, drawn, language, probs, ends, total, residual):
    """Spreads each accepted path's weight over the last token, coin by coin."""
    for path, (weight, coins) in ends.items():
        left = residual(path[-1])
        cells = sides(np.cumsum(left / left.sum())[:-1])
        finals = [point for points, _ in cells for point in points]
        rows = outcomes(rule, drawn.arrays, probs, None, [coins] * len(finals), finals)
        for i, (_, length) in enumerate(cells):
            assert rows[2 * i] == rows[2 * i + 1], "an interval with two outcomes"
            assert rows[2 * i][0] == path
            emitted = rows[2 * i][1]
            total[emitted] = total.get(emitted, 0.0) + weight * length


def completed(emitted: dict[tuple[int, ...], float], language: Language) -> dict:
    """Emitted sequences drawn on by the target to STEPS + 1 tokens."""
    full: dict[tuple[int, ...], float] = {}
    for path, weight in emitted.items():
        ways = {path: weight}
        for _ in range(STEPS + 1 - len(path)):
            ways = {(*p, t): w * language(p)[t] for p, w in ways.items() for t in range(V)}
        for key, value in ways.items():
            full[key] = full.get(key, 0.0) + value
    return full


def distance(emitted: dict, language: Language) -> float:
    """The largest difference from the target's own distribution of sequences."""
    full, exact = completed(emitted, language), language.sequences(STEPS + 1)
    return max(abs(full.get(key, 0.0) - value) for key, value in exact.items())


def tree_round(rule: AcceptRule, language: Language, drawn: Drawn):
    """What one round on a tree emits, exactly, and the mean of its accepted drafts."""
    n = len(drawn.parents)
    cells = []  # per coin that is drawn: the nodes that read it, its intervals
    if rule.name == "target_only":
        for depth in range(STEPS):  # one node a depth is on the path: one coin a depth
            nodes = [i for i in range(n) if len(drawn.path(i)) == depth]
            breaks = []
            for node in nodes:
                p = language(drawn.path(node))
                reach = np.cumsum([p[drawn.tokens[c]] for c in drawn.children(node)])
                breaks += list(reach / max(rule.threshold_acc, 1e-9))
            cells.append((nodes, sides(breaks)))
    else:
        for node in range(n):
            left = 1.0
            p = language(drawn.path(node))
            for c in drawn.children(node):
                share = p[drawn.tokens[c]]
                cells.append(([c], sides([share / left] if left > 0 else [])))
                left -= share
    coins, weights = [], []
    for choice in itertools.product(*(range(len(found)) for _, found in cells)):
        for side in (0, 1):
            row = np.zeros(n)
            for (nodes, found), which in zip(cells, choice, strict=True):
                row[nodes] = found[which][0][side]
            coins.append(row)
        weights.append(np.prod([found[w][1] for (_, found), w in zip(cells, choice, strict=True)]))
    probs = tree_probs(language, drawn, 1)
    rows = outcomes(rule, drawn.arrays, probs, None, coins, [0.5] * len(coins))
    ends: dict[tuple[int, ...], tuple[float, np.ndarray]] = {}
    for i, weight in enumerate(weights):
        assert rows[2 * i][0] == rows[2 * i + 1][0], "an interval with two outcomes"
        path = rows[2 * i][0]
        ends[path] = (ends.get(path, (0.0,))[0] + weight, coins[2 * i])

    def residual(node: int) -> np.ndarray:
        left = language(drawn.path(node)).copy()
        for c in drawn.children(node):
            left[drawn.tokens[c]] = 0
        return left

    emitted: dict[tuple[int, ...], float] = {}
    add_last(rule, drawn, language, probs, ends, emitted, residual)
    mean = sum(weight * (len(path) - 1) for path, (weight, _) in ends.items())
    given = CODE.expected(rule, drawn.arrays(1), probs, None, STEPS)
    return emitted, mean, float(given[0])

"""What must hold of the rules and processors, each check on any version of their modules."""

import itertools
from collections.abc import Callable
from types import ModuleType

import enumeration
import jax
import jax.numpy as jnp
import numpy as np
from enumerated_chains import BLOCK, TOKEN_WISE, chain_round
from enumeration import Code, Drawn, distance, random_tree, tree_probs, tree_round
from tiny_language import PROCESSORS, Language

from eagle3_jax.config import AcceptRule, SamplingConfig
from eagle3_jax.sampling import SamplingPlan, SamplingValues

NONE = PROCESSORS["none"]
ON_TREES = AcceptRule(), AcceptRule("rejection")
Modules = dict[str, ModuleType]  # verify, expected, sampling


def on_trees(code: Modules):
    """Both rules for certain drafts emit the target's distribution; the closed form is exact."""
    for rule, seed in itertools.product(ON_TREES, range(2)):
        language, drawn = Language(seed, NONE), random_tree(np.random.default_rng([seed, 5]))
        emitted, mean, given = tree_round(rule, language, drawn)
        assert distance(emitted, language) < 1e-12
        assert abs(mean - given) < 1e-12


def on_chains(code: Modules, rules=(TOKEN_WISE, BLOCK)):
    """So do both rules for drawn drafts."""
    for rule in rules:
        language = Language(3, NONE)
        emitted, mean, given = chain_round(rule, language, 3)
        assert distance(emitted, language) < 1e-12
        assert abs(mean - given) < 1e-12


def with_thresholds(code: Modules):
    """The closed form is that of what SGLang's rule accepts."""
    for single, acc in ((0.35, 0.7), (0.0, 0.0), (1.0, 0.6)):
        language, drawn = Language(4, NONE), random_tree(np.random.default_rng(8))
        rule = AcceptRule(threshold_single=single, threshold_acc=acc)
        _, mean, given = tree_round(rule, language, drawn)
        assert abs(mean - given) < 1e-12


def processors(code: Modules):
    """Every node's distribution is that of decoding its path one token at a time."""
    changed = [*PROCESSORS.values()]
    changed += [
        SamplingConfig(1.5, top_k=5, top_p=0.6, min_p=0.35),
        SamplingConfig(0.7, top_k=6, top_p=0.8, min_p=0.2, repetition_penalty=1.5),
        SamplingConfig(1.2, repetition_penalty=0.6, frequency_penalty=1.1, logit_bias={2: 3.0}),
    ]
    for config, seed in itertools.product(changed, range(2)):
        language = Language(seed, config, 8)
        drawn = random_tree(np.random.default_rng([seed, 6]))
        found = np.asarray(tree_probs(language, drawn, 1)[0])
        for node in range(len(drawn.parents)):
            assert np.abs(found[node] - language(drawn.path(node))).max() < 1e-12


def cuts(code: Modules):
    """At equal probabilities the lower ids stay, and all that reach min-p."""
    logits = np.log(np.array([0.125, 0.25, 0.25, 0.25, 0.125]))
    for given, kept in [
        ({"top_k": 1}, [1]),
        ({"top_k": 2}, [1, 2]),
        ({"top_p": 0.25}, [1]),
        ({"top_p": 0.5}, [1, 2]),
        ({"top_p": 0.8}, [0, 1, 2, 3]),
        ({"min_p": 1.0}, [1, 2, 3]),
        ({"min_p": 0.5}, [0, 1, 2, 3, 4]),
        ({"top_k": 3, "top_p": 0.5}, [1, 2]),
    ]:
        config = SamplingConfig(**given)
        plan, values = SamplingPlan.of(config, AcceptRule()), values_of(config, 5)
        p = np.asarray(
            code["sampling"].probabilities(jnp.asarray(logits)[None, None], plan, values)
        )
        expected = np.where(np.isin(np.arange(5), kept), np.exp(logits), 0)
        assert np.abs(p[0, 0] - expected / expected.sum()).max() < 1e-12, given


def values_of(config: SamplingConfig, size: int) -> SamplingValues:
    return SamplingValues.of(config, 1, size, np.dtype(np.float64))


ROWS = 64
GRID = 8
"""Coins on a grid: with probabilities that are multiples of its step, counting is exact."""
FORK = Drawn([0, 0, 0], [0, 0, 1])
"""Two children with the tokens 0 and 1."""
EIGHTHS = np.array([1, 2, 4, 1]) / 8


def run_all(code: Modules, rule: AcceptRule, drawn: Drawn, p, coins, finals, q=None):
    """What every row of coins leads to: (nodes accepted, tokens emitted)."""
    n, steps = len(drawn.parents), len(drawn.path(len(drawn.parents) - 1))
    pick, size = np.arange(ROWS) % len(coins), ROWS  # one size: single operations compile once
    probs = jnp.broadcast_to(jnp.asarray(p), (size, n, len(p)))
    draft_probs = None if q is None else jnp.broadcast_to(jnp.asarray(q), (size, steps, len(q)))
    coins_, finals_ = jnp.asarray(np.asarray(coins, float)[pick]), np.asarray(finals, float)[pick]
    found = code["verify"].sampled(
        rule, drawn.arrays(size), probs, draft_probs, coins_, jnp.asarray(finals_), steps
    )
    rows = zip(*map(np.asarray, (found.path, found.num_correct, found.tokens)), strict=True)
    for path, correct, tokens in itertools.islice(rows, len(coins)):
        yield path[: correct + 1].tolist(), tokens[: correct + 1].tolist()


def on_a_grid(code: Modules):
    """A coin on its threshold is above it: only then are all multiples of the step as likely."""
    steps = np.arange(GRID) / GRID
    for rule in ON_TREES:
        p = EIGHTHS if rule.name == "target_only" else np.array([4, 2, 2, 0]) / 8
        rows = list(itertools.product(steps, steps))
        coins = [(a, b, b) if rule.name == "target_only" else (0, a, b) for a, b in rows]
        first = np.zeros(4)
        for path, tokens in run_all(code, rule, FORK, p, coins, [0.5] * len(rows)):
            assert len(tokens) == len(path)
            first[tokens[0]] += 1 / len(rows)
        if rule.name == "rejection":  # what is left after both is token 2 alone: exact
            assert np.abs(first - p).max() < 1e-12
        else:  # what is left has two tokens, and one coin here
            assert np.abs(first[:2] - p[:2]).max() < 1e-12
    draws = code["sampling"].draw(jnp.broadcast_to(jnp.asarray(EIGHTHS), (GRID, 4)), steps)
    assert np.bincount(draws, minlength=4).tolist() == [1, 2, 4, 1]
    chain, q = Drawn([0, 0], [0, 1]), np.array([0.25, 0.5, 0.25, 0])
    for rule in (TOKEN_WISE, BLOCK):  # p/q is one half: half of the coins
        rows = run_all(code, rule, chain, EIGHTHS, [(a, a) for a in steps], [0.5] * GRID, q)
        assert sum(len(path) - 1 for path, _ in rows) == GRID // 2


def at_the_edges(code: Modules):
    """Guards of SGLang's kernels, and what rounding can bring about."""
    high, p = [(0.999, 0.999, 0.999)], np.array([0.0, 0.25, 0.25, 0.5])

    def accepted(rule, p, coins=high, drawn=FORK, q=None, final=0.5):
        return next(run_all(code, rule, drawn, p, coins, [final], q))

    loose = AcceptRule(threshold_single=0.0, threshold_acc=0.0)
    assert accepted(loose, p)[0] == [0, 2]  # never a token of probability 0
    assert accepted(AcceptRule(threshold_single=0.25), p)[0] == [0, 2]  # at least, not above
    tiny = np.array([1e-10, 0.0, 0.5, 0.5])
    floored = AcceptRule(threshold_acc=0.0)
    assert accepted(floored, tiny)[0] == [0]  # 1e-10 / 1e-9 lies below the coin
    assert accepted(floored, tiny, [(0.05, 0.05, 0.05)])[0] == [0, 1]
    above = np.array([1.0 + 1e-9, 0.0, 0.0, 0.0])
    certain = AcceptRule("rejection")
    assert accepted(certain, above, [(1.0, 1.0 + 1e-8, 1.0)])[0] == [0]  # sums above 1: not token 1
    whole = np.array([0.25, 0.75, 0.0, 0.0])
    for rule in ON_TREES:  # all that has mass is rejected: from the target, no unlikely token
        assert accepted(rule, whole, [(1.0, 1.0, 1.0)], final=0.5) == ([0], [1])
        assert accepted(rule, whole, [(1.0, 1.0, 1.0)], final=0.1) == ([0], [0])
    chain = Drawn([0, 0], [0, 1])
    for rule, wrong in itertools.product((TOKEN_WISE, BLOCK), (0.0, 1.5)):
        q = np.array([1.0, wrong, 0.0, 0.0])
        path, tokens = accepted(rule, np.array([0.5, 0.5, 0, 0]), [(0.0, 0.0)], chain, q, 0.1)
        assert path == [0]  # not a probability that anything was drawn with
        assert tokens == [1]  # and no weight to take off
    draw = code["sampling"].draw
    assert int(draw(jnp.asarray([0.0, 0.5, 0.5, 0.0]), jnp.asarray(1.0))) == 2
    assert int(draw(jnp.asarray([0.0, 0.5, 0.5, 0.0]), jnp.asarray(0.0))) == 1


def many_ids(code: Modules):
    """A vocabulary that is added up by blocks: every coin of a grid, weights on both sides."""
    block = code["sampling"].BLOCK
    ids = np.array([0, block - 1, block, block + 1, 3 * block - 1, 3 * block, 3 * block + 4])
    shares = np.array([1, 2, 1, 4, 3, 4, 1])
    weights = np.zeros((16, 3 * block + 5))
    weights[:, ids] = shares / 32  # half: the coin is scaled
    drawn = code["sampling"].draw(jnp.asarray(weights), jnp.asarray(np.arange(16) / 16))
    assert np.asarray(drawn).tolist() == np.repeat(ids, shares).tolist()


def coins_are_apart(code: Modules):
    """Another number for every seed, length, stream and place; the same for the same."""
    sampling = code["sampling"]
    keys = jax.vmap(jax.random.key)(jnp.asarray([3, 4, 3], jnp.uint32))
    found = []
    for length, stream in itertools.product(([5, 5, 6], [7, 7, 8]), range(3)):
        coins = sampling.coins(keys, jnp.asarray(length, jnp.int32), (4,), stream, jnp.float64)
        found.append(np.asarray(coins))
    found = np.concatenate(found)
    assert ((found >= 0) & (found < 1)).all()
    assert len(np.unique(found)) == found.size
    alone = sampling.coins(keys[:1], jnp.asarray([5], jnp.int32), (4,), 0, jnp.float64)
    assert np.array_equal(alone[0], found[0])


CHECKS: dict[str, Callable[[Modules], None]] = {
    f.__name__: f
    for f in (
        on_trees,
        on_chains,
        with_thresholds,
        processors,
        cuts,
        on_a_grid,
        at_the_edges,
        many_ids,
        coins_are_apart,
    )
}


def enumerate_with(code: Modules, patch):
    """Makes the enumeration run these modules, as they are written."""
    patch.setattr(enumeration, "CODE", Code.of(code["verify"], code["expected"], code["sampling"]))

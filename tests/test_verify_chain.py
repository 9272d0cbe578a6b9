"""Chains of drawn drafts: SGLang's recorded outcomes, and every draft and coin in float64."""

import dataclasses
import itertools
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from selection import by_default
from test_verify import (
    _RUN,
    PROCESSORS,
    STEPS,
    Drawn,
    Language,
    V,
    _float64,  # noqa: F401
    distance,
    outcomes,
    sides,
    tree_probs,
)

from eagle3_jax import verify
from eagle3_jax.config import AcceptRule
from eagle3_jax.tree import Tree

DATA = Path(__file__).parent / "data/sampling"
TOKEN_WISE = AcceptRule("rejection", sampled_drafts=True)
BLOCK = AcceptRule("rejection", sampled_drafts=True, block=True)


def draft(seed: int, path: tuple[int, ...]) -> np.ndarray:
    """q(. | path), any distribution; now and then it never proposes a token."""
    rng = np.random.default_rng([seed, 77, len(path), *path])
    q = rng.dirichlet(np.full(V, 0.8))
    if rng.random() < 0.5:
        q[rng.integers(V)] = 0
    return q / q.sum()


@dataclasses.dataclass
class Chain:
    """One drafted chain with p and q along it."""

    drafts: tuple[int, ...]
    weight: float
    p: list[np.ndarray]
    q: list[np.ndarray]

    def residual(self, correct: int, scale: float) -> np.ndarray:
        if correct == STEPS:
            return self.p[STEPS]
        return np.maximum(scale * self.p[correct] - self.q[correct], 0)


def chains(language: Language, seed: int, drawn: bool = True):
    """Every chain a draft can propose; not `drawn`: the one of its most likely tokens, for sure."""
    for drafts in itertools.product(range(V), repeat=STEPS):
        q = [draft(seed, drafts[:i]) for i in range(STEPS)]
        weight = float(np.prod([q[i][t] for i, t in enumerate(drafts)]))
        if not drawn:
            weight = float(all(q[i].argmax() == t for i, t in enumerate(drafts)))
        if weight > 0:
            yield Chain(drafts, weight, [language(drafts[:i]) for i in range(STEPS + 1)], q)


def token_chances(chain: Chain) -> tuple[list[float], list[float]]:
    """Thresholds of each level's coin, and the scale of the residual after each count."""
    ratios = [chain.p[i][t] / chain.q[i][t] for i, t in enumerate(chain.drafts)]
    return [min(1.0, r) for r in ratios], [1.0] * (STEPS + 1)


def block_chances(chain: Chain) -> tuple[list[float], list[float]]:
    """Sun et al. 2024, algorithm 2, in plain Python."""
    weights = [1.0]
    for i, t in enumerate(chain.drafts):
        weights.append(min(1.0, weights[-1] * chain.p[i][t] / chain.q[i][t]))
    chances = []
    for i in range(1, STEPS):
        mass = np.maximum(weights[i] * chain.p[i] - chain.q[i], 0).sum()
        below = mass + 1 - weights[i]
        chances.append(1.0 if weights[i] == 1 else mass / below if below > 0 else 0.0)
    return [*chances, weights[STEPS]], weights


_EXPECTED = jax.jit(verify.expected_drafts, static_argnums=(0, 4))


def chain_round(rule: AcceptRule, language: Language, seed: int, *, drawn_drafts: bool = True):
    """What one round emits, exactly; mean accepted drafts; and the same in closed form."""
    work_out = block_chances if rule.block else token_chances
    drawn = Drawn([0, *range(STEPS)], [0] * (STEPS + 1))
    emitted: dict[tuple[int, ...], float] = {}
    mean = 0.0
    coins, rows_of, finals = [], [], []
    everything = list(chains(language, seed, drawn_drafts))
    for chain in everything:
        chances, scales = work_out(chain)
        cells = [sides([c]) for c in chances]
        for choice in itertools.product(*(range(len(c)) for c in cells)):
            picked = [c[w] for c, w in zip(cells, choice, strict=True)]
            weight = float(np.prod([length for _, length in picked]))
            row = [points[0] for points, _ in picked]
            accepted = [coin < chance for coin, chance in zip(row, chances, strict=True)]
            if rule.block:
                correct = max((i + 1 for i, a in enumerate(accepted) if a), default=0)
            else:
                correct = next((i for i, a in enumerate(accepted) if not a), STEPS)
            left = chain.residual(correct, scales[correct])
            for points, length in sides(np.cumsum(left / left.sum())[:-1]):
                for side in (0, 1):
                    coins.append([points_[side] for points_, _ in picked] + [0.0])
                    finals.append(points[side])
                rows_of.append((chain, correct, weight * length))
    trees, probs, draft_probs = [], [], []
    whole = {}
    for chain in everything:
        drawn = Drawn([0, *range(STEPS)], [0, *chain.drafts])
        whole[chain.drafts] = np.asarray(tree_probs(language, drawn, 1)[0])
    for chain, _, _ in rows_of:
        trees += [[0, *chain.drafts]] * 2
        probs += [whole[chain.drafts]] * 2
        draft_probs += [np.stack(chain.q)] * 2
    tokens = jnp.asarray(trees, jnp.int32)

    def tree_of(size: int) -> Tree:
        base = drawn.arrays(size)
        return dataclasses.replace(base, tokens=tokens[np.arange(size) % len(coins)])

    probs, draft_probs = jnp.asarray(np.stack(probs)), jnp.asarray(np.stack(draft_probs))
    found = outcomes(rule, tree_of, probs, draft_probs, coins, finals)
    for i, (chain, correct, weight) in enumerate(rows_of):
        assert found[2 * i] == found[2 * i + 1], "an interval with two outcomes"
        path, tokens_ = found[2 * i]
        assert len(path) == correct + 1
        total = chain.weight * weight
        emitted[tokens_] = emitted.get(tokens_, 0.0) + total
        mean += total * correct
    drafted = jnp.asarray([[0, *chain.drafts] for chain in everything], jnp.int32)
    expected = _EXPECTED(
        rule,
        dataclasses.replace(drawn.arrays(len(everything)), tokens=drafted),
        jnp.asarray(np.stack([whole[chain.drafts] for chain in everything])),
        jnp.asarray(np.stack([chain.q for chain in everything])),
        STEPS,
    )
    given = sum(c.weight * float(e) for c, e in zip(everything, expected, strict=True))
    return emitted, mean, given


@pytest.mark.parametrize("name", by_default(["top_k", "none", "all"], lambda i, _: i == 0))
@pytest.mark.parametrize("rule", [TOKEN_WISE, BLOCK], ids=["token_wise", "block"])
def test_a_round_on_drawn_drafts_emits_the_targets_own_distribution(rule, name):
    language = Language(3, PROCESSORS[name])
    emitted, mean, given = chain_round(rule, language, 3)
    assert distance(emitted, language) < 1e-12
    assert abs(mean - given) < 1e-12
    if rule.block:
        assert mean >= chain_round(TOKEN_WISE, language, 3)[1] - 1e-12


def test_the_rule_for_drawn_drafts_on_certain_ones_is_not_lossless():
    """SafeAILab/EAGLE issue 183: a draft's argmax was not drawn from q, whatever q says."""
    language = Language(3, PROCESSORS["none"])
    emitted, _, _ = chain_round(TOKEN_WISE, language, 3, drawn_drafts=False)
    assert distance(emitted, language) > 1e-3


@pytest.mark.parametrize("rule", [TOKEN_WISE, BLOCK], ids=["token", "block"])
def test_chains_are_verified_as_sglang_does(rule):
    """`chain_speculative_sampling_triton`, run by Triton's interpreter: 12 recorded cases."""
    raw = np.load(DATA / "chain_rejection_sampling.npz")
    kind, lengths = "block" if rule.block else "token", set()
    for case in range(12):
        own = {k.split("/")[1]: raw[k] for k in raw.files if k.startswith(f"c{case}/")}
        candidates = own["candidates"]
        B, N = candidates.shape
        drawn = Drawn([0, *range(N - 1)], [0] * N)
        tree = dataclasses.replace(drawn.arrays(B), tokens=jnp.asarray(candidates, jnp.int32))
        found = _RUN(
            rule,
            tree,
            jnp.asarray(own["target_probs"]),
            jnp.asarray(own["draft_probs"]),
            jnp.asarray(own["uniform_samples"]),
            jnp.asarray(own["uniform_samples_for_final_sampling"]),
            N - 1,
        )
        correct = own[f"{kind}.num_correct_drafts"]
        np.testing.assert_array_equal(found.num_correct, correct)
        for b in range(B):
            index = own[f"{kind}.accept_index"][b][: correct[b] + 1]
            np.testing.assert_array_equal(found.path[b, : correct[b] + 1], index - b * N)
            expected = own[f"{kind}.predict"][index]
            np.testing.assert_array_equal(found.tokens[b, : correct[b] + 1], expected)
        lengths |= set(correct.tolist())
    assert lengths >= {0, 1, 2}


def sglang_tree_case():
    """The trees and probabilities of SGLang's own kernel test, links followed to parents."""
    facts = json.loads((DATA / "sgl_kernel_test_facts.json").read_text())
    N = len(facts["candidates"][0])
    trees = []
    for b in range(2):
        parents = [0] * N
        for node in range(N):
            child = facts["retrieve_next_token"][b][node]
            while child != -1:
                parents[child] = node
                child = facts["retrieve_next_sibling"][b][child]
        trees.append(Drawn(parents, facts["candidates"][b]).arrays(1))
    tree = jax.tree.map(lambda *x: jnp.concatenate(x), *trees)
    logits = np.full(facts["target_logits"]["shape"], facts["target_logits"]["fill"], np.float32)
    done = set()
    for b, node, token in facts["target_logits"]["set10"]:
        logits[b, node, token] = 10
        done.add((b, node))
    for b, node in itertools.product(range(2), range(N)):
        if (b, node) not in done:
            logits[b, node, facts["target_logits"]["otherwise_row_set10_at"]] = 10
    return facts, tree, logits


def test_target_only_on_sglangs_kernel_test():
    facts, tree, logits = sglang_tree_case()
    sampled = facts["tree_sampling_target_only"]
    probs = jax.nn.softmax(jnp.asarray(logits) / np.float32(sampled["temperature"]), axis=-1)
    steps = facts["num_spec_step"] - 1
    case = sampled["cases"][0]
    for seed in range(5):  # "the result must not depend on the coins"
        rng = np.random.default_rng(seed)
        coins = jnp.asarray(rng.random(tree.tokens.shape), jnp.float32)
        final = jnp.asarray(rng.random(2), jnp.float32)
        found = _RUN(AcceptRule(), tree, probs, None, coins, final, steps)
        N = tree.tokens.shape[1]
        for b in range(2):
            index = [i for i in case["accept_index"][b] if i >= 0]
            assert int(found.num_correct[b]) == case["accept_token_num"][b] == len(index) - 1
            assert (np.asarray(found.path[b, : len(index)]) + b * N).tolist() == index
            expected = [case["predicts"][i] for i in index]
            assert found.tokens[b, : len(index)].tolist() == expected


def test_thresholds_of_zero_accept_any_likely_first_child_but_none_of_probability_zero():
    """SGLang's stored case for thresholds of 0 is older than its guard; where p > 0 it holds."""
    facts, tree, logits = sglang_tree_case()
    sampled = facts["tree_sampling_target_only"]
    case, steps = sampled["cases"][1], facts["num_spec_step"] - 1
    coins, final = jnp.full(tree.tokens.shape, 0.999), jnp.full((2,), 0.5)

    def accept(temperature: float):
        probs = jax.nn.softmax(jnp.asarray(logits) / np.float32(temperature), axis=-1)
        rule = AcceptRule(threshold_single=0.0, threshold_acc=0.0)
        return _RUN(rule, tree, probs, None, coins, final, steps)

    # The second tree links its children against their numbers, which no drafted tree does.
    warm = accept(1.0)  # every token has some probability: the stored path
    assert int(warm.num_correct[0]) == case["accept_token_num"][0]
    assert warm.path[0, :3].tolist() == case["accept_index"][0][:3]
    cold = accept(sampled["temperature"])  # float32 has 0 off the argmax: the guard skips children
    assert cold.num_correct.tolist() == sampled["cases"][0]["accept_token_num"]

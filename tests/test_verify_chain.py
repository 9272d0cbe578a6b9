"""Chains of drawn drafts: SGLang's recorded outcomes, and every draft and coin in float64."""

import dataclasses
import itertools
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from enumerated_chains import BLOCK, TOKEN_WISE, chain_round
from enumeration import CODE, Drawn, distance
from selection import by_default
from tiny_language import PROCESSORS, Language

from eagle3_jax.config import AcceptRule

DATA = Path(__file__).parent / "data/sampling"


@pytest.fixture(autouse=True)
def _float64():
    with jax.enable_x64(True):
        yield


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
        found = CODE.run(
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
        found = CODE.run(AcceptRule(), tree, probs, None, coins, final, steps)
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
        return CODE.run(rule, tree, probs, None, coins, final, steps)

    # The second tree links its children against their numbers, which no drafted tree does.
    warm = accept(1.0)  # every token has some probability: the stored path
    assert int(warm.num_correct[0]) == case["accept_token_num"][0]
    assert warm.path[0, :3].tolist() == case["accept_index"][0][:3]
    cold = accept(sampled["temperature"])  # float32 has 0 off the argmax: the guard skips children
    assert cold.num_correct.tolist() == sampled["cases"][0]["accept_token_num"]

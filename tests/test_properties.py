"""Whatever weights, prompts, tree and batch: speculation saves passes and keeps the text.

float64, so that rounding cannot choose. Weights are arguments of the compiled programs: the draws
below run thousands of prompts through a dozen compiled shapes.
"""

import jax
import numpy as np
import pytest
from random_models import draft_config, random_draft, random_target, target_config
from selection import by_default

import eagle3_jax as e3
from eagle3_jax import loop
from eagle3_jax.config import RopeConfig

DRAWS = 60
NEW = 20

# (batch, tree, draft_attention, target changes, draft changes)
SHAPES = {
    "chain_1": (1, (1, 1, 2), "ancestors", {}, {}),
    "chain_3": (4, (3, 1, 4), "ancestors", {"tie_word_embeddings": True}, {"fc_norm": True}),
    "chain_6": (2, (6, 1, 7), "beam_slots", {}, {"norm_before_residual": True}),
    "one_level": (3, (1, 5, 4), "ancestors", {}, {"fc_bias": True}),
    "two_levels": (5, (2, 2, 6), "ancestors", {}, {"feedback": "post_norm"}),
    "tree": (4, (3, 4, 8), "ancestors", {"qkv_bias": True, "output_bias": True}, {}),
    "tree_slots": (4, (3, 4, 8), "beam_slots", {}, {"double_norm": True}),
    "deep_tree": (2, (5, 3, 12), "beam_slots", {"mlp_bias": True}, {"norm_before_fc": True}),
    "every_candidate": (2, (3, 3, 22), "ancestors", {}, {"qkv_bias": True, "output_bias": True}),
    "two_words": (2, (4, 6, 64), "ancestors", {}, {"embed": "draft"}),
    "wide_draft_window": (2, (7, 6, 10), "beam_slots", {}, {"final_norm": False}),
    "other_width": (
        3,
        (4, 2, 9),
        "ancestors",
        {"rope": RopeConfig(theta=300.0), "num_kv_heads": 4},
        {"hidden_size": 8, "embed": "draft", "num_aux": 2, "aux_boundaries": (3, "final_norm")},
    ),
    "target_head": (
        9,
        (2, 3, 5),
        "ancestors",
        {},
        {"head": "target", "draft_vocab_size": 13},
    ),
}


USUAL = ("two_levels",)
"""The others run with `--exhaustive`."""


def prompts_for(rng: np.random.Generator, batch: int) -> list[list[int]]:
    return [rng.integers(0, 13, rng.integers(1, 15)).tolist() for _ in range(batch)]


@pytest.mark.parametrize("name", by_default(SHAPES, lambda _, name: name in USUAL))
def test_speculation_keeps_the_text(name):
    batch, triple, mode, target_changes, draft_changes = SHAPES[name]
    tree = e3.TreeConfig(*triple)
    rng = np.random.default_rng(len(name))
    accepted = stopped = 0
    compiled = None
    with jax.enable_x64(True):
        for draw in range(DRAWS):
            target = random_target(target_config(**target_changes), seed=draw)
            draft = random_draft(draft_config(target.config, **draft_changes), seed=1000 + draw)
            prompts = prompts_for(rng, batch)
            stop = () if draw % 2 else (int(rng.integers(13)),)
            options = {"max_new_tokens": NEW, "stop_token_ids": stop}
            plain = e3.generate(target, prompts, **options)
            fast = e3.speculate(target, draft, prompts, tree=tree, draft_attention=mode, **options)
            assert fast.tokens == plain.tokens
            for new, stats, lengths in zip(
                fast.tokens, fast.stats, fast.accept_lengths, strict=True
            ):
                check_counts(new, stats, lengths, tree, stop)
                accepted += sum(lengths) - len(lengths)
                stopped += stats["finish_reason"]["type"] == "stop"
            sizes = (loop.start_jit._cache_size(), loop.finish_jit._cache_size())
            compiled = compiled or sizes
            assert sizes == compiled, "new weights or prompts compiled a program anew"
    assert accepted > 0
    assert stopped > 0


def check_counts(new, stats, lengths, tree, stop):
    """Every round but the last commits what it accepted; the prefill gave one token."""
    assert 1 <= len(new) <= NEW
    assert stats["completion_tokens"] == len(new)
    assert all(token not in stop for token in new[:-1])
    if not lengths:
        assert len(new) == 1
        assert "spec_verify_ct" not in stats
        return
    assert stats["spec_verify_ct"] == len(lengths)
    assert all(1 <= n <= tree.num_steps + 1 for n in lengths)
    assert 1 + sum(lengths[:-1]) < len(new) <= 1 + sum(lengths)
    assert stats["spec_num_correct_drafts"] == sum(lengths) - len(lengths)
    assert stats["spec_accept_length"] == len(new) / len(lengths)
    histogram = stats["spec_correct_drafts_histogram"]
    assert histogram == np.bincount(np.subtract(lengths, 1)).tolist()


def test_a_batch_is_its_prompts_one_by_one():
    rng = np.random.default_rng(5)
    with jax.enable_x64(True):
        target = random_target(target_config(), seed=1)
        draft = random_draft(draft_config(target.config), seed=2)
        prompts = prompts_for(rng, 6)
        options = {
            "max_new_tokens": NEW,
            "tree": e3.TreeConfig(3, 4, 8),
            "stop_token_ids": (4,),
            "trace": True,
        }
        together = e3.speculate(target, draft, prompts, **options)
        for i, prompt in enumerate(prompts):
            alone = e3.speculate(target, draft, [prompt], **options)
            assert alone.tokens[0] == together.tokens[i]
            assert alone.accept_lengths[0] == together.accept_lengths[i]
            ours = together.trace.of(i)
            assert [r.tokens for r in ours] == [r.tokens for r in alone.trace.rounds]
            assert [r.accepted for r in ours] == [r.accepted for r in alone.trace.rounds]


def test_streamed_rounds_are_the_traced_rounds():
    rng = np.random.default_rng(6)
    with jax.enable_x64(True):
        target = random_target(target_config(), seed=3)
        draft = random_draft(draft_config(target.config), seed=4)
        prompts = prompts_for(rng, 3)
        options = {"max_new_tokens": NEW, "tree": e3.TreeConfig(2, 2, 4), "stop_token_ids": (7,)}
        traced = e3.speculate(target, draft, prompts, trace=True, **options)
        assert list(e3.rounds(target, draft, prompts, **options)) == traced.trace.rounds
        for i, tokens in enumerate(traced.tokens):
            streamed = [t for r in traced.trace.of(i) for t in r.emitted]
            assert streamed == tokens[1:]

"""The public calls: what they refuse before compiling, what they return, the trace on disk."""

import dataclasses
import json

import jax.numpy as jnp
import numpy as np
import pytest
from random_models import draft_config, random_draft, random_target, target_config

import eagle3_jax as e3
from eagle3_jax import loop
from eagle3_jax.trace import sglang_stats

TREE = e3.TreeConfig(2, 2, 4)


@pytest.fixture(scope="module")
def pair():
    target = random_target(target_config(eos_token_ids=(3,)), seed=1, dtype=np.float32)
    return target, random_draft(draft_config(target.config), seed=2, dtype=np.float32)


@pytest.mark.parametrize(
    ("prompts", "new", "message"),
    [
        ([], 4, "prompts is empty"),
        ([[1], []], 4, "prompt 1 is empty"),
        ([[1, 13]], 4, "prompt 0, position 1: id 13 is outside the target's vocabulary 0..12"),
        ([[2, -1]], 4, "id -1 is outside"),
        ([1, 2], 4, "prompt 0 is '1', expected a list of token ids"),
        ("ab", 4, "prompts is a str"),
        (["ab", [1]], 4, "prompts mixes texts and id lists"),
        (["ab"], 4, "this target has no folder"),
        ([[1.5]], 4, "expected a list of token ids"),
        (7, 4, "prompts is a int, expected a list of id lists or of texts"),
        ([[1]], 0, "max_new_tokens is 0, expected at least 1"),
        ([[1] * 250], 10, "make 260 positions, the target has 256; the caches would take"),
    ],
)
def test_bad_calls_are_refused_before_compiling(pair, prompts, new, message):
    target, draft = pair
    before = loop.start_jit._cache_size()
    with pytest.raises(e3.ConfigError, match=message):
        e3.generate(target, prompts, max_new_tokens=new)
    with pytest.raises(e3.ConfigError, match=message):
        e3.speculate(target, draft, prompts, max_new_tokens=new, tree=TREE)
    with pytest.raises(e3.ConfigError, match=message):
        e3.rounds(target, draft, prompts, max_new_tokens=new, tree=TREE)
    assert loop.start_jit._cache_size() == before


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"target_hidden_size": 24, "hidden_size": 24}, "expects a target of width 24"),
        ({"vocab_size": 40}, "vocabulary of 40, this target has 13"),
        ({"aux_boundaries": (0, 1, 4)}, r"boundary 4 lies outside the target's 0\.\.3"),
        ({"aux_boundaries": "default(2, L//2, L-3)"}, r"would be \(2, 1, 0\)"),
    ],
)
def test_wrong_pairs(pair, change, message):
    target, draft = pair
    config = dataclasses.replace(draft.config, **change)
    other = random_draft(config, seed=0, dtype=np.float32)
    with pytest.raises(e3.ConfigError, match=message):
        e3.speculate(target, other, [[1]], max_new_tokens=4, tree=TREE)


def test_topk_above_the_draft_vocabulary(pair):
    target, draft = pair
    with pytest.raises(e3.ConfigError, match="topk=11 exceeds the draft vocabulary of 10"):
        e3.speculate(target, draft, [[1]], max_new_tokens=4, tree=e3.TreeConfig(1, 11, 4))


def test_unknown_draft_attention(pair):
    target, draft = pair
    with pytest.raises(e3.ConfigError, match="draft_attention is 'full'"):
        e3.speculate(target, draft, [[1]], max_new_tokens=4, tree=TREE, draft_attention="full")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"draft": None}, "speculate needs a draft and a tree"),
        ({"tree": None}, "speculate needs a draft and a tree"),
        ({"tree": (2, 2, 4)}, r"tree is \(2, 2, 4\), expected a TreeConfig"),
        ({"target": "folder"}, "target is a str, expected what load_target returns"),
        ({"draft": "folder"}, "draft is a str, expected what load_draft returns"),
        ({"stop_token_ids": 2}, "stop_token_ids is 2, expected a sequence"),
        ({"stop_token_ids": "12"}, "stop_token_ids is '12'"),
        ({"stop_token_ids": [None]}, "stop_token_ids has None"),
        ({"stop_token_ids": [2.5]}, "stop_token_ids has 2.5"),
        ({"stop_token_ids": [2**40]}, "no 32-bit id"),
        ({"max_new_tokens": True}, "max_new_tokens is True"),
        ({"max_new_tokens": 2.0}, "max_new_tokens is 2.0"),
        ({"prompts": [[1, [2, 3]]]}, "prompt 0 is .*, expected a list of token ids"),
        ({"prompts": [[2**70]]}, "outside the target's vocabulary"),
    ],
)
def test_arguments_of_another_type(pair, change, message):
    target, draft = pair
    arguments = {"target": target, "draft": draft, "prompts": [[1]], "max_new_tokens": 4}
    arguments |= {"tree": TREE, **change}
    with pytest.raises(e3.ConfigError, match=message):
        e3.speculate(**arguments)


def test_target_and_draft_swapped(pair):
    target, draft = pair
    with pytest.raises(e3.ConfigError, match="target is a Eagle3Draft"):
        e3.speculate(draft, target, [[1]], max_new_tokens=4, tree=TREE)
    with pytest.raises(e3.ConfigError, match="draft and tree go together"):
        e3.rounds(target, draft, [[1]], max_new_tokens=4, tree=None)


def test_numpy_and_jax_numbers_are_numbers(pair):
    target, draft = pair
    tree = e3.TreeConfig(np.int64(2), np.int32(2), np.int64(4))
    assert tree == TREE
    prompts = [[1, 2], [3, 4]]
    expected = e3.speculate(target, draft, prompts, max_new_tokens=4, tree=TREE).tokens
    for same in (np.asarray(prompts), jnp.asarray(prompts), tuple(map(tuple, prompts))):
        found = e3.speculate(target, draft, same, max_new_tokens=np.int64(4), tree=tree)
        assert found.tokens == expected


def test_default_stop_is_the_targets_eos(pair):
    target, draft = pair
    free = e3.generate(target, [[1, 2]], max_new_tokens=40, stop_token_ids=()).tokens[0]
    eos = free[4]
    first = free.index(eos)
    target = random_target(target_config(eos_token_ids=(99, eos)), seed=1, dtype=np.float32)
    for result in (
        e3.generate(target, [[1, 2]], max_new_tokens=40),
        e3.speculate(target, draft, [[1, 2]], max_new_tokens=40, tree=TREE),
    ):
        assert result.tokens[0] == free[: first + 1]
        assert result.stats[0]["finish_reason"] == {"type": "stop", "matched": eos}


def test_one_token_needs_no_round(pair):
    target, draft = pair
    result = e3.speculate(target, draft, [[1, 2]], max_new_tokens=1, tree=TREE, trace=True)
    assert len(result.tokens[0]) == 1
    assert result.accept_lengths == [[]]
    assert result.trace.rounds == []
    assert not any(key.startswith("spec_") for key in result.stats[0])


def test_plain_trace_has_a_root_per_pass(pair):
    target, _ = pair
    result = e3.generate(target, [[5, 1], [2]], max_new_tokens=6, stop_token_ids=(), trace=True)
    assert result.trace.tree is None
    for i, tokens in enumerate(result.tokens):
        rounds = result.trace.of(i)
        assert [r.tokens for r in rounds] == [[t] for t in tokens[:-1]]
        assert [r.bonus for r in rounds] == tokens[1:]
        assert all(r.margins[0] > 0 for r in rounds)
    streamed = e3.rounds(
        target, None, [[5, 1], [2]], max_new_tokens=6, tree=None, stop_token_ids=()
    )
    assert list(streamed) == result.trace.rounds


def test_trace_file_round_trip(pair, tmp_path):
    target, draft = pair
    result = e3.speculate(
        target, draft, [[5, 1], [2]], max_new_tokens=9, tree=TREE, stop_token_ids=(), trace=True
    )
    path = tmp_path / "trace.jsonl"
    result.trace.save(path)
    assert [p.name for p in tmp_path.iterdir()] == ["trace.jsonl"]
    assert e3.Trace.load(path) == result.trace
    kinds = [json.loads(line)["type"] for line in path.read_text().splitlines()]
    assert kinds == ["trace", *["round"] * len(result.trace.rounds), "sequence", "sequence"]


@pytest.mark.parametrize(
    ("cut", "message"),
    [
        (lambda lines: lines[:-1], "the file is cut short"),
        (lambda lines: [], "empty, expected a trace"),
        (lambda lines: lines[1:], "first line is 'round'"),
        (lambda lines: [lines[0], lines[1][:20], *lines[2:]], "line 2: not a trace line"),
        (lambda lines: [lines[0].replace('"format":1', '"format":9')], "format 9, expected 1"),
        (lambda lines: [lines[0], '{"type":"round","x":1}'], "line 2"),
        (lambda lines: [lines[0], '["round"]'], "line 2"),
    ],
)
def test_damaged_trace_files(pair, tmp_path, cut, message):
    target, draft = pair
    result = e3.speculate(target, draft, [[5, 1]], max_new_tokens=5, tree=TREE, trace=True)
    path = tmp_path / "trace.jsonl"
    result.trace.save(path)
    path.write_text("\n".join(cut(path.read_text().splitlines())))
    with pytest.raises(ValueError, match=message):
        e3.Trace.load(path)


def test_sglang_formulas():
    """The numbers of one recorded SGLang 0.5.23 answer (tree 3/4/8, 24 tokens)."""
    stats = sglang_stats(8, 24, [0, 1, 2, 2, 2, 2, 3, 3], 8)
    assert stats["spec_verify_ct"] == 8
    assert stats["spec_num_correct_drafts"] == 15
    assert stats["spec_num_proposed_drafts"] == 56
    assert stats["spec_accept_rate"] == 0.26785714285714285
    assert stats["spec_accept_length"] == 3.0
    assert stats["spec_correct_drafts_histogram"] == [1, 1, 4, 2]

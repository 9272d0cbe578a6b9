"""Replay against generation: the tiny pair under `speculate` and the real SGLang, and SmolLM2."""

import pytest
from replay_records import of_sglang, of_target, rounds_of
from sglang_goldens import TRACES, load
from smollm2_goldens import greedy, read

import eagle3_jax as e3
from eagle3_jax.record import EngineRound
from eagle3_jax.replay import replay

SHALLOW = [e3.TreeConfig(1), e3.TreeConfig(6), e3.TreeConfig(2, 2, 4)]
DEEP = [e3.TreeConfig(3, 4, 8), e3.TreeConfig(5, 8, 32), e3.TreeConfig(4, 8, 60)]
"""Three levels and topk above 1: the two draft attentions part."""
PROMPTS = [[5, 17, 33], list(range(3, 40)), [9], [60, 61, 62, 63, 64, 65]]


@pytest.fixture(scope="module")
def record(tiny_target, tiny_draft):
    plain = e3.generate(tiny_target, PROMPTS, max_new_tokens=50, stop_token_ids=())
    boundaries = tiny_draft.config.resolve(tiny_target.config.num_layers).aux_boundaries
    return of_target(tiny_target, PROMPTS, plain.tokens, boundaries)


@pytest.mark.parametrize(
    ("attention", "trees"),
    [
        ("ancestors", DEEP[:1]),
        pytest.param("ancestors", SHALLOW + DEEP[:2], marks=pytest.mark.exhaustive),
        ("beam_slots", DEEP[:1]),
        pytest.param("beam_slots", DEEP, marks=pytest.mark.exhaustive),
    ],
)
def test_all_trees_equal_speculation(record, tiny_target, tiny_draft, attention, trees):
    """One call for all trees; the last round of a served request may be cut in the record."""
    found = replay(
        record, tiny_draft, trees, shared=tiny_target.shared(), draft_attention=attention
    )
    for tree in trees:
        served = e3.speculate(
            tiny_target,
            tiny_draft,
            PROMPTS,
            max_new_tokens=50,
            tree=tree,
            draft_attention=attention,
            stop_token_ids=(),
        )
        mine = found.of(tree)
        for ours, theirs in zip(mine.accept_lengths, served.accept_lengths, strict=True):
            assert ours == theirs[: len(ours)], tree
            assert len(theirs) - len(ours) <= 1, tree
        rounds = sum(map(len, served.accept_lengths))
        assert len(mine.rounds) + mine.censored <= rounds
        assert len(mine.rounds) > rounds - len(PROMPTS) - 1


@pytest.mark.parametrize("case", TRACES)
@pytest.mark.parametrize("mode", ["free", "pinned"])
def test_sglang_round_by_round(case, mode, tiny_target, tiny_draft):
    """The accept lengths of SGLang 0.5.23, from its own states where they were recorded."""
    requests = [load("traces", case)[f"single{i}"] for i in range(4)]
    tree = requests[0].tree
    whole = all(r.has_tensors(i) for r in requests for i in range(r.num_rounds))
    assert whole == (case not in TRACES[-2:])
    boundaries = tuple(requests[0].arrays["prefill/boundaries"].tolist())
    if whole:
        record = of_sglang(requests)
    else:
        prompts, outputs = [r.prompt for r in requests], [r.output_ids for r in requests]
        rounds = [rounds_of(r) for r in requests]
        record = of_target(tiny_target, prompts, outputs, boundaries, rounds)
    found = replay(
        record,
        tiny_draft,
        tree,
        mode=mode,
        shared=tiny_target.shared(),
        draft_attention="beam_slots",
    ).trees[0]
    for request, ours in zip(requests, found.accept_lengths, strict=True):
        theirs = request.arrays["accept_len"].tolist()
        assert ours == theirs[: len(ours)]
        assert len(theirs) - len(ours) <= 1
        assert not whole or len(theirs) == len(ours) or ours
    if mode == "pinned":
        equal, compared = found.engine_equal or (0, 0)
        assert equal == compared == len(found.rounds) > 40


@pytest.mark.smollm2
@pytest.mark.exhaustive
def test_smollm2_equals_speculation(smollm2_target, smollm2_drafts):
    """All trees of one call on real text, and pinned to the rounds that were served."""
    attention = "ancestors"
    draft = smollm2_drafts["target"]
    prompts = [greedy()[i]["prompt_ids"] for i in (0, 6)]
    trees = [e3.TreeConfig(3), e3.TreeConfig(3, 4, 8), e3.TreeConfig(5, 4, 16)]
    boundaries = draft.config.aux_boundaries
    served = {
        tree: e3.speculate(
            smollm2_target,
            draft,
            prompts,
            max_new_tokens=64,
            tree=tree,
            draft_attention=attention,
            trace=True,
        )
        for tree in trees
    }
    outputs = served[trees[0]].tokens
    assert all(s.tokens == outputs for s in served.values())
    record = of_target(smollm2_target, prompts, outputs, boundaries)
    shared = smollm2_target.shared()
    found = replay(record, draft, trees, shared=shared, draft_attention=attention)
    for tree, answer in served.items():
        for ours, theirs in zip(found.of(tree).accept_lengths, answer.accept_lengths, strict=True):
            assert ours == theirs[: len(ours)], tree
            assert len(theirs) - len(ours) <= 1
    last = served[trees[-1]].trace
    rounds = [
        tuple(EngineRound(r.length, r.num_correct_drafts) for r in last.of(i)) for i in range(2)
    ]
    record = of_target(smollm2_target, prompts, outputs, boundaries, rounds)
    pinned = replay(
        record, draft, trees[-1], mode="pinned", shared=shared, draft_attention=attention
    ).trees[0]
    assert pinned.engine_equal == (len(pinned.rounds),) * 2
    assert len(pinned.rounds) >= sum(map(len, rounds)) - 2


@pytest.mark.smollm2
@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("name", "tree"),
    [
        ("sglang_chain_s3", (3, 1, 4)),
        ("sglang_tree_s5_k4_d16", (5, 4, 16)),
    ],
)
def test_smollm2_sglang_statistics(smollm2_target, smollm2_drafts, name, tree):
    """SGLang's histogram on ten prompts, but for the one round of each that its end cut."""
    draft = smollm2_drafts["target"]
    answers = read(name)["results"]
    prompts = [greedy()[i]["prompt_ids"] for i in range(10)]
    outputs = [a["output_ids"] for a in answers]
    record = of_target(smollm2_target, prompts, outputs, draft.config.aux_boundaries)
    found = replay(
        record,
        draft,
        e3.TreeConfig(*tree),
        shared=smollm2_target.shared(),
        draft_attention="beam_slots",
    ).trees[0]
    for ours, answer in zip(found.stats(), answers, strict=True):
        theirs = list(answer["meta_info"]["spec_correct_drafts_histogram"])
        mine = ours["spec_correct_drafts_histogram"]
        mine += [0] * (len(theirs) - len(mine))
        gap = [a - b for a, b in zip(theirs, mine, strict=True)]
        assert min(gap) >= 0
        assert sum(gap) <= 1

"""Round by round, every number the real SGLang had: chains and trees, alone and in a batch."""

import dataclasses
import json

import numpy as np
import pytest
from selection import by_default
from sglang_compare import TIE, Comparison, compare_round, compare_with_golden
from sglang_goldens import FOLDER, TRACES, load

import eagle3_jax as e3
from eagle3_jax.trace import Round

NUMBERS = range(4)


@pytest.fixture(
    scope="module",
    params=by_default(TRACES, lambda _, case: case != "tree_s2_k2_d4"),
)
def recorded(request):
    return load("traces", request.param)


def options(request) -> dict:
    return {
        "max_new_tokens": request.max_new_tokens,
        "tree": request.tree,
        "draft_attention": "beam_slots",
        "stop_token_ids": (),
    }


@pytest.fixture(scope="module")
def alone(recorded, tiny_target, tiny_draft) -> list[list[Round]]:
    """Our rounds of each request by itself."""
    requests = [recorded[f"single{i}"] for i in NUMBERS]
    return [
        list(e3.rounds(tiny_target, tiny_draft, [r.prompt], tensors=True, **options(r)))
        for r in requests
    ]


@pytest.fixture(scope="module")
def together(recorded, tiny_target, tiny_draft) -> list[list[Round]]:
    """Our rounds of the four requests at once, by request."""
    requests = [recorded[f"batch{i}"] for i in NUMBERS]
    prompts = [r.prompt for r in requests]
    found = list(e3.rounds(tiny_target, tiny_draft, prompts, tensors=True, **options(requests[0])))
    return [[r for r in found if r.sequence == i] for i in NUMBERS]


@pytest.mark.parametrize("number", NUMBERS)
def test_every_round_alone(recorded, alone, number):
    result = compare_with_golden(recorded[f"single{number}"], alone[number])
    assert result.differences == []
    assert result.compared > 20 * len(alone[number])


@pytest.mark.parametrize("number", NUMBERS)
def test_every_round_in_a_batch(recorded, together, number):
    result = compare_with_golden(recorded[f"batch{number}"], together[number])
    assert result.differences == []
    assert result.compared > 15 * len(together[number])


def discrete(rounds: list[Round]) -> list[tuple]:
    return [
        (r.index, r.length, r.tokens, r.parents, r.positions, r.accepted, r.bonus, r.emitted)
        for r in rounds
    ]


@pytest.mark.parametrize("number", NUMBERS)
def test_a_batch_changes_nothing(alone, together, number):
    assert discrete(together[number]) == discrete(alone[number])


def test_whole_generations_in_one_program(recorded, tiny_target, tiny_draft, together):
    """`speculate` runs the same rounds and gives SGLang's ids and statistics."""
    requests = [recorded[f"batch{i}"] for i in NUMBERS]
    prompts = [r.prompt for r in requests]
    result = e3.speculate(tiny_target, tiny_draft, prompts, trace=True, **options(requests[0]))
    assert result.trace is not None
    for number, request in enumerate(requests):
        assert result.tokens[number] == request.output_ids
        mine = {k: v for k, v in result.stats[number].items() if k in request.meta_info}
        assert mine == request.meta_info
        lengths = request.arrays["accept_len"].tolist()
        assert result.accept_lengths[number] == lengths
        assert discrete(result.trace.of(number)) == discrete(together[number])


@pytest.mark.parametrize("case", by_default(TRACES, lambda _, case: case == "tree_s3_k4_d8"))
def test_statistics_of_one_request(case, tiny_target, tiny_draft):
    request = load("traces", case)["single2"]
    result = e3.speculate(tiny_target, tiny_draft, [request.prompt], **options(request))
    mine = {k: v for k, v in result.stats[0].items() if k in request.meta_info}
    assert mine == request.meta_info
    assert result.tokens[0] == request.output_ids


@pytest.mark.parametrize("batch", [True, False], ids=["batch", "single"])
def test_plain_decoding(tiny_target, batch):
    recorded = json.loads((FOLDER / "traces/nospec.json").read_text())
    limit = recorded["sampling_params"]["max_new_tokens"]
    expected = [
        recorded["results"][f"batch{i}" if batch else f"single{i}"]["output_ids"] for i in NUMBERS
    ]
    if batch:
        result = e3.generate(
            tiny_target, recorded["prompts"], max_new_tokens=limit, stop_token_ids=()
        )
        assert result.tokens == expected
        assert result.accept_lengths == [[], [], [], []]
        assert not any(key.startswith("spec_") for key in result.stats[0])
    else:
        for prompt, ids in zip(recorded["prompts"], expected, strict=True):
            result = e3.generate(tiny_target, [prompt], max_new_tokens=limit, stop_token_ids=())
            assert result.tokens == [ids]


@pytest.fixture(scope="module")
def big(tiny_target, tiny_draft):
    """One recorded request of the big tree and our rounds of it."""
    request = load("traces", "tree_s5_k8_d32")["single1"]
    rounds = list(
        e3.rounds(tiny_target, tiny_draft, [request.prompt], tensors=True, **options(request))
    )
    return request, rounds


def swapped(ours: Round, name: str, first: int, second: int) -> Round:
    assert ours.tensors is not None
    values = np.array(ours.tensors[name])
    values[[first, second]] = values[[second, first]]
    return dataclasses.replace(ours, tensors=ours.tensors | {name: values})


def neighbours(request, index: int, level: int, close: bool) -> int:
    """Flat index of a candidate of `level` whose next sibling's score is (not) closer than TIE."""
    k = request.tree.topk
    scores = request.candidates("scores", index)
    start = k + (level - 1) * k * k
    gaps = np.abs(np.diff(scores[start : start + k * k].reshape(k, k), axis=1))
    wanted = gaps < TIE if close else gaps > 100 * TIE
    beam, child = np.argwhere(wanted)[0]
    return int(start + beam * k + child)


def test_an_order_inside_a_tie_is_no_difference(big):
    request, rounds = big
    at = neighbours(request, 4, 4, close=True)
    result = Comparison()
    compare_round(result, request, 4, swapped(rounds[4], "candidate_tokens", at, at + 1))
    assert (result.differences, result.tied) == ([], [4])


def test_another_order_is_a_difference(big):
    request, rounds = big
    at = neighbours(request, 4, 2, close=False)
    result = Comparison()
    compare_round(result, request, 4, swapped(rounds[4], "candidate_tokens", at, at + 1))
    assert result.tied == []
    assert "level 2 tokens" in result.differences[0]

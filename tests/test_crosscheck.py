"""Recorded rounds of the real SGLang: untouched they are equal, one change at a time is named."""

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
from crosscheck_data import answers_folder
from crosscheck_golden import edited, golden_run, with_request, with_stats

from eagle3_jax.crosscheck import DumpedRound, EngineRun, Result, compare, of_trace, ours, read_run
from eagle3_jax.crosscheck.metrics import distance
from eagle3_jax.crosscheck.noise import measure
from eagle3_jax.crosscheck.variants import with_config

CASES = [
    "tree_s3_k4_d8",
    *(
        pytest.param(case, marks=pytest.mark.exhaustive)
        for case in ("chain_s1", "chain_s3", "tree_s2_k2_d4", "tree_s5_k8_d32")
    ),
]


@pytest.fixture(scope="module")
def pair(tiny_target, sglang_models, converted):
    """The tiny pair as SGLang 0.5.23 runs it."""
    import eagle3_jax as e3

    folder = converted(sglang_models / "draft", "--target", str(sglang_models / "target"))
    draft = e3.load_draft(folder, target=tiny_target, as_engine="sglang-0.5.23")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ours, "BATCH", 1)  # one program for all of this file
        yield tiny_target, draft


ANSWERS = {
    "aux_one_early": ("draft differs at aux states", "AUX_SHIFTED", "one layer early"),
    "histogram_cut": (
        "statistics differ",
        "METRIC_INVARIANT",
        "counts 2 rounds, spec_verify_ct says 8",
    ),
    "token_swapped": (
        "acceptance differs at round 2",
        "TOKEN_NOT_THE_ENGINES_CHOICE",
        "token 5 is 64",
    ),
    "stale_kv": ("target differs", "KV_STALE_ROW", "row 14 holds"),
    "mask_bit": ("tree differs", "TREE_MASK_BIT", "node 1 does not see node 0"),
    "position": ("tree differs", "POS_OFF_BY_ONE", "positions off by +1"),
}
"""Fault of tests/data/crosscheck/tree -> what its answers alone show."""

DUMPS = {
    "aux_one_early": ("draft differs at aux states", "AUX_SHIFTED", "(1, 3, 4) for (2, 4, 5)"),
    "d2t_as_ids": ("draft differs at draft_tokens.0", "VOCAB_MAP_OFFSETS_AS_IDS", "round 0"),
    "norm_before_residual": (
        "draft differs at",
        "NORM_RESIDUAL_SOURCE",
        "norm_before_residual=true",
    ),
    "norm_output": ("draft differs at draft_input.0", "NORM_FEEDBACK", "round 0"),
    "fc_norm": ("draft differs at prefill.extend_aux", "NORM_BEFORE_FC", "fc_norm"),
    "draft_position": ("draft differs at draft_positions.0", "POS_OFF_BY_ONE", "off by +1"),
    "tree_scores": ("draft differs at draft_tokens.1", "TREE_SCORES", "own probability"),
    "token_swapped": (
        "acceptance differs at round 2",
        "TOKEN_NOT_THE_ENGINES_CHOICE",
        "node 0 say 41",
    ),
    "accept_one_less": ("acceptance differs at round 2", "UNDER_ACCEPTED", "1 were accepted"),
    "stale_kv": ("target differs: request 0, round 3", "KV_STALE_ROW", "row 14 holds"),
    "stale_draft_kv": (
        "draft differs at draft_hidden.0",
        "KV_STALE_ROW",
        "row 14 holds",
    ),
    "mask_bit": ("tree differs: request 0, round 1, node 1", "TREE_MASK_BIT", "mask bit (1, 0)"),
    "position": ("tree differs: request 0, round 1", "POS_OFF_BY_ONE", "off by +1"),
}
"""The same beside the dump."""


def recorded(name: str, folder: Path, *, dump: bool = False, kind: str = "tree") -> EngineRun:
    return read_run(answers_folder(kind, name, folder / name, dump=dump))


@pytest.mark.parametrize("name", ["right", "right_batch4", "rounding"])
def test_right_answers_are_equal(name, pair, tmp_path):
    result = compare(recorded(name, tmp_path), *pair)
    assert (result.kind, result.status) == ("equal", 0), result.text()
    assert all("statistics" in line.checked for line in result.lines)
    assert "states" in result.lines[0].checked


@pytest.mark.parametrize("name", ["right", "right_batch4"])
def test_right_dumps_are_equal(name, pair, tmp_path):
    pytest.importorskip("torch")
    result = compare(recorded(name, tmp_path, dump=True), *pair)
    assert (result.kind, result.status) == ("equal", 0), result.text()
    assert "tensors" in result.verdict


@pytest.mark.parametrize("name", ANSWERS)
def test_a_fault_is_named_from_answers(name, pair, tmp_path):
    _named(compare(recorded(name, tmp_path), *pair), *ANSWERS[name])


@pytest.mark.parametrize("tensor", ["input_token_logprobs", "output_top_logprobs"])
def test_any_wrong_logprob_is_named(tensor, pair, tmp_path):
    """Half a nat at one place, of a token that was not chosen or of the prompt's fourth."""
    run = recorded("right", tmp_path)
    request = run.requests[0]
    if tensor == "output_top_logprobs":
        (first, (token, value), *rest), top = request.output_top[5], list(request.output_top)
        top[5] = (first, (token, value - 0.5), *rest)
        changed = dataclasses.replace(request, output_top=top)
    else:
        values = request.input_logprobs.copy()
        values[3] += 0.5
        changed = dataclasses.replace(request, input_logprobs=values)
    result = compare(dataclasses.replace(run, requests=[changed, *run.requests[1:]]), *pair)
    assert result.kind == "target differs"
    assert result.first.tensor == tensor
    assert "1 of" in result.first.detail
    place = "place 5" if tensor == "output_top_logprobs" else "prompt token 3"
    assert place in result.first.detail


@pytest.mark.parametrize("name", DUMPS)
def test_a_fault_is_named_from_its_dump(name, pair, tmp_path):
    pytest.importorskip("torch")
    _named(compare(recorded(name, tmp_path, dump=True), *pair), *DUMPS[name])


SUSPECTS = {
    "d2t_as_ids": "d2t read as ids",
    "norm_before_residual": "norm_before_residual=true",
    "norm_output": "feedback=post_norm",
    "fc_norm": "fc_norm=true",
    "accept_one_less": "one round accepted fewer drafts than matched",
}


@pytest.mark.exhaustive
@pytest.mark.parametrize("kind", ["chain", "tree"])
@pytest.mark.parametrize("name", SUSPECTS)
def test_statistics_name_their_suspects(kind, name, pair, tmp_path):
    """From counts alone several faults may look alike: all that explain them are listed."""
    result = compare(recorded(name, tmp_path, kind=kind), *pair)
    assert result.kind == "statistics differ"
    assert result.first is not None
    assert SUSPECTS[name] in result.first.cause
    assert "suspect" in result.first.cause


@pytest.mark.exhaustive
def test_counts_that_no_suspect_explains_are_said_to_be_so(pair, tmp_path):
    result = compare(recorded("tree_scores", tmp_path), *pair)
    assert result.verdict.startswith("statistics differ: request 0: spec_verify_ct is 11")
    assert any("cannot be decided without the engine's rounds" in note for note in result.notes)


def _named(result: Result, verdict: str, code: str, words: str):
    assert result.verdict.startswith(verdict), result.text()
    assert result.status == 1
    assert result.first is not None
    assert result.first.code == code
    assert words in result.verdict
    json.dumps(result.json(), allow_nan=False)
    assert len(result.text().splitlines()) < 45


@pytest.mark.parametrize("case", CASES)
def test_untouched_is_equal(case, pair):
    result = compare(golden_run(case, ("single0", "batch2")), *pair)
    assert result.verdict.startswith("equal: 2 requests, 48 tokens"), result.text()
    assert (result.status, result.first, result.others, result.ties) == (0, None, [], [])
    tensors = int(result.verdict.split(", ")[-1].split()[0])
    assert tensors > 10 * sum(line.rounds[1] or 0 for line in result.lines)


def d2t(one: DumpedRound, draft) -> None:
    ids = np.asarray(draft.draft_to_target[...])
    offsets = {int(t): int(t) - i for i, t in enumerate(ids)}
    name = "draft_tokens.0"
    one.tensors[name] = np.array([offsets[int(t)] for t in one.tensors[name]])


def flipped(one: DumpedRound) -> DumpedRound:
    assert one.mask is not None
    mask = one.mask.copy()
    mask[3, 0] = False
    return dataclasses.replace(one, mask=mask)


def moved(one: DumpedRound) -> DumpedRound:
    assert one.positions is not None
    return dataclasses.replace(one, positions=[p + 1 for p in one.positions])


def reparented(one: DumpedRound) -> DumpedRound:
    assert one.positions is not None
    return dataclasses.replace(one, parents=[-1] + [0] * (len(one.positions) - 1))


def add(one: DumpedRound, name: str, row: int | None = None, size: float = 0.05) -> None:
    value = one.tensors[name]
    noise = np.random.default_rng(0).standard_normal(value.shape).astype(value.dtype)
    where = ... if row is None else row
    value[where] += size * noise[where]


def nan(one: DumpedRound, name: str) -> None:
    one.tensors[name][..., 0] = np.nan


def shifted_draft(one: DumpedRound) -> None:
    one.tensors["draft_positions.0"] += 1


def dropped(one: DumpedRound) -> DumpedRound:
    assert one.accepted is not None
    return dataclasses.replace(one, accepted=one.accepted[:-1], num_correct=len(one.accepted) - 2)


def tokens_swapped(one: DumpedRound) -> None:
    value = one.tensors["draft_tokens.1"]
    value[[0, 2]] = value[[2, 0]]


TREE = "tree_s3_k4_d8"
EDITS = {
    "mask bit": (flipped, "tree differs: request 0, round 1, node 3: mask bit (3, 0)"),
    "positions": (moved, "tree differs: request 0, round 1, node 0: positions is 12 at 0"),
    "parents": (reparented, "tree differs: request 0, round 1, node"),
    "draft positions": (shifted_draft, "draft differs at draft_positions.0"),
    "order of beams": (tokens_swapped, "draft differs at draft_tokens.1: request 0, round 1"),
    "draft state": (lambda o: add(o, "draft_hidden.1", 2), "draft differs at draft_hidden.1"),
    "draft logits": (lambda o: add(o, "draft_logits.0", 3), "draft differs at draft_logits.0"),
    "carried state": (lambda o: add(o, "seed_hidden"), "draft differs at seed_hidden"),
    "input state": (lambda o: add(o, "draft_input.1", 1), "draft differs at draft_input.1"),
    "scores": (lambda o: add(o, "candidate_scores"), "draft differs at candidate_scores"),
    "target state": (
        lambda o: add(o, "target_aux", 4),
        "target differs: request 0, round 1, node 4",
    ),
    "target logits": (lambda o: add(o, "target_logits", 5), "target differs: request 0, round 1"),
    "NaN": (lambda o: nan(o, "draft_logits.1"), "draft differs at draft_logits.1"),
    "extend state": (lambda o: add(o, "extend_aux", 0), "draft differs at extend_aux"),
    "extend logits": (lambda o: add(o, "extend_logits"), "draft differs at extend_logits"),
    "accepted": (dropped, "acceptance differs at round 1"),
}
CODES = {
    "mask bit": "TREE_MASK",
    "positions": "POS_OFF_BY_ONE",
    "parents": "TREE_PARENT",
    "draft positions": "POS_OFF_BY_ONE",
    "NaN": "NUMERIC_NAN",
    "accepted": "UNDER_ACCEPTED",
    "draft logits": "KV_OTHER",
    "target logits": "KV_OTHER",
    "order of beams": "TREE_ORDER",
}


@pytest.fixture(scope="module")
def tree_run():
    return golden_run(TREE)


@pytest.mark.parametrize("name", EDITS)
def test_one_change_is_named(name, tree_run, pair):
    edit, verdict = EDITS[name]
    result = compare(edited(tree_run, 1, edit), *pair)
    assert result.verdict.startswith(verdict), result.text()
    assert result.status == 1
    assert result.first is not None
    assert result.first.round == 1
    if name in CODES:
        assert result.first.code == CODES[name]


def test_d2t_read_as_ids(tree_run, pair):
    result = compare(edited(tree_run, 2, lambda one: d2t(one, pair[1])), *pair)
    assert result.verdict.startswith("draft differs at draft_tokens.0: request 0, round 2, node 0")
    assert "d2t read as ids" in result.verdict


def test_an_earlier_cause_comes_before_a_later_one(tree_run, pair):
    """A wrong state in round 1 is what a wrong token in round 3 follows from."""
    run = edited(tree_run, 1, EDITS["extend state"][0])
    result = compare(edited(run, 3, EDITS["positions"][0]), *pair)
    assert result.first is not None
    assert (result.first.round, result.first.tensor) == (1, "extend_aux")


def test_rounding_is_no_fault(tree_run, pair):
    """States moved by a few spacings of float32 stay equal."""
    run = tree_run
    for index in range(3):
        run = edited(run, index, lambda one: add(one, "target_aux", size=1e-6))
        run = edited(run, index, lambda one: add(one, "draft_hidden.0", size=1e-6))
    assert compare(run, *pair).kind == "equal"


@pytest.mark.parametrize("size", [1e-3, 1e-2])
def test_a_small_fault_is_no_rounding(size, tree_run, pair):
    result = compare(edited(tree_run, 1, lambda one: add(one, "target_aux", 0, size)), *pair)
    assert result.kind == "target differs"


def test_a_token_that_is_not_the_targets(tree_run, pair):
    request = tree_run.requests[0]
    output = [*request.output]
    output[9] = (output[9] + 1) % 100
    plain = dataclasses.replace(request, output=output, rounds=None)
    result = compare(with_request(tree_run, plain), *pair)
    assert result.first is not None
    assert result.first.position == 9
    assert "no near tie" in result.verdict
    assert result.lines[0].equal_until == 9


def test_several_faults_are_all_seen(tree_run, pair):
    """The text is followed, so what comes after a wrong token is judged as well."""
    request = tree_run.requests[0]
    output = [*request.output]
    output[9], output[20] = 1, 2
    plain = dataclasses.replace(request, output=output, rounds=None, stats={})
    result = compare(with_request(tree_run, plain), *pair, tree=tree_run.settings.tree)
    assert {d.position for d in (result.first, *result.others) if d} >= {9, 20}


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"spec_correct_drafts_histogram": [1, 1, 4]}, "counts 6 rounds, spec_verify_ct says 8"),
        ({"spec_num_correct_drafts": 20}, "the histogram [1, 1, 4, 2] holds 15 accepted drafts"),
        ({"spec_num_proposed_drafts": 57}, "8 rounds of 7 drafts make 56"),
        ({"spec_accept_length": 3.2}, "spec_accept_length is 3.2, completion_tokens / spec"),
        ({"completion_tokens": 23}, "completion_tokens is 23, the output has 24 ids"),
    ],
)
def test_statistics_that_contradict_themselves(changes, says, tree_run, pair):
    result = compare(with_stats(tree_run, **changes), *pair)
    assert result.verdict.startswith("statistics differ: request 0: ")
    assert says in result.verdict


def test_metrics():
    x = np.random.default_rng(0).standard_normal(200)
    same = distance(x, x)
    assert (same.rel_diff, same.max_abs, same.norm_ratio) == (0.0, 0.0, 1.0)
    twice = distance(2 * x, x)
    assert twice.cosine == pytest.approx(1)
    assert twice.norm_ratio == pytest.approx(2)
    assert twice.rel_diff == pytest.approx(1 - 2 * 2 / 5)
    assert twice.rel_l2 == pytest.approx(1)
    x[7] = np.nan
    broken = distance(x, x)
    assert (broken.finite, broken.where) == (False, (7,))
    assert broken.json()["rel_diff"] is None


def test_bounds_follow_the_measured_noise_up_to_the_cap():
    assert measure("float32", [np.full(9, 3e-6)]).logit == pytest.approx(2.4e-5)
    assert measure("float32", [np.full(9, 1.0)]).logit == 1e-3
    assert measure("bfloat16", [np.full(9, 0.004)]).logit == pytest.approx(0.032)
    half_wrong = measure("float32", [np.array([1e-7] * 6 + [5.0] * 5)])
    assert half_wrong.logit == pytest.approx(2e-5)  # faults in under half of the places
    assert "cap holds" in measure("bfloat16").how


def half_run(models: Path, folder: Path, tree, wrong: dict | None = None) -> EngineRun:
    """Our own rounds in bfloat16, as an engine's."""
    import eagle3_jax as e3

    target = e3.load_target(models / "target", dtype="bfloat16")
    draft = e3.load_draft(folder, target=target, dtype="bfloat16", as_engine="sglang-0.5.23")
    if wrong:
        draft = with_config(draft, dataclasses.replace(draft.config, **wrong))
    prompts = [[5, 17, 33, 91, 120, 7, 100, 45], [64, 3, 88, 21, 9]]
    found = e3.speculate(
        target, draft, prompts, max_new_tokens=40, tree=tree, stop_token_ids=(), trace=True
    )
    assert found.trace is not None
    return of_trace(found.trace, "bfloat16")


@pytest.mark.parametrize(
    "wrong",
    [
        None,
        pytest.param({"norm_before_residual": True}, marks=pytest.mark.exhaustive),
    ],
)
def test_a_half_type_is_rounding_and_a_fault_in_it_is_none(
    wrong, tree_run, pair, sglang_models, converted
):
    """bfloat16 beside float32: every difference is a tie, until a switch is wrong."""
    folder = converted(sglang_models / "draft", "--target", str(sglang_models / "target"))
    tree = tree_run.settings.tree
    result = compare(half_run(sglang_models, folder, tree, wrong), *pair, tree=tree)
    expected = "draft differs" if wrong else "equal up to ties"
    assert result.kind == expected, result.text()
    assert result.ties
    assert all(t.gap <= t.bound for t in result.ties)

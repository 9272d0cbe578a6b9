"""Faults that users reported (ids of the collected cases), and the finding each must give."""

import dataclasses

import numpy as np
import pytest
from crosscheck_golden import edited, golden_run, with_request
from scripted_draft import ReferenceDraft, Sizes, Truth
from scripted_records import Request, make

from eagle3_jax.config import TreeConfig
from eagle3_jax.crosscheck import (
    CrosscheckError,
    DumpedRound,
    EngineRequest,
    EngineRun,
    Settings,
    compare,
    compare_recorded,
    compare_runs,
    of_record,
    ours,
    read_run,
)
from eagle3_jax.crosscheck.evidence import Evidence
from eagle3_jax.crosscheck.noise import measure
from eagle3_jax.crosscheck.probe_draft import DraftRows
from eagle3_jax.crosscheck.stats import impossible, match_rates, metric_names
from eagle3_jax.crosscheck.suspects import pinned_at_maximum
from eagle3_jax.generation import rounds

CHAIN = TreeConfig(3)
BOUNDARIES = (2, 4, 5)
CASES = {  # one shape for all records of this file: 24 prompt tokens, about 60 in all
    "hole": ((3, 3, 0, 1), Truth(kv="hole")),
    "right": ((3, 0, 1, 2, 3, 0, 2, 1), Truth()),
}


def scripted(name: str, sequences: int = 1):
    script, truth = CASES[name]
    request = Request(script=script, rounds=12)
    return make([request] * sequences, truth=truth, capture=BOUNDARIES, seed=3)


def recorded(name: str):
    made = scripted(name)
    run = of_record(made.record, name)
    return compare_recorded(run, made.draft(Truth()), made.shared(), tree=CHAIN), made


def test_a_hole_after_each_full_accept():  # E3-052
    result, made = recorded("hole")
    assert result.kind == "draft differs"
    assert result.first is not None
    assert result.first.code == "KV_FULL_ACCEPT_HOLE"
    assert "only rounds after a full accept differ" in result.verdict
    first = made.accepted[0].index(3) + 1
    assert result.first.round == first


def test_equal_rounds_are_no_acceptance_problem():  # E3-096, E3-092
    result, made = recorded("right")
    assert result.status == 0
    assert result.verdict.startswith("not an acceptance problem: 1 requests")
    assert f"accept length {made.accept_length:.2f} as replayed" in result.verdict
    assert any("text itself was not checked" in note for note in result.notes)


def test_three_numbers_called_accept_length():  # E3-092
    found = metric_names([3, 0, 1, 2], completion=11, nodes=4)
    assert found["accepted per round"] == 1.5
    assert found["tokens per verification"] == 2.5
    assert found["completion tokens / verifications"] == 2.75
    assert found["accepted / drafted"] == 0.5


def test_prefix_and_raw_match_rates():  # E3-094
    found = match_rates([[1, 0, 1, 0], [1, 1, 0, 1]])
    assert (found["prefix"], found["raw"], found["drafted"]) == (3, 5, 8)
    assert (found["prefix_rate"], found["raw_rate"]) == (3 / 8, 5 / 8)


def texts(at: int, margin: float, dtype: str):  # E3-067
    """Two runs whose tokens part at one place, with top logprobs of logits near 20."""
    rng = np.random.default_rng(0)
    plain = rng.integers(2, 99, 40).tolist()
    other = [*plain]
    other[at] = 100
    for i in range(at + 1, 40):
        other[i] = int(rng.integers(2, 99))
    found = []
    for output, sign in ((plain, 1), (other, -1)):
        best = -np.full(40, 0.7)
        tops = [((t, float(b)), (101, float(b) - 4)) for t, b in zip(output, best, strict=True)]
        gap = margin if sign > 0 else 0.5 * margin
        pair = (plain[at], 100) if sign > 0 else (100, plain[at])
        tops[at] = ((pair[0], -0.7), (pair[1], -0.7 - gap))
        logprobs = best + sign * 0.004 * rng.standard_normal(40)
        stats = {"completion_tokens": 40, "finish_reason": {"type": "length", "length": 40}}
        found.append(
            EngineRun(
                "run",
                Settings(dtype=dtype),
                [
                    EngineRequest(
                        "0", [1, 2, 3], output, stats, output_logprobs=logprobs, output_top=tops
                    )
                ],
            )
        )
    return found


@pytest.mark.parametrize(("margin", "kind"), [(0.004, "equal up to ties"), (3.2, "target differs")])
def test_a_near_tie_and_a_logic_error(margin, kind):  # E3-067
    plain, speculative = texts(31, margin, "bfloat16")
    result = compare_runs(speculative, plain)
    assert result.kind == kind
    assert result.status == (0 if kind == "equal up to ties" else 1)
    assert result.lines[0].equal_until == 31
    if result.first is not None:
        assert result.first.code == "LOSSLESS_LOGIC_ERROR"
    else:
        assert result.ties[0].position == 31


def test_without_logprobs_a_difference_is_not_decidable():
    plain, other = texts(31, 0.004, "bfloat16")
    bare = [
        dataclasses.replace(
            run,
            requests=[
                dataclasses.replace(r, output_top=None, output_logprobs=None) for r in run.requests
            ],
        )
        for run in (plain, other)
    ]
    result = compare_runs(*bare)
    assert (result.kind, result.status) == ("not decidable", 2)
    assert "no tie can be told" in result.verdict


def edited_request(run: EngineRun, **changes) -> EngineRun:
    return dataclasses.replace(run, requests=[dataclasses.replace(run.requests[0], **changes)])


def test_a_token_that_is_not_listed_is_no_tie():
    """Its logprob is unknown: below the last one listed, which here is the chosen token itself."""
    plain, other = texts(31, 0.004, "bfloat16")
    alone = [
        edited_request(run, output_top=[top[:1] for top in run.requests[0].output_top])
        for run in (plain, other)
    ]
    assert compare_runs(*alone).kind == "not decidable"


def test_two_sampled_texts_are_not_decidable():
    plain, other = texts(31, 3.2, "bfloat16")
    result = compare_runs(edited_request(other, temperature=0.8), plain)
    assert (result.kind, result.first) == ("not decidable", None)
    assert "sampled" in result.verdict


@pytest.mark.parametrize(("limit", "kind"), [(20, "equal"), (30, "target differs")])
def test_a_shorter_text_that_was_asked_for(limit, kind):
    """Twenty tokens of twenty beside forty of forty are no fault, of thirty they are."""
    plain, _ = texts(31, 3.2, "bfloat16")
    request = plain.requests[0]
    short = edited_request(
        plain,
        output=request.output[:20],
        output_top=request.output_top[:20],
        output_logprobs=request.output_logprobs[:20],
        max_new_tokens=limit,
        stats={},
    )
    long = edited_request(plain, max_new_tokens=40)
    for pair in ((short, long), (long, short)):
        assert compare_runs(*pair).kind == kind


def test_nothing_in_common_is_not_equal(tmp_path):
    np.savez(tmp_path / "a.npz", x=np.zeros(3))
    np.savez(tmp_path / "b.npz", y=np.zeros(3))
    runs = [read_run(tmp_path / name) for name in ("a.npz", "b.npz")]
    assert compare_runs(runs[0], runs[0]).kind == "equal"
    result = compare_runs(*runs)
    assert (result.kind, result.status) == ("not decidable", 2)
    np.savez(tmp_path / "text.npz", x=np.array(["a"]))
    with pytest.raises(CrosscheckError, match="x is <U1, expected numbers"):
        read_run(tmp_path / "text.npz")


def test_histograms_longer_than_the_tree_said():
    requests = [
        EngineRequest("0", [1], [5, 5], {"spec_correct_drafts_histogram": counts})
        for counts in ([0, 0, 1], [0, 0, 0, 2])
    ]
    assert pinned_at_maximum(requests, TreeConfig(2)) is None


def test_a_rate_that_is_no_number_contradicts_itself():
    stats = {"spec_num_correct_drafts": 3, "spec_num_proposed_drafts": 9, "completion_tokens": 5}
    found = impossible(stats | {"spec_accept_rate": float("nan")}, nodes=4, steps=3, output=5)
    assert found == ["spec_accept_rate is nan, accepted / proposed drafts is 0.333333"]
    assert not impossible(stats | {"spec_accept_rate": 1 / 3}, nodes=4, steps=3, output=5)


TREE = "tree_s3_k4_d8"


@pytest.fixture(scope="module")
def pair(tiny_target, sglang_models, converted):
    import eagle3_jax as e3

    folder = converted(sglang_models / "draft", "--target", str(sglang_models / "target"))
    draft = e3.load_draft(folder, target=tiny_target, as_engine="sglang-0.5.23")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ours, "BATCH", 1)
        yield tiny_target, draft


@pytest.fixture(scope="module")
def tree_run():
    return golden_run(TREE, ("single0", "batch1", "batch2"))


def test_a_dense_prefix_goes_on_instead_of_the_path(tree_run, pair):  # E3-058
    request = tree_run.requests[0]
    scattered = next(
        r
        for r in request.rounds
        if r.accepted != list(range(len(r.accepted))) and "extend_aux" in r.tensors
    )

    def dense(one: DumpedRound):
        one.tensors["extend_aux"] = one.tensors["target_aux"][: len(one.accepted or [])]

    result = compare(edited(tree_run, scattered.index, dense), *pair)
    assert result.first is not None
    assert result.first.code == "TREE_NOT_COMPACTED"
    assert result.first.round == scattered.index
    assert f"dense prefix used: states of nodes {list(range(len(scattered.accepted)))}" in (
        result.verdict
    )


def test_the_state_of_another_request(tree_run, pair):  # E3-083
    other = tree_run.requests[1].rounds[1]

    def taken(one: DumpedRound):
        one.tensors["draft_input.0"] = other.tensors["draft_input.0"].copy()
        one.tensors.pop("seed_hidden")

    result = compare(edited(tree_run, 1, taken, number=2), *pair)
    assert result.first is not None
    assert (result.first.request, result.first.code) == (2, "BATCH_WRONG_ROW")
    assert "matches state of request 1" in result.verdict
    assert [line.equal_until for line in result.lines] == [24, 24, 24]


def nan_run(tree_run) -> EngineRun:  # E3-071
    rounds_, steps = 6, 3
    output = [0] * (1 + rounds_ * (steps + 1))
    stats = {
        "spec_verify_ct": rounds_,
        "spec_num_correct_drafts": rounds_ * steps,
        "spec_correct_drafts_histogram": [0] * steps + [rounds_],
        "completion_tokens": len(output),
        "prompt_tokens": 8,
    }
    request = dataclasses.replace(tree_run.requests[0], output=output, stats=stats, rounds=None)
    return dataclasses.replace(tree_run, requests=[request])


def test_acceptance_pinned_at_its_maximum(tree_run, pair):  # E3-071
    result = compare(nan_run(tree_run), *pair)
    assert result.status == 1
    assert any(d and d.code == "NUMERIC_NAN" for d in (result.first, *result.others)), result.text()
    assert "pinned at its maximum" in result.text()


def test_nan_in_an_aux_state_names_boundary_and_row(tree_run, pair):  # E3-071
    target, draft = pair
    request = tree_run.requests[0]
    aux = ours.Ours(target, draft, tree_run.settings.tree).teach(request.prompt, request.output).aux
    rows = aux.reshape(len(aux), -1).copy()
    rows[30 - 8, 40] = np.nan
    broken = dataclasses.replace(request, aux=rows, rounds=None)
    result = compare(with_request(tree_run, broken), *pair)
    assert result.first is not None
    assert result.first.code == "NUMERIC_NAN"
    assert "NaN or infinity at boundary 4, position 22" in result.verdict


def stopped(tree_run, pair, *, limit: int | None, after: int) -> tuple[EngineRequest, int]:
    """The first request cut right after an accepted run that holds a made-up stop token."""
    target, draft = pair
    request = dataclasses.replace(tree_run.requests[0], rounds=None, stats={})
    found = list(
        rounds(
            target,
            draft,
            [request.prompt],
            max_new_tokens=24,
            tree=tree_run.settings.tree,
            stop_token_ids=(),
            tensors=True,
        )
    )
    run = next(r for r in found if r.accept_length >= 3)
    at = run.length - len(request.prompt) + 1  # the run's first token
    end = at + 1 + after
    cut = dataclasses.replace(request, output=request.output[:end], max_new_tokens=limit)
    return dataclasses.replace(cut, temperature=0.0, stats={}), at


def test_a_token_after_eos_in_an_accepted_run(tree_run, pair):  # E3-068
    request, at = stopped(tree_run, pair, limit=None, after=1)
    stop = request.output[at]
    run = with_request(tree_run, request)
    run = dataclasses.replace(run, requests=run.requests[:1])
    result = compare(run, *pair, tree=run.settings.tree, stop_token_ids=(stop,))
    assert result.first is not None
    assert result.first.code == "LOSSLESS_AFTER_STOP"
    assert "1 token after EOS" in result.verdict


def test_a_run_cut_at_max_new_tokens_is_right(tree_run, pair):  # E3-068
    request, _ = stopped(tree_run, pair, limit=None, after=1)
    limit = len(request.output)
    stats = {"finish_reason": {"type": "length", "length": limit}}
    request = dataclasses.replace(request, max_new_tokens=limit, stats=stats)
    run = dataclasses.replace(with_request(tree_run, request), requests=[request])
    result = compare(run, *pair, tree=run.settings.tree, stop_token_ids=())
    assert result.kind == "equal", result.text()
    longer = dataclasses.replace(request, max_new_tokens=limit - 1)
    run = dataclasses.replace(run, requests=[longer])
    result = compare(run, *pair, tree=run.settings.tree, stop_token_ids=())
    assert result.first is not None
    assert result.first.code == "LOSSLESS_LENGTH"
    assert f"{limit} tokens, max_new_tokens is {limit - 1}" in result.verdict


def paged(one: DumpedRound, row: int, level: int) -> None:
    for name in ("draft_hidden", "draft_logits"):
        one.tensors[f"{name}.{level}"][row] += 0.1


def test_a_page_that_branches_share(tree_run, pair):  # E3-060
    right = dataclasses.replace(
        tree_run, settings=dataclasses.replace(tree_run.settings, page_size=1)
    )
    wrong = edited(tree_run, 1, lambda one: paged(one, 2, 1))
    wrong = dataclasses.replace(wrong, settings=dataclasses.replace(wrong.settings, page_size=4))
    result = compare_runs(wrong, right)
    assert result.first is not None
    assert result.first.code == "TREE_PAGED_COPY"
    position = tree_run.requests[0].rounds[1].tensors["draft_positions.1"][2]
    assert f"branch 2 at position {position}, page size 4 beside 1" in result.verdict
    assert compare_runs(right, right).kind == "equal"


def test_the_branch_and_positions_another_branch_reads(tree_run, pair):  # E3-060
    """The engine's numbers made by our own rows with the wrong sight: the probe finds it."""
    target, draft = pair
    mine = ours.Ours(target, draft, tree_run.settings.tree)
    request = tree_run.requests[0]
    taught = [mine.teach(r.prompt, r.output) for r in tree_run.requests]
    evidence = Evidence(mine, tree_run.requests, 0, taught, measure("float32"))
    theirs, expected = next(p for p in mine.pinned(request) if p[0].index == 1)
    rows = DraftRows.of("draft_hidden.1", theirs, expected, evidence)
    assert rows is not None
    wanted = next(
        c
        for c in rows._of_another_branch()
        if c.words.startswith("branch 2 also sees") and "branch 1" in c.words
    )
    made = rows.run([wanted])[0]["draft_hidden"]

    def wrong(one: DumpedRound):
        one.tensors["draft_hidden.1"] = made

    result = compare(edited(tree_run, 1, wrong), *pair)
    assert result.first is not None
    assert (result.first.code, result.first.node) == ("TREE_PAGED_COPY", 2)
    assert wanted.words in result.verdict


def port(w, residual: str) -> dict[str, np.ndarray]:  # E3-038
    """Named tensors of one row in forward order, by the float64 reference."""
    sizes = Sizes()
    rng = np.random.default_rng(5)
    embedding = rng.standard_normal((sizes.vocab, sizes.hidden))
    draft = ReferenceDraft(w, Truth(residual=residual), sizes, embedding, None)
    hidden = draft.fuse(rng.standard_normal((3, sizes.hidden)))
    e = embedding[17]
    made = {"embedding": e, "fused": hidden}
    normed = draft.norm(hidden, "midlayer.hidden_norm")
    x = np.concatenate((draft.norm(e, "midlayer.input_layernorm"), normed))
    v = draft.linear(x, "midlayer.self_attn.v_proj").reshape(-1, sizes.head_dim)
    attended = np.repeat(v, sizes.heads // sizes.kv_heads, axis=0).reshape(-1)
    attended = draft.linear(attended, "midlayer.self_attn.o_proj")
    a = attended + (e if residual == "embedding" else hidden)
    y = draft.norm(a, "midlayer.post_attention_layernorm")
    gate, up = (draft.linear(y, f"midlayer.mlp.{n}_proj") for n in ("gate", "up"))
    out = a + draft.linear(gate / (1 + np.exp(-gate)) * up, "midlayer.mlp.down_proj")
    assert np.allclose(draft.step(17, hidden, 0, [])[0], out)
    return made | {
        "normed input": x,
        "attention": attended,
        "attn residual sum": a,
        "post norm": y,
        "out": out,
    }


def test_a_port_with_another_residual(tmp_path):  # E3-038
    made = scripted("right")
    files = []
    for residual in ("embedding", "hidden"):
        files.append(tmp_path / f"{residual}.npz")
        np.savez(files[-1], **port(made.weights, residual))
    result = compare_runs(*map(read_run, files))
    assert result.first is not None
    assert result.first.tensor == "raw.attn residual sum"
    assert "norm ratio" in result.verdict
    assert "cosine" in result.verdict
    assert compare_runs(read_run(files[1]), read_run(files[1])).kind == "equal"

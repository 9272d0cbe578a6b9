"""What is counted from rounds: the numbers of users' reports, by name, and what pays."""

import dataclasses
import json
import math

import ml_dtypes
import numpy as np
import pytest
from replay_records import of_target
from scripted_draft import ReferenceDraft, Sizes, Truth
from scripted_records import Request, make

import eagle3_jax as e3
from eagle3_jax.config import AcceptRule, ConfigError, TreeConfig
from eagle3_jax.files.whole import finite
from eagle3_jax.record import EngineRound
from eagle3_jax.replay import replay
from eagle3_jax.replays.cost import Cost, priced, read_cost, sweep
from eagle3_jax.replays.report import as_json, lines
from eagle3_jax.replays.tables import by_distance, by_position, by_tag, misses, ranks
from eagle3_jax.replays.temperature import _chance, _probability
from eagle3_jax.trace import Trace

CHAIN = TreeConfig(3)


def run(made, trees=CHAIN, **options):
    return replay(made.record, made.draft(), trees, shared=made.shared(), **options)


def codes(result) -> list[str]:
    return [f.code for f in result.findings]


def test_three_numbers_for_one_word():
    """E3-092: accepted a round, tokens a verification, completion tokens / verifications."""
    result = run(make(Request(script=(3, 0, 1, 2), rounds=4)))
    t = result.trees[0]
    assert len(t.rounds) == 4
    found = as_json(result)["trees"][0]
    assert found["accepted_per_round"] == 1.5
    assert found["accept_length"] == t.accept_length == 2.5
    assert found["accept_rate"] == 0.5
    assert found["tokens_per_verify"] == 11 / 4
    stats = found["stats"][0]
    assert stats["spec_accept_length"] == 11 / 4
    assert stats["spec_correct_drafts_histogram"] == [1, 1, 1, 1]
    assert as_json(result)["formulas"].keys() >= {"accepted_per_round", "accept_length"}


def test_three_rows_by_position():
    """E3-095: cumulative, conditional, and what accuracies over every position promise."""
    result = run(make(Request(script=(3, 0, 1, 2, 3, 0, 2, 1), rounds=8)))
    t = result.trees[0]
    assert t.cumulative == [0.75, 0.5, 0.25]
    assert np.allclose(t.conditional, [0.75, 2 / 3, 0.5])
    assert t.accept_length == 2.5 == 1 + sum(t.cumulative)
    assert t.simulated is not None
    assert math.isclose(t.simulated[2], np.prod(t.accuracies))
    page = "\n".join(lines(result))
    for name in ("cumulative", "conditional", "simulated from those"):
        assert name in page


def test_accuracies_are_over_every_position():
    """From a count that walks no rounds: a chain of 1 at each start of the output."""
    made = make(Request(tokens=120))
    sequence = made.record.sequences[0]
    length = len(sequence.tokens)
    starts = range(sequence.prompt_length, length - 1)
    pinned = dataclasses.replace(sequence, rounds=tuple(EngineRound(s, 0) for s in starts))
    record = dataclasses.replace(made.record, sequences=[pinned])
    each = replay(record, made.draft(), CHAIN, shared=made.shared(), mode="pinned").trees[0]
    hits = {r.start: r.accepted for r in each.rounds}
    first = [hits[s] > 0 for s in starts if s in hits]
    free = run(made).trees[0]
    assert len(first) + each.censored == len(starts)
    assert free.accuracies is not None
    assert abs(free.accuracies[0] - np.mean(first)) < each.censored / len(first) + 1e-9


def test_outside_the_draft_vocabulary():
    """E3-016: everything else is accepted, so the bound is the accept length."""
    script = (1, 1, 1, 2, 1, 1, 1, 2, 1)
    made = make(Request(tokens=300, script=script, misses="outside"))
    result = run(made)
    t = result.trees[0]
    assert made.accept_length == t.accept_length == t.bound
    share = result.vocabulary.share
    text = made.record.sequences[0].tokens[25:]
    inside = np.isin(text, np.flatnonzero(made.weights["t2d"]))
    assert math.isclose(share, 1 - inside.mean())
    assert f"{share:.0%}" == "45%"
    assert misses(t)["outside_vocabulary"] == len(t.rounds) - misses(t)["full"]
    finding = next(f for f in result.findings if f.code == "VOCAB_COVERAGE")
    assert f"{share:.0%} of the output lies outside" in finding.message
    assert "the vocabulary, not the wiring" in finding.message


def test_a_miss_inside_the_vocabulary_is_no_fault_of_the_table():
    """Ranks are those of the reference draft."""
    made = make(Request(tokens=120, misses="inside"))
    result = run(made)
    assert misses(result.trees[0])["outside_vocabulary"] == 0
    assert "VOCAB_COVERAGE" not in codes(result)
    assert sum(row.rounds for row in ranks(result.trees[0])) == misses(result.trees[0])["ranked"]
    sequence = made.record.sequences[0]
    aux = made.captured(made.truth.boundaries).sequences[0].aux
    draft = ReferenceDraft(made.weights, made.truth, made.sizes, made.embedding, made.head)
    rounds = {r.start: r for r in result.trees[0].rounds if r.accepted == 0}
    checked = 0
    for t in range(len(aux) - 1):
        draft.commit(t, int(sequence.tokens[t + 1]), aux[t])
        if t + 1 in rounds:
            order, _ = draft.best(draft.out, 64)
            rank = order.tolist().index(int(sequence.tokens[t + 2])) + 1
            assert rounds[t + 1].rank == rank
            checked += 1
    assert checked == 10


def test_beyond_the_draft_s_window():
    """E3-044: the step at 128 is in the table, and the config value is named."""
    made = make(
        Request(tokens=240, script=lambda i, n: ((3, 3, 2) if n < 126 else (0, 0, 1))[i % 3]),
        sizes=Sizes(window=128),
    )
    result = run(made, window=128)
    rows = by_position(result, result.trees[0])
    assert [row.marked for row in rows] == [row.label.startswith("128") for row in rows]
    assert rows[0].accept_length > 3.2
    assert rows[-1].accept_length < 1.6
    assert "POS_WINDOW_DEGRADES" in codes(result)
    page = "\n".join(lines(result))
    assert "max_position_embeddings=128" in page
    assert "POS_WINDOW_DEGRADES" not in codes(run(made))


def test_the_fed_back_state_grows():
    """E3-046: out = 1.6 times what came in, seven steps long.

    With a large eps the norms are linear, a gate of biases alone makes the MLP linear too.
    """

    def edit(weights):
        mlp, width = "midlayer.mlp.", 64
        gate = 3.0
        scale = 0.6 * 1e3 / (gate / (1 + np.exp(-gate)))
        for name in ("self_attn.o_proj.weight", "mlp.gate_proj.weight"):
            weights[f"midlayer.{name}"][:] = 0
        for name in ("up", "down"):
            weights[f"{mlp}{name}_proj.bias"][:] = 0
        weights[mlp + "gate_proj.bias"][:] = gate
        weights[mlp + "up_proj.weight"][:] = np.eye(96, width)
        weights[mlp + "down_proj.weight"][:] = scale * np.eye(width, 96)
        weights["midlayer.post_attention_layernorm.weight"][:] = 1

    chain = TreeConfig(7)
    made = make(
        Request(script=(7, 5), rounds=12),
        edit=edit,
        tree=chain,
        truth=Truth(mlp_bias=True),
        sizes=Sizes(eps=1e6),
    )
    result = run(made, chain)
    assert result.norms is not None
    assert np.allclose(result.norms.ratio, 1.6 ** np.arange(7), rtol=2e-2)
    finding = next(f for f in result.findings if f.code == "POS_DRIFT_REPORT")
    assert "1.60 times the fused one at step 1" in finding.message
    assert "relative: 1.00, 1.60, 2.5" in "\n".join(lines(result))
    assert "POS_DRIFT_REPORT" not in codes(run(make(Request())))


def test_norms_are_those_of_the_reference():
    """Relative norms of the states going in, from the reference's own chain."""
    made = make(Request(script=(4,), rounds=10), tree=TreeConfig(5))
    result = run(made, TreeConfig(5), mode="pinned")
    sequence = made.record.sequences[0]
    aux = made.captured(made.truth.boundaries).sequences[0].aux
    draft = ReferenceDraft(made.weights, made.truth, made.sizes, made.embedding, made.head)
    starts = {r.start for r in sequence.rounds}
    ratios = []
    for t in range(len(aux) - 1):
        draft.commit(t, int(sequence.tokens[t + 1]), aux[t])
        if t + 1 not in starts:
            continue
        first = np.linalg.norm(draft.fuse(aux[t]))
        hidden, rows, found = draft.feedback(draft.out), [], [1.0]
        for i in range(4):
            found.append(np.linalg.norm(hidden) / first)
            token = int(sequence.tokens[t + 2 + i])
            out, row = draft.step(token, hidden, t + 1 + i, rows)
            rows.append(row)
            hidden = draft.feedback(out)
        ratios.append(found)
    assert len(ratios) == 10
    assert result.norms is not None
    assert np.allclose(result.norms.ratio, np.mean(ratios, axis=0), rtol=1e-4)
    assert result.norms.rows == [10] * 5


def test_pinned_at_the_maximum_with_one_token():
    """E3-071, second part: both sides answer id 0 for NaN logits."""
    made = make(Request(tokens=60))
    sequence = made.record.sequences[0]
    tokens = sequence.tokens.copy()
    only = int(made.draft().draft_to_target[...][0])
    tokens[24:] = only
    draft = made.draft()
    weight = draft.lm_head.weight
    weight[...] = weight[...] * 0
    record = dataclasses.replace(
        made.record, sequences=[dataclasses.replace(sequence, tokens=tokens, rounds=None)]
    )
    result = replay(record, draft, CHAIN, shared=made.shared())
    finding = next(f for f in result.findings if f.code == "NUMERIC_NAN")
    assert "pinned at its maximum 4" in finding.message
    assert "single token" in finding.message


def test_placeholders_of_an_image():
    """E3-080: text-only and after-image apart, and the span is named."""
    prompt = [*range(2, 10), *[250] * 12, *range(10, 14)]
    made = make(
        [
            Request(script=(3, 2), tags=("text",), tokens=100),
            Request(script=(0, 0, 1), prompt=prompt, tags=("image",), tokens=100),
        ]
    )
    result = run(made)
    rows = {row.label: row.accept_length for row in by_tag(result, result.trees[0])}
    assert abs(rows["text"] - 3.5) < 0.1
    assert abs(rows["image"] - 4 / 3) < 0.1
    finding = next(f for f in result.findings if f.code == "FEATURE_MM_SPLIT")
    assert "id 250 at positions 8..19" in finding.message


@pytest.mark.exhaustive
def test_half_floats():
    """E3-076: a float16 draft on bfloat16 states runs in both dtypes; the difference is noise."""
    made = make([Request(tokens=400), Request(tokens=400)])
    sequences = [
        dataclasses.replace(s, aux=s.aux.astype(ml_dtypes.bfloat16)) for s in made.record.sequences
    ]
    record = dataclasses.replace(made.record, sequences=sequences)
    lengths = [
        replay(record, made.draft(dtype=dtype), CHAIN, shared=made.shared(dtype), mode="pinned")
        .trees[0]
        .accept_length
        for dtype in ("float32", "bfloat16", "float16")
    ]
    assert all(abs(length - 2.5) < 0.15 for length in lengths)
    assert len(set(lengths)) > 1


def test_rounds_by_distance_begin_with_the_first():
    made = make([Request(tokens=100), Request(tokens=140)])
    result = run(made)
    rows = by_distance(result, result.trees[0])
    assert rows[0].label == "first round"
    assert rows[0].rounds == 2
    assert rows[0].accept_length == 4.0
    assert sum(row.rounds for row in rows) == len(result.trees[0].rounds)


def test_text_is_no_greedy_output():
    made = make(Request(tokens=80))
    record = dataclasses.replace(made.record, kind="text")
    result = replay(record, made.draft(), CHAIN, shared=made.shared())
    assert codes(result)[0] == "RECORD_NOT_GREEDY"
    assert as_json(result)["exact"] is False


def test_what_the_record_s_checks_saw_is_repeated():
    """E3-048: a BOS that stands twice is the writer's finding; no number is shown without it."""
    made = make(Request(tokens=80))
    record = dataclasses.replace(
        made.record, findings=("TOKEN_DOUBLED_BOS: 1 of 1 sequences begin with BOS (id 1) twice",)
    )
    result = replay(record, made.draft(), CHAIN, shared=made.shared())
    assert result.findings[0].code == "TOKEN_DOUBLED_BOS"
    assert any("[TOKEN_DOUBLED_BOS] 1 of 1" in line for line in lines(result))


def test_temperatures():
    """From the target's probabilities by hand: a product along the chain, to the first miss."""
    made = make(Request(tokens=120), top=256)
    result = run(made, temperatures=(0.5, 1.0), mode="pinned")
    sequence = made.record.sequences[0]
    for r, engine in zip(result.trees[0].rounds, sequence.rounds, strict=True):
        for T, found in zip(result.temperatures, r.expected, strict=True):
            expected, path = 0.0, 1.0
            for level in range(min(engine.accepted + 1, 3)):
                row = r.start + level
                p = np.exp(sequence.top_logprobs[row].astype(np.float64))
                weights = p ** (1 / T)
                at = np.flatnonzero(sequence.top_ids[row] == engine.proposed[level])
                path *= weights[at[0]] / weights.sum() if len(at) else 0.0
                expected += path
            assert found == pytest.approx(expected, rel=1e-5)
    means = as_json(result)["trees"][0]["expected"]
    assert 1 < means["1.0"] < means["0.5"] <= result.trees[0].accept_length + 0.5
    assert "lower bound" in "\n".join(lines(result))


COST = Cost(decode=10.0, draft=0.5, verify={4: 11.0, 32: 18.0})


def test_costs():
    assert COST.round(TreeConfig(3)) == 2 * 0.5 + 11 + 0.5
    assert COST.break_even(TreeConfig(3)) == 1.25
    assert COST.verify_of(18) == 14.5
    assert COST.verify_of(2) == 10 + 1 / 3
    with pytest.raises(ConfigError, match="32 nodes, the tree has 64"):
        COST.round(TreeConfig(4, 8, 64))


def test_the_best_tree_is_printed_as_flags():
    made = make(Request(tokens=160, script=(3,)))
    trees = [TreeConfig(1), TreeConfig(3), TreeConfig(3, 4, 16)]
    result = run(made, trees)
    best = priced(result.trees, COST)
    assert best[0].tree == TreeConfig(3)
    assert best[0].speedup == 4.0 / 1.25
    flags = "--speculative-num-steps 3 --speculative-eagle-topk 1 --speculative-num-draft-tokens 4"
    assert best[0].flags == flags
    assert f"best: {flags}" in lines(result, COST)
    slow = Cost(decode=1.0, draft=5.0, verify={64: 20.0})
    assert lines(result, slow)[-1].startswith("none pays")
    assert as_json(result, COST)["priced"][0]["flags"] == flags


def test_cost_as_text_and_as_file(tmp_path):
    text = "decode=10,draft=0.5,verify=4:11,verify=32:18"
    assert read_cost(text) == COST
    file = tmp_path / "cost.json"
    raw = {"decode": 10, "draft": 0.5, "verify": {"4": 11, "32": 18}, "extend": 1}
    file.write_text(json.dumps(raw))
    assert read_cost(str(file)) == dataclasses.replace(COST, extend=1.0)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("decode=10,verify=4:11", "draft is missing"),
        ("decode=10,draft=1,verify=4", "NODES:TIME"),
        ("decode=10,draft=0,verify=4:11", "above 0"),
        ("decode=x,draft=1,verify=4:11", "expected numbers"),
        ("decode=1,decode=2,draft=1,verify=4:11", "given twice"),
        ("decode=1,draft=1,verify=4:11,drafts=2", "unknown key 'drafts'"),
        ("nowhere.json", "no such file"),
    ],
)
def test_costs_that_are_none(text, message):
    with pytest.raises(ConfigError, match=message):
        read_cost(text)


def test_a_sweep_has_valid_trees_once():
    trees = sweep(64)
    assert len(set(trees)) == len(trees) > 40
    assert {t.topk for t in sweep(3)} == {1, 2}


@pytest.mark.exhaustive
@pytest.mark.parametrize("attention", ["ancestors", "beam_slots"])
def test_traces_are_those_of_speculation(tiny_target, tiny_draft, attention, tmp_path):
    """The same trees node by node; a replay knows the target on the accepted path only."""
    prompts = [[5, 17, 33], [60, 61, 62, 63, 64, 65]]
    trees = [TreeConfig(3), TreeConfig(4, 3, 12)]
    boundaries = tiny_draft.config.resolve(tiny_target.config.num_layers).aux_boundaries
    plain = e3.generate(tiny_target, prompts, max_new_tokens=40, stop_token_ids=())
    record = of_target(tiny_target, prompts, plain.tokens, boundaries)
    result = replay(
        record,
        tiny_draft,
        trees,
        shared=tiny_target.shared(),
        draft_attention=attention,
        trace=True,
    )
    for tree, replayed in zip(trees, result.trees, strict=True):
        served = e3.speculate(
            tiny_target,
            tiny_draft,
            prompts,
            max_new_tokens=40,
            tree=tree,
            draft_attention=attention,
            stop_token_ids=(),
            trace=True,
        ).trace
        ours = replayed.trace
        for number in range(2):
            mine, theirs = ours.of(number), served.of(number)
            assert len(theirs) - len(mine) <= 1
            for a, b in zip(mine, theirs, strict=False):
                same = ("length", "tokens", "parents", "positions", "accepted", "index")
                assert a.bonus == (b.bonus if b.emitted[-1] == b.bonus else -1)
                assert {k: getattr(a, k) for k in same} == {k: getattr(b, k) for k in same}
                assert np.allclose(a.scores, b.scores, atol=1e-5)
                known = [a.predicted[n] for n in a.accepted[:-1]]
                assert known == [b.predicted[n] for n in b.accepted[:-1]]
        ours.save(tmp_path / "trace.jsonl")
        assert Trace.load(tmp_path / "trace.jsonl").rounds == ours.rounds


def test_a_draft_trained_otherwise_is_low_not_wrong():
    """The same draft read with other switches: the rounds are still judged, the number is low."""
    made = make(Request(tokens=120))
    claim = Truth(norm_before_residual=True)
    found = replay(made.record, made.draft(claim), CHAIN, shared=made.shared())
    assert found.trees[0].accept_length < 1.6


def test_thresholds_raise_what_is_expected_at_a_temperature():
    made = make(Request(tokens=120), top=256)
    exact = run(made, temperatures=(1.0,))
    for rule in (AcceptRule(threshold_acc=0.5), AcceptRule(threshold_single=0.001)):
        found = run(made, temperatures=(1.0,), rule=rule)
        pairs = list(zip(found.trees[0].rounds, exact.trees[0].rounds, strict=True))
        assert all(a.expected >= b.expected for a, b in pairs)
        assert sum(a.expected[0] for a, _ in pairs) > sum(b.expected[0] for _, b in pairs) + 1e-3
    for p, rule, chance in [
        (0.3, AcceptRule(), 0.3),
        (0.3, AcceptRule(threshold_acc=0.5), 0.6),
        (0.6, AcceptRule(threshold_acc=0.5), 1.0),
        (0.3, AcceptRule(threshold_single=0.3), 1.0),
        (0.0, AcceptRule(threshold_single=0.0, threshold_acc=0.0), 0.0),
    ]:
        assert _chance(p, rule) == pytest.approx(chance)


@pytest.mark.parametrize("temperature", [0.05, 0.3, 0.9, 1.0, 1.5, 4.0, 20.0])
@pytest.mark.parametrize("kept", [1, 2, 7])
def test_a_lower_bound_from_few_logprobs(temperature, kept):
    """Never above what all logprobs give, whatever the rest of the distribution looks like."""
    rng = np.random.default_rng(kept)
    for _ in range(200):
        logits = rng.standard_normal(40) * rng.uniform(0.1, 6)
        logp = np.sort(logits - np.log(np.exp(logits).sum()))[::-1]
        exact = np.exp(logp / temperature) / np.exp(logp / temperature).sum()
        ids = np.arange(kept)
        for token in range(kept):
            bound = _probability(ids, logp[:kept], token, temperature, 40)
            assert bound <= exact[token] * (1 + 1e-9)
            whole = _probability(np.arange(40), logp, token, temperature, 40)
            assert whole == pytest.approx(exact[token], rel=1e-6)


def test_no_whole_round_is_said():
    made = make(Request(rounds=1, script=(3,)))
    s = made.record.sequences[0]
    short = dataclasses.replace(s, tokens=s.tokens[:-2], aux=s.aux[:-2], rounds=None)
    record = dataclasses.replace(made.record, sequences=[short])
    found = replay(record, made.draft(), CHAIN, shared=made.shared())
    assert [f.code for f in found.findings] == ["REPLAY_NO_ROUNDS"]
    assert "no whole round under 3/1/4: the record's end cuts all 1" in lines(found)[-1]


def test_states_too_large_to_square():
    """Finite in float32, but the draft's own norm is not: said, and JSON still."""
    made = make(Request(tokens=60))
    s = made.record.sequences[0]
    record = dataclasses.replace(
        made.record, sequences=[dataclasses.replace(s, aux=s.aux * np.float32(1e37))]
    )
    found = replay(record, made.draft(), CHAIN, shared=made.shared())
    assert "NUMERIC_NAN" in [f.code for f in found.findings]
    text = json.dumps(finite(as_json(found)), allow_nan=False)
    assert json.loads(text)["norms"]["fused"] in ("inf", "nan")

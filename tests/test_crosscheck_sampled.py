"""Sampled answers: right ones are equal, one wrong thing at a time is named."""

import dataclasses
import itertools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from selection import by_default

import eagle3_jax as e3
from eagle3_jax import AcceptRule, SamplingConfig, TreeConfig, verify
from eagle3_jax.crosscheck import (
    CrosscheckError,
    EngineRequest,
    EngineRun,
    Settings,
    compare,
    goodness,
    of_trace,
    ours,
    read_run,
)
from eagle3_jax.crosscheck.emitted import Emitted
from eagle3_jax.crosscheck.placing import acceptance_by_rule
from eagle3_jax.crosscheck.processed import Placed, Texts, place, texts_of
from eagle3_jax.crosscheck.sampled import Sampled
from eagle3_jax.crosscheck.sampled_causes import Group
from eagle3_jax.crosscheck.sampled_rule import judge_rule
from eagle3_jax.layers import Rows
from eagle3_jax.tree import Tree

CHAIN = TreeConfig(2)
PROMPTS = [[5, 17, 99, 3], [64, 2], [7] * 7, [120, 1, 33]] * 5
LENGTH = 40
ALL = {
    "top_k": 120,
    "top_p": 0.9999,
    "min_p": 1e-4,
    "repetition_penalty": 1.001,
    "presence_penalty": 0.001,
    "frequency_penalty": 0.001,
    "logit_bias": {0: 0.01},
}
"""Every processor runs and next to nothing changes: one compiled program for all texts."""
FULL = AcceptRule("rejection", sampled_drafts=True)
DRAWN = {"speculative_use_rejection_sampling": True}


@pytest.fixture(scope="module")
def pair(tiny_target, tiny_draft):
    return tiny_target, tiny_draft


@pytest.fixture(scope="module")
def texts(pair):
    """`texts(temperature, rule, seed, **changes)`: (tokens, stats) of all prompts."""
    done = {}

    def make(temperature=0.8, rule=None, seed=0, **changes):
        key = (temperature, rule, seed, str(changes))
        if key not in done:
            config = SamplingConfig(temperature, **(ALL | changes))
            seeds = range(1000 * seed, 1000 * seed + len(PROMPTS))
            found = e3.speculate(
                *pair,
                PROMPTS,
                max_new_tokens=LENGTH,
                tree=CHAIN,
                stop_token_ids=(),
                sampling=config.with_seed(tuple(seeds)),
                rule=rule,
                trace=True,
            )
            make.trace = found.trace
            done[key] = list(zip(PROMPTS, found.tokens, found.stats, strict=True))
        return done[key]

    return make


def answers(found, temperature=0.8, other=None, tree=CHAIN, **changes) -> EngineRun:
    """Texts as answers of an engine that says it sampled so."""
    said = {"temperature": temperature} | ALL | changes
    requests = [
        EngineRequest(
            str(i), prompt, tokens, stats, temperature=temperature, sampling=said, ignore_eos=True
        )
        for i, (prompt, tokens, stats) in enumerate(found)
    ]
    return EngineRun("run", Settings(tree=tree, dtype="float32", other=other or {}), requests)


def test_right_answers_are_equal(texts, pair):
    result = compare(answers(texts()), *pair)
    assert (result.kind, result.status) == ("equal", 0), result.text()
    tokens = len(PROMPTS) * LENGTH
    assert f"{tokens} sampled tokens, all allowed, distribution consistent (p = " in result.verdict
    assert "rule one-hot: the first draft was accepted in" in result.verdict
    assert "too few" not in result.verdict
    assert all(line.checked == ("distribution", "statistics") for line in result.lines)
    json.dumps(result.json(), allow_nan=False)


def test_what_the_draft_says_first_is_what_was_drafted(texts, pair):
    """From one pass over each text: the draft's argmax and its probability in every round."""
    made = texts(seed=9)
    run = of_trace(texts.trace, "trace")
    mine = ours.Ours(*pair, CHAIN)
    taught = [mine.teach(r.prompt, r.output) for r in run.requests[:4]]
    run = dataclasses.replace(run, requests=run.requests[:4])
    (group,) = Sampled(run, run.requests, mine, taught).groups
    rows = {
        (o, i): at
        for at, (o, i) in enumerate(zip(group.texts.owner, group.texts.index, strict=True))
    }
    seen = 0
    for number, request in enumerate(run.requests):
        assert request.output == made[number][1]
        for one in texts.trace.of(number):
            at = rows[number, one.length - len(request.prompt) + 1]
            assert group.placed.drafted[at] == one.tokens[1]
            assert group.placed.one_hot[at] == pytest.approx(one.target_probs[1], abs=1e-5)
            seen += 1
    assert seen > 100


@pytest.mark.exhaustive
def test_a_trace_of_sampled_rounds_is_equal(texts, pair):
    texts(seed=8)
    run = of_trace(texts.trace, "trace")
    result = compare(dataclasses.replace(run, requests=run.requests[:2]), *pair, ignore_eos=True)
    assert result.kind == "equal", result.text()
    assert result.lines[0].checked == ("distribution", "rounds", "statistics")


def test_no_false_alarm_in_twenty(texts, pair):
    """Four requests each under other seeds; few tokens are said to be few."""
    found = [one for seed in range(4) for one in texts(seed=seed)]
    for at in range(0, len(found), 4):
        bare = [(p, t, {}) for p, t, _ in found[at : at + 4]]
        result = compare(answers(bare, tree=None), pair[0])
        assert result.kind == "equal", result.text()
    few = compare(answers([(p, t[:9], {}) for p, t, _ in found[:2]], tree=None), pair[0])
    assert few.kind == "equal"
    assert "too few to tell much" in few.verdict


FAULTS = {
    "temperature": (
        {"temperature": 0.5},
        {},
        "SAMPLING_TEMPERATURE",
        "another temperature, near 0.48",
    ),
    "greedy": ({"top_k": 1}, {}, "SAMPLING_GREEDY", "_verify_uses_greedy"),
    "single": (
        {"rule": AcceptRule(threshold_single=0.05)},
        {},
        "SAMPLING_THRESHOLDS",
        "thresholds below 1, which favour likely drafts",
    ),
    "min_p": ({}, {"min_p": 0.1}, "SAMPLING_PROCESSORS_SKIPPED", "min_p skipped, as SGLang"),
    "top_k": ({}, {"top_k": 10}, "SAMPLING_PROCESSORS_SKIPPED", "top_k skipped: "),
    "penalty": (
        {},
        {"frequency_penalty": 2.0},
        "SAMPLING_PROCESSORS_SKIPPED",
        "frequency_penalty skipped",
    ),
}


@pytest.mark.parametrize("name", by_default(FAULTS, lambda _, name: name != "single"))
def test_what_was_done_instead_is_named(name, texts, pair):
    done, said, code, words = FAULTS[name]
    result = compare(answers(texts(**done), **said), *pair)
    assert result.status == 1, result.text()
    assert result.first is not None
    assert result.first.code == code, result.text()
    assert words in result.verdict
    assert result.verdict.startswith("acceptance differs")


def test_thresholds_the_server_says(texts, pair):
    found = texts(rule=AcceptRule(threshold_single=0.05))
    other = {"speculative_accept_threshold_single": 0.05}
    result = compare(answers(found, other=other), *pair)
    assert "the server ran with speculative_accept_threshold_single 0.05" in result.verdict


@pytest.mark.exhaustive
def test_drafts_drawn_from_q(texts, pair):  # E3-062
    found = texts(rule=FULL)
    result = compare(answers(found, other=DRAWN), *pair)
    assert result.kind == "equal", result.text()
    assert "rule full q: the first draft was accepted in" in result.verdict
    unsaid = compare(answers(found), *pair)
    assert unsaid.kind == "statistics differ"
    assert unsaid.first is not None
    assert unsaid.first.code == "SAMPLING_RULE"
    assert "the rule is full q" in unsaid.verdict


def logits_of(target, text) -> np.ndarray:
    """[T, V] by the target alone."""
    size = -(-len(text) // 64) * 64
    tokens = jnp.asarray([[*text, *[0] * (size - len(text))]], jnp.int32)
    states = target.states(tokens, Rows.prefill(1, size), target.new_cache(1, size))[0]
    return np.asarray(target.logits(states), np.float64)[0, : len(text)]


def softmax(z: np.ndarray) -> np.ndarray:
    p = np.exp(z - z.max(-1, keepdims=True))
    return p / p.sum(-1, keepdims=True)


def test_probabilities_are_those_of_decoding_one_by_one(texts, pair):
    """Penalties count each text's own tokens, over the chunks that rows are computed in."""
    config = SamplingConfig(
        0.7,
        min_p=0.02,
        repetition_penalty=1.5,
        presence_penalty=0.5,
        frequency_penalty=0.7,
        logit_bias={9: 2.0},
    )
    requests = [EngineRequest(str(i), p, t) for i, (p, t, _) in enumerate(texts()[:4])]
    mine = ours.Ours(pair[0], None, None)
    rows = texts_of(mine, range(4), requests, [], [None] * 4)
    found = place(mine, rows, config)
    expected = []
    for request in requests:
        z = logits_of(pair[0], [*request.prompt, *request.output])[len(request.prompt) - 1 :]
        for i, token in enumerate(request.output):
            for old in set(request.output[:i]):
                z[i, old] -= 0.5 + 0.7 * request.output[:i].count(old)
                z[i, old] *= 1.5 if z[i, old] < 0 else 1 / 1.5
            z[i, 9] += 2.0
            p = softmax(z[i] / 0.7)
            p = np.where(p < 0.02 * p.max(), 0, p)
            expected.append(p[token] / p.sum())
    assert np.allclose(found.p, expected, atol=1e-5)
    assert (np.asarray(expected)[64:] > 0).any()


def test_a_banned_token_inside_an_accepted_run(texts, pair):  # E3-064
    prompt, tokens, _ = texts()[0]
    accepts, at = [0, 2, 1, 3], 3  # tokens 1 | 2 3 4 | 5 6 | 7 8 9 10
    tokens = [t if t != 7 else 8 for t in tokens[:11]]
    tokens[at] = 7
    params = {"temperature": 0.8, "logit_bias": {"7": -100}}
    request = EngineRequest(
        "0", prompt, tokens, temperature=0.8, sampling=params, accepts=accepts, ignore_eos=True
    )
    run = EngineRun("run", Settings(dtype="float32"), [request])
    result = compare(run, pair[0])
    assert (result.status, result.kind) == (1, "acceptance differs")
    assert result.first is not None
    assert (result.first.position, result.first.round) == (at, 1)
    assert result.first.code == "SAMPLING_PROCESSORS_SKIPPED"
    p = softmax(logits_of(pair[0], [*prompt, *tokens])[len(prompt) + at - 1] / 0.8)[7]
    assert f"its probability is 0, without logit_bias {p:.2g}" in result.verdict
    assert result.verdict.startswith("acceptance differs at round 1: request 0, round 1, output")
    assert "1 of 11 sampled tokens is forbidden, inside accepted runs alone" in result.verdict
    assert result.lines[0].equal_until == at


def test_a_bias_at_temperature_0_is_no_fault(pair):
    """The argmax of biased logits is another token than the target's own, and expected."""
    config = SamplingConfig(0.0, logit_bias={9: 3.0, 41: -5.0})
    text = e3.generate(pair[0], PROMPTS[:1], max_new_tokens=20, stop_token_ids=(), sampling=config)
    request = EngineRequest("0", PROMPTS[0], text.tokens[0], temperature=0.0, ignore_eos=True)
    run = EngineRun("run", Settings(dtype="float32"), [request])
    assert compare(run, pair[0]).kind == "target differs"
    biased = dataclasses.replace(request, sampling={"logit_bias": {"9": 3.0, "41": -5.0}})
    result = compare(dataclasses.replace(run, requests=[biased]), pair[0])
    assert result.kind == "equal", result.text()


@pytest.mark.parametrize("wrong", [False, True])
@pytest.mark.parametrize("kind", ["after temperature", "before"])
def test_logprobs_of_sampled_answers(kind, wrong, texts, pair, tmp_path):
    """SGLang divides by the temperature first; both ways are known, a wrong number is named."""
    prompt, tokens, stats = texts()[1]
    z = logits_of(pair[0], [*prompt, *tokens])[len(prompt) - 1 : -1]
    p = softmax(z / 0.8 if kind == "after temperature" else z)
    logprobs = np.log(p[np.arange(len(tokens)), tokens])
    logprobs[5] += 0.5 * wrong
    meta = {"id": "a", "finish_reason": {"type": "length", "length": LENGTH}, **stats}
    meta["output_token_logprobs"] = [
        [float(v), t, None] for v, t in zip(logprobs, tokens, strict=True)
    ]
    params = {"temperature": 0.8, "max_new_tokens": LENGTH, "ignore_eos": True, "new_knob": 3}
    answer = {
        "request": {"input_ids": prompt, "sampling_params": params},
        "response": {"output_ids": tokens, "meta_info": meta},
    }
    (tmp_path / "answers.json").write_text(json.dumps(answer))
    run = read_run(tmp_path / "answers.json")
    assert run.requests[0].sampling == params
    result = compare(run, pair[0])
    assert result.kind == ("target differs" if wrong else "equal"), result.text()
    assert any("unknown sampling parameters" in n and "new_knob" in n for n in result.notes)
    if wrong:
        assert result.first is not None
        assert (result.first.tensor, result.first.position) == ("output_logprobs", 5)


def test_what_cannot_be_known(texts, pair):
    run = answers(texts()[:1])
    request = dataclasses.replace(run.requests[0], stats={})
    for sampling, why in [
        (None, "its sampling parameters are not in the results"),
        ({"temperature": 0.8, "json_schema": "{}"}, "json_schema changes the distribution"),
    ]:
        changed = [dataclasses.replace(request, sampling=sampling)]
        result = compare(dataclasses.replace(run, requests=changed), pair[0])
        assert (result.kind, result.status) == ("not decidable", 2)
        assert why in result.verdict
    refused = [dataclasses.replace(request, sampling={"top_p": 3})]
    with pytest.raises(CrosscheckError, match="top_p is 3"):
        compare(dataclasses.replace(run, requests=refused), pair[0])


P, Q = np.array([0.5, 0.3, 0.15, 0.05]), np.array([0.7, 0.1, 0.1, 0.1])
EXPECTED = {"strict": 0.4, "one_hot": 0.5, "full": 0.75}


def drawn(rule: str, count: int, rng) -> tuple[np.ndarray, np.ndarray]:
    """(emitted tokens, accepted) of one draft each, by the rule's own words."""
    drafts, target = rng.choice(4, count, p=Q), rng.choice(4, count, p=P)
    if rule == "strict":
        return target, target == drafts
    if rule == "one_hot":
        drafts, residual = np.zeros(count, int), np.array([0, 0.3, 0.15, 0.05])
        accepted = rng.random(count) < P[drafts]
    else:
        residual = np.maximum(P - Q, 0)
        accepted = rng.random(count) < np.minimum(1, P[drafts] / Q[drafts])
    other = rng.choice(4, count, p=residual / residual.sum())
    return np.where(accepted, drafts, other), accepted


@pytest.mark.parametrize("rule", EXPECTED)
def test_the_rule_of_a_record(rule):  # E3-062
    found = acceptance_by_rule(jnp.asarray(P, jnp.float32), jnp.asarray(Q, jnp.float32))
    assert {n: round(float(v), 6) for n, v in found.items()} == EXPECTED
    emitted, accepted = drawn(rule, 20_000, np.random.default_rng(1))
    assert abs(accepted.mean() - EXPECTED[rule]) < 0.015
    share = np.bincount(emitted, minlength=4) / len(emitted)
    assert np.abs(share - P).max() < 0.015
    hits = int(accepted.sum())
    fake = {n: np.full(50, v) for n, v in EXPECTED.items()}
    rows = np.arange(50)
    placed = Placed(*[np.ones(50)] * 6, np.zeros((50, 0)), rows, np.ones(50), **fake)
    text = Texts(rows * 0, rows, 50, np.ones((50, 1)), rows, rows == 0, np.zeros((50, 0)))
    request = EngineRequest(
        "0", [1], [1] * 50, {"spec_correct_drafts_histogram": [20_000 - hits, hits]}
    )
    run = EngineRun("run", Settings(), [request])
    wrong = compare_counts()
    result = judge_rule(run, [request], [Group(SamplingConfig(), text, placed)], wrong, [Emitted()])
    if rule == "one_hot":  # what the settings say: the counts differ for another reason
        assert result.faults == wrong
        assert "rules that fit: one-hot" in result.notes[0]
        assert "full q (" not in result.notes[0]
    else:
        assert [d.code for d in result.faults] == ["SAMPLING_RULE"]
        name = "strict" if rule == "strict" else "full q"
        assert f"the rule is {name} (" in result.faults[0].cause
        assert " or " not in result.faults[0].cause.split(", where")[0]
        assert "strict 40.0%, one-hot 50.0%, full 75.0%" in result.faults[0].detail


def compare_counts():
    from eagle3_jax.crosscheck import Divergence

    return [Divergence("statistics differ", 0, "spec_verify_ct is 2, on the same text 3")]


def test_each_rule_emits_p_exactly():  # E3-062
    """Over all drafts and coins: accepted as drafted, else drawn from what is left."""
    full = np.minimum(P, Q) + (1 - np.minimum(P, Q).sum()) * np.maximum(P - Q, 0) / 0.25
    best = np.array([P[0], 0, 0, 0]) + (1 - P[0]) * np.array([0, 0.3, 0.15, 0.05]) / 0.5
    for emitted in (full, best):
        assert np.abs(emitted - P).max() < 1e-12


@pytest.mark.parametrize("rule", ["target_only", "one_hot"])
def test_siblings_of_certain_proposals_emit_p(rule):  # E3-065
    """Every coin on either side of every threshold, weighed by its interval."""
    p = np.array([0.4, 0.3, 0.2, 0.1])
    if rule == "target_only":  # the root's coin against the running sum
        cells = [[(0.4, 0.2), (0.3, 0.55), (0.2, 0.8), (0.1, 0.95)]]
    else:  # a coin a sibling, against its share of what the rejected ones left
        cells = [[(x, x / 2), (1 - x, (1 + x) / 2)] for x in (0.4, 0.3 / 0.6, 0.2 / 0.3)]
    rows = list(itertools.product(*cells))
    with jax.enable_x64(True):
        coins = np.zeros((len(rows), 4))
        for i, row in enumerate(rows):
            for j, (_, coin) in enumerate(row):
                coins[i, j if rule == "target_only" else j + 1] = coin
        many = lambda x, kind: jnp.broadcast_to(jnp.asarray(x, kind), (len(rows), *np.shape(x)))  # noqa: E731
        ones = many(np.ones(4), jnp.float64)
        tree = Tree(
            many([9, 0, 1, 2], jnp.int32),
            many([0, 0, 0, 0], jnp.int32),
            many([0, 1, 1, 1], jnp.int32),
            ones,
            ones,
            many([[1], [3], [5], [9]], jnp.uint32),
        )
        probs = jnp.pad(many([p] * 4, jnp.float64), ((0, 0), (0, 0), (0, 6)))
        run = jax.jit(getattr(verify, rule), static_argnums=4)
        found = run(tree, probs, jnp.asarray(coins), jnp.full((len(rows),), 0.5), 1)
        first = np.asarray(found.tokens[:, 0])
    emitted = np.zeros(10)
    for token, row in zip(first, rows, strict=True):
        emitted[token] += np.prod([weight for weight, _ in row])
    assert np.abs(emitted[:4] - p).max() < 1e-12
    assert emitted[4:].sum() == 0


def test_p_values():
    rng = np.random.default_rng(0)
    low = [goodness.uniform_p_value(rng.random(n)) for n in (20, 60, 400, 4000) for _ in range(50)]
    assert min(low) > 1e-4
    assert 0.3 < np.mean(low) < 0.9
    assert goodness.uniform_p_value(rng.random(400) ** 1.5) < 1e-6
    assert goodness.uniform_p_value(np.concatenate([rng.random(400), np.full(60, 0.31)])) < 1e-6
    p = np.full(2000, 0.05)
    assert goodness.favoured_p_value(rng.random(2000) < p, p) > 0.01
    assert goodness.favoured_p_value(rng.random(2000) < 2 * p, p) < 1e-6
    assert goodness.binomial_fits(40, 100, 0.4)
    assert not goodness.binomial_fits(400, 1000, 0.5)
    assert not goodness.binomial_fits(600, 1000, 0.5)


@pytest.fixture(autouse=True, scope="module")
def _one_program():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ours, "BATCH", len(PROMPTS))
        yield

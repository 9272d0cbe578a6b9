"""What logprobs and texts say of an engine's penalties, and that rounding says nothing."""

import numpy as np
import pytest
from test_crosscheck_sampled import logits_of, softmax

from eagle3_jax.crosscheck import EngineRequest, EngineRun, Settings, compare, ours, round_penalties
from eagle3_jax.crosscheck.conventions import AFTER, BEFORE, SKIPPED, convention
from eagle3_jax.crosscheck.emitted import Emitted
from eagle3_jax.crosscheck.noise import Noise
from eagle3_jax.crosscheck.processed import Texts, place
from eagle3_jax.crosscheck.round_penalties import LAST
from eagle3_jax.crosscheck.sampled import Sampled

ACCEPTS = [2, 0, 2, 1, 2, 2, 0, 2, 2, 1, 2]
ROUNDS = tuple((n, sum(ACCEPTS[:n]) + n, k) for n, k in enumerate(ACCEPTS))
LENGTH = 1 + sum(k + 1 for k in ACCEPTS)
WEAK = {"frequency_penalty": 0.1, "presence_penalty": 0.1}


def sampled_text(target, prompt, said, counts, rng, temperature=0.8):
    """(tokens, logprobs) in NumPy; `counts(output)` are the tokens penalised next."""
    output, logprobs = [], []
    while len(output) < LENGTH:
        z = logits_of(target, [*prompt, *output])[-1].copy()
        counted = counts(output)
        for token in set(counted):
            z[token] -= said.get("presence_penalty", 0.0)
            z[token] -= said.get("frequency_penalty", 0.0) * counted.count(token)
        p = softmax(z / temperature)
        cut = np.where(p >= np.sort(p)[-said.get("top_k", len(p))], p, 0)
        output.append(int(rng.choice(len(z), p=cut / cut.sum())))
        logprobs.append(np.log(p[output[-1]]))
    return output, np.asarray(logprobs)


def each_rounds_last(output):
    """The root of each round that began before the next token."""
    return [output[at] for _, at, _ in ROUNDS if at < len(output)]


def run_of(target, said, counts, count, dtype="float32", noise=None) -> EngineRun:
    rng, requests = np.random.default_rng(0), []
    for i in range(count):
        prompt = [5 + i, 17, 99]
        output, logprobs = sampled_text(target, prompt, said, counts, rng)
        if noise is not None:
            logprobs = logprobs + rng.normal(0, noise, LENGTH)
        requests.append(
            EngineRequest(
                str(i),
                prompt,
                output,
                temperature=0.8,
                sampling={"temperature": 0.8, **said},
                accepts=ACCEPTS,
                ignore_eos=True,
                output_logprobs=None if noise is None else logprobs,
            )
        )
    return EngineRun("run", Settings(dtype=dtype), requests)


@pytest.mark.parametrize("right", [True, False])
def test_rounding_of_logprobs_is_no_other_penalty(right, tiny_target):
    """As much of it as bfloat16 has; penalties that count less are named through it."""
    said = WEAK if right else {"frequency_penalty": 2.0, "presence_penalty": 2.0}
    run = run_of(tiny_target, said, list if right else each_rounds_last, 4, "bfloat16", 0.02)
    result = compare(run, tiny_target)
    if right:
        assert result.status == 0, result.text()
    else:
        assert result.first is not None, result.text()
        assert result.first.code == "SAMPLING_ROUND_PENALTIES", result.text()
        assert "never an accepted" in result.verdict


@pytest.mark.parametrize("seed", range(3))
def test_which_logprobs_are_returned(seed):
    """Noise alone names nothing; unknown rounds are no evidence; an ignored penalty is no way."""
    rng = np.random.default_rng(seed)
    names = (AFTER, BEFORE, SKIPPED, *round_penalties.WAYS)
    tried = {name: -3 + rng.normal(0, 0.01, 200) for name in names}
    known = np.ones(200, bool)
    for name in (AFTER, BEFORE):
        noisy = tried[name] + rng.normal(0, 0.02, 200)
        assert convention(noisy, tried, known, "bfloat16")[0] in (AFTER, BEFORE)
    tried = {name: -3 + rng.normal(0, 1.0, 200) for name in names}
    given = tried[LAST] + rng.normal(0, 0.02, 200)
    assert convention(given, tried, known, "bfloat16") == (LAST, True)
    assert convention(given, tried, ~known, "bfloat16")[0] in (AFTER, BEFORE)
    given[3:] = np.nan
    assert convention(given, tried, known, "bfloat16") == (LAST, False)
    given = tried[SKIPPED] + rng.normal(0, 0.02, 200)
    assert convention(given, tried, known, "bfloat16")[0] in (AFTER, BEFORE)


def test_a_penalty_ignored_is_not_one_counted_otherwise(tiny_target):
    """Nothing is cut, so nothing is forbidden, and accepted drafts stand in the rounds."""
    said = {"frequency_penalty": 2.0, "presence_penalty": 2.0}
    run = run_of(tiny_target, said, lambda _: [], 8)
    result = compare(run, tiny_target)
    assert result.first is not None, result.text()
    assert result.first.code == "SAMPLING_PROCESSORS_SKIPPED", result.text()
    assert "ignored" in result.verdict


def test_likelihoods_have_no_allowance_for_rounding(tiny_target):
    """It is for what is forbidden alone: else another way seems likelier than a skipped one."""
    said = {"frequency_penalty": 2.0, "presence_penalty": 2.0, "top_k": 6}
    run = run_of(tiny_target, said, each_rounds_last, 2)
    mine = ours.Ours(tiny_target, None, None)
    taught = [mine.teach(r.prompt, r.output) for r in run.requests]
    sampled = Sampled(run, run.requests, mine, taught)
    faults = sampled.faults(Noise("bfloat16", 0.1, 0.01, None, None, ""))
    assert {d.code for d in faults} == {"SAMPLING_ROUND_PENALTIES"}
    (group,) = sampled.groups
    emitted = [Emitted(ROUNDS)] * 2
    counted = round_penalties.counted_in(group.texts, run.requests, emitted, LAST)
    exact = place(mine, group.texts, group.config, counted=counted)
    assert np.allclose(group.relaxed[LAST].p, exact.p, atol=1e-6)


def test_each_way_is_placed_once(tiny_target, monkeypatch):
    """However many requests have logprobs."""
    said = {"frequency_penalty": 0.1}
    requests = [
        EngineRequest(
            str(i),
            [5, 17],
            [3, 9, 9, 4],
            temperature=0.8,
            sampling=said,
            accepts=[2],
            output_logprobs=np.full(4, -4.0),
        )
        for i in range(4)
    ]
    asked = []
    for module in ("conventions", "sampled", "sampled_causes"):
        name = f"eagle3_jax.crosscheck.{module}.place"
        monkeypatch.setattr(name, lambda *a, **k: asked.append(k.get("counted")) or place(*a, **k))
    mine = ours.Ours(tiny_target, None, None)
    taught = [mine.teach(r.prompt, r.output) for r in requests]
    sampled = Sampled(EngineRun("run", Settings(), requests), requests, mine, taught)
    sampled.faults(Noise("float32", 1e-3, 1e-3, None, None, ""))
    assert sum(x is not None for x in asked) == len(round_penalties.WAYS)


@pytest.mark.parametrize("way", round_penalties.WAYS)
def test_a_request_of_one_token_has_no_rounds(way):
    owner, index = np.array([0, 1, 1]), np.array([0, 0, 1])
    nothing = np.zeros((3, 0))
    texts = Texts(owner, index, 3, nothing, np.array([5, 6, 7]), index == 0, nothing)
    requests = [EngineRequest("0", [1], [5]), EngineRequest("1", [2], [6, 7])]
    emitted = [Emitted(), Emitted(((0, 0, 1),))]
    assert round_penalties.counted_in(texts, requests, emitted, way) is not None
    assert round_penalties.counted_in(texts, requests, [Emitted()] * 2, way) is None

"""What an engine's penalties count and how it cuts, beside the real SGLang's answers and NumPy."""

import dataclasses

import numpy as np
import pytest
from crosscheck_data import answers_folder
from selection import by_default, every_other
from test_crosscheck_sampled import (
    CHAIN,
    LENGTH,
    PROMPTS,
    _one_program,  # noqa: F401
    logits_of,
    softmax,
)

import eagle3_jax as e3
from eagle3_jax import SamplingConfig
from eagle3_jax.crosscheck import (
    EngineRequest,
    EngineRun,
    Settings,
    compare,
    ours,
    read_run,
    round_penalties,
)
from eagle3_jax.crosscheck.emitted import Emitted
from eagle3_jax.crosscheck.processed import Texts, place, texts_of
from eagle3_jax.crosscheck.sampled_requests import joint_rows


@pytest.fixture(scope="module")
def pair(tiny_target, tiny_draft):
    return tiny_target, tiny_draft


@pytest.mark.parametrize("kind", every_other(["chain", "tree"]))
def test_what_sglangs_penalties_count_is_named(kind, pair, tmp_path):
    """The real SGLang 0.5.23 penalises the last token of each round, never an accepted draft."""
    run = read_run(answers_folder(kind, "penalties", tmp_path / "a"))
    result = compare(run, *pair)
    assert (result.status, result.kind) == (1, "acceptance differs"), result.text()
    assert result.first is not None
    assert result.first.code == "SAMPLING_ROUND_PENALTIES"
    assert "penalties count the last token of each round alone, never an accepted" in result.verdict
    assert result.first.position == {"chain": 15, "tree": 11}[kind]
    allowed = [d for d in (result.first, *result.others) if d.tensor != "output_ids"]
    assert allowed == []  # its logprobs are right, penalties counted so


def penalised_text(pair, prompt, way: str, sampling: SamplingConfig, rng) -> tuple[list, list]:
    """(tokens, accepted drafts of each round) of a chain whose penalties count as `way` says.

    In NumPy, from our draft's proposals and our target's logits alone.
    """
    output: list[int] = []
    accepts: list[int] = []
    ends: list[int] = []  # the last token of each round, and the prompt's own

    def choose(logits) -> int:
        if not ends:
            counted = []
        elif way == "last":
            counted = ends
        else:
            counted = [prompt[-1], *ends[:-1]]
        z = np.asarray(logits, np.float64).copy()
        for token in set(counted):
            z[token] -= sampling.presence_penalty
            z[token] -= sampling.frequency_penalty * counted.count(token)
            z[token] *= (
                sampling.repetition_penalty if z[token] < 0 else 1 / sampling.repetition_penalty
            )
        if sampling.temperature == 0:
            return int(z.argmax())
        return int(rng.choice(len(z), p=softmax(z / sampling.temperature)))

    def round_of(text, following):
        given = {"max_new_tokens": LENGTH, "tree": CHAIN, "stop_token_ids": (), "tensors": True}
        return next(e3.rounds(*pair, [text], follow=[following], **given))

    output.append(choose(logits_of(pair[0], prompt)[-1]))
    ends.append(output[0])
    while len(output) < LENGTH:
        one = round_of([*prompt, *output[:-1]], output[-1:])
        root = len(output)
        for node in range(CHAIN.num_steps + 1):
            output.append(choose(one.tensors["target_logits"][node]))
            if node == CHAIN.num_steps or one.tokens[node + 1] != output[-1]:
                break
        accepts.append(len(output) - root - 1)
        ends.append(output[-1])
    return output[:LENGTH], accepts


@pytest.mark.parametrize("way", round_penalties.WAYS)
def test_which_tokens_penalties_count(way):
    """Against a list of tokens a place, for two requests whose rows follow each other."""
    outputs, rounds = [[5, 6, 5, 7, 8, 6], [9, 9, 9]], [((0, 0, 2), (1, 3, 1)), ((0, 0, 1),)]
    expected = {
        "last": [[], [5], [5], [5], [5, 7], [5, 7], [], [9], [9]],
        "late": [[], [1], [1], [1], [1, 5], [1, 5], [], [2], [2]],
        "start": [[], [5], [5], [5], [5, 6, 5, 7], [5, 6, 5, 7], [], [9], [9]],
    }[way]
    owner, index = np.repeat([0, 1], [6, 3]), np.array([*range(6), *range(3)])
    nothing = np.zeros((9, 0))
    texts = Texts(owner, index, 9, nothing, np.concatenate(outputs), index == 0, nothing)
    requests = [EngineRequest(str(i), [4, 1 + i], x) for i, x in enumerate(outputs)]
    emitted = [Emitted(x) for x in rounds]
    found = round_penalties.counted_in(texts, requests, emitted, way)
    for row in range(9):
        output = outputs[owner[row]]
        kept = found.kept[owner == owner[row]][: index[row]]
        counted = [t for t, k in zip(output, kept, strict=False) if k]
        for token in found.left_out[row]:
            if token >= 0:
                counted.remove(token)
        counted += [t for t in found.also[row] if t >= 0]
        assert sorted(counted) == sorted(expected[row])
    assert round_penalties.counted_in(texts, requests, [emitted[0], Emitted()], way) is None


COUNTED = [("late", 0.0), ("last", 0.7)]


@pytest.mark.parametrize("case", by_default(COUNTED, lambda i, _: False), ids=str)
def test_penalties_counted_in_another_way_are_named(case, pair):
    way, temperature = case
    penalties = {"frequency_penalty": 2.0, "presence_penalty": 2.0, "repetition_penalty": 1.2}
    sampling = SamplingConfig(temperature, **penalties)
    rng, requests = np.random.default_rng(0), []
    for i, prompt in enumerate(PROMPTS[: 4 if temperature == 0 else 12]):
        output, accepts = penalised_text(pair, prompt, way, sampling, rng)
        said = {"temperature": temperature, **penalties}
        requests.append(
            EngineRequest(
                str(i),
                prompt,
                output,
                temperature=temperature,
                sampling=said,
                accepts=accepts,
                ignore_eos=True,
            )
        )
    run = EngineRun("run", Settings(tree=CHAIN, dtype="float32"), requests)
    result = compare(run, *pair)
    assert result.first is not None, result.text()
    assert result.first.code == "SAMPLING_ROUND_PENALTIES", result.text()
    words = {"late": "one round late", "last": "never an accepted"}
    assert words[way] in result.verdict


def test_sglangs_plain_sampler_takes_top_p_of_the_whole(pair):
    """Beside top-k; its verification takes it of what top-k left."""
    config = SamplingConfig(1.5, top_k=12, top_p=0.5)
    rng = np.random.default_rng(0)
    outputs = [rng.integers(0, 128, 12).tolist() for _ in range(2)]
    requests = [EngineRequest(str(i), PROMPTS[i], x) for i, x in enumerate(outputs)]
    requests[0].stats["spec_verify_ct"] = 5
    mine = ours.Ours(pair[0], None, None)
    rows = texts_of(mine, range(2), requests, [], [None] * 2)
    joint = joint_rows(config, EngineRun("run", Settings(), requests), requests, rows)
    assert joint is not None
    assert joint.tolist() == [True] + [False] * 11 + [True] * 12
    found = place(mine, dataclasses.replace(rows, joint=joint), config)
    expected, differ = [], 0
    for request in requests:
        z = logits_of(pair[0], [*request.prompt, *request.output])[len(request.prompt) - 1 :]
        for i in range(12):
            p = softmax(z[i] / 1.5)
            order = np.argsort(-p, kind="stable")
            both = np.zeros((2, 128))
            for row, whole in enumerate((p, p / p[order[:12]].sum())):
                before = np.cumsum(whole[order]) - whole[order]
                kept = order[:12][before[:12] < 0.5]
                both[row, kept] = p[kept] / p[kept].sum()
            chosen = both[0] if joint[len(expected)] else both[1]
            differ += int((both[0] > 0).sum() > (both[1] > 0).sum())
            expected.append(chosen.max())
    assert differ > 12
    assert np.allclose(found.top, expected, atol=1e-5)
    no_cut = dataclasses.replace(config, top_p=1.0)
    for changed, engine in [(config, "vllm"), (no_cut, "sglang")]:
        assert (
            joint_rows(changed, EngineRun("r", Settings(engine), requests), requests, rows) is None
        )

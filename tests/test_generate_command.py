"""`eagle3 speculate` and `eagle3 generate`, as a user types them."""

import io
import json
import re
import signal
import subprocess
import sys
from collections.abc import Iterator

import numpy as np
import pytest
from rich.console import Console
from safetensors.numpy import load_file, save_file
from sglang_goldens import FOLDER
from terminal import Screen, run_in_terminal
from tiny_text import WORDS, ids_of, text_target

import eagle3_jax as e3
from eagle3_jax import comparison
from eagle3_jax.cli import main
from eagle3_jax.driver import Job
from eagle3_jax.live import token_depths

PROMPTS = [[5, 17, 33, 91, 120, 7, 100, 45], [64, 3, 88, 21, 9], [77], [11, 12, 13]]
SGR = {1: "1;32", 2: "1;36", 3: "1;35", 0: ""}
TREE = ["--num-steps", "3", "--topk", "4", "--num-draft-tokens", "8"]
TREE_348 = e3.TreeConfig(3, 4, 8)


@pytest.fixture(scope="module")
def models(sglang_models, converted) -> dict[str, str]:
    target = sglang_models / "target"
    draft = converted(sglang_models / "draft", "--target", str(target))
    return {"target": str(target), "draft": str(draft)}


@pytest.fixture(scope="module")
def texts(sglang_models, tmp_path_factory) -> str:
    """The tiny target with words and a chat template."""
    folder = tmp_path_factory.mktemp("texts") / "target"
    return str(text_target(sglang_models / "target", folder))


@pytest.fixture
def pair(models) -> list[str]:
    return ["speculate", "--target", models["target"], "--draft", models["draft"]]


@pytest.fixture
def ids(tmp_path) -> list[str]:
    (tmp_path / "ids.json").write_text(json.dumps(PROMPTS))
    return ["--ids", str(tmp_path / "ids.json")]


@pytest.fixture
def call(capsys):
    """`call(argv)` -> exit status, stdout, stderr."""

    def run(argv: list[str]) -> tuple[int, str, str]:
        capsys.readouterr()
        status = main(argv)
        captured = capsys.readouterr()
        return status, captured.out, captured.err

    return run


@pytest.fixture
def printed(call):
    """`printed(argv)` -> the one object of `--json`."""

    def run(argv: list[str]) -> dict:
        status, out, err = call([*argv, "--json"])
        assert (status, err) == (0, "")
        assert out.count("\n") == 1
        return json.loads(out)

    return run


def test_tokens_and_statistics_of_the_real_sglang(printed, pair, tmp_path):
    recorded = json.loads((FOLDER / "traces/tree_s3_k4_d8.json").read_text())
    (tmp_path / "ids.json").write_text(json.dumps(recorded["prompts"]))
    argv = [*pair, *TREE, "--ids", str(tmp_path / "ids.json"), "--as-engine", "sglang-0.5.23"]
    found = printed([*argv, "--max-new-tokens", "24", "--stop", "none"])
    assert found["prompts"] == recorded["prompts"]
    assert found["tree"] == recorded["tree"]
    for i, prompt in enumerate(found["prompts"]):
        result, stats = recorded["results"][f"batch{i}"], found["stats"][i]
        assert found["tokens"][i] == result["output_ids"]
        assert stats["prompt_tokens"] == len(prompt)
        spec = {k: v for k, v in result["meta_info"].items() if k in stats}
        assert {"spec_accept_length", "spec_verify_ct", "finish_reason"} <= spec.keys()
        for key, value in spec.items():
            assert stats[key] == (pytest.approx(value) if isinstance(value, float) else value)


def test_json_is_speculate(printed, pair, ids, tiny_target, tiny_draft):
    argv = [*pair, *ids, *TREE, "--max-new-tokens", "20", "--stop", "24,2"]
    found, again = printed(argv), printed(argv)
    expected = e3.speculate(
        tiny_target,
        tiny_draft,
        PROMPTS,
        max_new_tokens=20,
        tree=TREE_348,
        stop_token_ids=(24, 2),
    )
    assert found["tokens"] == expected.tokens
    assert found["stats"] == expected.stats
    assert found["accept_lengths"] == expected.accept_lengths
    assert {s["finish_reason"]["type"] for s in found["stats"]} == {"stop", "length"}
    seconds = found.pop("seconds")
    assert set(seconds) == {"load", "compile", "generate"}
    assert min(seconds.values()) >= 0
    del again["seconds"]
    assert found == again
    assert list(found) == ["prompts", "tokens", "accept_lengths", "stats", "tree", "rule"]


@pytest.mark.exhaustive
def test_batches_do_not_change_the_result(printed, pair, ids):
    argv = [*pair, *ids, *TREE, "--max-new-tokens", "20"]
    one, two = printed(argv), printed([*argv, "--batch-size", "1"])
    del one["seconds"], two["seconds"]
    assert one == two


def test_trace_is_the_trace_of_speculate(printed, pair, ids, tmp_path, tiny_target, tiny_draft):
    """Driven round by round and in batches, what is written is what one call records."""
    file = tmp_path / "trace.jsonl"
    argv = [*pair, *ids, *TREE, "--max-new-tokens", "20", "--stop", "24", "--trace", str(file)]
    found = printed(argv)
    expected = e3.speculate(
        tiny_target,
        tiny_draft,
        PROMPTS,
        max_new_tokens=20,
        tree=TREE_348,
        stop_token_ids=(24,),
        trace=True,
    ).trace
    assert expected is not None
    written = e3.Trace.load(file)
    for ours, theirs in zip(written.rounds, expected.rounds, strict=True):
        for name in ("scores", "draft_probs", "margins"):
            np.testing.assert_allclose(getattr(ours, name), getattr(theirs, name), atol=1e-4)
            setattr_frozen(ours, name, getattr(theirs, name))
    assert written == expected
    assert found["tokens"] == written.tokens
    assert found["stats"] == written.stats


def setattr_frozen(item: e3.Round, name: str, value: object):
    object.__setattr__(item, name, value)


@pytest.mark.exhaustive
def test_tokens_that_no_round_carries(printed, pair, models, ids, tmp_path, tiny_target):
    """One new token is the prefill's: no round runs, the trace has it all the same."""
    expected = e3.generate(tiny_target, PROMPTS, max_new_tokens=1).tokens
    file = tmp_path / "trace.jsonl"
    for argv in ([*pair, *TREE], ["generate", "--target", models["target"]]):
        found = printed([*argv, *ids, "--max-new-tokens", "1", "--trace", str(file)])
        written = e3.Trace.load(file)
        assert found["tokens"] == written.tokens == expected
        assert written.rounds == []
        assert [s["finish_reason"] for s in written.stats] == [{"type": "length", "length": 1}] * 4


def test_generate_is_generate(printed, models, ids, tmp_path, tiny_target):
    file = tmp_path / "trace.jsonl"
    argv = ["generate", "--target", models["target"], *ids, "--max-new-tokens", "20"]
    argv += ["--stop", "none", "--batch-size", "1"]
    found = printed([*argv, "--trace", str(file)])
    expected = e3.generate(tiny_target, PROMPTS, max_new_tokens=20, stop_token_ids=())
    assert found["tokens"] == expected.tokens
    assert found["stats"] == expected.stats
    assert found["accept_lengths"] == [[], [], [], []]
    assert found["tree"] is None
    written = e3.Trace.load(file)
    assert written.tree is None
    assert [r.sequence for r in written.rounds] == [i for i in range(4) for _ in range(19)]


def test_sampling_is_speculate_with_a_seed_a_prompt(
    printed, pair, ids, tmp_path, tiny_target, tiny_draft
):
    flags = ["--temperature", "0.9", "--top-k", "20", "--logit-bias", '{"7": -100}', "--seed", "5"]
    argv = [*pair, *ids, *flags, "--max-new-tokens", "12", "--stop", "none", "--batch-size", "2"]
    found = printed([*argv, "--rule", "rejection", "--trace", str(tmp_path / "t.jsonl")])
    config = e3.SamplingConfig(0.9, top_k=20, logit_bias={7: -100}, seed=[5, 6, 7, 8])
    expected = e3.speculate(
        tiny_target,
        tiny_draft,
        PROMPTS,
        max_new_tokens=12,
        tree=e3.TreeConfig(3),
        stop_token_ids=(),
        sampling=config,
        rule="rejection",
    )
    assert found["tokens"] == expected.tokens
    assert found["rule"] == "rejection"
    trace = e3.Trace.load(tmp_path / "t.jsonl")
    assert trace.tokens == expected.tokens
    assert trace.sampling["rule"]["lossless"] is True
    assert trace.sampling["logit_bias"] == {"7": -100.0}


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--temperature", "-1"], "temperature is -1"),
        (["--temperature", "1", "--top-p", "0"], "top_p is 0"),
        (["--rule", "rejection"], "temperature > 0"),
        (["--threshold-acc", "0.5"], "temperature > 0"),
        (["--temperature", "1", "--rule", "rejection", "--threshold-acc", "0.5"], "threshold_acc"),
        (["--temperature", "1", "--sampled-drafts", *TREE], "needs a chain"),
        (["--temperature", "1", "--block"], "sampled_drafts=True"),
        (["--temperature", "1", "--compare"], "--compare needs temperature 0"),
        (["--temperature", "1", "--logit-bias", '{"500": 1}'], "names token 500"),
        (["--temperature", "1", "--logit-bias", '{"5": 1, "5": 2}'], "has token 5 twice"),
        (["--temperature", "1", "--logit-bias", '{"5": NaN}'], "logit_bias of token 5 is nan"),
        (["--temperature", "1", "--logit-bias", '{"5": true}'], "logit_bias of token 5 is True"),
        (["--temperature", "1", "--logit-bias", '[["5", 1]]'], "expected a JSON object"),
        (["--temperature", "nan"], "temperature is nan"),
        (["--temperature", "1", "--top-k", "9" * 5000], "9..."),
    ],
)
def test_sampling_errors(call, pair, ids, flags, message):
    status, out, err = call([*pair, *ids, *flags])
    assert status == 2
    assert message in err
    assert out == ""
    assert len(err) < 500


@pytest.mark.parametrize("bias", ["4", "[1]", "{", '{"a": 1}', '{"1": 1e999}'])
def test_a_bias_that_is_no_bias(call, pair, ids, bias):
    status, out, err = call([*pair, *ids, "--temperature", "1", "--logit-bias", bias])
    assert status == 2
    assert "--logit-bias" in err or "logit_bias" in err
    assert out == ""


def test_dtypes(printed, pair, models, ids, tmp_path):
    file = tmp_path / "trace.jsonl"
    shared = [*ids, "--max-new-tokens", "3", "--trace", str(file)]
    printed([*pair, *shared, "--dtype", "float64"])
    assert e3.Trace.load(file).dtype == {"target": "float64", "draft": "float64"}
    printed(["generate", "--target", models["target"], *shared, "--dtype", "bfloat16"])
    assert e3.Trace.load(file).dtype == {"target": "bfloat16"}


@pytest.mark.parametrize("raw", [False, True])
def test_texts_through_the_template(printed, pair, texts, raw, tiny_target, tiny_draft):
    argv = [*pair, "--target", texts, *TREE, "--max-new-tokens", "20"]
    argv += [part for text in ("w20 w30", "w40", "w6", "w7") for part in ("--prompt", text)]
    found = printed([*argv, *(["--raw"] if raw else [])])
    form = "<s> {}" if raw else "<s> user {} assistant"
    rendered = [form.format(text) for text in ("w20 w30", "w40", "w6", "w7")]
    assert found["prompts"] == [ids_of(text) for text in rendered]
    prompts, tree = found["prompts"], TREE_348
    expected = e3.speculate(tiny_target, tiny_draft, prompts, max_new_tokens=20, tree=tree)
    assert found["tokens"] == expected.tokens
    assert found["texts"] == [" ".join(WORDS[t] for t in tokens) for tokens in expected.tokens]


def test_files_of_prompts(printed, pair, texts, tmp_path):
    messages = {
        "messages": [{"role": "system", "content": "w9"}, {"role": "user", "content": "w8"}]
    }
    lines = ["w20 w30", {"prompt": "w40"}, messages, {"input_ids": [77, 1]}]
    (tmp_path / "p.jsonl").write_text("\n".join(map(json.dumps, lines)))
    argv = [*pair, "--target", texts, *TREE, "--prompts", str(tmp_path / "p.jsonl")]
    assert printed([*argv, "--max-new-tokens", "20"])["prompts"] == [
        ids_of("<s> user w20 w30 assistant"),
        ids_of("<s> user w40 assistant"),
        ids_of("<s> system w9 user w8 assistant"),
        [77, 1],
    ]


def test_elsewhere_than_on_a_terminal_texts_alone(call, pair, texts, tiny_target):
    argv = [*pair, "--target", texts, *TREE, "--max-new-tokens", "20", "--prompt", "w20 w30"]
    status, out, err = call(argv)
    rendered = ids_of("<s> user w20 w30 assistant")
    (tokens,) = e3.generate(tiny_target, [rendered], max_new_tokens=20).tokens
    text = " ".join(WORDS[t] for t in tokens)
    assert (status, out) == (0, f"{text}\n")
    assert re.fullmatch(
        r"20 tokens \| \d+ rounds \| accept length \d\.\d\d \| [\d.]+ tokens/s \| "
        r"compiling took \d+\.\d s more\n",
        err,
    )
    status, out, err = call([*argv, "--prompt", "w6", "--batch-size", "1"])
    assert out.splitlines()[:3] == ["[1/2] w20 w30", text, "[2/2] w6"]
    assert "\x1b" not in out + err


def test_ids_without_a_tokenizer(call, models, ids, tiny_target):
    status, out, _ = call(
        ["generate", "--target", models["target"], *ids, "--max-new-tokens", "20"]
    )
    tokens = e3.generate(tiny_target, PROMPTS, max_new_tokens=20).tokens
    assert status == 0
    assert out.splitlines()[1::2] == [" ".join(map(str, row)) for row in tokens]


def test_compare(call, printed, pair, texts, ids):
    argv = [*pair, "--target", texts, "--max-new-tokens", "20", *TREE, "--compare"]
    status, out, err = call([*argv, "--prompt", "w20 w30"])
    assert (status, err) == (0, "")
    lines = out.splitlines()
    assert lines[0] == "[1/1] w20 w30"
    plain, speculate = lines.index("plain:"), lines.index("speculate:")
    assert lines[plain + 1] == lines[speculate + 1]
    assert len(lines[plain + 1].split()) == 20
    assert "same text: yes" in lines
    rows = {line.split()[0]: line.split() for line in lines[-2:]}
    assert int(rows["plain"][2]) == 19 > int(rows["speculate"][2])
    for row in rows.values():
        assert int(row[1]) == 20
        assert float(row[-1]) > 0

    argv = [*pair, *ids, *TREE, "--max-new-tokens", "20", "--stop", "none", "--compare"]
    found = printed(argv)
    assert [c["same"] for c in found["compare"]] == [True] * 4
    assert [c["target_passes"] for c in found["compare"]] == [
        {"plain": 19, "speculate": len(lengths)} for lengths in found["accept_lengths"]
    ]
    assert set(found["seconds"]["compare"]) == {"plain", "speculate"}


def test_compared_texts_in_columns(pair, texts, monkeypatch):
    console = Console(
        file=io.StringIO(), force_terminal=True, width=90, height=30, color_system="standard"
    )
    monkeypatch.setattr("eagle3_jax.generate_command.Console", lambda **_: console)
    argv = [*pair, "--target", texts, *TREE, "--max-new-tokens", "20", "--compare"]
    assert main([*argv, "--prompt", "w20 w30"]) == 0
    shown = Screen(90, 30).feed(console.file.getvalue())
    head = next(i for i, line in enumerate(shown.lines) if line.split() == ["plain", "speculate"])
    half = shown.lines[head].index("speculate")
    end = shown.lines.index("same text: yes")
    rows = shown.lines[head + 1 : end]
    left, right = (
        " ".join(r[part] for r in rows).split() for part in (slice(half), slice(half, 90))
    )
    assert left == right
    assert len(left) == 20
    styles = [
        {style for row in shown.rows[head + 1 : end] for at, (_, style) in row.items() if side(at)}
        for side in (lambda at: at < half, lambda at: at >= half)
    ]
    assert not styles[0] & set(SGR.values()) - {""}
    assert {SGR[1], SGR[2]} <= styles[1]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_progress_bar_goes_to_stderr(call, pair, ids, monkeypatch):
    """On a terminal it counts prompts, then it is gone; what is printed stays the same."""
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "100")
    argv = [*pair, *ids, *TREE, "--max-new-tokens", "20", "--batch-size", "1"]
    _, without, _ = call(argv)
    errors = Terminal()
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stderr", errors)
        _, out, _ = call(argv)
    assert out == without
    written = errors.getvalue()
    assert "prompts" in written
    assert "4/4" in written
    assert re.search(r"accept length \d\.\d\d", written)
    # the last line is the note on speed; the bar above it was removed
    assert [line for line in Screen(100, 30).feed(written).lines if "prompts" in line] == []


@pytest.mark.parametrize("near", [False, True])
def test_compare_with_another_text(call, pair, ids, monkeypatch, tiny_target, near):
    """A call that changes one token: no near tie, unless the threshold says so."""
    honest = Job.call

    def wrong(self: Job, prompts, trace: bool = False, first: int = 0) -> e3.Generation:
        found = honest(self, prompts, trace, first)
        found.tokens[1][5] = 99
        return found

    monkeypatch.setattr(Job, "call", wrong)
    monkeypatch.setattr(comparison, "NEAR_TIE", {"float32": 1e9 if near else 1e-3})
    argv = [*pair, *ids, *TREE, "--max-new-tokens", "20", "--stop", "none", "--compare"]
    status, out, _ = call(argv)
    plain = e3.generate(tiny_target, PROMPTS, max_new_tokens=20, stop_token_ids=(), trace=True)
    assert plain.trace is not None
    margin = plain.trace.of(1)[4].margins[0]
    assert margin > 1e-3
    kind = "a near tie (below 1e+09)" if near else "no near tie: this is a fault (below 0.001)"
    assert (
        f"same text: no, first at token 5: '{plain.tokens[1][5]}' plain, '99' with speculation; "
        f"margin {margin:.2e}, {kind}\n"
    ) in out
    assert status == (0 if near else 1)
    assert out.count("same text: yes") == 3
    status, out, _ = call([*argv, "--json"])
    assert status == (0 if near else 1)
    difference = json.loads(out)["compare"][1]
    assert difference["near_tie"] is near
    assert difference["first_difference"] == {
        "position": 5,
        "plain": plain.tokens[1][5],
        "speculate": 99,
        "margin": pytest.approx(margin),
    }


@pytest.mark.parametrize(
    ("a", "b", "position"), [([1], [1], None), ([1, 2], [1, 3], 1), ([1], [1, 2], 1), ([], [4], 0)]
)
def test_first_difference(a, b, position):
    assert comparison.first_difference(a, b) == position


def interrupting(monkeypatch, after: int, times: int = 1):
    """Sends this process SIGINT, as Ctrl-C does, while round `after` is computed."""
    honest = Job.rounds

    def rounds(self: Job, prompts, first: int = 0) -> Iterator[e3.Round]:
        for count, item in enumerate(honest(self, prompts, first)):
            if count == after:
                for _ in range(times):
                    signal.raise_signal(signal.SIGINT)
            yield item

    monkeypatch.setattr(Job, "rounds", rounds)


@pytest.mark.parametrize("command", ["speculate", "generate"])
def test_ctrl_c_keeps_what_there_is(call, pair, models, ids, tmp_path, monkeypatch, command):
    argv = [*pair, *TREE]
    argv = argv if command == "speculate" else ["generate", "--target", models["target"]]
    full, file = tmp_path / "full.jsonl", tmp_path / "part.jsonl"
    argv = [*argv, *ids, "--max-new-tokens", "20", "--batch-size", "1", "--stop", "none"]
    assert call([*argv, "--trace", str(full)])[0] == 0
    before = signal.getsignal(signal.SIGINT)
    interrupting(monkeypatch, after=2)
    status, out, err = call([*argv, "--trace", str(file)])
    assert status == 130
    assert err.splitlines()[-1] == f"interrupted after 0 of 4 prompts; trace written to {file}"
    whole, part = e3.Trace.load(full), e3.Trace.load(file)
    assert part.rounds == whole.rounds[:3]
    assert part.prompts == PROMPTS
    emitted = [t for item in part.rounds for t in item.emitted]
    assert part.tokens == [[whole.tokens[0][0], *emitted], [], [], []]
    assert 0 < len(emitted) < 19
    assert [s["finish_reason"] for s in part.stats] == [{"type": "abort"}] * 4
    assert part.stats[0]["completion_tokens"] == len(emitted) + 1
    assert out.splitlines()[1] == " ".join(map(str, part.tokens[0]))
    assert signal.getsignal(signal.SIGINT) is before

    status, out, err = call([*argv, "--trace", str(file), "--json"])
    assert status == 130
    assert json.loads(out)["error"]["code"] == "INTERRUPTED"


def test_second_ctrl_c_does_not_wait_for_the_round(call, pair, ids, tmp_path, monkeypatch):
    interrupting(monkeypatch, after=2, times=2)
    file = tmp_path / "part.jsonl"
    argv = [*pair, *ids, *TREE, "--max-new-tokens", "20", "--batch-size", "1"]
    argv += ["--trace", str(file)]
    assert call(argv)[0] == 130
    assert len(e3.Trace.load(file).rounds) == 2


@pytest.fixture
def ctrl_c_works():
    """A shell starts its background jobs with SIGINT ignored, and they pass that on."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("ctrl_c_works")
def test_ctrl_c_while_loading(call, pair, ids, monkeypatch):
    def load(*_: object, **__: object):
        signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr("eagle3_jax.generate_command.load_target", load)
    assert call([*pair, *ids]) == (130, "", "interrupted\n")


def test_live_view_in_a_terminal(pair, texts, tmp_path):
    file = tmp_path / "trace.jsonl"
    argv = [*pair, "--target", texts, "--prompt", "w20 w30", *TREE, "--stop", "none"]
    argv += ["--max-new-tokens", "40", "--trace", str(file)]
    status, written = run_in_terminal(argv, width=72, height=12)
    assert status == 0, written
    trace = e3.Trace.load(file)
    (tokens,) = trace.tokens
    shown = Screen(72, 12).feed(written)
    assert shown.lines[0].startswith(
        "plain: the target's own tokens; accepted draft tokens by depth:"
    )
    assert "compiling ..." in written
    last = next(i for i, line in enumerate(shown.lines) if line.startswith("40 tokens | "))
    first = next(i for i, line in enumerate(shown.lines) if line.split()[:1] == [WORDS[tokens[0]]])
    rows = shown.lines[first:last]
    words = [
        (row, column.start(), column[0])
        for row in range(first, last)
        for column in re.finditer(r"\S+", shown.lines[row])
    ]
    assert [word for _, _, word in words] == [WORDS[t] for t in tokens]
    assert len(rows) > 1
    depths = token_depths([r.accept_length for r in trace.rounds], len(tokens))
    assert {0, 1, 2} <= set(depths)
    for (row, column, word), depth in zip(words, depths, strict=True):
        styles = {shown.rows[row][column + i][1] for i in range(len(word))}
        assert styles == {SGR[depth]}, word
    assert re.match(
        r"40 tokens \| \d+ rounds \| accept length \d\.\d\d \| [\d.]+ tok", shown.lines[last]
    )
    assert shown.lines[last + 1].startswith("trace written to ")


def test_ctrl_c_in_a_terminal(pair, sglang_models, tmp_path):
    long = text_target(sglang_models / "target", tmp_path / "long", max_position_embeddings=40000)
    file, sent = tmp_path / "trace.jsonl", []

    def interrupt(text: str, process: subprocess.Popen):
        if " rounds | " in text and not sent:
            sent.append(process.send_signal(signal.SIGINT))

    argv = [*pair, "--target", str(long), "--prompt", "w20", "--stop", "none"]
    argv += ["--max-new-tokens", "20000", "--trace", str(file)]
    status, written = run_in_terminal(argv, watch=interrupt)
    assert status == 130, written
    trace = e3.Trace.load(file)
    (tokens,) = trace.tokens
    assert tokens == [tokens[0], *(t for item in trace.rounds for t in item.emitted)]
    assert 1 < len(tokens) < 20000
    assert trace.stats[0]["finish_reason"] == {"type": "abort"}
    lines = [line for line in Screen(80, 24).feed(written).lines if line]
    message = "".join(lines[lines.index(next(x for x in lines if x.startswith("interrupted "))) :])
    assert message == f"interrupted after 0 of 1 prompts; trace written to {file}"
    assert "Traceback" not in written


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (["--target", "no/such/folder"], "error [FILE]: no/such/folder: no such folder"),
        (["--target", "{tmp}"], "config.json: no such file"),
        (["--draft", "{tmp}"], "error [CHECKPOINT]: {tmp}: no draft.json"),
        (
            ["--target", "{draft_source}"],
            "error [CONFIG_INVALID]: {draft_source}/config.json: arch",
        ),
        (["--target", "{tmp}/ids.json"], "error [FILE]: {tmp}/ids.json: not a folder"),
        (
            ["--draft", "{draft_source}"],
            "error [CHECKPOINT]: {draft_source}: a PyTorch checkpoint, not a converted draft; "
            "convert it once with python -m convert.from_torch {draft_source} --target {target} "
            "--out draft-converted and give --draft draft-converted",
        ),
        (["--topk", "4"], "num_draft_tokens is required for a tree (topk=4)"),
        (["--num-steps", "0"], "TreeConfig.num_steps is 0, expected a positive"),
        (
            ["--topk", "200", "--num-draft-tokens", "9"],
            "topk=200 exceeds the draft vocabulary of 80",
        ),
        (["--as-engine", "sglang"], "unknown engine 'sglang': known are sglang-0.5.23"),
        (["--draft-attention", "all"], "error [USAGE]: argument --draft-attention: invalid choice"),
        (["--stop", "eos"], "argument --stop: expected ids such as 2,7 or none, found 'eos'"),
        (["--stop", "2,128"], "--stop 128: outside the vocabulary 0..127"),
        (["--max-new-tokens", "0"], "--max-new-tokens is 0, expected at least 1"),
        (["--batch-size", "0"], "--batch-size is 0, expected at least 1"),
        (["--max-new-tokens", "600"], "ids.json, entry 0: 8 tokens and --max-new-tokens 600 make"),
        (["--trace", "{tmp}/none/t.jsonl"], "none/t.jsonl: no folder {tmp}/none to write in"),
        (["--trace", "{tmp}"], "error [FILE]: {tmp}: a folder, expected a file to write"),
        (["--dtype", "int8"], "argument --dtype: invalid choice: 'int8'"),
    ],
)
def test_errors(call, pair, ids, sglang_models, tmp_path, change, message):
    places = {"tmp": tmp_path, "draft_source": sglang_models / "draft"}
    places["target"] = sglang_models / "target"
    change = [part.format(**places) for part in change]
    status, out, err = call([*pair, *ids, *change])
    assert (status, out) == (2, "")
    assert err.startswith("error [")
    assert err.count("\n") == 1
    assert message.format(**places) in err
    status, out, err = call([*pair, *ids, *change, "--json"])
    assert (status, err) == (2, "")
    assert set(json.loads(out)["error"]) == {"code", "message"}
    assert not (tmp_path / "none").exists()


@pytest.mark.parametrize(
    ("prompts", "message"),
    [
        (["--prompt", "a"], "error [TOKENIZER]: --prompt 1: a text, and {target} has no tokenizer"),
        (["--ids", "{tmp}/none.json"], "error [PROMPTS]: {tmp}/none.json: cannot be read: No such"),
        (["--ids", "{tmp}/wide.json"], "wide.json, entry 1: id 128 at position 0 is outside"),
        (["--prompt", "a", "--ids", "x"], "argument --ids: not allowed with argument --prompt"),
        ([], "one of the arguments --prompt --prompts --ids is required"),
    ],
)
def test_prompt_errors(call, pair, models, tmp_path, prompts, message):
    places = {"tmp": tmp_path, "target": models["target"]}
    (tmp_path / "wide.json").write_text("[[1], [128]]")
    status, out, err = call([*pair, *(part.format(**places) for part in prompts)])
    assert (status, out, err.count("\n")) == (2, "", 1)
    assert message.format(**places) in err


def test_a_draft_for_another_target(call, pair, ids, sglang_models, tmp_path):
    folder = text_target(sglang_models / "target", tmp_path / "target", vocab_size=100)
    tensors = load_file(folder / "model.safetensors")
    names = ("model.embed_tokens.weight", "lm_head.weight")
    save_file(tensors | {n: tensors[n][:100] for n in names}, folder / "model.safetensors")
    (tmp_path / "ids.json").write_text("[[1]]")
    status, _, err = call([*pair, "--target", str(folder), *ids])
    assert (status, err.count("\n")) == (2, 1)
    assert "the draft is for a target vocabulary of 128, the target has 100" in err


def test_missing_packages(call, pair, texts, monkeypatch):
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    status, _, err = call([*pair, "--target", texts, "--prompt", "w7"])
    assert status == 2
    assert err == (
        "error [FILE]: text needs the tokenizers package: pip install 'eagle3-jax[tokenizer]'\n"
    )
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    status, _, err = call([*pair, "--target", "org/name", "--prompt", "w7"])
    assert status == 2
    assert err == (
        "error [FILE]: org/name: no such folder; as a Hub id it needs the huggingface_hub package: "
        "pip install 'eagle3-jax[hub]'\n"
    )

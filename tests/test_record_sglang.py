"""Records from SGLang: recorded answers token by token against our target, faults, a server."""

import copy
import http.server
import json
import threading
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from record_commands import fails, run

from eagle3_jax import record
from eagle3_jax.layers import Rows
from eagle3_jax.record import RecordError
from eagle3_jax.records.capture import Described, target_facts
from eagle3_jax.records.sglang import read_answer, read_responses

DATA = Path(__file__).parent / "data/records"
PROMPT = [5, 17, 33, 91, 120, 7, 100, 45]
ROUNDING = 5e-6


@pytest.fixture(scope="module")
def states(tiny_target):
    """What the target itself has for some tokens: [T, A, E]."""

    def compute(tokens, boundaries):
        ids = jnp.asarray([list(map(int, tokens))], jnp.int32)
        rows, cache = Rows.prefill(1, ids.shape[1]), tiny_target.new_cache(1, ids.shape[1])
        return np.asarray(tiny_target.states(ids, rows, cache, boundaries)[1][0])

    return compute


def described(sglang_models, boundaries=(2, 4, 5)) -> Described:
    return Described(boundaries, "greedy", **target_facts(sglang_models / "target"))


def answers() -> dict:
    lines = (DATA / "sglang_engine.jsonl").read_text().splitlines()
    return {(a := json.loads(line))["response"]["meta_info"]["id"]: a for line in lines}


@pytest.mark.parametrize("case", ["chain_s3", "tree_s5_k8_d32", "aux_only", "nospec"])
def test_each_row_is_the_state_of_its_token(case, sglang_models, states):
    boundaries = ("final_norm",) if case == "nospec" else (2, 4, 5)
    answer = answers()[case]
    found = read_answer(answer, described(sglang_models, boundaries), case)
    assert found.tokens.tolist() == PROMPT + answer["response"]["output_ids"]
    assert (found.prompt_length, found.first, found.rounds) == (8, 0, None)
    assert len(found.aux) == len(found.tokens) - 1
    expected = states(found.tokens, boundaries)[:-1]
    assert np.abs(found.aux - expected).max() < ROUNDING
    assert np.abs(found.aux[1:] - expected[:-1]).max() > 0.1


def test_answers_of_the_http_server(sglang_models, states):
    found = list(read_responses([DATA / "sglang_http.json"], described(sglang_models)))
    assert [s.prompt_length for s in found] == [4, 5]
    for item in found:
        assert len(item.tokens) == item.prompt_length + 8
        assert np.abs(item.aux - states(item.tokens, (2, 4, 5))[:-1]).max() < ROUNDING


def test_best_next_tokens_stand_beside_their_rows(sglang_models, tiny_target, states):
    answer = json.loads((DATA / "sglang_logprobs.json").read_text())
    tokens = answer["request"]["input_ids"] + answer["response"]["output_ids"]
    rows = states(tokens, (2, 4, 5))[:-1].reshape(len(tokens) - 1, -1)
    answer["response"]["meta_info"]["hidden_states"] = [rows[:8].tolist(), *rows[8:].tolist()]
    found = read_answer(answer, described(sglang_models), "r")
    normed = states(tokens, ("final_norm",))[:-1, 0]
    logits = np.asarray(tiny_target.logits(jnp.asarray(normed)), np.float64)
    logprobs = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    assert found.top_ids.shape == found.top_logprobs.shape == (len(tokens) - 1, 3)
    taken = np.take_along_axis(logprobs, found.top_ids, axis=1)
    assert np.abs(taken - found.top_logprobs).max() < 1e-4
    assert np.array_equal(found.top_ids[:, 0], logits.argmax(-1))
    assert np.array_equal(found.top_ids[7:, 0], found.tokens[8:])


def test_where_the_prompt_comes_from(sglang_models):
    facts = described(sglang_models)
    answer = answers()["chain_s3"]
    bare = answer["response"]
    given = [
        read_answer(bare | {"prompt_token_ids": PROMPT}, facts, "r"),
        read_answer(bare | {"input_ids": PROMPT}, facts, "r"),
        read_answer(bare, facts, "r", PROMPT),
        read_answer(answer, facts, "r"),
    ]
    logged = copy.deepcopy(bare)
    logged["meta_info"]["input_token_logprobs"] = [[None, t, None] for t in PROMPT]
    given.append(read_answer(logged, facts, "r"))
    assert all(g.tokens.tolist() == PROMPT + bare["output_ids"] for g in given)
    with pytest.raises(RecordError, match="prompt's ids are not in the answer"):
        read_answer(bare, facts, "r")
    with pytest.raises(RecordError, match="7 prompt ids, meta_info counts 8"):
        read_answer(bare, facts, "r", PROMPT[1:])


def test_forms_of_a_file(sglang_models, tmp_path):
    facts, items = described(sglang_models), list(answers().values())[:2]
    forms = {
        "lines.jsonl": "".join(json.dumps(i) + "\n\n" for i in items),
        "list.json": json.dumps(items, indent=1),
        "line.json": json.dumps(items),
    }
    for name, text in forms.items():
        (tmp_path / name).write_text(text)
        assert len(list(read_responses([tmp_path / name], facts))) == 2
    (tmp_path / "one.json").write_text(json.dumps(items[0], indent=2))
    assert len(list(read_responses([tmp_path / "one.json"], facts))) == 1
    both = [tmp_path / "one.json", tmp_path / "list.json"]
    assert len(list(read_responses(both, facts, [PROMPT] * 3))) == 3
    with pytest.raises(RecordError, match="only 2 prompts are given"):
        list(read_responses(both, facts, [PROMPT] * 2))
    with pytest.raises(RecordError, match="4 prompts are given, found 3"):
        list(read_responses(both, facts, [PROMPT] * 4))
    (tmp_path / "cut.jsonl").write_text(forms["lines.jsonl"][:-40])
    with pytest.raises(RecordError, match=r"cut\.jsonl, line 3: not JSON"):
        list(read_responses([tmp_path / "cut.jsonl"], facts))
    (tmp_path / "bad.json").write_text("[\n1,")
    with pytest.raises(RecordError, match=r"bad\.json, line 2: not JSON"):
        list(read_responses([tmp_path / "bad.json"], facts))


def test_a_prompt_in_chunks(sglang_models, states):
    """The server returns the rows of the last chunk only."""
    answer = copy.deepcopy(answers()["chain_s3"]["response"])
    del answer["meta_info"]["hidden_states"][0][:6]
    found = read_answer(answer, described(sglang_models), "r", PROMPT)
    assert found.first == 6
    assert np.abs(found.aux - states(found.tokens, (2, 4, 5))[6:-1]).max() < ROUNDING


def test_a_cached_prefix(sglang_models, states):
    answer = copy.deepcopy(answers()["chain_s3"]["response"])
    meta = answer["meta_info"]
    meta["hidden_states"][0] = meta["hidden_states"][0][3:]
    meta["cached_tokens"] = 3
    found = read_answer(answer, described(sglang_models), "r", PROMPT)
    assert found.first == 3
    expected = states(found.tokens, (2, 4, 5))[3:-1]
    assert np.abs(found.aux - expected).max() < ROUNDING


def rows_of(case: str) -> list:
    return answers()[case]["response"]["meta_info"]["hidden_states"]


def broken(change) -> dict:
    answer = copy.deepcopy(answers()["chain_s3"]["response"])
    change(answer, answer["meta_info"])
    return answer


FAULTS = {
    "lost rows": (
        lambda a, m: m["hidden_states"].pop(),
        "12 rows of states for 14 tokens, 0 of them cached, expected 13 (SGLang before the fix of",
    ),
    "fewer cached": (
        lambda a, m: m.update(cached_tokens=3),
        "13 rows of states for 14 tokens, 3 of them cached, expected 10",
    ),
    "retraction": (
        lambda a, m: (
            m["hidden_states"].insert(0, m["hidden_states"][0]),
            m.update(num_retractions=1),
        ),
        "21 rows of states for 14 tokens, 0 of them cached, expected 13 (1 retractions",
    ),
    "last only": (
        lambda a, m: m.update(hidden_states=[m["hidden_states"][-1]]),
        'only the last row was asked for ("last")',
    ),
    "no states": (lambda a, m: m.pop("hidden_states"), "--enable-return-hidden-states"),
    "no output": (lambda a, m: a.pop("output_ids"), "output_ids are object"),
    "ragged": (lambda a, m: m["hidden_states"][0].append([1.0]), "no rows of numbers of one width"),
    "words": (lambda a, m: m["hidden_states"].append(["x"]), "no rows of numbers of one width"),
    "no meta": (lambda a, m: a.pop("meta_info"), "no meta_info"),
    "plain decoding": (
        lambda a, m: m.update(hidden_states=rows_of("nospec")),
        "states are [13, 32], expected [rows, 3 * width]",
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_an_answer_that_does_not_fit(name, sglang_models):
    change, message = FAULTS[name]
    with pytest.raises(RecordError) as error:
        read_answer(broken(change), described(sglang_models), "answer 3", PROMPT)
    assert str(error.value).startswith("answer 3: ")
    assert message in str(error.value)


def test_fewer_boundaries_than_the_server_captured(sglang_models):
    answer = answers()["chain_s3"]["response"]
    with pytest.raises(RecordError, match="96 numbers a row are 3 states of the target's width 32"):
        read_answer(answer, described(sglang_models, (2, 4)), "r", PROMPT)


def test_an_openai_style_answer_is_refused(sglang_models):
    with pytest.raises(RecordError, match="ask /generate"):
        read_answer({"choices": [{"hidden_states": [0.0]}]}, described(sglang_models), "r")


class Replayed(http.server.BaseHTTPRequestHandler):
    """SGLang's recorded answers, after the failures that `server.script` asks for."""

    def log_message(self, *args):
        pass

    def do_GET(self):
        self.server.seen.append((self.path, dict(self.headers)))
        if self.path not in self.server.places:
            self.reply(404, {"error": {"message": "not here"}})
            return
        self.reply(200, self.server.info)

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.seen.append((self.path, body))
        if self.server.script:
            step = self.server.script.pop(0)
            if step == "hang up":
                self.connection.close()
                return
            self.reply(*step)
            return
        self.reply(200, self.server.answers[tuple(body["input_ids"])])

    def reply(self, status, value):
        data = value if isinstance(value, bytes) else json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


@pytest.fixture
def server():
    recorded = json.loads((DATA / "sglang_http.json").read_text())
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Replayed) as found:
        found.daemon_threads = True
        found.answers = {tuple(a["request"]["input_ids"]): a["response"] for a in recorded}
        found.info = json.loads((DATA / "sglang_server_info.json").read_text())
        found.script, found.seen, found.places = [], [], {"/server_info"}
        found.url = f"http://127.0.0.1:{found.server_port}"
        thread = threading.Thread(target=found.serve_forever, daemon=True)
        thread.start()
        yield found
        found.shutdown()
        thread.join()


@pytest.fixture
def asked(server, tmp_path, sglang_models):
    """Arguments that read the two recorded prompts from the server."""
    ids = tmp_path / "ids.json"
    ids.write_text(json.dumps([list(prompt) for prompt in server.answers]))
    return [
        "from-sglang", "--url", server.url, "--ids", ids, "--boundaries", "2,4,5", "--target",
        sglang_models / "target", "--max-new-tokens", 8, "--out", tmp_path / "live.record",
        "--retries", 2,
    ]  # fmt: skip


def test_a_server(server, asked, tmp_path, states, capsys, monkeypatch):
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    key = tmp_path / "key"
    key.write_text("secret\n")
    server.script = [(503, {"error": {"message": "busy"}}), "hang up"]
    assert run(*asked, "--ignore-eos", "--top-logprobs", 3, "--api-key-file", key) == 0
    found = record.load(tmp_path / "live.record")
    assert found.kind == "greedy"
    assert found.provenance["server"]["version"] == "0.5.23"
    assert found.provenance["server"]["speculative_eagle_topk"] == 4
    assert "secret" not in json.dumps(found.provenance)
    for item, prompt in zip(found.sequences, server.answers, strict=True):
        assert tuple(item.tokens[: item.prompt_length]) == prompt
        assert np.abs(item.aux - states(item.tokens, (2, 4, 5))[:-1]).max() < ROUNDING
    (_, headers), *posts = server.seen
    assert headers["Authorization"] == "Bearer secret"
    assert len(posts) == 4
    assert posts[0] == (
        "/generate",
        {
            "input_ids": list(next(iter(server.answers))),
            "sampling_params": {"temperature": 0.0, "max_new_tokens": 8, "ignore_eos": True},
            "return_hidden_states": True,
            "return_logprob": True,
            "top_logprobs_num": 3,
            "logprob_start_len": 0,
        },
    )
    assert "states     " in capsys.readouterr().out


def test_an_older_server_and_a_sampled_record(server, asked, tmp_path):
    server.places = {"/get_server_info"}
    assert run(*asked, "--temperature", "0.5") == 0
    assert record.load(tmp_path / "live.record").kind == "sampled"


@pytest.mark.parametrize(
    ("script", "message"),
    [
        ([(400, {"error": {"message": "too long a prompt"}})], "HTTP 400: too long a prompt"),
        ([(503, b"busy")] * 3, "HTTP 503: busy (2 more tries)"),
        (["hang up"] * 3, "(2 more tries)"),
        ([(200, b"<html>")], "not JSON"),
        ([(200, {"error": {"message": "aborted"}})], "aborted"),
    ],
)
def test_a_server_that_fails(server, asked, script, message, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    server.script = script
    assert message in fails(capsys, *asked)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["ids.json"]


def test_what_came_before_a_failure_is_kept(server, asked, tmp_path, capsys):
    first = next(iter(server.answers.values()))
    server.script = [(200, first), (400, {"error": {"message": "out of memory"}})]
    message = fails(capsys, *asked)
    assert "HTTP 400: out of memory" in message
    assert "1 of 2 sequences are kept in" in message
    found = record.load(tmp_path / "live.record")
    assert len(found.sequences) == 1
    assert found.findings[0].startswith("CAPTURE_CUT: 1 of 2 prompts: ")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"enable_return_hidden_states": False, "return_hidden_states_mode": None},
            "--enable-return-hidden-states",
        ),
        ({"speculative_algorithm": None}, "returns the last state only"),
        ({"disable_radix_cache": False}, "--disable-radix-cache, or declare --partial-context"),
        ({"chunked_prefill_size": 4}, "5 tokens, the server prefills 4 at a time"),
    ],
)
def test_a_server_that_cannot_give_aux_states(server, asked, change, message, capsys):
    server.info |= change
    assert message in fails(capsys, *asked)
    assert [path for path, _ in server.seen] == ["/server_info"]


def test_the_aux_only_mode_is_enough(server, asked):
    server.info |= {"speculative_algorithm": None, "enable_return_aux_hidden_states": True}
    assert run(*asked) == 0


def test_no_server(asked, capsys, monkeypatch):
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    asked[2] = "http://127.0.0.1:1"
    assert "refused" in fails(capsys, *asked)
    asked[2] = "file:///etc/passwd"
    assert "expected http://HOST:PORT" in fails(capsys, *asked)


def test_saved_answers_through_the_command(tmp_path, sglang_models, capsys):
    out = tmp_path / "saved.safetensors"
    base = ["from-sglang", DATA / "sglang_http.json", "--boundaries", "default", "--out", out]
    target = ["--target", sglang_models / "target"]
    assert "--kind" in fails(capsys, *base, *target)
    assert "say L with" in fails(capsys, *base, "--kind", "greedy")
    assert "give --url, or files" in fails(capsys, *base, "--url", "http://x", *target)
    assert run(*base, "--kind", "greedy", *target, "--json") == 0
    page = json.loads(capsys.readouterr().out)
    assert page["boundaries"] == [2, 4, 5]
    assert (page["sequences"], page["tokens"], page["rows"]) == (2, 25, 23)
    assert page["findings"] == []
    assert "--force" in fails(capsys, *base, "--kind", "greedy", *target)
    lossy = [*base[:-1], tmp_path / "b", "--kind", "greedy", *target, "--store", "bfloat16"]
    assert "is no bfloat16" in fails(capsys, *lossy)

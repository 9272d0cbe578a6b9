"""Driving a server: SGLang's recorded answers replayed over HTTP, with refusals and failures."""

import http.server
import json
import socket
import threading

import pytest
from crosscheck_data import DATA
from selection import by_default

from eagle3_jax import cli
from eagle3_jax.command import Parser, stop_ids
from eagle3_jax.crosscheck import live_command
from eagle3_jax.crosscheck.live import Asking, drive, saved_notes
from eagle3_jax.crosscheck.reading import read_run
from eagle3_jax.crosscheck.types import CrosscheckError
from eagle3_jax.findings import ConvertError
from eagle3_jax.records.live import Server
from eagle3_jax.records.types import RecordError

ASKING = Asking(max_new_tokens=24, ignore_eos=True, top_logprobs=3)
TARGET = {"architectures": ["LlamaForCausalLM"], "vocab_size": 128}


class Replayed(http.server.BaseHTTPRequestHandler):
    """Recorded answers by prompt; `server.script` says what goes wrong first."""

    def log_message(self, *args):
        pass

    def do_GET(self):
        self.server.seen.append((self.path, None))
        if self.path in self.server.places:
            self.reply(200, self.server.places[self.path])
        else:
            self.reply(404, {"error": {"message": "not here"}})

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.seen.append((self.path, body))
        if self.path == "/flush_cache":
            self.reply(200, b"Cache flushed.\n")
            return
        step = self.server.script.pop(0) if self.server.script else None
        if step == "hang up":
            self.connection.close()
        elif step == "half":
            self.reply(200, b'{"output_ids": [1', promise=400)
        elif step == "slow":
            threading.Event().wait(0.5)
        elif step is not None:
            self.reply(*step)
        elif refused := next((w for w in self.server.refused if w in body), None):
            self.reply(400, {"error": {"message": self.server.refused[refused]}})
        else:
            self.reply(200, self.answer(body))

    def answer(self, body):
        ids = body["input_ids"]
        if isinstance(ids[0], list):
            return [self.answer(body | {"input_ids": one}) for one in ids]
        answer = json.loads(json.dumps(self.server.answers[tuple(ids)]))
        if "return_hidden_states" not in body:
            del answer["meta_info"]["hidden_states"]
        if "return_logprob" not in body:
            del answer["meta_info"]["output_token_logprobs"]
        self.server.change(answer)
        return answer

    def reply(self, status, value, promise=None):
        data = value if isinstance(value, bytes) else json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(promise or len(data)))
        self.end_headers()
        self.wfile.write(data)


def recorded(name="right"):
    lines = (DATA / f"chain/{name}.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


@pytest.fixture
def server(monkeypatch):
    monkeypatch.setattr("eagle3_jax.records.live.time.sleep", lambda seconds: None)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Replayed) as found:
        found.daemon_threads = True
        found.answers = {tuple(a["request"]["input_ids"]): a["response"] for a in recorded()}
        found.places = {
            f"/{name}": json.loads((DATA / f"chain/{name}.json").read_text())
            for name in ("server_info", "model_info")
        }
        found.script, found.seen, found.refused = [], [], {}
        found.change = lambda answer: None
        found.url = f"http://127.0.0.1:{found.server_port}"
        found.ask = Server(found.url, timeout=5, retries=2)
        thread = threading.Thread(target=found.serve_forever, args=(0.01,), daemon=True)
        thread.start()
        yield found
        found.shutdown()
        thread.join()


def prompts(server):
    return [list(prompt) for prompt in server.answers]


def bodies(server):
    return [body for path, body in server.seen if path == "/generate"]


def test_all_of_it_is_kept_and_reads_back(server, tmp_path):
    server.places["/server_info"] |= {"api_key": "sk-1", "nested": [{"ssl_password": "x"}]}
    done = []
    asked = prompts(server)
    assert (
        drive(server.ask, asked, tmp_path / "a", ASKING, target=TARGET, on_done=done.append) == ()
    )
    assert done == [1, 2, 3, 4]
    assert bodies(server)[0] == recorded()[0]["request"] | {"top_logprobs_num": 3}
    info = json.loads((tmp_path / "a/server_info.json").read_text())
    assert info["api_key"] == info["nested"][0]["ssl_password"] == "<redacted>"
    assert info["speculative_num_steps"] == 3
    run = read_run(tmp_path / "a")
    assert run.settings.tree is not None
    assert (run.settings.tree.num_steps, run.settings.tree.topk) == (3, 1)
    assert (run.settings.version, run.settings.dtype) == ("0.5.23", "float32")
    for request, answer in zip(run.requests, recorded(), strict=True):
        assert request.prompt == answer["request"]["input_ids"]
        assert request.output == answer["response"]["output_ids"]
        assert request.aux.shape == (len(request.prompt) + 23, 96)
        assert request.stats["spec_verify_ct"] == answer["response"]["meta_info"]["spec_verify_ct"]


def test_two_drives_leave_the_same_bytes(server, tmp_path):
    for name in ("a", "b"):
        drive(server.ask, prompts(server), tmp_path / name, ASKING)
    files = sorted(path.name for path in (tmp_path / "a").iterdir())
    assert files == ["answers.jsonl", "driven.json", "model_info.json", "server_info.json"]
    for name in files:
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()


def test_a_batch_is_one_request(server, tmp_path):
    drive(server.ask, prompts(server)[:2], tmp_path / "one", ASKING)
    server.seen.clear()
    asking = Asking(max_new_tokens=24, ignore_eos=True, top_logprobs=3, batch_size=3)
    drive(server.ask, prompts(server), tmp_path / "three", asking)
    assert [len(body["input_ids"]) for body in bodies(server)] == [3, 1]
    lines = (tmp_path / "three/answers.jsonl").read_text().splitlines()
    assert lines[:2] == (tmp_path / "one/answers.jsonl").read_text().splitlines()


@pytest.mark.parametrize(
    ("refused", "given_up"),
    [
        ({"return_hidden_states": "not configured to return hidden states."}, ["hidden states"]),
        ({"return_logprob": "logprob is not supported here"}, ["logprobs"]),
        ({"top_logprobs_num": "top_logprobs_num is too large"}, ["top logprobs"]),
        (
            {"return_hidden_states": "no", "top_logprobs_num": "no", "return_logprob": "no"},
            ["hidden states", "top logprobs", "logprobs"],
        ),
    ],
)
def test_what_is_refused_is_left_out_and_said(server, tmp_path, refused, given_up):
    server.refused = refused
    notes = drive(server.ask, prompts(server), tmp_path / "a", ASKING)
    assert [note.split(" are not compared")[0] for note in notes] == given_up
    assert all("the server refuses them: " in note for note in notes)
    assert saved_notes(tmp_path / "a") == notes
    assert len(bodies(server)) == 4 + len(given_up)
    run = read_run(tmp_path / "a")
    assert (run.requests[0].aux is None) == ("hidden states" in given_up)
    assert run.requests[0].output == recorded()[0]["response"]["output_ids"]


def test_a_refusal_of_the_bare_request_is_the_error(server, tmp_path):
    server.refused = {"sampling_params": "temperature must be positive"}
    with pytest.raises(CrosscheckError, match="HTTP 400: temperature must be positive"):
        drive(server.ask, prompts(server), tmp_path / "a", ASKING)
    assert list(tmp_path.iterdir()) == []


def test_passing_failures_are_tried_again(server, tmp_path):
    server.script = ["hang up", (503, {"error": {"message": "busy"}})]
    drive(server.ask, prompts(server)[:1], tmp_path / "a", ASKING)
    assert len(bodies(server)) == 3
    assert read_run(tmp_path / "a").requests[0].output == recorded()[0]["response"]["output_ids"]


@pytest.mark.parametrize(
    ("script", "message"),
    [
        (["half"] * 3, "IncompleteRead"),
        (["hang up"] * 3, "without response"),
        (["slow"] * 3, "timed out"),
        ([(500, {"error": {"message": "CUDA out of memory"}})] * 3, "HTTP 500: CUDA out of memory"),
        ([(401, {"error": "Unauthorized"})], "HTTP 401: Unauthorized"),
        ([(200, b"<html>")], "the answer is not JSON"),
        ([(200, {"error": {"message": "aborted"}})], "prompt 0: aborted"),
        ([(200, {"text": "hello"})], "no meta_info: not an answer of SGLang's /generate"),
        ([(200, [])], "0 answers to 1 prompts"),
        (
            [(200, {"meta_info": {"output_token_logprobs": [5]}})],
            r"prompt 0: output_token_logprobs are no \[logprob, id, text\]",
        ),
    ],
)
def test_a_failure_is_one_line_and_leaves_nothing(server, tmp_path, script, message):
    server.script = script
    ask = Server(server.url, timeout=0.1, retries=2)
    with pytest.raises(CrosscheckError, match=message) as error:
        drive(ask, prompts(server)[:1], tmp_path / "a", ASKING)
    assert str(error.value).startswith(server.url)
    assert "\n" not in str(error.value)
    assert list(tmp_path.iterdir()) == []


def test_nobody_listens(tmp_path):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}"
    with pytest.raises(CrosscheckError, match=r"/server_info: .*refused"):
        drive(Server(url, retries=0), [[1]], tmp_path / "a")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda places: places.clear(), "no SGLang server: it has neither"),
        (lambda places: places["/server_info"].pop("model_path"), "no model_path in it"),
        (lambda places: places["/server_info"].update(context_length=30), "context of 30"),
        (lambda places: places["/server_info"].update(max_req_input_len=6), "the server takes 6"),
        (
            lambda places: places["/model_info"].update(architectures=["Qwen3ForCausalLM"]),
            "a Qwen3ForCausalLM; the target given is a LlamaForCausalLM",
        ),
    ],
)
def test_a_server_that_does_not_fit(server, tmp_path, change, message):
    change(server.places)
    with pytest.raises(CrosscheckError, match=message):
        drive(server.ask, prompts(server), tmp_path / "a", ASKING, target=TARGET)
    assert bodies(server) == []


@pytest.mark.parametrize(("ids", "message"), [([3, 128], "id 128.* 0..127"), ([], "no tokens")])
def test_bad_ids_are_never_sent(server, tmp_path, ids, message):
    with pytest.raises(CrosscheckError, match=f"prompt 1 has {message}"):
        drive(server.ask, [[5], ids], tmp_path / "a", ASKING, target=TARGET)
    assert bodies(server) == []


def test_an_older_server(server, tmp_path):
    """Other places, its arguments nested, text only; ids out of the logprobs."""
    info = server.places.pop("/server_info")
    server.places["/get_server_info"] = {"server_args": info, "version": "0.4.9"}
    server.places["/get_model_info"] = server.places.pop("/model_info")
    server.change = lambda answer: answer.pop("output_ids")
    notes = drive(server.ask, prompts(server), tmp_path / "a", ASKING, target=TARGET)
    assert notes == ("output ids were read out of output_token_logprobs: the server sends none",)
    run = read_run(tmp_path / "a")
    assert run.settings.version == "0.4.9"
    assert [r.output for r in run.requests] == [a["response"]["output_ids"] for a in recorded()]
    server.refused = {"return_logprob": "logprob"}
    with pytest.raises(CrosscheckError, match="neither output_ids nor logprobs"):
        drive(server.ask, prompts(server), tmp_path / "b", ASKING)


def test_cached_prefixes_are_said_and_can_be_emptied(server, tmp_path):
    def cached(answer):
        answer["meta_info"]["cached_tokens"] = 4
        del answer["meta_info"]["hidden_states"][0][:4]

    server.change = cached
    notes = drive(server.ask, prompts(server)[:2], tmp_path / "a", ASKING)
    assert len(notes) == 1
    assert "2 of 2 prompts began in the server's prefix cache (8 tokens)" in notes[0]
    assert [r.cached_tokens for r in read_run(tmp_path / "a").requests] == [4, 4]
    assert [r.first for r in read_run(tmp_path / "a").requests] == [4, 4]
    server.change = lambda answer: None
    server.seen.clear()
    drive(server.ask, prompts(server)[:1], tmp_path / "b", Asking(flush_cache=True))
    assert [path for path, _ in server.seen][2:] == ["/flush_cache", "/generate"]


def test_chunks_are_said(server, tmp_path):
    server.places["/server_info"]["chunked_prefill_size"] = 8
    notes = drive(server.ask, prompts(server), tmp_path / "a", ASKING)
    assert len(notes) == 1
    assert "prompts over 8 tokens are prefilled in chunks" in notes[0]


def test_no_folder_is_overwritten(server, tmp_path):
    with pytest.raises(CrosscheckError, match="exists: name a new folder"):
        drive(server.ask, prompts(server), tmp_path, ASKING)
    with pytest.raises(CrosscheckError, match="no such folder"):
        drive(server.ask, prompts(server), tmp_path / "x/y", ASKING)
    assert server.seen == []


@pytest.mark.parametrize("text", ["", "[]", '{"format": 1}', '{"format": 2, "notes": []}'])
def test_damaged_notes(tmp_path, text):
    assert saved_notes(tmp_path) == ()
    (tmp_path / "driven.json").write_text(text)
    with pytest.raises(CrosscheckError, match=r"driven\.json: "):
        saved_notes(tmp_path)


def parsed(*words):
    parser = Parser(prog="eagle3")
    live_command.add_live_arguments(parser)
    parser.add_argument("--prompts")
    parser.add_argument("--target")
    parser.add_argument("--draft")
    parser.add_argument("--stop", type=stop_ids)
    parser.add_argument("--ignore-eos", action="store_true")
    return parser.parse_args([str(word) for word in words])


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--save", "d"], "--save needs --url"),
        (["--flush-cache"], "--flush-cache needs --url"),
        (["--url", "http://h"], "--url needs --prompts"),
        (["--url", "http://h", "--prompts", "p", "--batch-size", "0"], "--batch-size is 0"),
        (["--url", "http://h", "--prompts", "p", "--timeout", "0"], "--timeout is 0.0"),
        (["--url", "http://h", "--prompts", "p", "--timeout", "nan"], "--timeout is nan"),
        (["--url", "http://h", "--prompts", "p", "--timeout", "1e300"], "at most 86400"),
        (["--write-sglang-dump", "d", "--target", "t"], "needs --target and --draft"),
    ],
)
def test_options_that_do_not_go_together(words, message):
    with pytest.raises(ConvertError, match=message) as error:
        live_command.check_live_arguments(parsed(*words))
    assert error.value.code == "USAGE"


@pytest.mark.parametrize("key", [b"", b"a\nb", b"\xff\xfe"])
def test_a_key_that_no_header_takes(key, server, tmp_path):
    (tmp_path / "key").write_bytes(key)
    args = parsed("--url", server.url, "--prompts", "p", "--api-key-file", tmp_path / "key")
    with (
        pytest.raises(ConvertError, match="one line of ASCII"),
        live_command.driven(args, prompts(server), None),
    ):
        pass
    assert server.seen == []


def test_a_count_of_cached_tokens_that_is_none(server, tmp_path):
    answer = {"output_ids": [1], "meta_info": {"cached_tokens": "x"}}
    server.script = [(200, answer)]
    drive(Server(server.url), prompts(server)[:1], tmp_path / "a", ASKING)
    with pytest.raises(CrosscheckError, match="cached_tokens is 'x', expected a count"):
        read_run(tmp_path / "a")


def test_the_options_of_a_drive(server, tmp_path, sglang_models):
    (tmp_path / "key").write_text("k\n")
    options = ["--url", server.url, "--prompts", "p", "--max-new-tokens", 24, "--batch-size", 2]
    options += ["--top-logprobs", 0, "--stop", "3,5", "--api-key-file", tmp_path / "key"]
    args = parsed(*options, "--timeout", 5)
    live_command.check_live_arguments(args)
    with live_command.driven(args, prompts(server), sglang_models / "target") as folder:
        assert len(read_run(folder).requests) == 4
    assert not folder.exists()
    assert bodies(server)[0] == {
        "input_ids": prompts(server)[:2],
        "sampling_params": {
            "temperature": 0,
            "max_new_tokens": 24,
            "ignore_eos": False,
            "stop_token_ids": [3, 5],
        },
        "return_hidden_states": True,
        "return_logprob": True,
        "logprob_start_len": 0,
    }
    kept = parsed(*options, "--save", tmp_path / "kept")
    with live_command.driven(kept, prompts(server), None) as folder:
        assert folder == tmp_path / "kept"
    assert (tmp_path / "kept/answers.jsonl").is_file()


def test_an_address_that_is_none():
    args = parsed("--url", "localhost:30000", "--prompts", "p")
    with pytest.raises(RecordError, match="expected http://HOST:PORT"):  # noqa: SIM117
        with live_command.driven(args, [[1]], None):
            pass


VERDICTS = {
    None: ("equal", 0, "4 requests, 96 tokens"),
    "token_swapped": ("acceptance differs", 1, "output token 6"),
    "aux_one_early": ("draft differs", 1, "one layer early"),
}


@pytest.mark.parametrize("fault", by_default(VERDICTS, lambda i, _: i < 2))
def test_from_a_server_to_a_verdict(fault, server, sglang_models, converted, tmp_path, capsys):
    """`eagle3 crosscheck --url` as a user runs it; the same again from what was kept."""
    wrong = {} if fault is None else {tuple(a["request"]["input_ids"]): a for a in recorded(fault)}
    server.answers |= {ids: answer["response"] for ids, answer in wrong.items()}
    asked = list(wrong) or prompts(server)
    file, folder = tmp_path / "prompts.jsonl", tmp_path / "kept"
    file.write_text("".join(json.dumps({"input_ids": list(ids)}) + "\n" for ids in asked))
    draft = converted(sglang_models / "draft", "--target", str(sglang_models / "target"))
    capsys.readouterr()

    def said(*words) -> tuple[dict, int]:
        pair = ["--target", sglang_models / "target", "--draft", draft]
        status = cli.main([str(w) for w in ("crosscheck", *words, *pair, "--json")])
        return json.loads(capsys.readouterr().out), status

    url = ["--url", server.url, "--prompts", file, "--max-new-tokens", 24, "--ignore-eos"]
    found, status = said(*url, "--save", folder)
    kind, expected, words = VERDICTS[fault]
    assert (found["kind"], status) == (kind, expected), found["verdict"]
    assert words in found["verdict"]
    assert len(bodies(server)) == len(asked)
    again, status = said(folder)
    assert (again, status) == (found, expected)

"""What engines leave behind, in every form that is read; and what is refused, in one line."""

import json
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from crosscheck_golden import golden_run

from eagle3_jax.command import Parser, run_command
from eagle3_jax.config import TreeConfig
from eagle3_jax.crosscheck import CrosscheckError, command, read_run
from eagle3_jax.crosscheck.answers import settings_of_server
from eagle3_jax.trace import Trace

RECORDS = Path(__file__).parent / "data/records"
RIGHT = Path(__file__).parent / "data/crosscheck/chain/right.jsonl"
BATCH = Path(__file__).parent / "data/crosscheck/chain/right_batch4.jsonl"
STALE = Path(__file__).parent / "data/crosscheck/chain/stale_kv.jsonl"


def answer(**meta: Any) -> dict[str, Any]:
    known = {
        "id": "a",
        "finish_reason": {"type": "length", "length": 3},
        "prompt_tokens": 2,
        "completion_tokens": 3,
        "cached_tokens": 1,
    }
    return {"output_ids": [7, 8, 9], "input_ids": [1, 2], "meta_info": known | meta}


def written(tmp_path: Path, value: Any, name: str = "answers.json") -> Path:
    path = tmp_path / name
    path.write_text(value if isinstance(value, str) else json.dumps(value))
    return path


NEW = {
    "spec_verify_ct": 2,
    "spec_num_correct_drafts": 1,
    "spec_num_proposed_drafts": 6,
    "spec_accept_rate": 1 / 6,
    "spec_accept_length": 1.5,
    "spec_correct_drafts_histogram": [1, 1],
}
OLD = {
    "spec_verify_ct": 2,
    "spec_accept_token_num": 1,
    "spec_draft_token_num": 6,
    "spec_accept_rate": 1 / 6,
    "spec_accept_length": 1.5,
    "spec_accept_histogram": [1, 1],
}


@pytest.mark.parametrize("meta", [NEW, OLD], ids=["0.5.23", "0.5.10"])
def test_statistics_of_both_generations(meta, tmp_path):
    path = written(tmp_path, [answer(**meta, of_the_future=[1])])
    request = read_run(path).requests[0]
    assert {k: v for k, v in request.stats.items() if k in NEW} == NEW
    assert request.original["of_the_future"] == [1]
    assert all(request.original[name] == value for name, value in meta.items())
    assert request.missing == ()
    assert (request.prompt, request.output, request.cached_tokens) == ([1, 2], [7, 8, 9], 1)


def test_a_missing_statistic_is_named(tmp_path):
    meta = {k: v for k, v in NEW.items() if k != "spec_correct_drafts_histogram"}
    request = read_run(written(tmp_path, answer(**meta))).requests[0]
    assert request.missing == ("spec_correct_drafts_histogram",)


def test_lines_pairs_and_lists_are_the_same(tmp_path):
    plain = [answer(), answer(id="b")]
    pairs = [{"request": {"input_ids": [1, 2]}, "response": a} for a in plain]
    for a in pairs:
        del a["response"]["input_ids"]
    forms = {
        "list.json": json.dumps(plain | pairs if isinstance(plain, dict) else pairs),
        "lines.jsonl": "\n".join(map(json.dumps, pairs)),
        "batch.json": json.dumps(
            {"request": {"input_ids": [[1, 2], [1, 2]]}, "response": [p["response"] for p in pairs]}
        ),
    }
    for name, text in forms.items():
        requests = read_run(written(tmp_path, text, name)).requests
        assert [r.name for r in requests] == ["a", "b"], name
        assert [r.prompt for r in requests] == [[1, 2], [1, 2]], name


def test_prompts_come_from_logprobs_or_from_the_caller(tmp_path):
    logged = answer(input_token_logprobs=[[None, 1, None], [-0.5, 2, None]])
    bare = answer()
    for one in (logged, bare):
        del one["input_ids"]
    request = read_run(written(tmp_path, logged)).requests[0]
    assert request.prompt == [1, 2]
    assert request.input_logprobs is not None
    assert np.isnan(request.input_logprobs[0])
    assert read_run(written(tmp_path, bare), prompts=[[1, 2]]).requests[0].prompt == [1, 2]
    with pytest.raises(CrosscheckError, match="give them with --prompts"):
        read_run(written(tmp_path, bare))


def test_recorded_answers(tmp_path):
    """States under EAGLE3, of plain decoding, of the aux-only mode; of a chain and a tree."""
    found = read_run(RECORDS / "sglang_engine.jsonl").requests
    shapes = {r.name: (r.aux.shape, r.hidden_kind) for r in found if r.aux is not None}
    assert shapes["chain_s3"] == ((13, 96), "aux")
    assert shapes["nospec"] == ((13, 32), None)
    assert shapes["aux_only"] == ((11, 96), None)
    request = read_run(RECORDS / "sglang_logprobs.json").requests[0]
    assert request.output_logprobs is not None
    assert request.output_top is not None
    tops = request.output_top
    assert [t[0][0] for t in tops] == request.output
    assert request.output_logprobs.tolist() == [t[0][1] for t in tops]


def test_an_openai_style_answer(tmp_path):
    body = {
        "id": "c",
        "choices": [{"token_ids": [7, 8], "finish_reason": "stop", "prompt_token_ids": [1]}],
        "usage": {"prompt_tokens": 1, "completion_tokens": 2},
    }
    run = read_run(written(tmp_path, body))
    request = run.requests[0]
    assert run.settings.engine == "openai"
    assert (request.prompt, request.output, request.finish_reason) == ([1], [7, 8], "stop")
    del body["choices"][0]["token_ids"]
    with pytest.raises(CrosscheckError, match="return_token_ids"):
        read_run(written(tmp_path, body))


def test_vllm_outputs_and_counters(tmp_path):
    output = {"prompt_token_ids": [1], "outputs": [{"token_ids": [7], "finish_reason": "length"}]}
    assert read_run(written(tmp_path, [output])).requests[0].output == [7]
    summary = {
        "vllm": "0.32.0",
        "dtype": "float32",
        "k": 3,
        "prompts": [[1, 2]],
        "results": [
            {
                "output_ids": [3] * 69,
                "spec": {
                    "num_drafts": 41,
                    "num_draft_tokens": 123,
                    "num_accepted_tokens": 27,
                    "num_accepted_tokens_per_pos": [16, 9, 2],
                },
            }
        ],
    }
    run = read_run(written(tmp_path, summary))
    stats = run.requests[0].stats
    assert (run.settings.engine, run.settings.version) == ("vllm", "0.32.0")
    assert run.settings.tree == TreeConfig(3)
    assert stats["spec_correct_drafts_histogram"] == [25, 7, 7, 2]
    assert stats["spec_verify_ct"] == 41
    assert run.requests[0].original["spec"] == summary["results"][0]["spec"]


@pytest.mark.parametrize(
    ("key", "value"),
    [("num_steps", "x"), ("num_steps", 2.5), ("eagle_topk", [2]), ("num_draft_tokens", "8")],
)
def test_a_servers_tree_of_other_types(key, value):
    info = {"speculative_algorithm": "EAGLE3", "speculative_num_steps": 3}
    info |= {"speculative_eagle_topk": 2, "speculative_num_draft_tokens": 4}
    with pytest.raises(CrosscheckError, match=f"speculative_{key} is .*, expected a number"):
        settings_of_server(info | {f"speculative_{key}": value}, "info")


@pytest.mark.parametrize("text", ["[1]", '"x"'])
def test_a_server_info_that_is_no_object(text, tmp_path):
    written(tmp_path, [answer()])
    (tmp_path / "server_info.json").write_text(text)
    with pytest.raises(CrosscheckError, match=r"server_info\.json: a \w+, expected"):
        read_run(tmp_path)


def test_a_dump_with_a_missing_step(tmp_path):
    for step in (3, 4, 6):
        (tmp_path / f"step={step}___rank=0___dump_index={step}___name=positions.pt").touch()
    with pytest.raises(CrosscheckError, match="steps 3 to 6, but nothing of step 5"):
        read_run(tmp_path)


def test_what_a_server_says_is_no_answer(tmp_path):
    for name in ("server_info.json", "model_info.json", "driven.json"):
        (tmp_path / name).write_text("{}")
    with pytest.raises(CrosscheckError, match="neither SGLang's dumper files"):
        read_run(tmp_path)


def test_the_servers_description():
    info = json.loads((RECORDS / "sglang_server_info.json").read_text())
    found = settings_of_server(info, "info")
    assert found.tree == TreeConfig(3, 4, 8)
    assert (found.dtype, found.speculative) == ("float32", True)
    chain = {"speculative_algorithm": "EAGLE3", "speculative_num_steps": 3, "page_size": 16}
    found = settings_of_server({"server_args": chain}, "info")
    assert (found.tree, found.page_size) == (TreeConfig(3), 16)


@pytest.mark.parametrize("name", ["sglang_dumper", "sglang_dumper_tree"])
def test_a_dump_has_the_rounds_of_the_engine(name, tmp_path):
    pytest.importorskip("torch")
    with zipfile.ZipFile(RECORDS / f"{name}.zip") as archive:
        archive.extractall(tmp_path)
    run = read_run(tmp_path)
    case = "tree_s3_k4_d8" if name.endswith("tree") else "chain_s3"
    golden = golden_run(case, ("single0",)).requests[0]
    request = run.requests[0]
    assert request.prompt == golden.prompt
    assert request.output == golden.output[: len(request.output)]
    assert request.rounds is not None
    assert golden.rounds is not None
    known = [r for r in request.rounds if r.num_correct is not None]
    assert known
    for mine, theirs in zip(known, golden.rounds, strict=False):
        assert (mine.length, mine.tokens, mine.positions, mine.num_correct, mine.bonus) == (
            theirs.length,
            theirs.tokens,
            theirs.positions,
            theirs.num_correct,
            theirs.bonus,
        )
        for level in range(2):
            key = f"draft_tokens.{level}"
            if key in mine.tensors:
                assert mine.tensors[key].tolist() == theirs.tensors[key].tolist()


def test_a_trace_is_a_run(tmp_path):
    trace = Trace([[1, 2]], [[3]], [], None, "greedy", None, {"target": "float32"})
    trace.save(tmp_path / "trace.jsonl")
    run = read_run(tmp_path / "trace.jsonl")
    assert run.settings.engine == "eagle3_jax"
    assert run.requests[0].output == [3]


BAD: dict[str, tuple[Any, str]] = {
    "not json": ("{", "not JSON"),
    "empty": ("", "empty, expected answers"),
    "no answers": ([], "no answers in it"),
    "too long a number": ("9" * 5000, "not JSON: a number too long"),
    "a number": ([3], "expected an answer of an engine"),
    "no meta_info": ([{"text": "x"}], "no meta_info, choices or outputs"),
    "no ids": ([{"text": "x", "meta_info": {}}], "no output_ids"),
    "an error": ([{"error": {"message": "busy"}}], "the engine's error"),
    "text ids": ([answer() | {"output_ids": ["a"]}], "output_ids are"),
    "another prompt": ([answer(prompt_tokens=9)], "2 prompt ids, meta_info counts 9"),
    "other logprobs": (
        [answer(output_token_logprobs=[[-1.0, 1, None]] * 3)],
        "of other tokens than output_ids",
    ),
    "words for counts": ([answer(**NEW | {"spec_verify_ct": "2"})], "expected a count"),
    "words for a histogram": (
        [answer(**NEW | {"spec_correct_drafts_histogram": [1, None]})],
        "expected counts",
    ),
    "short tops": ([answer(output_top_logprobs=[[[-1.0, 7, None]]])], "has 1 places, the output 3"),
    "no states": ([answer(hidden_states=3)], "hidden_states is 3, expected a list"),
    "no list": ([answer(output_top_logprobs="x")], "output_top_logprobs is x, expected a list"),
    "ragged states": ([answer(hidden_states=[[[1.0]], [1.0, 2.0]])], "rows of numbers"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_one_line(name, tmp_path, capsys):
    value, says = BAD[name]
    path = written(tmp_path, value)
    with pytest.raises(CrosscheckError) as error:
        read_run(path)
    assert says in str(error.value)
    assert str(path) in str(error.value)
    assert crosscheck(str(path), str(path)) == 2
    assert capsys.readouterr().err.startswith("error [CROSSCHECK]: ")


ARCHIVES: dict[str, tuple[Callable[[bytes], bytes], str]] = {
    "empty": (lambda whole: b"", "no .npz archive, or not all of it"),
    "cut": (lambda whole: whole[:60], "no .npz archive, or not all of it"),
    "a text": (lambda whole: b"tensors", "no .npz archive, or not all of it"),
    "damaged": (lambda whole: whole.replace(b"NUMPY", b"MUNPY"), "Bad CRC-32"),
}


@pytest.mark.parametrize("name", ARCHIVES)
def test_a_bad_archive_is_one_line(name, tmp_path):
    change, says = ARCHIVES[name]
    file = tmp_path / "tensors.npz"
    np.savez(file, states=np.arange(6.0), ids=np.array([7]))
    assert len(read_run(file).requests) == 1
    file.write_bytes(change(file.read_bytes()))
    with pytest.raises(CrosscheckError) as error:
        read_run(file)
    assert says in str(error.value)
    assert str(file) in str(error.value)


def crosscheck(*argv: str) -> int:
    parser = Parser(prog="eagle3")
    command.add_parser(parser.add_subparsers(required=True))
    return run_command(parser, lambda args: args.run(args), ["crosscheck", *argv])


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        ([], "give RESULTS, or --url"),
        (["x.json"], "give --target and --draft, or a second run"),
        (["x.json", "y.json", "--target", "t"], "two runs are compared without models: --target"),
        (["x.json", "--draft", "d", "--topk", "2"], "need --num-steps"),
        (["/nowhere", "/nowhere"], "no such file or folder"),
    ],
)
def test_the_command_refuses(argv, says, capsys):
    assert crosscheck(*argv) == 2
    assert says in capsys.readouterr().err


def test_two_runs_on_the_command_line(capsys):
    assert crosscheck(str(BATCH), str(RIGHT)) == 0
    assert capsys.readouterr().out.startswith("equal: 4 requests in both")
    assert crosscheck(str(STALE), str(RIGHT), "--json") == 1
    found = json.loads(capsys.readouterr().out)
    assert found["kind"] == "target differs"
    assert (found["first"]["tensor"], found["first"]["node"]) == ("states", 15)
    assert found["status"] == 1


def test_a_folder_without_results_says_what_was_expected(tmp_path):
    with pytest.raises(CrosscheckError, match=r"neither SGLang's dumper files .* nor a file"):
        read_run(tmp_path)

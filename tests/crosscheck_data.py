"""Recorded runs of the real SGLang (tests/data/crosscheck) as folders that `crosscheck` takes."""

import json
import shutil
import tarfile
from pathlib import Path
from typing import Any

DATA = Path(__file__).parent / "data/crosscheck"
TREES = {"chain": (3, 1, 4), "tree": (3, 4, 8)}


def answers_folder(kind: str, name: str, folder: Path, *, dump: bool = False) -> Path:
    """`server_info.json`, `model_info.json`, `answers.jsonl`, on request the dump (needs torch).

    kind: `chain` or `tree`; name: `right`, `right_batch4` or a fault of `faults(kind)`. The dump is
    of another, shorter run of the first prompt (of all four in `right_batch4`).
    """
    folder.mkdir(parents=True)
    for file in ("server_info.json", "model_info.json"):
        shutil.copy(DATA / kind / file, folder / file)
    shutil.copy(DATA / kind / f"{name}.jsonl", folder / "answers.jsonl")
    if dump:
        dump_folder(kind, name, folder / "dump")
    return folder


def dump_folder(kind: str, name: str, folder: Path) -> Path:
    """The `step=*.pt` files of a run."""
    folder.mkdir(parents=True)
    with tarfile.open(DATA / kind / f"{name}.dump.tar.xz") as archive:
        archive.extractall(folder, filter="data")
    return folder


def faults(kind: str) -> dict[str, Any]:
    """What each fault did (`done`) and how far its answers are from the right ones (`answers`)."""
    return json.loads((DATA / kind / "effects.json").read_text(encoding="utf-8"))

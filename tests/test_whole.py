"""Outputs are whole or absent: files, folders, and what stood in their place."""

import os
from pathlib import Path

import pytest

from eagle3_jax.files.whole import finite, put, whole_file


def folder(path: Path, text: str) -> Path:
    path.mkdir()
    (path / "file").write_text(text)
    return path


@pytest.mark.parametrize("public", [True, False])
def test_a_file_is_there_when_all_is_written(tmp_path, public):
    path = tmp_path / "out.txt"
    old = os.umask(0o027)
    try:
        with whole_file(path, public=public, encoding="utf-8") as file:
            file.write("half")
            assert not path.exists()
    finally:
        os.umask(old)
    assert path.read_text() == "half"
    assert path.stat().st_mode & 0o777 == (0o640 if public else 0o600)
    assert list(tmp_path.iterdir()) == [path]


def test_a_failure_leaves_the_old_file(tmp_path):
    path = tmp_path / "out.txt"
    path.write_text("old")

    def cut():
        with whole_file(path) as file:
            file.write("new")
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        cut()
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("before", ["absent", "empty", "full", "file"])
def test_a_folder_takes_its_place(tmp_path, before):
    made, place = folder(tmp_path / "made", "new"), tmp_path / "place"
    if before == "file":
        place.write_text("old")
    elif before == "full":
        folder(place, "old")
    elif before == "empty":
        place.mkdir()
    put(made, place)
    assert (place / "file").read_text() == "new"
    assert list(tmp_path.iterdir()) == [place]


@pytest.mark.parametrize("stuck", [False, True])
def test_what_stood_there_is_never_lost(tmp_path, monkeypatch, stuck):
    """Not even when it cannot go back: then it is left where it stepped aside."""
    made, place = folder(tmp_path / "made", "new"), folder(tmp_path / "place", "old")
    replace, calls = os.replace, []

    def fail(source, target):
        calls.append(source)
        if len(calls) == 2 or (stuck and len(calls) == 3):
            raise OSError(5, "Input/output error")
        replace(source, target)

    monkeypatch.setattr("os.replace", fail)
    with pytest.raises(OSError, match="Input/output error"):
        put(made, place)
    kept = [p for p in tmp_path.rglob("file") if p.read_text() == "old"]
    assert len(kept) == 1
    assert (kept[0] == place / "file") is not stuck
    assert len(list(tmp_path.iterdir())) == 2


def test_numbers_that_json_lacks_are_words():
    given = {"a": [1.5, float("inf")], "b": (float("nan"), "x", None, True)}
    assert finite(given) == {"a": [1.5, "inf"], "b": ["nan", "x", None, True]}

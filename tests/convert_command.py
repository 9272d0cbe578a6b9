"""The converter's command run in this process, with what every test of it wants to know."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from convert import from_torch
from eagle3_jax.checkpoint import read_manifest, read_tensors


class Command:
    """Converts into `tmp_path / "out"` and checks what was printed and written."""

    def __init__(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
        self.folder, self.out, self.capsys = tmp_path, tmp_path / "out", capsys

    def run(self, path: Path, *flags: object) -> tuple[int, str, str]:
        """Exit status, stdout, stderr."""
        self.capsys.readouterr()
        status = from_torch.main([str(path), "--out", str(self.out), *map(str, flags)])
        captured = self.capsys.readouterr()
        return status, captured.out, captured.err

    def converted(self, path: Path, *flags: object) -> dict[str, Any]:
        """The manifest of a conversion that must succeed."""
        status, _, err = self.run(path, *flags, "--force")
        assert (status, err) == (0, "")
        return read_manifest(self.out)

    def refused(self, code: str, text: str, path: Path, *flags: object) -> str:
        """Exit 2, one line on stderr with this code and text, and nothing written."""
        before = sorted(self.folder.iterdir())
        status, out, err = self.run(path, *flags)
        assert status == 2
        assert out == ""
        assert err.startswith(f"error [{code}]: ")
        assert err.count("\n") == 1
        assert text in err
        assert sorted(self.folder.iterdir()) == before
        return err

    def stored(self) -> dict[str, np.ndarray]:
        """Every tensor of the draft that was written."""
        return stored(self.out)


def stored(folder: Path) -> dict[str, np.ndarray]:
    """Every tensor of a draft folder."""
    records = read_manifest(folder)["tensors"]
    return read_tensors(folder, records, records)


def codes(manifest: dict[str, Any]) -> list[str]:
    """Codes of the findings, in order."""
    return [finding["code"] for finding in manifest["findings"]]


def digests(manifest: dict[str, Any]) -> dict[str, str]:
    """Canonical name -> sha256."""
    return {name: record["sha256"] for name, record in manifest["tensors"].items()}

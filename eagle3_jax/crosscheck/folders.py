"""Folders written whole or not at all, and the files of SGLang's dumper in one."""

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from eagle3_jax.crosscheck.types import CrosscheckError
from eagle3_jax.files import torchsave
from eagle3_jax.records.dumper import HOOK

Named = dict[str, np.ndarray]


@contextmanager
def new_folder(folder: Path) -> Iterator[Path]:
    """A folder beside the destination that takes its name when all is written.

    Raises:
      CrosscheckError: the destination exists, or its parent does not.
    """
    if folder.exists() or folder.is_symlink():
        raise CrosscheckError(f"{folder}: exists: name a new folder")
    if not folder.parent.is_dir():
        raise CrosscheckError(f"{folder.parent}: no such folder")
    held = Path(tempfile.mkdtemp(dir=folder.parent, prefix=f".{folder.name}."))
    made = held / folder.name  # mkdtemp's own is for its owner only
    try:
        made.mkdir()
        yield made
        os.replace(made, folder)
    finally:
        shutil.rmtree(held, ignore_errors=True)


class Steps:
    """One forward pass after the other, as files of SGLang's dumper.

    Attributes:
      files: written so far.
    """

    def __init__(self, folder: Path):
        self._folder = folder
        self._step = 0
        self.files = 0

    def write(self, core: Named, hooked: Named, layer: Named):
        """Core fields by name, hooks of modules, and those inside layer 0."""
        for name, value in core.items():
            self._file(name, value, {})
        for name, value in hooked.items():
            self._file(HOOK + name, value, {})
        for name, value in layer.items():
            self._file(HOOK + name, value, {"layer_id": 0})
        self._step += 1

    def _file(self, name: str, value: np.ndarray, tags: dict[str, Any]):
        self.files += 1
        meta = {"step": self._step, "rank": 0, "dump_index": self.files, "name": name}
        meta |= {"recompute_status": "disabled", **tags}
        stem = "___".join(f"{key}={item}" for key, item in meta.items())
        torchsave.save({"value": value, "meta": meta}, self._folder / f"{stem}.pt")

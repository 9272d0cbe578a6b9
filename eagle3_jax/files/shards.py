"""Weights in one file or many: what a folder holds, which file wins, what an index promises."""

import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePosixPath

import numpy as np

from eagle3_jax.files.safetensors_file import SafetensorsFile
from eagle3_jax.files.source import FileError, TensorSource, read_json, sha256_file
from eagle3_jax.files.torchfile import TORCH_SUFFIXES, TorchFile

__all__ = [
    "FileError",
    "Shards",
    "TensorSource",
    "has_weights",
    "open_weights",
    "read_json",
    "sha256_file",
]

INDEX_SUFFIX = ".index.json"
NUMBERED = re.compile(r"(.*)-(\d+)-of-(\d+)(\.\w+)")


class Shards:
    """Several weight files as one source; every tensor is in exactly one of them.

    Args:
      parts: the opened files. index: the file that lists them.
      listed: tensor -> the part the index promises it in; None when there is no index.

    Raises:
      FileError: the same tensor in two files, a tensor the index lists and its file lacks, or one a
        file holds and the index does not list.
    """

    def __init__(
        self,
        parts: Sequence[TensorSource],
        index: Path | None = None,
        listed: Mapping[str, TensorSource] | None = None,
    ):
        owners: dict[str, TensorSource] = {}
        for part in parts:
            for name in part.names():
                if name in owners:
                    raise FileError(
                        f"tensor {name!r} is in two files: {owners[name].where(name)} and "
                        f"{part.where(name)}"
                    )
                owners[name] = part
        for name, part in (listed or {}).items():
            if owners.get(name) is not part:
                raise FileError(
                    f"{index}: lists tensor {name!r} in {part.files[0].name}, which lacks it"
                )
        for name, part in owners.items():
            if listed is not None and name not in listed:
                raise FileError(
                    f"{part.where(name)}: holds tensor {name!r}, which {index} does not list"
                )
        self._owners = owners
        self.files = tuple(f for part in parts for f in part.files) + ((index,) if index else ())
        self.notes: tuple[str, ...] = ()

    def names(self) -> Sequence[str]:  # noqa: D102
        return tuple(self._owners)

    def shape(self, name: str) -> tuple[int, ...]:  # noqa: D102
        return self._owner(name).shape(name)

    def dtype(self, name: str) -> str:  # noqa: D102
        return self._owner(name).dtype(name)

    def where(self, name: str) -> str:  # noqa: D102
        return self._owner(name).where(name)

    def read(self, name: str) -> np.ndarray:  # noqa: D102
        return self._owner(name).read(name)

    def _owner(self, name: str) -> TensorSource:
        if name not in self._owners:
            raise FileError(f"{self.files[-1].parent}: no file has a tensor {name!r}")
        return self._owners[name]


def open_weights(path: str | os.PathLike) -> TensorSource:
    """The tensors of a folder, of a weight file, or of a `*.index.json`.

    In a folder safetensors win over `.bin`; what was passed over is told in `notes`. `.bin` needs
    the torch extra and is read weights-only.

    Raises:
      FileError: nothing there, two candidates, a missing shard, an index path that leaves the
        folder, and everything the readers refuse.
    """
    path = Path(path)
    if path.is_dir():
        return _open_folder(path)
    if not path.exists():
        raise FileError(f"{path}: no such file or folder")
    if path.name.endswith(INDEX_SUFFIX):
        return _open_index(path)
    return _open_file(path)


def has_weights(folder: str | os.PathLike) -> bool:
    """Whether a folder holds weight files, and not only a config."""
    return any(_candidates(Path(folder)))


def _open_file(path: Path) -> SafetensorsFile | TorchFile:
    if path.suffix == ".safetensors":
        return SafetensorsFile(path)
    if path.suffix in TORCH_SUFFIXES:
        return TorchFile(path)
    raise FileError(
        f"{path}: unknown kind of weight file, expected .safetensors, {', '.join(TORCH_SUFFIXES)} "
        f"or {INDEX_SUFFIX}"
    )


def _names(folder: Path) -> list[str]:
    try:
        return sorted(entry.name for entry in folder.iterdir())
    except OSError as error:
        raise FileError(f"{folder}: cannot be read: {error.strerror}") from None


def _candidates(folder: Path) -> tuple[list[Path], list[Path]]:
    """Safetensors and torch weights of a folder, indexes included."""
    names = _names(folder)
    ours = [n for n in names if n.endswith((".safetensors", ".safetensors" + INDEX_SUFFIX))]
    torch = [
        n
        for n in names
        if n.startswith("pytorch_model") and n.endswith((".bin", ".bin" + INDEX_SUFFIX))
    ]
    return [folder / n for n in ours], [folder / n for n in torch]


def _open_folder(folder: Path) -> TensorSource:
    safetensors, torch = _candidates(folder)
    chosen = safetensors or torch
    if not chosen:
        found = ", ".join(_names(folder)[:8]) or "nothing"
        raise FileError(
            f"{folder}: no weights: expected model.safetensors, an index of shards, or "
            f"pytorch_model.bin, found {found}"
        )
    indexes = [path for path in chosen if path.name.endswith(INDEX_SUFFIX)]
    files = [path for path in chosen if path not in indexes]
    if len(indexes) > 1:
        raise FileError(f"{folder}: two indexes: {', '.join(path.name for path in indexes)}")
    if indexes:
        source = _open_index(indexes[0])
        strays = [path.name for path in files if path not in source.files]
        if strays:
            raise FileError(
                f"{folder}: {strays[0]} is not listed in {indexes[0].name}: remove one of them, or "
                "name the file to read"
            )
    elif len(files) == 1 and not NUMBERED.fullmatch(files[0].name):
        source = _open_file(files[0])
    else:
        source = _open_numbered(folder, files)
    if safetensors and torch:
        passed = ", ".join(path.name for path in torch)
        source.notes += (f"safetensors were read; passed over: {passed}",)
    return source


def _open_index(index: Path) -> Shards:
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise FileError(f"{index}: has no weight_map, expected tensor name -> file name")
    parts: dict[str, SafetensorsFile | TorchFile] = {}
    listed: dict[str, TensorSource] = {}
    for name, file in weight_map.items():
        if not isinstance(file, str) or not _stays_inside(file):
            raise FileError(f"{index}: tensor {name!r} is in {file!r}, not a file of this folder")
        if file not in parts:
            path = index.parent / file
            if not path.exists():
                raise FileError(f"{index}: shard {file} is missing, it holds tensor {name!r}")
            parts[file] = _open_file(path)
        listed[name] = parts[file]
    return Shards(list(parts.values()), index, listed)


def _stays_inside(file: str) -> bool:
    # Lexical on purpose: the hub cache's folders hold links to blobs elsewhere.
    path = PurePosixPath(file)
    plain = "\\" not in file and "\0" not in file and ":" not in file
    return bool(path.parts) and plain and not path.is_absolute() and ".." not in path.parts


def _open_numbered(folder: Path, files: list[Path]) -> Shards:
    """Shards named `x-00001-of-00004` without an index: the set must be whole."""
    matches = [NUMBERED.fullmatch(path.name) for path in files]
    sets = {(m[1], m[3], m[4]) for m in matches if m}
    if len(sets) != 1 or not all(matches):
        raise FileError(
            f"{folder}: {len(files)} weight files and no index: "
            f"{', '.join(path.name for path in files[:8])}: name the file to read"
        )
    stem, total, suffix = sets.pop()
    present = {int(m[2]) for m in matches if m}
    missing = [n for n in range(1, int(total) + 1) if n not in present]
    if missing:
        raise FileError(
            f"{folder}: shard {stem}-{missing[0]:0{len(total)}d}-of-{total}{suffix} is missing"
        )
    return Shards([_open_file(path) for path in files])

"""What every weight file offers, and how small JSON files are read."""

import collections
import hashlib
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

MAX_JSON_BYTES = 100_000_000
"""The safetensors format's own limit for a header; no index or config comes near it."""


class FileError(ValueError):
    """A file that is missing, damaged or not what it should be: says which, found, expected."""


class TensorSource(Protocol):
    """Named tensors on disk, read one at a time.

    Attributes:
      files: every file the tensors come from, the index included.
      notes: choices made while opening ("safetensors preferred to .bin"), for the report.
    """

    @property
    def files(self) -> tuple[Path, ...]: ...  # noqa: D102

    @property
    def notes(self) -> tuple[str, ...]: ...  # noqa: D102

    def names(self) -> Sequence[str]:
        """Tensor names in file order."""
        ...

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of one tensor, without reading it."""
        ...

    def dtype(self, name: str) -> str:
        """NumPy name of the stored dtype: "float32", "bfloat16", "int64", "float8_e4m3fn", ..."""
        ...

    def read(self, name: str) -> np.ndarray:
        """One tensor in its stored dtype; read-only, it may be a view of the mapped file."""
        ...

    def where(self, name: str) -> str:
        """The file that holds the tensor, for messages."""
        ...


class WrappedSource:
    """A source that shows another one's tensors; a subclass changes what differs."""

    def __init__(self, source: TensorSource):
        self._source = source

    @property
    def files(self) -> tuple[Path, ...]:  # noqa: D102
        return self._source.files

    @property
    def notes(self) -> tuple[str, ...]:  # noqa: D102
        return self._source.notes

    def names(self) -> Sequence[str]:  # noqa: D102
        return self._source.names()

    def shape(self, name: str) -> tuple[int, ...]:  # noqa: D102
        return self._source.shape(name)

    def dtype(self, name: str) -> str:  # noqa: D102
        return self._source.dtype(name)

    def read(self, name: str) -> np.ndarray:  # noqa: D102
        return self._source.read(name)

    def where(self, name: str) -> str:  # noqa: D102
        return self._source.where(name)


def read_json(path: str | os.PathLike) -> dict[str, Any]:
    """One JSON object from a file.

    Raises:
      FileError: missing, unreadable, over 100 MB, not UTF-8, not JSON, a key given twice, or JSON
        that is not an object.
    """
    path = Path(path)
    try:
        if path.stat().st_size > MAX_JSON_BYTES:
            raise FileError(f"{path}: over {MAX_JSON_BYTES} bytes, expected a small JSON file")
        data = path.read_bytes()
    except FileNotFoundError:
        raise FileError(f"{path}: no such file") from None
    except OSError as error:
        raise FileError(f"{path}: cannot be read: {error.strerror}") from None
    return parse_object(data, str(path))


def parse_object(data: bytes, where: str) -> dict[str, Any]:
    """A JSON object from bytes; `where` opens every message. Raises `FileError`."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) != len(pairs):
            twice = collections.Counter(key for key, _ in pairs).most_common(1)[0][0]
            raise FileError(f"{where}: key {twice!r} is given twice")
        return found

    try:
        value = json.loads(data.decode("utf-8-sig"), object_pairs_hook=unique)
    except FileError:
        raise
    except UnicodeDecodeError:
        raise FileError(f"{where}: not UTF-8 text") from None
    except json.JSONDecodeError as error:
        raise FileError(
            f"{where}: not JSON: {error.msg} at line {error.lineno} column {error.colno}"
        ) from None
    except (ValueError, RecursionError) as error:
        raise FileError(f"{where}: not usable JSON: {error}") from None
    if not isinstance(value, dict):
        raise FileError(f"{where}: holds a JSON {type(value).__name__}, expected an object")
    return value


def sha256_file(path: Path) -> str:
    """Hex digest of a file's bytes."""
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise FileError(f"{path}: cannot be read: {error.strerror}") from None

"""Keys and tensors of a GGUF file, each checked when it is asked for; needs the gguf extra."""

from pathlib import Path
from typing import Any

from eagle3_jax.files.source import FileError


class GgufFile:
    """Keys and tensors of one GGUF file, little-endian, mapped.

    Raises:
      FileError: no gguf package, no such file, damaged, split, or an architecture other than llama.
    """

    def __init__(self, path: Path):
        self.path = path
        reader = _open(path)
        self.fields = reader.fields
        self.tensors = {tensor.name: tensor for tensor in reader.tensors}
        if reader.byte_order != "I":
            raise FileError(f"{path}: big-endian GGUF, expected little-endian")
        architecture = self.value("general.architecture", str)
        if architecture != "llama":
            raise FileError(f"{path}: architecture is {architecture!r}, supported: 'llama'")
        if self.optional("split.count", int, 1) != 1:
            raise FileError(f"{path}: one part of a split GGUF; join the parts first")

    def value(self, key: str, kind: type) -> Any:
        """One key, checked to be of a type: int, float, bool, str, or list."""
        if key not in self.fields:
            raise FileError(f"{self.path}: key {key!r} is missing")
        try:
            value = self.fields[key].contents()
        except (ValueError, IndexError) as error:
            raise FileError(f"{self.path}: key {key!r} cannot be read: {error}") from None
        if type(value) is not kind:
            raise FileError(
                f"{self.path}: key {key!r} is {type(value).__name__}, expected {kind.__name__}"
            )
        return value

    def optional(self, key: str, kind: type, default: Any) -> Any:
        """One key, or the value that the format gives to a file without it."""
        return self.value(key, kind) if key in self.fields else default


def _open(path: Path) -> Any:
    try:
        import gguf
    except ImportError:
        raise FileError(
            "reading GGUF needs the gguf package: pip install 'eagle3-jax[gguf]'"
        ) from None
    if not path.is_file():
        raise FileError(f"{path}: no such file")
    try:
        return gguf.GGUFReader(path)
    except OSError as error:
        raise FileError(f"{path}: cannot be read: {error.strerror}") from None
    except (ValueError, IndexError, KeyError, OverflowError, TypeError) as error:
        raise FileError(f"{path}: damaged, or not a GGUF file: {error}") from None

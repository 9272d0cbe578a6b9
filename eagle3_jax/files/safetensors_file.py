"""One safetensors file, mapped and checked before use."""

import dataclasses
import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, BinaryIO

import ml_dtypes
import numpy as np

from eagle3_jax.files.source import MAX_JSON_BYTES, FileError, parse_object

DTYPES: dict[str, np.dtype] = {
    "BOOL": np.dtype(np.bool_),
    "U8": np.dtype(np.uint8),
    "I8": np.dtype(np.int8),
    "U16": np.dtype(np.uint16),
    "I16": np.dtype(np.int16),
    "U32": np.dtype(np.uint32),
    "I32": np.dtype(np.int32),
    "U64": np.dtype(np.uint64),
    "I64": np.dtype(np.int64),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F32": np.dtype(np.float32),
    "F64": np.dtype(np.float64),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E5M2": np.dtype(ml_dtypes.float8_e5m2),
    "F8_E8M0": np.dtype(ml_dtypes.float8_e8m0fnu),
}
"""safetensors dtype code -> NumPy dtype."""


MAX_ELEMENTS = 1 << 56


@dataclasses.dataclass(frozen=True)
class _Entry:
    dtype: np.dtype
    shape: tuple[int, ...]
    start: int
    stop: int


class SafetensorsFile:
    """One safetensors file, its header checked in full before any tensor is touched.

    Attributes:
      metadata: the header's `__metadata__`, as it stands.

    Raises:
      FileError: truncated, a header that is not the format's, sizes or offsets that disagree with
        each other or with the file, overlaps and holes.
    """

    def __init__(self, path: Path):
        self.path = path
        self.files = (path,)
        self.notes: tuple[str, ...] = ()
        try:
            with path.open("rb") as file:
                size = os.fstat(file.fileno()).st_size
                self._data_start, header = _read_header(path, file, size)
        except OSError as error:
            raise FileError(f"{path}: cannot be read: {error.strerror}") from None
        self.metadata = _metadata(path, header)
        self._entries = _check_entries(path, header, size - self._data_start)
        self._size = size

    def names(self) -> Sequence[str]:  # noqa: D102
        return tuple(self._entries)

    def shape(self, name: str) -> tuple[int, ...]:  # noqa: D102
        return self._entry(name).shape

    def dtype(self, name: str) -> str:  # noqa: D102
        return self._entry(name).dtype.name

    def where(self, name: str) -> str:  # noqa: D102
        return str(self.path)

    def read(self, name: str) -> np.ndarray:
        """One tensor as a map of its own, whose pages go when the array goes."""
        entry = self._entry(name)
        if 0 in entry.shape:
            return np.zeros(entry.shape, entry.dtype)
        offset = self._data_start + entry.start
        try:
            if self.path.stat().st_size != self._size:
                raise FileError(f"{self.path}: changed since it was opened")
            array = np.memmap(self.path, entry.dtype, "r", offset, entry.shape)
        except OSError as error:
            raise FileError(f"{self.path}: cannot be read: {error.strerror}") from None
        return array if array.flags.aligned else np.array(array)

    def _entry(self, name: str) -> _Entry:
        if name not in self._entries:
            raise FileError(f"{self.path}: has no tensor {name!r}")
        return self._entries[name]


def _read_header(path: Path, file: BinaryIO, size: int) -> tuple[int, dict[str, Any]]:
    prefix = file.read(8)
    if len(prefix) < 8:
        raise FileError(f"{path}: {size} bytes, too short for a safetensors file")
    length = int.from_bytes(prefix, "little")
    if length > MAX_JSON_BYTES or length > size - 8:
        raise FileError(
            f"{path}: the header claims {length} bytes, the file has {size}: "
            "truncated, or not a safetensors file"
        )
    return 8 + length, parse_object(file.read(length), f"{path}: safetensors header")


def _metadata(path: Path, header: dict[str, Any]) -> dict[str, Any]:
    metadata = header.pop("__metadata__", {})
    if not isinstance(metadata, dict):
        raise FileError(f"{path}: __metadata__ is {metadata!r}, expected an object")
    return metadata


def _check_entries(path: Path, header: dict[str, Any], data_size: int) -> dict[str, _Entry]:
    entries = {name: _check_entry(path, name, item) for name, item in header.items()}
    position, previous = 0, "the start of the data"
    for name, entry in sorted(entries.items(), key=lambda item: (item[1].start, item[1].stop)):
        if entry.stop > data_size:
            raise FileError(
                f"{path}: tensor {name!r} ends at byte {entry.stop} of the data, the file has "
                f"{data_size}: truncated"
            )
        if entry.start != position:
            what = "overlaps" if entry.start < position else "leaves a hole after"
            raise FileError(
                f"{path}: tensor {name!r} starts at byte {entry.start}, expected {position}: "
                f"it {what} {previous}"
            )
        position, previous = entry.stop, repr(name)
    if position != data_size:
        raise FileError(
            f"{path}: the tensors take {position} bytes, the file has {data_size} bytes of data"
        )
    return entries


def _check_entry(path: Path, name: str, item: Any) -> _Entry:
    where = f"{path}: tensor {name!r}"
    if not isinstance(item, dict) or set(item) != {"dtype", "shape", "data_offsets"}:
        raise FileError(f"{where}: entry is {item!r}, expected dtype, shape and data_offsets")
    code, shape, offsets = item["dtype"], item["shape"], item["data_offsets"]
    if not isinstance(code, str) or code not in DTYPES:
        raise FileError(f"{where}: dtype {code!r} is not one of {', '.join(DTYPES)}")
    if not isinstance(shape, list) or not all(_is_size(n) for n in shape):
        raise FileError(f"{where}: shape {shape!r} is not a list of sizes")
    if len(shape) > 32 or math.prod(n or 1 for n in shape) > MAX_ELEMENTS:
        raise FileError(f"{where}: shape {shape!r} is larger than any array")
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(_is_size(n) for n in offsets):
        raise FileError(f"{where}: data_offsets {offsets!r} are not two positions")
    dtype = DTYPES[code]
    expected = math.prod(shape) * dtype.itemsize
    if offsets[1] - offsets[0] != expected:
        raise FileError(
            f"{where}: {offsets[1] - offsets[0]} bytes for {code} {shape}, expected {expected}"
        )
    return _Entry(dtype, tuple(shape), offsets[0], offsets[1])


def _is_size(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0

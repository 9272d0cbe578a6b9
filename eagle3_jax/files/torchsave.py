"""Writes what `torch.load` reads, without torch: dicts of arrays and plain values.

The format is torch's own since 1.6: a zip of `data.pkl`, in which each tensor is a call of
`torch._utils._rebuild_tensor_v2` on a storage named by number, and of each storage's bytes. Loads
with `weights_only=True`.
"""

import struct
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from eagle3_jax.files.whole import whole_file

STORAGES = {
    "float64": "DoubleStorage",
    "float32": "FloatStorage",
    "float16": "HalfStorage",
    "bfloat16": "BFloat16Storage",
    "int64": "LongStorage",
    "int32": "IntStorage",
    "int16": "ShortStorage",
    "int8": "CharStorage",
    "uint8": "ByteStorage",
    "bool": "BoolStorage",
}


def save(value: Mapping[str, Any], path: Path):
    """A dict of arrays, numbers, strings, None, lists and dicts; arrays come back as tensors.

    Raises:
      TypeError: a value or dtype that the format has no word for here.
    """
    pickled = _Pickled()
    pickled.write(value)
    with whole_file(path, "wb") as file, zipfile.ZipFile(file, "w") as archive:
        archive.writestr("archive/data.pkl", pickled.finished())
        archive.writestr("archive/byteorder", "little")
        for number, array in enumerate(pickled.arrays):
            archive.writestr(f"archive/data/{number}", array.tobytes())
        archive.writestr("archive/version", "3\n")


class _Pickled:
    """Pickle protocol 2, written opcode by opcode, so that torch's names need no torch."""

    def __init__(self):
        self.arrays: list[np.ndarray] = []
        self._out = bytearray(b"\x80\x02")

    def finished(self) -> bytes:
        return bytes(self._out + b".")

    def write(self, value: Any):
        if value is None:
            self._out += b"N"
        elif isinstance(value, bool):
            self._out += b"\x88" if value else b"\x89"
        elif isinstance(value, int):
            self._int(value)
        elif isinstance(value, float):
            self._out += b"G" + struct.pack(">d", value)
        elif isinstance(value, str):
            data = value.encode("utf-8", "surrogatepass")
            self._out += b"X" + len(data).to_bytes(4, "little") + data
        elif isinstance(value, Mapping):
            self._out += b"}("
            for key, item in value.items():
                self.write(key)
                self.write(item)
            self._out += b"u"
        elif isinstance(value, list):
            self._out += b"]("
            for item in value:
                self.write(item)
            self._out += b"e"
        elif isinstance(value, tuple):
            self._out += b"("
            for item in value:
                self.write(item)
            self._out += b"t"
        elif isinstance(value, np.ndarray):
            self._tensor(value)
        else:
            raise TypeError(f"a {type(value).__name__} has no form in a torch file")

    def _int(self, value: int):
        size = (value.bit_length() + 8) // 8
        data = value.to_bytes(size, "little", signed=True)
        self._out += b"\x8a" + size.to_bytes(1, "little") + data

    def _name(self, module: str, name: str):
        self._out += f"c{module}\n{name}\n".encode()

    def _tensor(self, array: np.ndarray):
        if array.dtype.name not in STORAGES:
            raise TypeError(f"dtype {array.dtype.name} has no torch storage")
        array = np.ascontiguousarray(array).reshape(array.shape)
        little = array.astype(array.dtype.newbyteorder("<"), copy=False)
        self._name("torch._utils", "_rebuild_tensor_v2")
        self._out += b"(("
        self.write("storage")
        self._name("torch", STORAGES[array.dtype.name])
        self.write(str(len(self.arrays)))
        self.write("cpu")
        self.write(array.size)
        self._out += b"tQ"
        self.write(0)
        self.write(tuple(array.shape))
        self.write(tuple(step // array.itemsize for step in array.strides))
        self._out += b"\x89"
        self._name("collections", "OrderedDict")
        self._out += b")RtR"
        self.arrays.append(little)

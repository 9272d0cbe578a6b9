"""One safetensors file of a record in the making."""

import json
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np

from eagle3_jax.files.safetensors_file import DTYPES
from eagle3_jax.records.checks import Checks, state_chunks
from eagle3_jax.records.reading import METADATA_KEY
from eagle3_jax.records.types import EngineRound, RecordSequence

HEADER_BYTES = 64 << 10
"""Left free for the header, which is written last; a longer one costs a copy of the file."""

CODES = {dtype: code for code, dtype in DTYPES.items()}


class Part:
    """One safetensors file in the making: states as they come, small tensors and header last."""

    def __init__(self, path: Path):
        self.path = path
        self.file = path.open("w+b")
        self.file.seek(8 + HEADER_BYTES)
        self.size = 0
        self.sequences: list[dict[str, Any]] = []
        self._entries: dict[str, Any] = {}
        self._small: list[tuple[str, np.ndarray]] = []

    def add(self, sequence: RecordSequence, checks: Checks):
        """Writes a sequence's states, in pieces that `checks` sees too."""
        prefix = f"{len(self.sequences):06d}."
        start, aux = self.size, sequence.aux
        for first, chunk in state_chunks(aux):
            checks.add_rows(first, chunk)
            self._write(chunk)
        self._enter(prefix + "aux", aux, start)
        small = {
            "tokens": sequence.tokens.astype(np.int32, copy=False),
            "top_ids": _cast(sequence.top_ids, np.int32),
            "top_logprobs": _cast(sequence.top_logprobs, np.float32),
            **_pack_rounds(sequence.rounds),
            "positions": _cast(sequence.positions, np.int32),
            "loss_mask": sequence.loss_mask,
        }
        self._small += [(prefix + name, a) for name, a in small.items() if a is not None]
        self.sequences.append(
            {
                "name": sequence.name,
                "prompt_length": sequence.prompt_length,
                "first": sequence.first,
                "tags": list(sequence.tags),
            }
        )

    def close(self, header: dict[str, Any]):
        """Writes what is left: small tensors, then the header."""
        for name, array in sorted(self._small, key=lambda item: -item[1].itemsize):
            start = self.size
            self._write(array)
            self._enter(name, array, start)
        described = json.dumps(header | {"sequences": self.sequences}, allow_nan=False)
        text = json.dumps({"__metadata__": {METADATA_KEY: described}} | self._entries).encode()
        length = max(HEADER_BYTES, len(text) + -len(text) % 64)
        if length > HEADER_BYTES:
            self._make_room(length)
        self.file.seek(0)
        self.file.write(length.to_bytes(8, "little") + text.ljust(length))
        self.file.close()

    def _make_room(self, length: int):
        longer = self.path.with_suffix(".longer").open("w+b")
        longer.seek(8 + length)
        self.file.seek(8 + HEADER_BYTES)
        shutil.copyfileobj(self.file, longer, 16 << 20)
        self.file.close()
        os.replace(longer.name, self.path)
        self.file = longer

    def _write(self, array: np.ndarray):
        data = np.ascontiguousarray(array)
        self.file.write(data.view(np.uint8).data if data.size else b"")
        self.size += data.nbytes

    def _enter(self, name: str, array: np.ndarray, start: int):
        self._entries[name] = {
            "dtype": CODES[array.dtype.newbyteorder("=")],
            "shape": list(array.shape),
            "data_offsets": [start, self.size],
        }


def _cast(array: np.ndarray | None, dtype: type) -> np.ndarray | None:
    return None if array is None else array.astype(dtype, copy=False)


def _pack_rounds(rounds: tuple[EngineRound, ...] | None) -> dict[str, np.ndarray | None]:
    """[n, 3] start, accepted, bonus and [n, most] proposed; -1 where nothing is known."""
    if rounds is None:
        return {}
    table = [(r.start, r.accepted, -1 if r.bonus is None else r.bonus) for r in rounds]
    longest = max((len(r.proposed or ()) for r in rounds), default=0)
    proposed = np.full((len(rounds), longest), -1, np.int32)
    for i, item in enumerate(rounds):
        proposed[i, : len(item.proposed or ())] = item.proposed or ()
    return {
        "rounds": np.array(table, np.int32).reshape(-1, 3),
        "proposed": proposed if longest else None,
    }

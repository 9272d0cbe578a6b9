"""A converted draft's tensors under a framework's names, written a few at a time."""

import dataclasses
import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from eagle3_jax.canonical_tensors import not_finite, sha256_array
from eagle3_jax.checkpoint import CheckpointError, read_manifest, read_tensors
from eagle3_jax.config import DraftConfig
from eagle3_jax.dialects import LAYER_NAMES, MODEL_NAMES
from eagle3_jax.export_rules import Form
from eagle3_jax.files.safetensors_file import DTYPES
from eagle3_jax.findings import ConvertError
from eagle3_jax.vocab import to_mask, to_offsets

CODES = {dtype: code for code, dtype in DTYPES.items()}
TOGETHER = 1 << 24
"""Values of the tensors that are read at once; a larger one is read alone."""

INNER = {canonical: name for name, canonical in LAYER_NAMES.items()}
OUTER = {canonical: name for name, canonical in reversed(MODEL_NAMES.items())}


@dataclasses.dataclass(frozen=True)
class Planned:
    """What one canonical tensor becomes: one tensor, several rows (`fc_norm`), d2t and t2d."""

    canonical: str
    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    dtype: str
    vocab_size: int = 0

    def dtype_of(self, name: str) -> str:
        """NumPy name of one written tensor's dtype."""
        return {"d2t": "int64", "t2d": "bool"}.get(name, self.dtype)

    def arrays(self, array: np.ndarray) -> Iterator[np.ndarray]:
        """The written tensors in the order of `names`, from the canonical one in its new dtype."""
        if self.canonical == "fc_norm.weight":
            yield from array
        elif self.canonical == "draft_to_target":
            for name in self.names:
                yield to_offsets(array) if name == "d2t" else to_mask(array, self.vocab_size)
        else:
            yield array


def plan_tensors(
    config: DraftConfig, manifest: Mapping[str, Any], form: Form, dtype: str
) -> tuple[tuple[Planned, ...], str]:
    """Every tensor of the file, and the dtype config.json should name.

    A full vocabulary in its own order has no d2t, as in the frameworks' own files.
    """
    records, shapes = manifest["tensors"], config.tensor_shapes()
    lacking = [name for name in shapes if "dtype" not in records.get(name, {})]
    if lacking:
        raise CheckpointError(f"draft.json has no record of tensor {lacking[0]!r}: damaged")
    planned: list[Planned] = []
    for canonical, shape in shapes.items():
        stored = records[canonical]["dtype"] if dtype == "keep" else dtype
        if canonical == "draft_to_target":
            names = _vocabulary(config, manifest, form)
            table = {"d2t": shape, "t2d": (config.vocab_size,)}
            if names:
                made = tuple(table[name] for name in names)
                planned.append(Planned(canonical, names, made, "int32", config.vocab_size))
        elif canonical == "fc_norm.weight":
            names = tuple(f"fc_norm.{i}.weight" for i in range(shape[0]))
            planned.append(Planned(canonical, names, (shape[1:],) * shape[0], stored))
        else:
            planned.append(
                Planned(canonical, (_spelled(canonical, config, form),), (shape,), stored)
            )
    gate = next(p.dtype for p in planned if p.canonical == "layers.0.mlp.gate.weight")
    return tuple(planned), gate


def write_tensors(file: Path, source: Path, tensors: tuple[Planned, ...]) -> dict[str, str]:
    """Writes safetensors: the header first, then the tensors, a few in memory at a time.

    Returns the digest of every canonical tensor as written, the map's as int32.

    Raises:
      ConvertError: WEIGHT_NOT_FINITE when a cast makes values infinite.
      CheckpointError: damaged weights.
    """
    records = read_manifest(source)["tensors"]
    digests: dict[str, str] = {}
    with file.open("wb") as stream:
        _write_header(stream, tensors)
        for group in _groups(tensors):
            arrays = read_tensors(source, [planned.canonical for planned in group], records)
            for planned in group:
                digest = _write_one(stream, arrays.pop(planned.canonical), planned)
                digests[planned.canonical] = digest
    if "draft_to_target" not in digests:
        digests["draft_to_target"] = records["draft_to_target"]["sha256"]
    return digests


def _write_one(stream: BinaryIO, array: np.ndarray, planned: Planned) -> str:
    """Apart, so that nothing of this tensor is held while the next is read."""
    cast = _cast(array, planned)
    for out in planned.arrays(cast):
        stream.write(np.ascontiguousarray(out).reshape(-1).view(np.uint8).data)
    return sha256_array(cast)


def _groups(tensors: tuple[Planned, ...]) -> Iterator[list[Planned]]:
    """Tensors to read at once: many small ones, or one that is large."""
    group: list[Planned] = []
    held = 0
    for planned in tensors:
        size = sum(math.prod(shape) for shape in planned.shapes)
        if group and held + size > TOGETHER:
            yield group
            group, held = [], 0
        group.append(planned)
        held += size
    yield group


def _write_header(stream: BinaryIO, tensors: tuple[Planned, ...]):
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    place = 0
    for planned in tensors:
        for name, shape in zip(planned.names, planned.shapes, strict=True):
            dtype = np.dtype(planned.dtype_of(name))
            stop = place + dtype.itemsize * math.prod(shape)
            header[name] = {
                "dtype": CODES[dtype],
                "shape": list(shape),
                "data_offsets": [place, stop],
            }
            place = stop
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    stream.write(len(text).to_bytes(8, "little") + text)


def _cast(array: np.ndarray, planned: Planned) -> np.ndarray:
    dtype = np.dtype(planned.dtype)
    if array.dtype == dtype:
        return array
    with np.errstate(over="ignore", invalid="ignore"):
        made = array.astype(dtype)
    lost = not_finite(made) - not_finite(array)
    if lost:
        raise ConvertError(
            "WEIGHT_NOT_FINITE",
            f"tensor {planned.names[0]!r}: {lost} values are too large for {planned.dtype}",
        )
    return made


def _vocabulary(config: DraftConfig, manifest: Mapping[str, Any], form: Form) -> tuple[str, ...]:
    table = manifest.get("d2t", {})
    whole = config.draft_vocab_size == config.vocab_size
    if whole and table.get("sorted", False):
        return ()
    return ("d2t", "t2d") if form.mask else ("d2t",)


def _spelled(canonical: str, config: DraftConfig, form: Form) -> str:
    if not canonical.startswith("layers."):
        return OUTER[canonical]
    _, index, rest = canonical.split(".", 2)
    numbered = config.num_layers > 1 or config.latent is not None or form.stem == "layers"
    prefix = f"layers.{index}." if numbered else "midlayer."
    return prefix + INNER[rest]

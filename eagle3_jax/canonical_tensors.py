"""Canonical tensors out of a checkpoint: renamed, stacked, cast on request, digested."""

import hashlib
from typing import Any

import numpy as np

from eagle3_jax.config import DraftConfig
from eagle3_jax.dialects import Matched
from eagle3_jax.files.shards import TensorSource
from eagle3_jax.findings import ConvertError, Findings

CHUNK = 1 << 24


def check_shapes(source: TensorSource, matched: Matched, config: DraftConfig):
    """Every tensor the config implies is there in its shape.

    An embedding may have padding rows past the vocabulary; `fc_norm.i` are `[E]` each.

    Raises:
      ConvertError: WEIGHT_MISSING or WEIGHT_SHAPE, with the tensor's own name.
    """
    for canonical, expected in config.tensor_shapes().items():
        if canonical == "draft_to_target":
            continue
        names = matched.sources.get(canonical)
        if names is None:
            raise ConvertError("WEIGHT_MISSING", f"missing: {matched.spelled(canonical)}")
        if canonical == "fc_norm.weight" and len(names) != expected[0]:
            raise ConvertError(
                "WEIGHT_SHAPE", f"{len(names)} fc_norm tensors, but fc takes {expected[0]} states"
            )
        row = expected[1:] if canonical == "fc_norm.weight" else expected
        for name in names:
            shape = source.shape(name)
            padded = canonical == "embed.weight" and len(shape) == 2 and shape[0] > row[0]
            if shape != row and not (padded and shape[1:] == row[1:]):
                raise ConvertError(
                    "WEIGHT_SHAPE",
                    f"{source.where(name)}: tensor {name!r} has shape {list(shape)}, expected "
                    f"{list(row)} from the other tensors and config.json",
                )


def read_tensors(
    source: TensorSource,
    matched: Matched,
    config: DraftConfig,
    targets: np.ndarray,
    dtype: str,
    findings: Findings,
) -> tuple[dict[str, np.ndarray], dict[str, dict[str, Any]]]:
    """The draft's tensors by canonical name, and a record of each for the manifest.

    With `dtype="keep"` the bytes are the file's; they may be views of it.

    Raises:
      ConvertError: WEIGHT_NOT_FINITE, with the tensor and the number of NaN and infinite values.
    """
    tensors: dict[str, np.ndarray] = {}
    records: dict[str, dict[str, Any]] = {}
    for canonical, shape in config.tensor_shapes().items():
        if canonical == "draft_to_target":
            array, names = targets.astype(np.int32), matched.sources.get("d2t", ())
        else:
            names = matched.sources[canonical]
            array = _stored(source, names, canonical, shape, dtype)
            count = not_finite(array)
            if count:
                findings.refuse(
                    "WEIGHT_NOT_FINITE",
                    f"tensor {names[0]!r} has {count} values that are NaN or infinite",
                )
        tensors[canonical] = array
        records[canonical] = {"from": list(names), **describe(array)}
    return tensors, records


def describe(array: np.ndarray) -> dict[str, Any]:
    """Dtype, shape and digest, as the manifest stores them."""
    return {
        "dtype": array.dtype.name,
        "shape": list(array.shape),
        "sha256": sha256_array(array),
    }


def not_finite(array: np.ndarray) -> int:
    """How many values are NaN or infinite, counted in pieces."""
    flat = array.reshape(-1)
    pieces = range(0, flat.size, CHUNK)
    return sum(int(np.count_nonzero(~np.isfinite(flat[i : i + CHUNK]))) for i in pieces)


def sha256_array(array: np.ndarray) -> str:
    """Hex digest of the values in C order, little endian."""
    flat = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    return hashlib.sha256(flat.data).hexdigest()


def _stored(
    source: TensorSource,
    names: tuple[str, ...],
    canonical: str,
    shape: tuple[int, ...],
    dtype: str,
) -> np.ndarray:
    if canonical == "fc_norm.weight":
        array = np.stack([source.read(name) for name in names])
    else:
        array = source.read(names[0])[: shape[0]]
    if dtype == "keep":
        return array
    with np.errstate(over="ignore", invalid="ignore"):
        return array.astype(np.dtype(dtype), copy=False)

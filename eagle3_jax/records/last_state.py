"""Is a captured last state the one before the target's final norm, or the one after it?

A state y after RMSNorm with weight w has rms(y / w) = 1 in every row, up to eps and rounding; no
other state has. Without w nothing decides it.
"""

import dataclasses
from pathlib import Path
from typing import Literal

import numpy as np

from eagle3_jax.config import Boundary
from eagle3_jax.files.shards import open_weights
from eagle3_jax.files.source import FileError

TOLERANCE = 0.02
"""bfloat16 rounding moves the RMS of a row by well under 1%."""

ROWS = 64


@dataclasses.dataclass(frozen=True)
class FinalNorm:
    """The weight [E] of a target's final norm, and the tensor it was read from."""

    weight: np.ndarray
    name: str

    def kind(self, rows: np.ndarray) -> Literal["before", "after"]:
        """Of states [R, E]; weights that are applied as 1 + w (Gemma) are tried as well."""
        rows = rows[:ROWS].astype(np.float64)
        for weight in (self.weight, 1 + self.weight):
            used = np.abs(weight) > 1e-3 * np.abs(weight).max()
            rms = np.sqrt(np.mean((rows[:, used] / weight[used]) ** 2, axis=1))
            if used.any() and (np.abs(rms - 1) < TOLERANCE).all():
                return "after"
        return "before"


def read_final_norm(folder: Path | None) -> FinalNorm | None:
    """From a target's weights; None without weights, or without a single tensor that fits."""
    if folder is None:
        return None
    try:
        source = open_weights(folder)
    except FileError:
        return None
    names = [
        name
        for name in source.names()
        if name.endswith(("norm.weight", "ln_f.weight"))
        and not any(part.isdigit() for part in name.split("."))
        and len(source.shape(name)) == 1
    ]
    named = [name for name in names if name.split(".")[-2] in ("norm", "final_layernorm", "ln_f")]
    if len(named) != 1:
        return None
    return FinalNorm(source.read(named[0]).astype(np.float64), named[0])


def last_slot(boundaries: tuple[Boundary, ...], num_layers: int | None) -> int | None:
    """The slot that holds a last state, before or after the norm; None when there is none."""
    for slot, boundary in enumerate(boundaries):
        if boundary == "final_norm" or (num_layers is not None and boundary == num_layers):
            return slot
    return None

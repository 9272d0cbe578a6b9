"""What every reader of a foreign capture needs: shapes, positions, the target's facts."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from eagle3_jax.config import Boundary, default_boundaries
from eagle3_jax.files.source import read_json
from eagle3_jax.records.checks import spans
from eagle3_jax.records.types import Kind, RecordError
from eagle3_jax.source_config import TargetFacts


@dataclasses.dataclass(frozen=True)
class Described:
    """What the user says about a capture, or the target's config.json does.

    Attributes:
      boundaries: of the aux slots, in file order; `"default"` for (2, L//2, L-3).
      prompt_length: tokens before the output, where the files do not tell.
      folder: the target's, stored as the record's embedding.
    """

    boundaries: tuple[Boundary, ...] | str
    kind: Kind
    prompt_length: int = 0
    vocab_size: int | None = None
    num_layers: int | None = None
    hidden_size: int | None = None
    bos_token_id: int | None = None
    folder: Path | None = None
    tags: tuple[str, ...] = ()

    def slots(self) -> tuple[Boundary, ...]:
        """The boundaries as numbers.

        Raises:
          RecordError: the default is asked for and the target's depth is unknown.
        """
        if not isinstance(self.boundaries, str):
            return self.boundaries
        if self.num_layers is None:
            raise RecordError(
                "--boundaries default is (2, L//2, L-3): say L with --num-layers or --target"
            )
        return default_boundaries(self.num_layers)

    def before_norm(self) -> Boundary:
        """The boundary L, the last state before the final norm."""
        if self.num_layers is None:
            raise RecordError(
                "this capture holds the last state before the final norm, boundary L: say L with "
                "--num-layers or --target"
            )
        return self.num_layers


def target_facts(folder: Path) -> dict[str, Any]:
    """Sizes and BOS from a target's config.json, of any architecture.

    Raises:
      FileError, ConvertError: no config.json, or one that is no target's.
    """
    file = folder / "config.json"
    raw = read_json(file)
    facts = TargetFacts.read(raw, str(file))
    bos = raw.get("bos_token_id")
    if bos is None and isinstance(raw.get("text_config"), dict):
        bos = raw["text_config"].get("bos_token_id")
    return {
        "vocab_size": facts.vocab_size,
        "num_layers": facts.num_layers,
        "hidden_size": facts.hidden_size,
        "bos_token_id": bos if type(bos) is int else None,
        "folder": folder,
    }


def fold(states: np.ndarray, slots: int, where: str, width: int | None = None) -> np.ndarray:
    """Aux states as captured -> [R, A, E].

    Accepts [R, A*E] and [R, A, E], with or without a leading axis of 1; uint16 and int16 are read
    as the bits of bfloat16, which NumPy files cannot name.

    Args:
      width: E where it is known.

    Raises:
      RecordError: another rank, or a width that is not `slots` states.
    """
    if states.dtype in (np.uint16, np.int16):
        states = states.view(ml_dtypes.bfloat16)
    if states.ndim > 2 and states.shape[0] == 1:
        states = states[0]
    if states.ndim == 2 and states.shape[1] % slots == 0:
        states = states.reshape(len(states), slots, -1)
    shape = list(states.shape)
    if states.ndim != 3 or shape[1] != slots:
        raise RecordError(
            f"{where}: states are {shape}, expected [rows, {slots} * width] or "
            f"[rows, {slots}, width]: {slots} boundaries are named"
        )
    if width is not None and shape[2] != width:
        found = shape[1] * shape[2] / width
        raise RecordError(
            f"{where}: {shape[1] * shape[2]} numbers a row are {found:g} states of the target's "
            f"width {width}, expected {slots}: as many as boundaries are named"
        )
    return states


def flat_ids(values: Any, where: str, what: str = "token ids") -> np.ndarray:
    """Integer ids [T] or [1, T] -> int32 [T].

    Raises:
      RecordError: anything else, or ids beyond 32 bits.
    """
    try:
        ids = np.asarray(values)
    except ValueError:
        ids = np.zeros((0, 0))
    if ids.ndim == 2 and len(ids) == 1:
        ids = ids[0]
    if ids.ndim != 1 or not ids.size or ids.dtype.kind not in "iu":
        raise RecordError(f"{where}: {what} are {ids.dtype} {list(ids.shape)}, expected ids [T]")
    if ids.min() < 0 or ids.max() > np.iinfo(np.int32).max:
        raise RecordError(f"{where}: {what} range from {ids.min()} to {ids.max()}: no ids")
    return ids.astype(np.int32)


def first_of(positions: Sequence[int] | np.ndarray, where: str) -> int:
    """The first of consecutive positions.

    Raises:
      RecordError: a gap (`gap 16..39`), or positions that repeat or go back.
    """
    found = np.asarray(positions).reshape(-1).astype(np.int64)
    jumps = np.flatnonzero(np.diff(found) != 1)
    if len(jumps):
        before, after = int(found[jumps[0]]), int(found[jumps[0] + 1])
        if after > before:
            raise RecordError(
                f"{where}: gap {spans(range(before + 1, after))}: rows jump from position {before} "
                f"to {after}; the states between were not captured"
            )
        raise RecordError(
            f"{where}: position {after} follows {before}: rows repeat or are out of order"
        )
    return int(found[0])


def mask_of(values: Any, total: int, where: str) -> np.ndarray:
    """A loss mask of any number type, [T] or [1, T] -> bool [T]."""
    mask = np.asarray(values)
    if mask.ndim == 2 and len(mask) == 1:
        mask = mask[0]
    if mask.shape != (total,):
        raise RecordError(f"{where}: loss_mask is {list(mask.shape)}, expected [{total}]")
    return mask != 0


def prompt_of(mask: np.ndarray | None, declared: int) -> int:
    """The prompt's length: as declared, else up to the first token that counts."""
    if declared or mask is None or not mask.any():
        return declared
    return int(mask.argmax())


def stored_as(states: np.ndarray, dtype: str, where: str) -> np.ndarray:
    """States in another dtype, when they survive it bit for bit (JSON made floats of them).

    Raises:
      RecordError: a value that the dtype cannot hold.
    """
    with np.errstate(over="ignore"):
        cast = states.astype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)
    same = (cast.astype(states.dtype) == states) | np.isnan(states)
    if not same.all():
        value = states[tuple(np.argwhere(~same)[0])]
        raise RecordError(
            f"{where}: {value!r} is no {dtype} ({int((~same).sum())} of {same.size} such values): "
            "the states were computed in another dtype, store them as captured"
        )
    return cast

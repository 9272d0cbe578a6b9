"""Records from `.npz` files, for whoever captures states with a script of his own.

| key | shape | meaning |
|---|---|---|
| `tokens` or `input_ids` | [T] | ids, prompt and output |
| `aux` or `hidden_states` | [R, A, E], [R, A*E] | states; uint16 holds the bits of bfloat16 |
| `prompt_length` | scalar | optional, default 0 |
| `positions` | [R] | optional; consecutive positions of the rows, else from 0 on |
| `mrope_positions` | [3, T] | optional; rotary positions by time, height and width |
| `loss_mask` | [T] | optional |
| `top_ids`, `top_logprobs` | [R, n] | optional, both |
| `boundaries` | [A] | optional numbers, checked against `--boundaries` |
"""

import zipfile
import zlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np

from eagle3_jax.records.capture import Described, first_of, flat_ids, fold, mask_of, prompt_of
from eagle3_jax.records.trainers import find
from eagle3_jax.records.types import RecordError, RecordSequence

KEYS = {
    "tokens",
    "input_ids",
    "aux",
    "hidden_states",
    "prompt_length",
    "positions",
    "mrope_positions",
    "loss_mask",
    "top_ids",
    "top_logprobs",
    "boundaries",
}

DAMAGED = (
    *(ValueError, KeyError, AttributeError, EOFError),
    *(zipfile.BadZipFile, zlib.error, RuntimeError),
)
"""What NumPy and zipfile raise for a file that is cut short or has wrong bytes."""


def read_npz(paths: Sequence[Path], described: Described) -> Iterator[RecordSequence]:
    """One sequence a file; a folder's files in the order of their numbers.

    Raises:
      RecordError: a file that is no `.npz`, an unknown or missing key, a gap in `positions`, other
        boundaries than named.
    """
    for path in find(paths, "*.npz"):
        try:
            with np.load(path, allow_pickle=False) as file:
                arrays = {name: file[name] for name in file.files}
        except OSError as error:
            raise RecordError(f"{path}: cannot be read: {error.strerror or error}") from None
        except DAMAGED as error:
            raise RecordError(f"{path}: not a .npz file of plain arrays: {error}") from None
        yield _sequence(path, arrays, described)


def _sequence(path: Path, arrays: Mapping[str, np.ndarray], described: Described):
    where, slots = str(path), described.slots()
    unknown = sorted(arrays.keys() - KEYS)
    if unknown:
        raise RecordError(f"{where}: key {unknown[0]!r}, expected {', '.join(sorted(KEYS))}")

    def one_of(*names: str) -> np.ndarray:
        found = [name for name in names if name in arrays]
        if len(found) != 1:
            raise RecordError(f"{where}: has {found or 'neither'}, expected one of {names}")
        return arrays[found[0]]

    if "boundaries" in arrays and arrays["boundaries"].tolist() != list(slots):
        raise RecordError(
            f"{where}: boundaries {arrays['boundaries'].tolist()}, --boundaries names {list(slots)}"
        )
    tokens = flat_ids(one_of("tokens", "input_ids"), where, "tokens")
    aux = fold(one_of("aux", "hidden_states"), len(slots), where, described.hidden_size)
    first = 0
    if "positions" in arrays:
        if arrays["positions"].ndim > 1 and 3 in arrays["positions"].shape:
            raise RecordError(
                f"{where}: positions are {list(arrays['positions'].shape)}, expected those of the "
                "rows [R]; positions on three axes are named mrope_positions"
            )
        first = first_of(arrays["positions"], where)
        if arrays["positions"].size != len(aux):
            raise RecordError(
                f"{where}: {arrays['positions'].size} positions for {len(aux)} rows of states"
            )
    mask = arrays.get("loss_mask")
    mask = None if mask is None else mask_of(mask, len(tokens), where)
    declared = described.prompt_length
    if "prompt_length" in arrays:
        if arrays["prompt_length"].size != 1 or arrays["prompt_length"].dtype.kind not in "iu":
            raise RecordError(f"{where}: prompt_length is no whole number")
        declared = int(arrays["prompt_length"].reshape(()))
    return RecordSequence(
        tokens=tokens,
        aux=aux,
        prompt_length=prompt_of(mask, declared),
        first=first,
        loss_mask=mask,
        top_ids=arrays.get("top_ids"),
        top_logprobs=arrays.get("top_logprobs"),
        positions=_on_axes(arrays.get("mrope_positions")),
        name=path.stem,
        tags=described.tags,
    )


def _on_axes(positions: np.ndarray | None) -> np.ndarray | None:
    """[3, T], also from transformers' [3, 1, T]; another shape is left for the record's checks."""
    if positions is not None and positions.ndim == 3 and positions.shape[1] == 1:
        return positions[:, 0]
    return positions

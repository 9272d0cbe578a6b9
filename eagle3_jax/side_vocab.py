"""A vocabulary map that a trainer left beside the weights instead of in them."""

import dataclasses
import re
from pathlib import Path
from typing import Any, Literal

import numpy as np

from eagle3_jax.files.shards import FileError, read_json
from eagle3_jax.files.torchfile import load_pickle, to_numpy
from eagle3_jax.findings import ConvertError

SIDE_FILE = re.compile(
    r"(d2t|t2d|vocab_mapping|token_map|selected_token|hot_token|^cache).*\.(pt|npy|npz|json|bin)$"
)
IDS = re.compile(r"selected_token|token_map|hot_token|selected_ids|draft_to_target")
"""Names of lists of target ids; `d2t` is a table of offsets."""


@dataclasses.dataclass(frozen=True)
class SideMap:
    """A table found beside the weights.

    Attributes:
      file: where. table: [W], as the file has it. kind: what its name says it is. mask: its `t2d`.
    """

    file: Path
    table: np.ndarray
    kind: Literal["offset", "absolute"]
    mask: np.ndarray | None


def find_side_map(folder: Path, draft_vocab_size: int) -> SideMap | None:
    """The one table of that length in the files where trainers keep it; None without such a file.

    Raises:
      ConvertError: VOCAB_MAP_SIDE_FILE for a file that cannot be read, none with such a table, or
        several that differ.
    """
    files = sorted(entry for entry in folder.iterdir() if SIDE_FILE.search(entry.name))
    found: list[SideMap] = []
    for file in files:
        try:
            arrays = _arrays(file)
        except (FileError, OSError, ValueError) as error:
            reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
            raise ConvertError(
                "VOCAB_MAP_SIDE_FILE",
                f"the weights have no d2t, and {file.name} beside them, which looks like a "
                f"vocabulary map, cannot be read: {reason}",
            ) from None
        masks = [a for n, a in arrays.items() if n.startswith("t2d") and a.ndim == 1]
        for name, array in arrays.items():
            kind = _kind(name)
            fits = array.shape == (draft_vocab_size,) and array.dtype.kind in "iu"
            if kind is not None and fits:
                found.append(SideMap(file, array, kind, masks[0] if masks else None))
    if not files:
        return None
    names = ", ".join(file.name for file in files)
    if not found:
        raise ConvertError(
            "VOCAB_MAP_SIDE_FILE",
            f"the weights have no d2t, and {names} beside them has no table of {draft_vocab_size} "
            "integers under a name that is known (d2t, selected_token_ids, ...): add it to the "
            "weights as d2t, offsets in the order of lm_head's rows",
        )
    if len({tuple(_targets(one).tolist()) for one in found}) > 1:
        raise ConvertError(
            "VOCAB_MAP_SIDE_FILE",
            f"the weights have no d2t, and the vocabulary maps beside them differ: {names}",
        )
    return found[0]


def _targets(side: SideMap) -> np.ndarray:
    table = side.table.astype(np.int64)
    return table + np.arange(len(table)) if side.kind == "offset" else table


def _kind(name: str) -> Literal["offset", "absolute"] | None:
    if name.startswith("d2t"):
        return "offset"
    return "absolute" if IDS.search(name) else None


def _arrays(file: Path) -> dict[str, np.ndarray]:
    """What a file holds by name; a bare array has the file's."""
    if file.suffix == ".npy":
        return {file.stem: np.load(file, allow_pickle=False)}
    if file.suffix == ".npz":
        with np.load(file, allow_pickle=False) as archive:
            return {name: archive[name] for name in archive.files}
    value: Any = read_json(file) if file.suffix == ".json" else load_pickle(file)
    items = value.items() if isinstance(value, dict) else [(file.stem, value)]
    arrays: dict[str, np.ndarray] = {}
    for name, item in items:
        if isinstance(item, list):
            arrays[str(name)] = np.asarray(item)
        elif hasattr(item, "layout"):
            arrays[str(name)] = to_numpy(item, f"{file}: {name!r}")
    return arrays

"""The draft vocabulary: from `d2t` and `t2d` to the direct map draft id -> target id, and back."""

import dataclasses
from typing import Literal

import numpy as np

from eagle3_jax.findings import ConvertError, Findings

Kind = Literal["offset", "absolute", "identity"]


@dataclasses.dataclass(frozen=True)
class VocabMap:
    """A checked map of a draft vocabulary.

    Attributes:
      targets: int64 [W], the target id of each draft id (SGLang's `hot_token_id`).
      kind: how the file spelled it; `"identity"` when it has no table.
      table: int64 [W], the file's own numbers, None without a table.
    """

    targets: np.ndarray
    kind: Kind
    table: np.ndarray | None = None

    @property
    def ascending(self) -> bool:
        """Whether target ids rise with draft ids; a frequency order (ModelOpt) does not."""
        return bool(np.all(np.diff(self.targets) > 0))


def resolve_map(
    table: np.ndarray | None,
    *,
    draft_vocab_size: int,
    vocab_size: int,
    findings: Findings,
    mask: np.ndarray | None = None,
    kind: Literal["auto", "offset", "absolute"] = "auto",
) -> VocabMap:
    """The map of a checkpoint whose `d2t` is `table` and whose `t2d` is `mask`.

    Every PyTorch trainer stores offsets: `target = i + d2t[i]`. Both readings are tried; a reading
    is valid when all its target ids are in [0, V) and none repeats. When both are, `t2d` decides.
    The order of rows is never changed: it is the order of lm_head's rows.

    Raises:
      ConvertError: VOCAB_MAP_MISSING, _LENGTH, _DTYPE, _ALL_ZERO, _ABSOLUTE, _AMBIGUOUS, _INVALID
        (with the first wrong row), or VOCAB_T2D_DISAGREES.
    """
    W, V = draft_vocab_size, vocab_size
    allowed = None if mask is None else _mask_ids(mask, V)
    if table is None:
        if W < V:
            findings.refuse(
                "VOCAB_MAP_MISSING",
                f"the draft vocabulary has {W} ids of the target's {V}, but the file has no d2t: "
                "nothing says which",
            )
        found = VocabMap(np.arange(W, dtype=np.int64), "identity")
    else:
        found = _read_table(_integers(table, W), V, allowed, kind, findings)
    if allowed is not None and not np.array_equal(allowed, np.sort(found.targets)):
        raise ConvertError("VOCAB_T2D_DISAGREES", _disagreement(found.targets, allowed))
    return found


def to_offsets(targets: np.ndarray) -> np.ndarray:
    """The direct map as `d2t`, int64 [W]."""
    return targets.astype(np.int64) - np.arange(len(targets), dtype=np.int64)


def to_mask(targets: np.ndarray, vocab_size: int) -> np.ndarray:
    """The direct map as `t2d`, bool [V]."""
    mask = np.zeros(vocab_size, np.bool_)
    mask[targets] = True
    return mask


def _integers(table: np.ndarray, W: int) -> np.ndarray:
    if table.dtype.kind not in "iu":
        raise ConvertError("VOCAB_MAP_DTYPE", f"d2t is {table.dtype.name}, expected integers")
    if table.shape != (W,):
        raise ConvertError(
            "VOCAB_MAP_LENGTH",
            f"d2t has shape {list(table.shape)}, expected [{W}]: one entry per row of lm_head",
        )
    if table.dtype == np.uint64 and table.size and int(table.max()) > np.iinfo(np.int64).max:
        raise ConvertError("VOCAB_MAP_INVALID", f"d2t holds {table.max()}, no vocabulary id")
    return table.astype(np.int64)


def _read_table(
    table: np.ndarray, V: int, allowed: np.ndarray | None, kind: str, findings: Findings
) -> VocabMap:
    W = len(table)
    offset = VocabMap(np.arange(W, dtype=np.int64) + table, "offset", table)
    absolute = VocabMap(table, "absolute", table)
    wrong = {"offset": _first_wrong(offset, V), "absolute": _first_wrong(absolute, V)}
    if kind != "auto":
        chosen = offset if kind == "offset" else absolute
        if wrong[kind] is not None:
            raise ConvertError("VOCAB_MAP_INVALID", f"d2t as {kind} ids: {wrong[kind]}")
    elif wrong["offset"] is not None and wrong["absolute"] is None:
        raise ConvertError(
            "VOCAB_MAP_ABSOLUTE",
            f"d2t is not a table of offsets ({wrong['offset']}) but is one of target ids: "
            "--d2t-kind absolute reads it so",
        )
    elif wrong["offset"] is not None:
        raise ConvertError("VOCAB_MAP_INVALID", f"d2t: {wrong['offset']}")
    elif wrong["absolute"] is not None or W == 1:
        chosen = offset
    elif allowed is None:
        raise ConvertError(
            "VOCAB_MAP_AMBIGUOUS",
            f"d2t is valid both as offsets and as target ids (draft id 0 -> {offset.targets[0]} or "
            f"{table[0]}, draft id {W - 1} -> {offset.targets[-1]} or {table[-1]}) and the file "
            "has no t2d: --d2t-kind offset|absolute decides",
        )
    else:
        chosen = absolute if np.array_equal(allowed, np.sort(table)) else offset
    if W < V and not table.any():
        findings.refuse(
            "VOCAB_MAP_ALL_ZERO",
            f"d2t is all zeros: the {W} draft ids would be the first {W} of {V} target ids; an "
            "untouched buffer looks like this",
        )
    return chosen


def _first_wrong(candidate: VocabMap, V: int) -> str | None:
    targets, table = candidate.targets, candidate.table
    assert table is not None
    outside = np.flatnonzero((targets < 0) | (targets >= V))
    repeats = np.ones(len(targets), np.bool_)
    repeats[np.unique(targets, return_index=True)[1]] = False
    wrong = np.union1d(outside, np.flatnonzero(repeats))
    if not wrong.size:
        return None
    row = int(wrong[0])
    target = int(targets[row])
    step = f" + offset {table[row]}" if candidate.kind == "offset" else ""
    if outside.size and row == outside[0]:
        return f"draft id {row}{step} -> target id {target}, outside 0..{V - 1}"
    first = int(np.flatnonzero(targets == target)[0])
    return f"draft id {row}{step} -> target id {target}, which draft id {first} already has"


def _mask_ids(mask: np.ndarray, V: int) -> np.ndarray:
    if mask.dtype.kind not in "biu":
        raise ConvertError("VOCAB_T2D_DISAGREES", f"t2d is {mask.dtype.name}, expected booleans")
    if mask.shape != (V,):
        raise ConvertError(
            "VOCAB_T2D_DISAGREES", f"t2d has shape {list(mask.shape)}, expected [{V}]"
        )
    if mask.dtype.kind != "b" and not np.isin(mask, (0, 1)).all():
        raise ConvertError("VOCAB_T2D_DISAGREES", "t2d holds numbers other than 0 and 1")
    return np.flatnonzero(mask)


def _disagreement(targets: np.ndarray, allowed: np.ndarray) -> str:
    extra = np.setdiff1d(targets, allowed)
    if extra.size:
        row = int(np.flatnonzero(np.isin(targets, extra))[0])
        which = f"draft id {row} -> target id {targets[row]}, which t2d has false"
    else:
        which = f"t2d has target id {np.setdiff1d(allowed, targets)[0]} true, d2t never names it"
    counts = f"t2d has {len(allowed)} target ids true, the map names {len(targets)}"
    return f"{counts}, they differ: {which}"

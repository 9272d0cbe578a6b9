"""The readings of a draft's vocabulary table, as direct maps."""

import numpy as np

from eagle3_jax.config import ConfigError


def readings(
    targets: np.ndarray, vocab_size: int, side: np.ndarray | None
) -> dict[str, np.ndarray]:
    """Name -> [W] target id of each draft row, -1 where a reading names none; distinct ones only.

    Args:
      targets: the draft's own map (`draft_to_target`). side: another file's, as a direct map.
    """
    index = np.arange(len(targets), dtype=np.int64)
    targets = targets.astype(np.int64)
    found = {
        "checkpoint": targets,
        "offsets taken as ids": targets - index,
        "ids taken as offsets": targets + index,
        "none (row i is id i)": index,
        "ascending order": np.sort(targets),
    }
    if side is not None:
        found["side file"] = side.astype(np.int64)
    kept: dict[str, np.ndarray] = {}
    for name, read in found.items():
        ids = np.where((read >= 0) & (read < vocab_size), read, -1)
        if not any(np.array_equal(ids, other) for other in kept.values()):
            kept[name] = ids
    return kept


def side_map(table: np.ndarray, rows: int, vocab_size: int, name: str) -> np.ndarray:
    """A side file's table, read as offsets when that gives distinct ids, else as ids.

    Raises:
      ConfigError: another length, no integers, or neither reading names distinct ids.
    """
    if table.dtype.kind not in "iu" or table.shape != (rows,):
        raise ConfigError(
            f"{name}: {table.dtype.name} of shape {list(table.shape)}, expected {rows} integers, "
            "one for each row of lm_head"
        )
    table = table.astype(np.int64)
    for ids in (table + np.arange(rows), table):
        if ids.min() >= 0 and ids.max() < vocab_size and len(np.unique(ids)) == rows:
            return ids
    raise ConfigError(
        f"{name}: neither offsets nor target ids: expected {rows} distinct ids below {vocab_size}"
    )


def rows_of(ids: np.ndarray, vocab_size: int) -> np.ndarray:
    """[V] the draft row of each target id, -1 for none; the first row where two name one id."""
    result = np.full(vocab_size, -1, np.int64)
    rows = np.flatnonzero(ids >= 0)[::-1]
    result[ids[rows]] = rows
    return result

"""Target states an engine gave to a draft: whose, of which layer, of which position they are."""

import dataclasses
from collections.abc import Sequence

import numpy as np

from eagle3_jax.config import Boundary
from eagle3_jax.crosscheck.metrics import distance
from eagle3_jax.crosscheck.noise import Noise
from eagle3_jax.crosscheck.ours import Ours, Taught
from eagle3_jax.crosscheck.result import Divergence
from eagle3_jax.crosscheck.types import EngineRequest

NEAR = 2
"""Rows looked at before and after, for states that are late or early."""
SIMILAR = 0.3
"""Relative L2 below which states of a half or quantised type still tell which layer they are of."""


@dataclasses.dataclass(frozen=True)
class Known:
    """All that one request's states can be compared with.

    Attributes:
      layers: [T, L + 2, E] every boundary of the request's own text, the normed last state at the
        end; None when only the draft's are known. names: of those columns.
      own: [T, A, E] the draft's boundaries. others: of the other requests, by number.
    """

    layers: np.ndarray | None
    names: tuple[Boundary, ...]
    boundaries: tuple[Boundary, ...]
    own: np.ndarray
    others: dict[int, np.ndarray]


def known_states(
    number: int, requests: Sequence[EngineRequest], ours: Ours, taught: Sequence[Taught]
) -> Known:
    """What `name_states` needs of request `number`; runs the target once more, for all layers."""
    layers, names = None, ()
    if not ours.recorded:
        names = (*range(ours.target.config.num_layers + 1), "final_norm")
        request = requests[number]
        layers = ours.teach(request.prompt, request.output, names).aux
    others = {j: t.aux for j, t in enumerate(taught) if j != number}
    return Known(layers, names, ours.boundaries, taught[number].aux, others)


def check_states(
    number: int, request: EngineRequest, ours: Ours, taught: Taught, noise: Noise
) -> tuple[Divergence | None, bool]:
    """`hidden_states` of an answer beside the target's, row by row; False when not comparable.

    The fault's `node` is the position of the first row that differs.
    """
    assert request.aux is not None
    rows, width = request.aux.shape
    E, A = ours.target.config.hidden_size, taught.aux.shape[1]
    names: tuple[Boundary, ...] = ()
    if not ours.recorded:
        names = (*range(ours.target.config.num_layers + 1), "final_norm")
    if width == A * E and A > 0:
        found, tensor = request.aux.reshape(rows, A, E), "aux states"
        expected = taught.aux
    elif width == E and names:
        found, tensor = request.aux[:, None], "last states"
        expected = ours.teach(request.prompt, request.output, ("final_norm",)).aux
    else:
        return None, False
    expected = expected[request.first : request.first + rows].astype(np.float32)
    found = found[: len(expected)]
    for row, (mine, theirs) in enumerate(zip(expected, found, strict=True)):
        apart = distance(theirs, mine)
        if noise.same(apart.rel_l2, apart.finite):
            continue
        position = request.first + row
        fault = Divergence(
            kind="target differs",
            request=number,
            node=position,
            tensor=tensor,
            distance=apart,
            detail=f"the {tensor} of position {position} are others: {apart}",
            order=(-2, 0),
        )
        if tensor == "last states":
            return fault, True
        known = Known(None, names, ours.boundaries, taught.aux, {})
        if names:
            layers = ours.teach(request.prompt, request.output, names).aux
            known = dataclasses.replace(known, layers=layers)
        positions = np.arange(request.first, request.first + len(found))
        named = name_states(found, positions, known, noise)
        if named is not None:
            kind = "target differs" if named[0].startswith("NUMERIC") else "draft differs"
            fault = dataclasses.replace(fault, kind=kind, code=named[0], cause=named[1])
        return fault, True
    return None, True


def name_states(
    rows: np.ndarray, positions: np.ndarray, known: Known, noise: Noise
) -> tuple[str, str] | None:
    """What rows [R, A, E] of one request are, when not the states of their positions.

    Returns:
      A code and words, None when they are nothing known.
    """
    bad = np.argwhere(~np.isfinite(rows.astype(np.float32)))
    if len(bad):
        row, slot = int(bad[0][0]), int(bad[0][1])
        name = known.boundaries[slot] if slot < len(known.boundaries) else slot
        return "NUMERIC_NAN", f"NaN or infinity at boundary {name}, position {positions[row]}"
    wrong = [
        r
        for r, p in enumerate(positions)
        if p < len(known.own) and not _same(rows[r], known.own[p][: rows.shape[1]], noise)
    ]
    if not wrong:
        return None
    return (
        _layers(rows[wrong], positions[wrong], known, noise)
        or _shifted(rows[wrong], positions[wrong], known, noise)
        or _of_another(rows[wrong], positions[wrong], known, noise)
        or _scaled(rows[wrong], positions[wrong], known)
        or _normed(rows[wrong], positions[wrong], known)
    )


def _same(a: np.ndarray, b: np.ndarray, noise: Noise) -> bool:
    apart = distance(a, b)
    return noise.same(apart.rel_l2, apart.finite)


def _layers(
    rows: np.ndarray, positions: np.ndarray, known: Known, noise: Noise
) -> tuple[str, str] | None:
    if known.layers is None:
        return None
    inside = positions < len(known.layers)
    rows, table = rows[inside], known.layers[positions[inside]].astype(np.float64)
    if not len(rows):
        return None
    found: list[Boundary] = []
    for slot in range(rows.shape[1]):
        off = table - rows[:, slot, None].astype(np.float64)
        apart = np.sqrt((off**2).sum((0, 2)) / np.maximum((table**2).sum((0, 2)), 1e-300))
        best = int(apart.argmin())
        if apart[best] > min(SIMILAR, 4 * noise.state):
            return None
        found.append(known.names[best])
    wanted = known.boundaries[: len(found)]
    if tuple(found) == tuple(wanted):
        return None
    steps = {
        b - a
        for a, b in zip(wanted, found, strict=True)
        if isinstance(a, int) and isinstance(b, int)
    }
    shown = f"boundaries {_show(found)} for {_show(wanted)}"
    if len(steps) == 1 and all(isinstance(b, int) for b in (*wanted, *found)):
        step = steps.pop()
        layers = "one layer" if abs(step) == 1 else f"{abs(step)} layers"
        return "AUX_SHIFTED", f"the states are {layers} {'early' if step < 0 else 'late'}: {shown}"
    if sorted(map(str, found)) == sorted(map(str, wanted)):
        return "AUX_ORDER", f"the states are in another order: {shown}"
    return "AUX_OTHER_LAYERS", f"the states are of other layers: {shown}"


def _shifted(
    rows: np.ndarray, positions: np.ndarray, known: Known, noise: Noise
) -> tuple[str, str] | None:
    for step in sorted(range(-NEAR, NEAR + 1), key=abs):
        at = positions + step
        inside = (at >= 0) & (at < len(known.own))
        if not step or not inside.any():
            continue
        pairs = zip(rows[inside], known.own[at[inside]], strict=True)
        if all(_same(a, b[: a.shape[0]], noise) for a, b in pairs):
            word = "before" if step < 0 else "after"
            count = "one position" if abs(step) == 1 else f"{abs(step)} positions"
            return "ALIGN_SHIFTED", f"they are the states of {count} {word}"
    return None


def _of_another(
    rows: np.ndarray, positions: np.ndarray, known: Known, noise: Noise
) -> tuple[str, str] | None:
    first = rows[0].astype(np.float64)
    for j, table in known.others.items():
        near = np.abs(table[:, : first.shape[0]].astype(np.float64) - first).sum((1, 2))
        if len(near) and _same(first, table[int(near.argmin()), : first.shape[0]], noise):
            return (
                "BATCH_WRONG_ROW",
                f"position {positions[0]} has the state of request {j}, position "
                f"{int(near.argmin())}",
            )
    near = np.abs(known.own[:, : first.shape[0]].astype(np.float64) - first).sum((1, 2))
    best = int(near.argmin())
    if _same(first, known.own[best, : first.shape[0]], noise):
        return "ALIGN_WRONG_ROW", f"position {positions[0]} has the state of position {best}"
    return None


def _scaled(rows: np.ndarray, positions: np.ndarray, known: Known) -> tuple[str, str] | None:
    inside = positions < len(known.own)
    if not inside.any():
        return None
    apart = distance(rows[inside], known.own[positions[inside]][:, : rows.shape[1]])
    if apart.cosine > 0.99999 and abs(apart.norm_ratio - 1) > 0.01:
        return "FEATURE_SCALED", f"they are the right states times {apart.norm_ratio:.4g}"
    return None


def _normed(rows: np.ndarray, positions: np.ndarray, known: Known) -> tuple[str, str] | None:
    """The right states under a norm before `fc` (unit weights are enough to see it)."""
    inside = positions < len(known.own)
    if not inside.any():
        return None
    own = known.own[positions[inside]][:, : rows.shape[1]].astype(np.float64)
    for axes, name, words in (
        ((2,), "fc_norm", "a norm per state"),
        ((1, 2), "norm_before_fc", "one norm over all states"),
    ):
        normed = own / np.sqrt((own * own).mean(axes, keepdims=True) + 1e-6)
        if distance(rows[inside], normed).rel_l2 < 0.01:
            return "NORM_BEFORE_FC", f"norm flag flipped: {words} before fc ({name})"
    return None


def _show(boundaries: Sequence[Boundary]) -> str:
    return "(" + ", ".join(map(str, boundaries)) + ")"

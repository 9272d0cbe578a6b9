"""One dumped round beside the expected one: the first tensor that differs, as computed."""

import dataclasses
from collections.abc import Iterator

import numpy as np

from eagle3_jax.crosscheck.draft_ties import AFTER, Context, draft_tie, value_of
from eagle3_jax.crosscheck.metrics import Distance, distance
from eagle3_jax.crosscheck.noise import Noise
from eagle3_jax.crosscheck.result import Divergence, Kind, Tie
from eagle3_jax.crosscheck.types import DumpedRound

PLACES: dict[str, Kind] = {
    "prefill.target_aux": "target differs",
    "prefill.target_logits": "target differs",
    "prefill.extend_tokens": "draft differs",
    "prefill.extend_positions": "draft differs",
    "prefill.extend_aux": "draft differs",
    "prefill.fused": "draft differs",
    "prefill.extend_hidden": "draft differs",
    "prefill.extend_logits": "draft differs",
    "seed_hidden": "draft differs",
    "seed_ids": "draft differs",
    "seed_probs": "draft differs",
}
LEVEL = ("draft_tokens", "draft_positions", "draft_input", "draft_hidden", "draft_logits")


@dataclasses.dataclass
class Seen:
    """What comparing a request's rounds adds up.

    Attributes:
      compared: number of tensors. distances: relative L2 of equal float tensors.
      ties: rounds whose drafts rounding reordered.
    """

    compared: int = 0
    distances: list[float] = dataclasses.field(default_factory=list)
    ties: list[Tie] = dataclasses.field(default_factory=list)


def names_of(found: DumpedRound, expected: DumpedRound) -> Iterator[tuple[str, Kind]]:
    """Every tensor both may have, in the order an engine computes them, with whose it is."""
    yield from PLACES.items()
    level = 0
    while any(f"{n}.{level}" in r.tensors for n in LEVEL for r in (found, expected)):
        for name in LEVEL:
            yield f"{name}.{level}", "draft differs"
        level += 1
    yield from AFTER.items()
    known = set(PLACES) | set(AFTER)
    for name in found.tensors:
        if name not in known and not name.startswith(LEVEL) and name in expected.tensors:
            yield name, "draft differs"


def compare_round(
    found: DumpedRound, expected: DumpedRound, noise: Noise, context: Context, seen: Seen
) -> Divergence | None:
    """The first tensor of a round that differs beyond rounding; None for none.

    A tie among drafts is noted in `seen`, and the rest of what was drafted then not compared.
    """
    drafts_tied = False
    number = context.request
    if found.length != expected.length:
        return Divergence(
            kind="acceptance differs",
            request=number,
            round=found.index,
            tensor="length",
            detail=f"it starts at {found.length}, expected {expected.length}",
            order=(found.index, 0),
        )
    for order, (name, kind) in enumerate(names_of(found, expected)):
        mine, theirs = value_of(expected, name), value_of(found, name)
        if mine is None or theirs is None:
            continue
        if drafts_tied and not name.startswith("extend_tokens"):
            continue
        if name in ("accepted", "num_correct") and drafts_tied:
            continue
        if not _comparable(name, found, context):
            continue
        seen.compared += 1
        theirs, mine = _aligned(name, theirs, mine)
        at = {
            "request": number,
            "round": found.index,
            "tensor": name,
            "order": (found.index, order),
        }
        if theirs.shape != mine.shape:
            return Divergence(
                kind=kind,
                detail=f"{name} has shape {list(theirs.shape)}, expected {list(mine.shape)}",
                **at,
            )
        if theirs.dtype.kind in "iub":
            wrong = np.argwhere(np.asarray(theirs != mine))
            if not len(wrong):
                continue
            tie = draft_tie(name, theirs, found, expected, noise, context)
            if tie is not None:
                seen.ties.append(tie)
                drafts_tied = True
                continue
            place = tuple(int(i) for i in wrong[0])
            whose, detail = _what(name, kind, theirs, mine, place)
            if name == "tokens" and place != (0,) and "draft_tokens.0" not in found.tensors:
                whose = "draft differs"
            return Divergence(kind=whose, node=_node(name, place), detail=detail, **at)
        worst = _rows_apart(theirs, mine, _bounds(name, noise, expected))
        if worst is None:
            seen.distances.append(distance(theirs, mine).rel_l2)
            continue
        row, apart = worst
        if name == "candidate_scores" and context.topk == 1:
            continue
        return Divergence(
            kind=kind,
            node=row,
            distance=apart,
            detail=f"{name}{'' if row is None else f' of row {row}'} is another: {apart}",
            **at,
        )
    return None


def _comparable(name: str, found: DumpedRound, context: Context) -> bool:
    """A chain computes no probabilities after its first round (SGLang: 1.0)."""
    if name in ("seed_probs", "candidate_scores", "scores") and context.topk == 1:
        return False
    return not (name == "num_correct" and found.accepted is not None)


def _aligned(name: str, theirs: np.ndarray, mine: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Aux states folded or not, fewer of them where not all were dumped; half types widened."""
    if name.endswith("aux") and theirs.ndim != mine.ndim:
        theirs, mine = (x.reshape(len(x), -1) for x in (theirs, mine))
    if name.endswith("aux") and theirs.ndim == 3 and theirs.shape[1] < mine.shape[1]:
        mine = mine[:, : theirs.shape[1]]
    if name == "prefill.extend_hidden" and theirs.ndim == mine.ndim + 1:
        theirs = theirs[-1]
    if theirs.dtype.kind == "V" or str(theirs.dtype) in ("bfloat16", "float16"):
        theirs = theirs.astype(np.float32)
    return theirs, mine


def _rows_apart(
    theirs: np.ndarray, mine: np.ndarray, noise: Noise
) -> tuple[int | None, Distance] | None:
    """The first row that is not equal up to rounding, so that one in many is not averaged away."""
    if theirs.ndim < 2:
        whole = distance(theirs, mine)
        return None if noise.same(whole.rel_l2, whole.finite) else (None, whole)
    for row, (a, b) in enumerate(zip(theirs, mine, strict=True)):
        apart = distance(a, b)
        if not noise.same(apart.rel_l2, apart.finite):
            return row, apart
    return None


def _bounds(name: str, noise: Noise, expected: DumpedRound) -> Noise:
    """Scores are products of probabilities: what logits may move by, once a level, twice."""
    if name not in ("scores", "candidate_scores", "seed_probs"):
        return noise
    levels = 1 + sum(n.startswith("draft_tokens.") for n in expected.tensors)
    return dataclasses.replace(noise, state=max(noise.state, 2 * levels * noise.logit))


def _node(name: str, place: tuple[int, ...]) -> int | None:
    return place[0] if place and name not in ("bonus", "num_correct") else None


def _what(
    name: str, kind: Kind, theirs: np.ndarray, mine: np.ndarray, place: tuple[int, ...]
) -> tuple[Kind, str]:
    if name == "mask":
        i, j = place
        return kind, (
            f"mask bit ({i}, {j}) is {int(theirs[place])}, expected {int(mine[place])}: node {i} "
            f"{'sees' if theirs[place] else 'does not see'} node {j}"
        )
    if name == "tokens" and place == (0,):
        return "acceptance differs", f"the root is token {theirs[0]}, expected {mine[0]}"
    shown = [np.asarray(x).reshape(-1).tolist() for x in (theirs, mine)]
    if theirs.ndim == 0:
        return kind, f"{name} is {shown[0][0]}, expected {shown[1][0]}"
    i = "" if len(place) == 0 else f" at {place[0] if len(place) == 1 else list(place)}"
    return kind, f"{name} is {theirs[place]}{i}, expected {mine[place]}" + (
        f" ({shown[0]}, expected {shown[1]})" if len(shown[0]) <= 12 else ""
    )

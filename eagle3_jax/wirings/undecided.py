"""What a record cannot decide about a wiring."""

from collections.abc import Callable

from eagle3_jax.config import RopeConfig
from eagle3_jax.record import Record
from eagle3_jax.wirings.candidates import neighbours
from eagle3_jax.wirings.search import Search
from eagle3_jax.wirings.stats import paired
from eagle3_jax.wirings.wiring import Wiring


def undecided(
    search: Search,
    record: Record,
    base: Wiring,
    best: Wiring,
    options: Callable[[Wiring], list[Wiring]],
) -> list[str]:
    """Which alternatives to `best` this record does not tell from it, or cannot try at all."""
    found = []
    if len(record.boundaries) <= len(best.boundaries):
        found.append("boundaries: the record holds only those of one choice")
    if record.kind != "greedy":
        found.append(
            f"the accept length of greedy decoding: the tokens are {record.kind}, so this is how "
            "often the draft guesses them"
        )
    if not search.material.pack.pinned:
        found.append("cache policy and engine: the record has no rounds of an engine")
    if len(search.material.pack.pieces) < 2:
        found.append("states of another request: the record has one sequence")
    for what in ("embed", "head"):
        if len(search.material.owns(what)) == 1:
            owner = search.material.owns(what)[0]
            found.append(f"owner of the {what}: only the {owner}'s is here")
    if search.material.rotation is None:
        found.append("rotated states: no rotation was given")
    near = neighbours(search.material, best, reach=2)
    if near and best != base:
        block = search.material.pack.block
        first, *others = search.scores([best, *near], search.many)
        close = [
            str(w.boundaries)
            for w, other in zip(near, others, strict=True)
            if paired(first.accepted, other.accepted, block).low <= 0
        ]
        if close:
            found.append(f"boundaries: {', '.join(close)} accept as much, within the noise")
    others = options(best)
    cost, *costs = search.costs([best, *others], search.some)
    same: dict[str, list[str]] = {}
    for other, its in zip(others, costs, strict=True):
        (name, (_, value)) = next(iter(best.changes(other).items()))
        if search.z(its - cost) < 2.0:
            shown = f"{value.kind} {value.theta:g}" if isinstance(value, RopeConfig) else str(value)
            same.setdefault(name, []).append(shown)
    for name, values in same.items():
        found.append(f"{name}: {', '.join(values)} would do as well on this record")
    return found

"""Rows run again under candidates: what they read, see, or stand at is wrong in one thing."""

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from eagle3_jax.cache import KVCache
from eagle3_jax.crosscheck.evidence import Evidence, Named
from eagle3_jax.crosscheck.metrics import distance
from eagle3_jax.crosscheck.types import DumpedRound
from eagle3_jax.ops.bits import pack_bits

RECENT = 24
"""Committed slots, counted from the end, that are tried one by one."""
TOGETHER = 32
"""Candidates run in one call."""
ROOM = 64


@dataclasses.dataclass(frozen=True)
class Candidate:
    """One wrong reading of T rows: an edit of the cache, of what they see, or of where they are.

    Attributes:
      edit: what is done to the cache, None for nothing.
      sees: [T, S] bool. positions: [T].
    """

    code: str
    words: str
    sees: np.ndarray
    positions: np.ndarray
    edit: Callable[[KVCache], KVCache] | None = None


class ProbedRows:
    """T rows of one model after a committed prefix, run under many candidates at once."""

    def __init__(self, length: int, positions: np.ndarray, window: np.ndarray, slots: int):
        self.length, self.slots = length, slots
        self.positions = positions
        self.sees = np.zeros((len(positions), slots), bool)
        self.sees[:, :length] = True
        self.sees[:, length : length + len(positions)] = window

    def candidates(self) -> Iterator[Candidate]:
        """As it should be first, so that what a probe finds is not its own rounding."""
        yield Candidate("", "as it should be", self.sees, self.positions)
        for step in (-1, 1):
            words = f"positions off by {step:+d}"
            yield Candidate("POS_OFF_BY_ONE", words, self.sees, self.positions + step)
        first = max(0, self.length - RECENT)
        for slot in range(self.length - 1, first - 1, -1):
            yield self._edited(
                "KV_ROW_MISSING", f"row {slot} of the cache was never written (zeros)", slot, _zero
            )
            sees = self.sees.copy()
            sees[:, slot] = False
            yield Candidate("KV_ROW_UNSEEN", f"row {slot} is not seen", sees, self.positions)
            if slot:
                yield self._edited(
                    "KV_STALE_ROW",
                    f"stale KV row: row {slot} holds what row {slot - 1} has",
                    slot,
                    _copy,
                )

    def _edited(self, code: str, words: str, slot: int, how: Callable[..., KVCache]) -> Candidate:
        return Candidate(code, words, self.sees, self.positions, functools.partial(how, slot=slot))

    def run(self, chosen: Sequence[Candidate]) -> tuple[dict[str, np.ndarray], ...]:
        """Tensors by name, one dictionary a candidate."""
        raise NotImplementedError

    def search(
        self,
        theirs: np.ndarray,
        name: str,
        evidence: Evidence,
        only: Sequence[int] | None = None,
    ) -> Named:
        """The candidate whose result is the engine's; `only` these rows of it are known."""
        kept = list(self.candidates())
        best: tuple[float, Candidate] | None = None
        for at in range(0, len(kept), TOGETHER):
            part = kept[at : at + TOGETHER]
            for candidate, tensors in zip(part, self.run(part), strict=True):
                made = tensors.get(name.split(".")[0])
                if made is None:
                    return None
                if only is not None:
                    made = made[list(only)]
                made = made[: len(theirs)] if theirs.ndim == made.ndim else made[-1]
                if made.shape != theirs.shape:
                    made = made.reshape(theirs.shape) if made.size == theirs.size else made
                if made.shape != theirs.shape:
                    return None
                apart = distance(theirs, made)
                if apart.finite and (best is None or apart.rel_l2 < best[0]):
                    best = apart.rel_l2, candidate
        if best is None or not best[1].code or not evidence.noise.same(best[0]):
            return None
        return best[1].code, best[1].words


def round_before(evidence: Evidence, index: int) -> DumpedRound | None:
    """Our own round before, on the engine's text."""
    begins = {r.index: r.length for r in evidence.rounds}
    begins |= {r.index: r.length for r in evidence.request.rounds or ()}
    if index - 1 not in begins:
        return None
    known = [DumpedRound(index - 1, begins[index - 1])]
    request = dataclasses.replace(evidence.request, rounds=known)
    return next((mine for _, mine in evidence.ours.pinned(request)), None)


def stacked(cache: KVCache, chosen: Sequence[Candidate]) -> tuple[KVCache, jax.Array, jax.Array]:
    """Caches, positions and bits of `TOGETHER` candidates; the last one fills up."""
    padded = [*chosen, *[chosen[-1]] * (TOGETHER - len(chosen))]
    edited = [cache if c.edit is None else c.edit(cache) for c in padded]
    caches = jax.tree.map(lambda *x: jnp.concatenate(x), *edited)
    positions = jnp.asarray(np.stack([c.positions for c in padded]), jnp.int32)
    return caches, positions, jnp.asarray(np.stack([pack_bits(c.sees) for c in padded]))


def _zero(cache: KVCache, slot: int) -> KVCache:
    return jax.tree.map(lambda x: x.at[:, slot].set(0), cache)


def _copy(cache: KVCache, slot: int) -> KVCache:
    return jax.tree.map(lambda x: x.at[:, slot].set(x[:, slot - 1]), cache)


def rows_from(cache: KVCache, other: KVCache, slots: Sequence[int]) -> KVCache:
    """A cache with some slots of another's."""
    index = jnp.asarray(slots, jnp.int32)
    return jax.tree.map(lambda x, y: x.at[:, index].set(y[:, index]), cache, other)


def row_moved(cache: KVCache, other: KVCache, goal: int, source: int) -> KVCache:
    """A cache whose slot `goal` holds another's slot `source`."""
    return jax.tree.map(lambda x, y: x.at[:, goal].set(y[:, source]), cache, other)


def bucket(rows: int) -> int:
    """Slots in multiples of `ROOM`, so that few sizes compile."""
    return -(-rows // ROOM) * ROOM


def widened(x: np.ndarray) -> np.ndarray:
    """Half types as float32."""
    return x if x.dtype.kind == "f" and x.dtype.itemsize >= 4 else x.astype(np.float32)

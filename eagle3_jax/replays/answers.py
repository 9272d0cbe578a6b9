"""What every row of a bin answers under one topk, for all num_steps and num_draft_tokens."""

import dataclasses
from collections.abc import Iterable

import numpy as np

from eagle3_jax.config import TreeConfig
from eagle3_jax.replays.bin import OUTSIDE, UNKNOWN, BinReplay, Chains
from eagle3_jax.replays.result import Reason

NOWHERE = np.iinfo(np.int32).max


@dataclasses.dataclass
class Answers:
    """Of one topk at the rows of a bin: what every num_steps and num_draft_tokens would accept."""

    replay: BinReplay
    topk: int
    steps: int
    chains: Chains | None
    known: np.ndarray = dataclasses.field(init=False)
    place: np.ndarray = dataclasses.field(init=False)
    rank: np.ndarray = dataclasses.field(init=False)

    def __post_init__(self):
        S = self.replay.rows.slots
        self.known = np.zeros(S, bool)
        if self.chains is not None:
            return
        self.place = np.full((S, self.steps, self.steps), NOWHERE, np.int32)
        self.rank = np.full((S, self.steps), UNKNOWN, np.int32)
        starts = np.flatnonzero(self.replay.rows.judged)
        self.rank[starts, 0] = self.replay.rank[starts]
        hit = self.replay.level0(starts, self.topk)
        self.known[starts[~hit]] = True
        self._growable = starts[hit]

    def grow(self, wanted: Iterable[int], *, fill: bool):
        """Drafts trees at the wanted rows; `fill` uses spare room for rows that come next."""
        wanted = np.asarray(sorted(set(wanted)), np.int64)
        if not len(wanted):
            return
        size = self.replay.starts_per_call(self.topk)
        tree = TreeConfig(self.steps, self.topk, 2)
        for first in range(0, len(wanted), size):
            starts = wanted[first : first + size]
            if fill:
                starts = np.concatenate([starts, self._next(starts, size - len(starts))])
            self.place[starts], self.rank[starts], _ = self.replay.trees(starts, tree)
            self.known[starts] = True

    def _next(self, starts: np.ndarray, room: int) -> np.ndarray:
        """Up to `room` rows not drafted yet, the first ones after each of `starts`."""
        free = self._growable[~self.known[self._growable]]
        free = free[~np.isin(free, starts)]
        each = -(-room // len(starts))
        places = np.searchsorted(free, starts).tolist()
        return np.unique(np.concatenate([free[at : at + each] for at in places]))[:room]

    def accepted(self, slot: int, tree: TreeConfig) -> int:
        """True drafts of a round that row `slot` seeds, as far as they can be judged."""
        if self.chains is not None:
            return min(int(self.chains.hits[slot]), tree.num_steps)
        s, kept = tree.num_steps, tree.num_draft_tokens - 1
        return int((self.place[slot, :s, s - 1] < kept).sum())

    def miss(self, slot: int, level: int, tree: TreeConfig) -> tuple[Reason, int | None]:
        """Why level `level` has no true draft, and the true token's rank there, 1 for the best."""
        table = self.rank if self.chains is None else self.chains.rank
        rank = int(table[slot, level])
        if self.replay.rows.true[slot + 1 + level] == OUTSIDE:
            return "outside_vocabulary", None
        if self.chains is None and self.place[slot, level, tree.num_steps - 1] < NOWHERE:
            return "not_selected", rank + 1
        if rank == UNKNOWN:
            return "not_expanded", None
        return "ranked", rank + 1

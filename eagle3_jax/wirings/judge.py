"""Wirings judged on all chains beside the configured one."""

import dataclasses

import numpy as np

from eagle3_jax.wirings.rungs import Scores
from eagle3_jax.wirings.search import CLEAR, Search
from eagle3_jax.wirings.stats import Paired, paired
from eagle3_jax.wirings.wiring import Wiring

UNFIT = 0.25
"""A gain in accept length over the states of other tokens that a draft of use would exceed."""


@dataclasses.dataclass(frozen=True)
class Candidate:
    """One wiring with its evidence.

    Attributes:
      words: what differs from the configured one. accept_length: on the rounds scored.
      nll: mean negative log-likelihood of the record's tokens that the map has; outside: the share
        it lacks. gain: accept length over the configured wiring's, round by round.
      z: by how many standard errors its log loss is below the configured wiring's.
    """

    wiring: Wiring
    words: str
    accept_length: float
    nll: float
    outside: float
    gain: Paired
    z: float


class Judge:
    """Candidates on the largest rung, beside the configured wiring."""

    def __init__(self, search: Search, base: Wiring):
        self.search, self.base = search, base
        self._made: dict[Wiring, Candidate] = {}

    def cost(self, wiring: Wiring) -> np.ndarray:
        """[chains] log loss per step."""
        return self.search.costs([wiring], self.search.many)[0]

    def scores(self, wiring: Wiring) -> Scores:
        """On all chains."""
        return self.search.scores([wiring], self.search.many)[0]

    def rows(self, wiring: Wiring) -> np.ndarray:
        """[chains] the row of the head each chain drafts first."""
        return self.search.rows(wiring, self.search.many)[0]

    def uses_states(self, wiring: Wiring) -> bool:
        """Whether the states of other tokens would be clearly worse: the draft reads something."""
        shuffled = dataclasses.replace(wiring, rows="shuffled")
        return self.search.z(self.cost(shuffled) - self.cost(wiring)) >= CLEAR

    def at_chance(self, wiring: Wiring) -> bool:
        """Whether it accepts what the states of other tokens give, and enough rounds say so."""
        shuffled = dataclasses.replace(wiring, rows="shuffled")
        block = self.search.material.pack.block
        gain = paired(self.scores(wiring).accepted, self.scores(shuffled).accepted, block)
        return gain.high < UNFIT

    def best(self, finalists: list[Wiring]) -> Wiring:
        """The configured one unless another is clearly better by log loss; then the longest."""
        lowest = min((self.cost(w) for w in finalists), key=np.mean)
        level = self.search.z(self.cost(self.base) - lowest) < 2.0
        return self.base if level else self.search.first(finalists)

    def candidate(self, wiring: Wiring) -> Candidate:
        """A wiring with its evidence."""
        if wiring not in self._made:
            found, base = self.scores(wiring), self.scores(self.base)
            block = self.search.material.pack.block
            counted = self.search.counted(self.search.many)
            nll = found.nll[counted]
            outside = np.isnan(nll)
            self._made[wiring] = Candidate(
                wiring,
                wiring.describe(self.base),
                1 + float(found.accepted.mean()),
                float("nan") if outside.all() else float(nll[~outside].mean()),
                float(outside.mean()),
                paired(found.accepted, base.accepted, block),
                self.search.z(base.cost - found.cost),
            )
        return self._made[wiring]

"""From the configured wiring to the best one: few chains for many wirings, more for the best."""

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np

from eagle3_jax.config import Boundary
from eagle3_jax.wirings import candidates
from eagle3_jax.wirings.engine import compare
from eagle3_jax.wirings.material import Material
from eagle3_jax.wirings.rungs import Rung
from eagle3_jax.wirings.scoring import Scoring
from eagle3_jax.wirings.stats import paired, z_score
from eagle3_jax.wirings.wiring import Wiring

CROWD = 300
"""More wirings than this are first thinned on the smallest rung."""
BEAM = 4
LEVELS = 3
CLEAR = 3.0  # standard errors
NEAR = 24
CLIMBS = 4
HIDDEN = 1.4
"""Two faults of which neither shows alone leave a shorter accept length than this."""


class Search(Scoring):
    """Looks for the best wiring, among few chains first."""

    def __init__(
        self,
        material: Material,
        singles: Callable[[Wiring], list[Wiring]],
        say: Callable[[str], None] = lambda text: None,
    ):
        super().__init__(material)
        self.singles, self.say = singles, say

    def accept_length(self, wiring: Wiring) -> float:
        """On the middle rung."""
        return 1 + float(self.scores([wiring], self.some)[0].accepted.mean())

    def reproduces(self, wiring: Wiring) -> bool:
        """Whether it drafts and accepts what the engine did, in every round."""
        pack = self.material.pack
        if not pack.pinned:
            return False
        found = self.scores([wiring], self.some)[0]
        chains = [pack.chains[i] for i in self.some.chains]
        return not compare("", chains, found.accepted, found.proposed).different

    def z(self, difference: np.ndarray) -> float:
        """`z_score` with the block of this record's chains."""
        return z_score(difference, self.material.pack.block)

    def best(self, base: Wiring) -> list[Wiring]:
        """The wirings found, best first on the middle rung, `base` among them.

        All boundaries and all single changes; while that helps, or nothing works yet, all single
        changes of the best ones too.
        """
        pool = self._expand(base)
        expanded = {base}
        previous = base
        for level in range(LEVELS - 1):
            ranked = self._ranked(pool)
            best = ranked[0]
            cost = self.costs([previous, best], self.some)
            gain = self.z(cost[0] - cost[1])
            self.say(f"level {level}: {best.describe(base)}: {gain:.1f} standard errors")
            if gain < CLEAR and (level or self.accept_length(base) > HIDDEN):
                break
            if self.reproduces(best):
                break
            for place, wiring in enumerate(self._beam(ranked, expanded, base)):
                expanded.add(wiring)
                pool = list(dict.fromkeys((*pool, *self._expand(wiring, place < 2))))
            previous = best
        pool = self._polished(pool)
        ranked = self._ranked(pool)
        return ranked

    def _polished(self, pool: list[Wiring]) -> list[Wiring]:
        """With the neighbours of the best one, slot by slot, until none is better."""
        if len(self.material.boundaries) <= self.material.config.num_aux:
            return pool
        for _ in range(3):
            best = self._ranked(pool)[0]
            near = self._thinned(candidates.neighbours(self.material, best), self.few, NEAR)
            pool = list(dict.fromkeys((*pool, *near)))
            if self._ranked(pool)[0] == best:
                break
        return pool

    def _beam(self, ranked: list[Wiring], expanded: set[Wiring], base: Wiring) -> list[Wiring]:
        """The best wirings that were not expanded yet, few of each kind of change."""
        found: list[Wiring] = []
        kinds: dict[frozenset, int] = {}
        for wiring in ranked:
            kind = frozenset(base.changes(wiring))
            if wiring not in expanded and kinds.get(kind, 0) < 2:
                kinds[kind] = kinds.get(kind, 0) + 1
                found.append(wiring)
            if len(found) == BEAM:
                break
        return found

    def _ranked(self, pool: list[Wiring]) -> list[Wiring]:
        means = self.costs(pool, self.some).mean(axis=1)
        return [pool[i] for i in np.argsort(means, kind="stable")]

    def _expand(self, base: Wiring, boundaries: bool = True) -> list[Wiring]:
        more = self._boundaries(base) if boundaries else []
        return list(dict.fromkeys((base, *self.singles(base), *more)))

    def _boundaries(self, base: Wiring, keep: int = 12) -> list[Wiring]:
        """The best choices of boundaries with everything else as in `base`, any map."""
        m = self.material
        if len(m.boundaries) <= len(base.boundaries):
            return []
        choices, in_every_order = candidates.tuples(m, len(base.boundaries))
        maps = list(m.maps)
        if choices:
            made = [dataclasses.replace(base, boundaries=c, vocab="checkpoint") for c in choices]
        else:
            made = [base, *candidates.neighbours(m, base)]
        found = self._top(made, maps, keep)
        if not in_every_order:
            swapped = [w for one in found[:4] for w in candidates.orders(one)]
            slots = self._by_slot(made, len(base.boundaries)) if choices else []
            swapped += [dataclasses.replace(base, boundaries=c) for c in slots]
            around = [w for one in found[:2] for w in candidates.neighbours(m, one)]
            found = self._top(list(dict.fromkeys((*found, *swapped, *around))), maps, keep)
        return found

    def _top(self, made: list[Wiring], maps: list[str], keep: int) -> list[Wiring]:
        """The best `keep` of them with any map; the fewer are left, the more chains judge."""
        crowd = [dataclasses.replace(w, vocab=name) for w in made for name in maps]
        if len(crowd) > CROWD:
            crowd = self._thinned(crowd, self.fewest, 400 if len(made) > 1500 else 100)
        if self.few is not self.fewest and len(crowd) > 4 * keep:
            crowd = self._thinned(crowd, self.few, 4 * keep)
        return self._thinned(crowd, self.some, keep)

    def _thinned(self, crowd: list[Wiring], rung: Rung, keep: int) -> list[Wiring]:
        means = self.costs(crowd, rung).mean(axis=1)
        return [crowd[i] for i in np.argsort(means, kind="stable")[:keep]]

    def _by_slot(self, made: list[Wiring], count: int) -> list[tuple[Boundary, ...]]:
        """Choices from the boundaries that do best in each slot, whatever the others hold."""
        means = self.costs(made, self.fewest).mean(axis=1)
        best: list[list[Boundary]] = []
        for slot in range(count):
            by: dict[Any, float] = {
                b: np.sort(means[[w.boundaries[slot] == b for w in made]])[:8].mean()
                for b in {w.boundaries[slot] for w in made}
            }
            best.append(sorted(by, key=by.__getitem__)[:6])
        grids = np.meshgrid(*[np.arange(len(b)) for b in best], indexing="ij")
        found = []
        for index in zip(*[g.ravel() for g in grids], strict=True):
            chosen = tuple(best[s][i] for s, i in enumerate(index))
            if len(set(chosen)) == count:
                found.append(chosen)
        return found

    def settled(self, best: Wiring, base: Wiring) -> Wiring:
        """On all chains: the longest accept length nearby in boundaries, without idle changes.

        Between neighbouring boundaries the log loss of a weak draft says how sure it is more than
        how often it is right.
        """
        for _ in range(CLIMBS):
            near = [best, *candidates.neighbours(self.material, best, reach=2)]
            first = self.first(near)
            if first == best:
                break
            best = first
        best = self._usual(best, base)
        for name, (old, _) in base.changes(best).items():
            plainer = dataclasses.replace(best, **{name: old})
            cost = self.costs([plainer, best], self.many)
            if self.z(cost[0] - cost[1]) < CLEAR:
                best = plainer
        return best

    def _usual(self, best: Wiring, base: Wiring) -> Wiring:
        """With boundaries a mistake leads to, where they do as well: all shifted together, the
        default of the depth, another order.

        The longest accept length of thousands of choices is partly luck.
        """
        if best.boundaries == base.boundaries:
            return best
        usual = [
            dataclasses.replace(best, boundaries=one.boundaries)
            for one in self.singles(base)
            if set(base.changes(one)) == {"boundaries"}
        ]
        if best in usual:
            return best
        mine, *others = self.scores([best, *usual], self.many)  # side by side
        block = self.material.pack.block
        as_good = [
            one
            for one, found in zip(usual, others, strict=True)
            if self.z(found.cost - mine.cost) < CLEAR
            and paired(mine.accepted, found.accepted, block).low <= 0
        ]
        return self.first(as_good) if as_good else best

    def _merit(self, wiring: Wiring) -> tuple[float, float]:
        found = self.scores([wiring], self.many)[0]
        return float(found.accepted.mean()), -float(found.cost.mean())

    def first(self, finalists: list[Wiring]) -> Wiring:
        """The one with the longest accept length on all chains, then with the lowest log loss."""
        self._ensure(finalists, self.many)  # side by side
        return max(finalists, key=self._merit)

"""From the configured wiring to the best one: few chains for many wirings, more for the best."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from eagle3_jax.config import Boundary
from eagle3_jax.wirings import candidates, scorer
from eagle3_jax.wirings.block import Knobs
from eagle3_jax.wirings.engine import compare
from eagle3_jax.wirings.material import Material
from eagle3_jax.wirings.rungs import Rung, Scores, costs_of, rungs
from eagle3_jax.wirings.stats import z_score
from eagle3_jax.wirings.wiring import Wiring

CROWD = 300
"""More wirings than this are first thinned on the smallest rung."""
BEAM = 4
LEVELS = 3
TABLE = 500 << 20  # bytes of projections kept
CLEAR = 3.0  # standard errors
NEAR = 24
CLIMBS = 4
HIDDEN = 1.4
"""Two faults of which neither shows alone leave a shorter accept length than this."""


class Search:
    """Scores wirings on three rungs and keeps what it has seen."""

    def __init__(
        self,
        material: Material,
        singles: Callable[[Wiring], list[Wiring]],
        say: Callable[[str], None] = lambda text: None,
    ):
        self.material, self.singles, self.say = material, singles, say
        self.fewest, self.few, self.some, self.many = rungs(material.pack, material.config)
        self._cache: dict[tuple[Wiring, int], tuple[Any, Any, Any]] = {}
        self._tables: dict[tuple, scorer.Projections] = {}
        self._rows: dict[int, tuple] = {}
        self.tried: set[Wiring] = set()

    def _ensure(self, wirings: Sequence[Wiring], rung: Rung) -> list[Wiring]:
        """Computes what is missing; the keys of the cache."""
        plain = [dataclasses.replace(w, vocab="checkpoint") for w in wirings]
        missing = [w for w in dict.fromkeys(plain) if (w, id(rung)) not in self._cache]
        for group in _groups(missing):
            self._compute(group, rung)
        self.tried.update(wirings)
        return plain

    def scores(self, wirings: Sequence[Wiring], rung: Rung) -> list[Scores]:
        """Of each wiring, on a rung of all steps."""
        plain = self._ensure(wirings, rung)
        return [self._scores(w, key, rung) for w, key in zip(wirings, plain, strict=True)]

    def _scores(self, wiring: Wiring, key: Wiring, rung: Rung) -> Scores:
        m = self.material
        i = list(m.maps).index(wiring.vocab)
        cost, nll, best = self._cache[key, id(rung)]
        proposed = m.maps[wiring.vocab][best]
        hit = proposed == self.tokens(rung)
        return Scores(cost[i], nll[i], proposed, np.cumprod(hit, axis=0).sum(axis=0))

    def rows(self, wiring: Wiring, rung: Rung) -> np.ndarray:
        """[steps, chains] the draft's best rows of the head."""
        (key,) = self._ensure([wiring], rung)
        return self._cache[key, id(rung)][2]

    def tokens(self, rung: Rung) -> np.ndarray:
        """[steps, chains] the record's tokens that the chains draft."""
        pack = self.material.pack
        slots = np.array([pack.chains[i].slot for i in rung.chains])
        return pack.tokens[slots[None] + 2 + np.arange(rung.steps)[:, None]]

    def counted(self, rung: Rung) -> np.ndarray:
        """See `Pack.counted`."""
        return self.material.pack.counted(rung.chains)[: rung.steps]

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

    def costs(self, wirings: Sequence[Wiring], rung: Rung) -> np.ndarray:
        """[wirings, chains]; a wiring is computed once for all vocabulary maps."""
        plain = self._ensure(wirings, rung)
        names = list(self.material.maps)
        pairs = zip(wirings, plain, strict=True)
        return np.stack([self._cache[k, id(rung)][0][names.index(w.vocab)] for w, k in pairs])

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
        for name, (old, _) in base.changes(best).items():
            plainer = dataclasses.replace(best, **{name: old})
            cost = self.costs([plainer, best], self.many)
            if self.z(cost[0] - cost[1]) < CLEAR:
                best = plainer
        return best

    def _merit(self, wiring: Wiring) -> tuple[float, float]:
        found = self.scores([wiring], self.many)[0]
        return float(found.accepted.mean()), -float(found.cost.mean())

    def first(self, finalists: list[Wiring]) -> Wiring:
        """The one with the longest accept length on all chains, then with the lowest log loss."""
        self._ensure(finalists, self.many)  # side by side
        return max(finalists, key=self._merit)

    def prepared(self, wiring: Wiring, rung: Rung):
        """The scorer's four arguments for one wiring on one rung."""
        m = self.material
        rows, subset = self._slots(rung)
        chosen = list(dict.fromkeys(m.index(b) for b in wiring.boundaries))
        table = self._table(wiring, chosen, rung)
        place = {b: i for i, b in enumerate(chosen)}
        knobs = {name: jnp.asarray(value) for name, value in m.knobs(wiring, place).items()}
        weights = m.weights(wiring.head, wiring.gate_up == "swapped", subset)
        return rows, weights, table, Knobs(**knobs)

    def _slots(self, rung: Rung):
        if id(rung) not in self._rows:
            self._rows[id(rung)] = self.material.rows(rung)
        return self._rows[id(rung)]

    def _compute(self, group: list[Wiring], rung: Rung):
        m = self.material
        rows, subset = self._slots(rung)
        first = group[0]
        weights = m.weights(first.head, first.gate_up == "swapped", subset)
        count = len(rung.chains)
        tokens = self.tokens(rung)
        has = np.stack([table[tokens] >= 0 for table in m.rows_of.values()])
        for batch, chosen in self._batches(group, rung):
            table = self._table(first, chosen, rung)
            place = {b: i for i, b in enumerate(chosen)}
            knobs = [m.knobs(w, place) for w in batch]
            knobs += knobs[-1:] * (rung.batch - len(batch))
            stacked = {n: jnp.asarray(np.stack([k[n] for k in knobs])) for n in knobs[0]}
            nll, best = scorer.score(
                weights,
                rows,
                table,
                Knobs(**stacked),
                form=m.form,
                steps=rung.steps,
            )
            nll, best = np.asarray(nll)[:, :, : len(m.maps), :, :count], np.asarray(best)
            for i, wiring in enumerate(batch):
                cost = costs_of(nll[i], has, self.counted(rung), m.config.vocab_size)
                kept = (cost.astype(np.float32), None, None)
                if rung is self.some or rung is self.many:
                    plain = np.where(has, nll[i, scorer.SHARPNESS.index(1.0)], np.nan)
                    rows_ = best[i, :, :count]
                    kept = (cost, plain, rows_ if subset is None else np.array(subset)[rows_])
                self._cache[wiring, id(rung)] = kept

    def _batches(self, group: list[Wiring], rung: Rung):
        """Wirings of one batch with the boundaries they read, at most what the table may hold."""
        m = self.material
        A, D = m.config.num_aux, m.config.hidden_size
        room = max(TABLE // (A * D * rung.slots * 4), A)
        if room >= len(m.boundaries):
            everything = list(range(len(m.boundaries)))
            for i in range(0, len(group), rung.batch):
                yield group[i : i + rung.batch], everything
            return
        room = min(room, 8) if room >= 8 else A
        batch: list[Wiring] = []
        chosen: list[int] = []
        for wiring in sorted(group, key=lambda w: str(w.boundaries)):
            wanted = [m.index(b) for b in wiring.boundaries]
            union = list(dict.fromkeys((*chosen, *wanted)))
            if batch and (len(union) > room or len(batch) == rung.batch):
                yield batch, _padded(chosen, room)
                batch, union = [], wanted
            batch.append(wiring)
            chosen = union
        if batch:
            yield batch, _padded(chosen, room)

    def _table(self, wiring: Wiring, chosen: list[int], rung: Rung) -> scorer.Projections:
        key = (wiring.fuse_norm, wiring.space, tuple(chosen), id(rung))
        if key not in self._tables:
            while len(self._tables) >= 4:
                self._tables.pop(next(iter(self._tables)))
            self._tables[key] = self.material.projections(wiring, chosen, rung, rung.slots)
        return self._tables[key]


def _padded(chosen: list[int], room: int) -> list[int]:
    return chosen + chosen[-1:] * (room - len(chosen))


def _groups(wirings: list[Wiring]) -> list[list[Wiring]]:
    """Wirings that share matrices and projections."""
    groups: dict[tuple, list[Wiring]] = {}
    for w in wirings:
        groups.setdefault((w.head, w.gate_up, w.fuse_norm, w.space), []).append(w)
    return list(groups.values())

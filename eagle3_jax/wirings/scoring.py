"""Scores of wirings on the rungs of a record, each computed once."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from eagle3_jax.wirings import scorer
from eagle3_jax.wirings.block import Knobs
from eagle3_jax.wirings.material import Material
from eagle3_jax.wirings.rungs import Rung, Scores, costs_of, rungs
from eagle3_jax.wirings.wiring import Wiring

TABLE = 500 << 20  # bytes of projections kept


class Scoring:
    """Scores wirings on four rungs and keeps what it has seen."""

    def __init__(self, material: Material):
        self.material = material
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

    def costs(self, wirings: Sequence[Wiring], rung: Rung) -> np.ndarray:
        """[wirings, chains]; a wiring is computed once for all vocabulary maps."""
        plain = self._ensure(wirings, rung)
        names = list(self.material.maps)
        pairs = zip(wirings, plain, strict=True)
        return np.stack([self._cache[k, id(rung)][0][names.index(w.vocab)] for w, k in pairs])

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

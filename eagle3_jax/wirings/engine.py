"""What an engine's rounds say beside the draft's own: the first one that differs, and why."""

import dataclasses
import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from eagle3_jax.wirings import scorer
from eagle3_jax.wirings.block import Form, KeyValue, Knobs, Run, Weights
from eagle3_jax.wirings.pack import Chain

POLICIES = {
    "refresh": "the draft's cache holds target states for committed tokens",
    "keep": "the draft's cache keeps what drafting wrote for accepted tokens",
    "hole": "the draft's cache lacks the last row after a full accept",
}
ROUNDING = 0.05
"""Share of rounds that may differ by rounding: bfloat16 changes about one in fifty."""


@dataclasses.dataclass(frozen=True)
class Agreement:
    """One explanation beside the engine's rounds.

    Attributes:
      accepted: by this explanation, [rounds]. first: of the rounds that differ, as (sequence,
        round), None when none does.
    """

    name: str
    rounds: int
    different: int
    first: tuple[int, int] | None
    accepted: np.ndarray

    @property
    def equal(self) -> bool:
        """Equal, but for what rounding does."""
        return self.different <= ROUNDING * self.rounds


def compare(
    name: str, chains: Sequence[Chain], accepted: np.ndarray, proposed: np.ndarray
) -> Agreement:
    """Accepted counts [rounds] and proposed target ids [steps, rounds] beside the engine's.

    Proposals count up to the first miss: past it the record's tokens are not the draft's.
    """
    different = []
    for i, chain in enumerate(chains):
        engine = chain.engine
        assert engine is not None
        same = int(accepted[i]) == engine.accepted
        if same and engine.proposed is not None:
            upto = min(engine.accepted + 1, len(engine.proposed), len(proposed))
            same = proposed[:upto, i].tolist() == list(engine.proposed[:upto])
        if not same:
            different.append(i)
    return _agreement(name, chains, accepted, different)


def compare_counts(name: str, chains: Sequence[Chain], accepted: np.ndarray) -> Agreement:
    """Accepted counts [rounds] alone beside the engine's, as trees leave no proposed chain."""
    engines = [chain.engine for chain in chains]
    different = [i for i, e in enumerate(engines) if e is None or e.accepted != int(accepted[i])]
    return _agreement(name, chains, accepted, different)


def _agreement(
    name: str, chains: Sequence[Chain], accepted: np.ndarray, different: list[int]
) -> Agreement:
    first = None
    if different:
        chain = chains[different[0]]
        first = (chain.sequence, chain.round or 0)
    return Agreement(name, len(chains), len(different), first, accepted)


@functools.partial(jax.jit, static_argnames=("form", "steps"))
def follow(
    w: Weights,
    rows: scorer.Rows,
    projections: scorer.Projections,
    knobs: Knobs,  # of one wiring
    engine_accepted: jax.Array,  # [M] of the rounds at rows.chains
    keep: jax.Array,  # [] bool
    hole: jax.Array,  # [] bool
    *,
    form: Form,
    steps: int,
) -> jax.Array:
    """Replays rounds in order with a cache that is not refreshed as it should be.

    Returns:
      Best row of the head [steps, M].
    """
    run = Run(form, w, knobs)
    first = scorer.first_rows(run, rows, projections)
    seen = scorer.visible(knobs, rows)
    fresh = scorer.committed(run, rows, *first, seen)

    def extended(caches: list[KeyValue], c: jax.Array, before: jax.Array) -> list[KeyValue]:
        """With rows from target states: of the last round's tokens, and the one drafting starts at.

        Those of one layer do not depend on the cache; only the last row may be new.
        """
        if len(form.layers) == 1:
            return [_written(caches[0], c, [x[c] for x in fresh[0]], jnp.bool_(True))]
        for behind in range(steps, -1, -1):
            wanted = (behind <= before) & ~keep
            if behind == 1:
                wanted = jnp.where(before == steps, ~hole, wanted)
            wanted = wanted | (behind == 0)
            caches = _renewed(run, rows, first, seen, caches, jnp.maximum(c - behind, 0), wanted)
        return caches

    def one(state: tuple[list[KeyValue], jax.Array], item: tuple[jax.Array, jax.Array]):
        (caches, before), (c, accepted) = state, item
        caches = extended(caches, c, before)
        at = c[None]
        embedded, hidden = (x[at] for x in first)
        own: list[list[KeyValue]] = [[] for _ in form.layers]
        best = []
        for step in range(steps):
            if step:
                token = jnp.minimum(at + 1 + step, rows.end[at] - 1)
                embedded = rows.embedded[knobs.embed, token]
            place = rows.ahead(at, step)
            out, hidden = scorer.through(
                run, embedded, hidden, place, caches, seen, at, own, bool(step)
            )
            best.append(jnp.argmax(run.logits(out), axis=-1)[0].astype(jnp.int32))
        for i in range(steps - 1):
            kept = keep & (i < accepted)
            caches = [
                _written(cache, c + 1 + i, [x[0] for x in mine[i]], kept)
                for cache, mine in zip(caches, own, strict=True)
            ]
        left_out = hole & (accepted == steps)
        caches = [
            _written(cache, c + steps, [jnp.zeros_like(x[0]) for x in cache], left_out)
            for cache in caches
        ]
        return (caches, accepted), jnp.stack(best)

    return jax.lax.scan(one, (fresh, jnp.int32(0)), (rows.chains, engine_accepted))[1].T


def _renewed(
    run: Run,
    rows: scorer.Rows,
    first: tuple[jax.Array, jax.Array],
    seen: scorer.Seen,
    caches: list[KeyValue],
    slot: jax.Array,
    wanted: jax.Array,
) -> list[KeyValue]:
    """With the row of one slot as target states and the rows before it make it."""
    at = slot[None]
    place = rows.place[at]
    own: list[list[KeyValue]] = [[] for _ in caches]
    others = jnp.arange(rows.start.shape[0], dtype=jnp.int32) != slot

    def before(layer: int, chains: jax.Array, position: jax.Array) -> jax.Array:
        return seen(layer, chains, position) & others[None]

    embedded, hidden = (x[at] for x in first)
    scorer.through(run, embedded, hidden, place, caches, before, at, own, True)
    return [
        _written(cache, slot, [x[0] for x in mine[0]], wanted)
        for cache, mine in zip(caches, own, strict=True)
    ]


def _written(
    cache: KeyValue, slot: jax.Array, row: Sequence[jax.Array], wanted: jax.Array
) -> KeyValue:
    slot = jnp.minimum(slot, cache[0].shape[0] - 1)
    key, value = (
        x.at[slot].set(jnp.where(wanted, new, x[slot])) for x, new in zip(cache, row, strict=True)
    )
    return key, value

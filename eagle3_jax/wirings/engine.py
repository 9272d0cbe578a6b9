"""What an engine's rounds say beside the draft's own: the first one that differs, and why."""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from eagle3_jax.wirings import scorer
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
    first = None
    if different:
        chain = chains[different[0]]
        first = (chain.sequence, chain.round or 0)
    return Agreement(name, len(chains), len(different), first, accepted)


@functools.partial(jax.jit, static_argnames=("head_dim", "steps"))
def follow(
    w: scorer.LayerWeights,
    rows: scorer.Rows,
    projections: scorer.Projections,
    knobs: scorer.Knobs,  # of one wiring
    engine_accepted: jax.Array,  # [M] of the rounds at rows.chains
    keep: jax.Array,  # [] bool
    hole: jax.Array,  # [] bool
    *,
    head_dim: int,
    steps: int,
) -> jax.Array:
    """Replays rounds in order with a cache that is not refreshed as it should be.

    Returns:
      Best row of the head [steps, M].
    """
    H, k = head_dim, knobs
    embedded, hidden = scorer.first_rows(w, rows, projections, k)
    fresh = scorer.keys_values(w, k, H, embedded, hidden, rows.position)

    def one(cache: tuple[jax.Array, jax.Array], item: tuple[jax.Array, jax.Array]):
        c, accepted = item
        at = c[None]
        seen = scorer.visible(rows, k, at)
        keys = cache[0].at[c].set(fresh[0][c])  # the row drafting starts from is always new
        values = cache[1].at[c].set(fresh[1][c])
        e, g = embedded[at], hidden[at]
        own: list[Any] = []
        best = []
        for step in range(steps):
            position = rows.position[at] + step
            if step:
                token = jnp.minimum(at + 1 + step, rows.end[at] - 1)
                e = rows.embedded[k.embed, token]
                own.append(scorer.keys_values(w, k, H, e, g, position))
            attended = scorer.attend_chain(
                scorer.queries(w, k, H, e, g, position),
                keys,
                values,
                seen(position),
                [key for key, _ in own],
                [value for _, value in own],
            )
            out = scorer.layer(w, k, e, g, attended)
            top = jnp.argmax(scorer.to_logits(w, k, out), axis=-1)[0].astype(jnp.int32)
            best.append(top)
            g = scorer.feedback(w, k, out)
        cache = (keys, values)
        for i, (key, value) in enumerate(own):
            kept = keep & (i < accepted)
            keys = _write(keys, c + 1 + i, key[0], kept)
            values = _write(values, c + 1 + i, value[0], kept)
        empty, zero = hole & (accepted == steps), jnp.zeros_like(keys[0])
        cache = _write(keys, c + steps, zero, empty), _write(values, c + steps, zero, empty)
        return cache, jnp.stack(best)

    return jax.lax.scan(one, fresh, (rows.chains, engine_accepted))[1].T


def _write(x: jax.Array, slot: jax.Array, row: jax.Array, wanted: jax.Array) -> jax.Array:
    slot = jnp.minimum(slot, x.shape[0] - 1)
    return x.at[slot].set(jnp.where(wanted, row, x[slot]))

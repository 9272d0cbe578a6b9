"""How well a draft predicts a record under many wirings: one compiled function, wirings as data.

A chain starts at a slot c: step 0 is the row of slot c, computed from target states, step j the
draft's own j-th row after it. Until the first miss its tokens are the record's, so step j of every
chain is one pass: all see step 0's rows up to c and their own earlier steps (training-time test).
"""

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp

from eagle3_jax.wirings.block import Form, KeyValue, Knobs, Place, Run, Weights, attend

SHARPNESS = (0.5, 1.0, 2.0, 4.0)
"""Factors on the logits: acceptance asks which token is best, not how sure the draft is."""
BLOCK = 128
"""Rows that pass a layer at once where all slots do; the number of slots is a multiple."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Rows:
    """Sequences side by side, T slots in all; padded slots are sequences of their own."""

    embedded: jax.Array  # [2, T, D]: the tokens in the target's embedding, and in the draft's own
    labels: jax.Array  # [maps, T] each token as a row of the head in use, -1 for none
    start: jax.Array  # [T] first slot of its sequence
    end: jax.Array  # [T] slot after its last
    place: Place  # of T slots
    farthest: jax.Array | None  # [T] the largest rotary position so far, where there are axes
    prompt: jax.Array  # [T] tokens of its prompt
    orders: jax.Array  # [orders, T] where slot t's states stand in the record
    chains: jax.Array  # [M] slots where chains start

    def ahead(self, at: jax.Array, step: int) -> Place:
        """Where rows drafted `step` tokens after slots `at` stand."""
        return self.place[at].ahead(None if self.farthest is None else self.farthest[at], step)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Projections:
    """`fc` applied to each boundary alone: a sum over slots is `fc` of that choice."""

    table: jax.Array  # [A, boundaries, T, D]
    squares: jax.Array  # [boundaries, T] sum of squares, for the norm over all features
    count: jax.Array  # [] how many features that norm has


@functools.partial(jax.jit, static_argnames=("form", "steps"))
def score(
    w: Weights,
    rows: Rows,
    projections: Projections,
    knobs: Knobs,  # every field with a leading axis [C]
    *,
    form: Form,
    steps: int,
) -> tuple[jax.Array, jax.Array]:
    """Scores C wirings on the same chains.

    Returns:
      Negative log-likelihood of the record's token [C, SHARPNESS, maps, steps, M], 0 where the map
      lacks it, and the best row of the head [C, steps, M].
    """
    return jax.vmap(lambda k: _one(Run(form, w, k), rows, projections, steps))(knobs)


def _one(run: Run, rows: Rows, projections: Projections, steps: int):
    chains = rows.chains
    embedded, hidden = first_rows(run, rows, projections)
    seen = visible(run.k, rows)
    caches = committed(run, rows, embedded, hidden, seen)
    embedded, hidden = embedded[chains], hidden[chains]
    own: list[list[KeyValue]] = [[] for _ in run.form.layers]
    nll, best = [], []
    for step in range(steps):
        if step:
            at = jnp.minimum(chains + 1 + step, rows.end[chains] - 1)
            embedded = rows.embedded[run.k.embed, at]
        out, hidden = through(
            run, embedded, hidden, rows.ahead(chains, step), caches, seen, chains, own, bool(step)
        )
        logits = run.logits(out)
        labels = rows.labels[:, jnp.minimum(chains + 2 + step, rows.end[chains] - 1)]
        chosen = jnp.take_along_axis(logits[None], jnp.maximum(labels, 0)[:, :, None], axis=2)
        chosen = chosen[:, :, 0]
        loss = [f * -chosen + jax.nn.logsumexp(f * logits, axis=-1)[None] for f in SHARPNESS]
        nll.append(jnp.where((labels >= 0)[None], jnp.stack(loss), 0.0))
        best.append(jnp.argmax(logits, axis=-1).astype(jnp.int32))
    return jnp.stack(nll, axis=2), jnp.stack(best)


def first_rows(run: Run, rows: Rows, projections: Projections) -> tuple[jax.Array, jax.Array]:
    """Embeddings and fused states [T, D] of every slot, before any drafting."""
    k, A, T = run.k, projections.table.shape[0], rows.start.shape[0]
    chosen = projections.table[jnp.arange(A, dtype=jnp.int32), k.slots]
    squares = jnp.sum(projections.squares[k.slots], axis=0)
    scale = jnp.where(k.concat, jax.lax.rsqrt(squares / projections.count + run.w.eps), 1.0)
    fused = jnp.sum(chosen, axis=0) * scale[:, None] + run.w.fc_bias[None]
    slot, position = jnp.arange(T, dtype=jnp.int32), rows.place.position
    source = jnp.clip(slot + k.row_shift, rows.start, rows.end - 1)
    fused = fused[rows.orders[k.order][source]]
    chunk = jnp.maximum(k.chunk, 1)
    border = (k.chunk > 0) & (position < rows.prompt) & ((position + 1) % chunk == 0)
    at = jnp.clip(slot + jnp.where(border, 0, k.token_shift), rows.start, rows.end - 1)
    embedded = rows.embedded[k.embed, at]
    zeroed = k.zero_first & (position == 0)
    return jnp.where(zeroed[:, None], 0.0, embedded), fused


Seen = Callable[[int, jax.Array, jax.Array], jax.Array]
"""(layer, slots [M], positions [M] of rows drafted from them) -> which first rows they see."""


def visible(k: Knobs, rows: Rows) -> Seen:
    """Which of the T first rows drafted rows see, [M, T]."""
    position = rows.place.position
    slot = jnp.arange(position.shape[0], dtype=jnp.int32)
    first = jnp.where(k.no_prompt, rows.prompt - 1, k.first_seen)
    cached = position >= first

    def seen(layer: int, chains: jax.Array, at: jax.Array) -> jax.Array:
        causal = (slot[None] >= rows.start[chains][:, None]) & (slot[None] <= chains[:, None])
        present = cached[None] | (slot[None] == chains[:, None])
        return causal & present & (at[:, None] - position[None] < k.window[layer])

    return seen


def committed(
    run: Run, rows: Rows, embedded: jax.Array, hidden: jax.Array, seen: Seen
) -> list[KeyValue]:
    """What the first rows leave in each layer's cache; all but the last layer run on them."""
    found: list[KeyValue] = []
    T = hidden.shape[0]
    for index in range(len(run.form.layers)):
        x, residual = run.inputs(index, embedded, hidden)
        cache = run.key_value(index, x, rows.place)
        found.append(cache)
        if index + 1 == len(run.form.layers):
            break

        def passed(at: jax.Array, index=index, x=x, residual=residual, cache=cache) -> jax.Array:
            place = rows.place[at]
            mixed = attend(
                run.query(index, x[at], place), cache, seen(index, at, place.position), []
            )
            return run.finish(index, mixed, residual[at])

        blocks = jnp.arange(T, dtype=jnp.int32).reshape(-1, BLOCK)
        hidden = run.kept(index, jax.lax.map(passed, blocks).reshape(T, -1), hidden)
    return found


def through(
    run: Run,
    embedded: jax.Array,  # [M, D]
    hidden: jax.Array,
    place: Place,
    caches: list[KeyValue],
    seen: Seen,
    chains: jax.Array,  # [M] slots the rows were drafted from
    own: list[list[KeyValue]],  # by layer: of the rows before, and these if they are drafted
    drafted: bool,
) -> tuple[jax.Array, jax.Array]:
    """Rows through all layers: states [M, D], and what they feed back."""
    first = hidden
    for index, cache in enumerate(caches):
        x, residual = run.inputs(index, embedded, hidden)
        if drafted:
            own[index].append(run.key_value(index, x, place))
        query = run.query(index, x, place)
        mixed = attend(query, cache, seen(index, chains, place.position), own[index])
        hidden = run.kept(index, run.finish(index, mixed, residual), hidden)
        first = hidden if index == 0 else first
    return hidden, run.feedback(hidden, first)

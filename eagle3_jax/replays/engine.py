"""Replay on the device: rows over target states, then chains and trees from any of those rows.

The rows of several sequences lie side by side in one cache. A row sees slots `low` .. `high` - 1,
so neither its place in the cache nor its neighbours matter; every call has a fixed number of rows
and a fixed slice of slots, so that no length of a record compiles anew.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from eagle3_jax.cache import KVCache
from eagle3_jax.config import TreeConfig
from eagle3_jax.draft import Eagle3Draft, Shared
from eagle3_jax.layers import Rows
from eagle3_jax.modules import Structure
from eagle3_jax.tree import Candidates, DraftAttention, Seed, grow, top_probabilities, unpack


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Span:
    """Where C rows are and what they see."""

    positions: jax.Array  # [C] int32
    low: jax.Array  # [C] int32, first slot seen
    high: jax.Array  # [C] int32, first slot no longer seen
    axes: jax.Array | None = None  # [3, C] int32, multi-axis rotary positions

    def rows(self, start: jax.Array, words: jax.Array, ahead: Any = 0, each: int = 1) -> Rows:
        """As one sequence's rows from slot `start` on, `each` for a place, `ahead` positions on."""

        def moved(x: jax.Array) -> jax.Array:
            return jnp.repeat(x + ahead, each, axis=-1)[None]

        none = jnp.zeros((1,), jnp.int32)
        axes = None if self.axes is None else moved(self.axes)
        return Rows(moved(self.positions), start[None], none, words[None], axes)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Judged:
    """What the draft says after each row, and where it has the true next token."""

    tokens: jax.Array  # [C, top] int32 target ids, best first
    probs: jax.Array  # [C, top]
    rank: jax.Array  # [C] int32 of the true token, 0 for the best; -1 outside the draft vocabulary


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Bin:
    """Rows over target states."""

    cache: KVCache  # of one sequence of S slots
    state: jax.Array  # [S, D] what each row feeds back


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Steps:
    """Drafted rows of up to G starts: their keys, values, and the state each feeds back next."""

    cache: KVCache  # of J sequences of G slots
    state: jax.Array  # [G, D]


@dataclasses.dataclass(frozen=True)
class Engine:
    """A draft taken apart for the jitted calls below."""

    structure: Structure
    leaves: tuple[jax.Array, ...]
    shared: Shared | None


@functools.partial(jax.jit, static_argnames=("structure", "top", "seen"), donate_argnames=("bin",))
def commit(
    structure: Structure,
    leaves: tuple[jax.Array, ...],
    shared: Shared | None,
    bin: Bin,
    aux: jax.Array,  # [C, A, E]
    tokens: jax.Array,  # [C] the token after each state
    true: jax.Array,  # [C] draft id of the token after that, -1 for none
    span: Span,
    start: jax.Array,  # [] slot of the first row
    *,
    top: int,
    seen: int,
) -> tuple[Bin, Judged | None, jax.Array]:
    """Writes C rows from slot `start` on; judges them unless top is 0; norms [C] after `fuse`."""
    draft: Eagle3Draft = structure.build(leaves)
    view = bin.cache.first(seen)
    fused = draft.fuse(aux[None])
    rows = span.rows(start, _between(span.low, span.high, seen))
    out, view = draft.step(tokens[None], fused, rows, view, shared=shared)
    cache = jax.tree.map(
        lambda x, part: lax.dynamic_update_slice_in_dim(x, part, 0, axis=1), bin.cache, view
    )
    fed_back = draft.feedback(out)[0]
    state = lax.dynamic_update_slice_in_dim(bin.state, fed_back, start, axis=0)
    judged = _judge(draft, shared, out[0], true, top) if top else None
    return Bin(cache, state), judged, _norm(fused[0])


@functools.partial(jax.jit, static_argnames=("structure", "seen"), donate_argnames=("steps",))
def chain_level(
    structure: Structure,
    leaves: tuple[jax.Array, ...],
    shared: Shared | None,
    cache: KVCache,
    steps: Steps,
    index: jax.Array,  # [C] which starts; G for none
    tokens: jax.Array,  # [C] the token drafted last
    true: jax.Array,  # [C] draft id of the next one
    span: Span,
    level: jax.Array,  # [] 0 for the first drafted token's row
    *,
    seen: int,
) -> tuple[Steps, Judged, jax.Array]:
    """One more drafted row of each start, after its prefix and own rows; norms [C] of its input."""
    draft: Eagle3Draft = structure.build(leaves)
    J, C = steps.cache.k[0].shape[0], len(index)
    own = jax.tree.map(lambda x: x[:, index].reshape(1, J * C, *x.shape[2:]), steps.cache)
    view = cache.first(seen).followed_by(own)
    written = jnp.arange(J, dtype=jnp.int32) <= level
    mine = jnp.eye(C, dtype=bool)[:, None, :] & written[None, :, None]
    words = (_between(span.low, span.high, seen), _pack(mine.reshape(C, J * C)))
    at = seen + level * C
    rows = span.rows(at, jnp.concatenate(words, axis=1))
    state = steps.state[index]
    out, view = draft.step(tokens[None], state[None], rows, view, shared=shared)
    steps = Steps(
        jax.tree.map(
            lambda kept, new: kept.at[level, index].set(new[0], mode="drop"),
            steps.cache,
            view.rows(at, C),
        ),
        steps.state.at[index].set(draft.feedback(out)[0], mode="drop"),
    )
    return steps, _judge(draft, shared, out[0], true, 1), _norm(state)


@functools.partial(
    jax.jit, static_argnames=("structure", "tree", "draft_attention", "seen", "whole")
)
def grow_at(
    structure: Structure,
    leaves: tuple[jax.Array, ...],
    shared: Shared | None,
    cache: KVCache,
    seed: Seed,  # of C starts
    tokens: jax.Array,  # [C, num_steps] the true tokens after the bonus, -1 where there is none
    true: jax.Array,  # [C, num_steps] their draft ids
    span: Span,  # positions of the roots
    *,
    tree: TreeConfig,
    draft_attention: DraftAttention,
    seen: int,
    whole: bool = False,
) -> tuple[jax.Array, jax.Array, Candidates | None]:
    """Drafts a tree from each of C starts.

    Returns:
      place [C, num_steps, num_steps]: at [c, l, s - 1], how many candidates of a tree of s levels
      come before the true one at level l (selected iff below num_draft_tokens - 1), or a number
      above all when level l never has the true token;
      rank [C, num_steps] of the true token in the draft's answer after the true path, 0 for the
      best, -1 outside the draft vocabulary, -2 where that path was not drafted further (level 0
      too: `commit` has it); the candidates if asked for.
    """
    draft: Eagle3Draft = structure.build(leaves)
    C, k = seed.tokens.shape
    levels = tree.num_steps - 1
    view = cache.first(seen).followed_by(draft.new_cache(1, levels * C * k))
    prefix = jnp.repeat(_between(span.low, span.high, seen), k, axis=0)
    same = jnp.eye(C, dtype=bool)[:, None, None, :, None]
    ranks = []

    def forward(level, tokens, hidden, bits):
        nonlocal view
        own = unpack(bits, k * levels).reshape(C, k, levels, 1, k)
        own = jnp.broadcast_to(own & same, (C, k, levels, C, k)).reshape(C * k, -1)
        words = jnp.concatenate((prefix, _pack(own)), axis=1)
        rows = span.rows(jnp.int32(seen + level * C * k), words, level, k)
        out, view = draft.step(
            tokens.reshape(1, -1), hidden.reshape(1, C * k, -1), rows, view, shared=shared
        )
        out = out.reshape(C, k, -1)
        logits = draft.logits(out, shared=shared)
        wanted = jnp.broadcast_to(true[:, level + 1, None], (C, k))
        ranks.append(_rank(logits, wanted))
        return logits, draft.feedback(out)

    found = grow(seed, forward, draft.to_target, tree, draft_attention)
    place, rank = _true_path(found, tokens, ranks, tree)
    return place, rank, found if whole else None


def _true_path(
    found: Candidates, tokens: jax.Array, ranks: list[jax.Array], tree: TreeConfig
) -> tuple[jax.Array, jax.Array]:
    k, steps = tree.topk, tree.num_steps
    C = tokens.shape[0]
    nowhere = jnp.full((C,), jnp.iinfo(jnp.int32).max, jnp.int32)
    index = jnp.arange(found.tokens.shape[1], dtype=jnp.int32)
    before = jnp.full((C,), -1, jnp.int32)
    places, kept = [], [jnp.full((C,), -2, jnp.int32)]
    alive = jnp.ones((C,), bool)
    for level in range(steps):
        first = 0 if level == 0 else k + (level - 1) * k * k
        part = slice(first, first + (k if level == 0 else k * k))
        child = found.parents[:, part] == before[:, None]
        if level:
            beam = jnp.argmax(child, axis=1) // k
            rank = jnp.take_along_axis(ranks[level - 1], beam[:, None], axis=1)[:, 0]
            kept.append(jnp.where(alive & jnp.any(child, axis=1), rank, -2))
        on = child & (found.tokens[:, part] == tokens[:, level, None])
        alive = alive & jnp.any(on, axis=1)
        node = first + jnp.argmax(on, axis=1).astype(jnp.int32)
        score = jnp.take_along_axis(found.scores, node[:, None], axis=1)
        earlier = (found.scores > score) | ((found.scores == score) & (index[None] < node[:, None]))
        counted = jnp.cumsum(earlier.astype(jnp.int32), axis=1)
        row = []
        for s in range(1, steps + 1):
            last = k + (s - 1) * k * k - 1
            row.append(jnp.where(alive, counted[:, last], nowhere) if s > level else nowhere)
        places.append(jnp.stack(row, axis=1))
        before = jnp.where(alive, node, -2)
    return jnp.stack(places, axis=1), jnp.stack(kept, axis=1)


def _judge(
    draft: Eagle3Draft, shared: Shared | None, out: jax.Array, true: jax.Array, top: int
) -> Judged:
    logits = draft.logits(out, shared=shared)
    probs, ids = top_probabilities(logits, top)
    return Judged(draft.to_target(ids), probs, _rank(logits, true))


def _rank(logits: jax.Array, true: jax.Array) -> jax.Array:
    """Of draft ids [...] in logits [..., W]; equals rank by id, as in `top_probabilities`."""
    score = jnp.take_along_axis(logits, jnp.maximum(true, 0)[..., None], axis=-1)
    index = lax.broadcasted_iota(jnp.int32, logits.shape, logits.ndim - 1)
    before = (logits > score) | ((logits == score) & (index < true[..., None]))
    return jnp.where(true < 0, -1, before.sum(axis=-1, dtype=jnp.int32))


def _norm(x: jax.Array) -> jax.Array:
    return jnp.sqrt(jnp.sum(x.astype(jnp.float32) ** 2, axis=-1))


def _between(low: jax.Array, high: jax.Array, slots: int) -> jax.Array:
    """[C, slots / 32] uint32: bits low .. high - 1 of each row."""
    return _below(high, slots) & ~_below(low, slots)


def _below(n: jax.Array, slots: int) -> jax.Array:
    count = jnp.clip(n[:, None] - 32 * jnp.arange(slots // 32, dtype=jnp.int32)[None], 0, 32)
    part = (jnp.uint32(1) << jnp.minimum(count, 31).astype(jnp.uint32)) - jnp.uint32(1)
    return jnp.where(count == 32, jnp.uint32(0xFFFFFFFF), part)


def _pack(dense: jax.Array) -> jax.Array:
    """[C, n] bool -> [C, n / 32] uint32, n a multiple of 32."""
    words = dense.reshape(dense.shape[0], -1, 32).astype(jnp.uint32)
    shifts = jnp.arange(32, dtype=jnp.uint32)[None, None]
    return (words << shifts).sum(axis=-1, dtype=jnp.uint32)

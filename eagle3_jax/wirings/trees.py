"""Accept lengths of one wiring under a tree, from the places where its chains were scored."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

from eagle3_jax.checks import check_draft_attention
from eagle3_jax.config import TreeConfig
from eagle3_jax.draft import Eagle3Draft
from eagle3_jax.tree import (
    DRAFT_ATTENTIONS,
    DraftAttention,
    Seed,
    grow,
    select,
    top_probabilities,
    unpack,
)
from eagle3_jax.wirings import engine, scorer
from eagle3_jax.wirings.block import Form, KeyValue, Knobs, Run, Weights
from eagle3_jax.wirings.judge import Judge
from eagle3_jax.wirings.search import CLEAR, Search
from eagle3_jax.wirings.stats import Paired, paired
from eagle3_jax.wirings.wiring import Wiring

ROWS = 256
"""Drafted rows of one call, about."""


@dataclasses.dataclass(frozen=True)
class UnderTree:
    """Two wirings under a tree on the same rounds.

    Attributes:
      configured, best: accept lengths. gain: of the best over the configured one, round by round.
    """

    tree: TreeConfig
    draft_attention: DraftAttention
    configured: float
    best: float
    gain: Paired


def under_tree(
    search: Search, base: Wiring, best: Wiring, tree: TreeConfig, draft: Eagle3Draft
) -> tuple[UnderTree, list[engine.Agreement]]:
    """Accepts of both on all chains with the paired interval; the best beside the engine's."""
    attention, a, agreements = beside_engine(search, best, tree, draft)
    b = a if best == base else accepted(search, base, tree, attention)
    gain = paired(a, b, search.material.pack.block)
    found = UnderTree(tree, attention, 1 + float(b.mean()), 1 + float(a.mean()), gain)
    return found, agreements


def rival(
    judge: Judge, finalists: list[Wiring], tree: TreeConfig, draft: Eagle3Draft, needed: float
) -> Wiring:
    """The likeliest wiring if the tree's rounds show what chains leave open, else the base.

    A change without which the tree accepts as much is left out.
    """
    others = [w for w in finalists if w != judge.base and judge.candidate(w).z >= CLEAR]
    if not others:
        return judge.base
    likeliest = max(others, key=lambda w: judge.candidate(w).z)
    gain = under_tree(judge.search, judge.base, likeliest, tree, draft)[0].gain
    clear = gain.z >= needed and gain.low > 0 and judge.uses_states(likeliest)
    if not clear:
        return judge.base
    attention, counts, _ = beside_engine(judge.search, likeliest, tree, draft)
    for name, (old, _) in judge.base.changes(likeliest).items():
        plainer = dataclasses.replace(likeliest, **{name: old})
        plain = accepted(judge.search, plainer, tree, attention)
        if plainer != judge.base and judge.search.z(counts - plain) < CLEAR:
            likeliest, counts = plainer, plain
    return likeliest


def beside_engine(
    search: Search, wiring: Wiring, tree: TreeConfig, draft: Eagle3Draft
) -> tuple[DraftAttention, np.ndarray, list[engine.Agreement]]:
    """Accepts [chains] under the draft attention that agrees more with the engine's rounds.

    Without the engine's rounds nothing agrees, and the attention is the draft's own.
    """
    pack = search.material.pack
    own = check_draft_attention(draft, None)
    if not pack.pinned:
        return own, accepted(search, wiring, tree, own), []
    chains = [pack.chains[i] for i in search.many.chains]
    tried: list[DraftAttention] = [own]
    if tree.num_steps > 2:
        tried.extend(name for name in DRAFT_ATTENTIONS if name != own)
    counts: dict[DraftAttention, np.ndarray] = {
        name: accepted(search, wiring, tree, name) for name in tried
    }
    found: dict[DraftAttention, engine.Agreement] = {
        name: engine.compare_counts("refresh", chains, a) for name, a in counts.items()
    }
    best = min(found, key=lambda name: found[name].different)
    return best, counts[best], [found[best]]


def accepted(
    search: Search, wiring: Wiring, tree: TreeConfig, attention: DraftAttention
) -> np.ndarray:
    """[chains] drafts of a tree that are right, for one wiring on the largest rung."""
    m, rung = search.material, search.many
    rows, weights, projections, knobs = search.prepared(wiring, rung)
    first = start(weights, rows, projections, knobs, form=m.form)
    C = min(max(1, ROWS // tree.topk), rung.chains_padded)
    slots = np.asarray(rows.chains)
    slots = np.concatenate((slots, np.repeat(slots[-1:], -len(slots) % C)))
    tokens = np.zeros((len(slots), tree.num_steps), np.int32)
    true = search.tokens(rung)[: tree.num_steps].T
    tokens[: len(true)] = true
    table, embedding = jnp.asarray(m.maps[wiring.vocab], jnp.int32), m.embedding(wiring.embed)
    found = [
        grown(
            weights,
            rows,
            knobs,
            *first,
            jnp.asarray(slots[i : i + C]),
            jnp.asarray(tokens[i : i + C]),
            table,
            embedding,
            form=m.form,
            tree=tree,
            attention=attention,
        )
        for i in range(0, len(slots), C)
    ]
    return np.concatenate(jax.device_get(found))[: len(rung.chains)]


@functools.partial(jax.jit, static_argnames=("form",))
def start(
    w: Weights, rows: scorer.Rows, projections: scorer.Projections, knobs: Knobs, *, form: Form
) -> tuple[jax.Array, jax.Array, list[KeyValue]]:
    """Embeddings and states [T, D] of the first rows, and what they leave in the caches."""
    run = Run(form, w, knobs)
    embedded, hidden = scorer.first_rows(run, rows, projections)
    seen = scorer.visible(knobs, rows)
    return embedded, hidden, scorer.committed(run, rows, embedded, hidden, seen)


@functools.partial(jax.jit, static_argnames=("form", "tree", "attention"))
def grown(
    w: Weights,
    rows: scorer.Rows,
    knobs: Knobs,
    embedded: jax.Array,  # [T, D]
    hidden: jax.Array,
    caches: list[KeyValue],
    chains: jax.Array,  # [C] slots to draft from
    true: jax.Array,  # [C, num_steps] the record's tokens
    table: jax.Array,  # [W] target id of each draft row, -1 for none
    embedding: jax.Array,  # [V, D]
    *,
    form: Form,
    tree: TreeConfig,
    attention: DraftAttention,
) -> jax.Array:
    """[C] right drafts of a tree grown at each slot."""
    run, seen = Run(form, w, knobs), scorer.visible(knobs, rows)
    C, k, levels = chains.shape[0], tree.topk, tree.num_steps - 1
    none: list[list[KeyValue]] = [[] for _ in form.layers]
    out, fed = scorer.through(
        run,
        embedded[chains],
        hidden[chains],
        rows.ahead(chains, 0),
        caches,
        seen,
        chains,
        none,
        False,
    )
    probs, ids = top_probabilities(run.logits(out), k)
    each = jnp.repeat(chains, k)
    drafted: list[list[KeyValue]] = []  # by level, then by layer, [C, k, ...]

    def forward(level: int, tokens: jax.Array, states: jax.Array, bits: jax.Array):
        slots = unpack(bits, k * max(levels, 1)).reshape(C, k, -1, k)[:, :, :level]
        beams = jnp.argmax(slots, axis=3)  # [C, k, level], the row seen of each level before
        own: list[list[KeyValue]] = [
            [_picked(drafted[before][layer], beams[:, :, before]) for before in range(level)]
            for layer in range(len(form.layers))
        ]
        out, fed = scorer.through(
            run,
            embedding[jnp.maximum(tokens.reshape(-1), 0)],
            states.reshape(C * k, -1),
            rows.ahead(each, level + 1),
            caches,
            seen,
            each,
            own,
            True,
        )
        mine = [[x.reshape(C, k, *x.shape[1:]) for x in layer[-1]] for layer in own]
        drafted.append([(key, value) for key, value in mine])
        return run.logits(out).reshape(C, k, -1), fed.reshape(C, k, -1)

    seed = Seed(probs, table[ids], fed)
    found = grow(seed, forward, lambda ids: table[ids], tree, attention)
    nodes, _ = select(found, jnp.zeros((C,), jnp.int32), tree)
    right = nodes.depths == 0
    for level in range(tree.num_steps):
        hit = (nodes.depths == level + 1) & (nodes.tokens == true[:, level, None])
        right = right | (hit & jnp.take_along_axis(right, nodes.parents, axis=1))
    return jnp.max(jnp.where(right, nodes.depths, 0), axis=1)


def _picked(row: KeyValue, beams: jax.Array) -> KeyValue:
    """Of [C, k, ...] the rows `beams` [C, k], as [C k, ...]."""
    key, value = (
        jnp.take_along_axis(x, beams.reshape(*beams.shape, *[1] * (x.ndim - 2)), axis=1).reshape(
            -1, *x.shape[2:]
        )
        for x in row
    )
    return key, value

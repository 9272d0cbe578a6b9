"""Whose rounds a record's engine ran: this wiring's, a policy of its cache, another wiring's."""

import dataclasses
import itertools
from collections.abc import Callable

import jax.numpy as jnp
import numpy as np

from eagle3_jax.config import TreeConfig
from eagle3_jax.draft import Eagle3Draft, Shared
from eagle3_jax.record import Record
from eagle3_jax.replay import replay
from eagle3_jax.wirings import engine
from eagle3_jax.wirings.pack import Pack
from eagle3_jax.wirings.rungs import Scores
from eagle3_jax.wirings.search import Search
from eagle3_jax.wirings.wiring import Wiring

SHOWN = 5
TREE_KEYS = (
    "speculative_num_steps",
    "speculative_eagle_topk",
    "speculative_num_draft_tokens",
)


def engine_tree(record: Record) -> TreeConfig | None:
    """The tree the record's engine drafted, from its provenance; None where it does not say."""
    server = record.provenance.get("server")
    found = [server.get(key) for key in TREE_KEYS] if isinstance(server, dict) else []
    values = [value for value in found if type(value) is int]
    if len(values) < len(TREE_KEYS):
        return None
    return TreeConfig(*values)


def engine_steps(record: Record) -> int | None:
    """The longest round of the first sequences, None without rounds."""
    steps = [
        max(item.accepted, len(item.proposed or ()))
        for sequence in itertools.islice(record.sequences, 64)
        for item in sequence.rounds or ()
    ]
    return max(steps, default=0) or None


def explain_tree(
    pack: Pack,
    record: Record,
    draft: Eagle3Draft,
    shared: Shared | None,
    tree: TreeConfig,
) -> list[engine.Agreement]:
    """The engine's rounds beside the draft's own trees from the same places.

    A drafted row sees its ancestors, or what SGLang's draft attention sees: whichever agrees more.
    """
    sequences = [p.sequence for p in pack.pieces if p.sequence.rounds]
    if not sequences:
        return []
    whole = dataclasses.replace(record, sequences=sequences)
    numbers = [p.index for p in pack.pieces if p.sequence.rounds]
    found = []
    for attention in ("beam_slots", "ancestors") if tree.num_steps > 2 else ("ancestors",):
        result = replay(
            whole, draft, tree, mode="pinned", shared=shared, draft_attention=attention
        ).trees[0]
        other = [r for r in result.rounds if r.accepted != r.engine]
        first = (numbers[other[0].sequence], other[0].index) if other else None
        found.append(
            engine.Agreement("refresh", len(result.rounds), len(other), first, result.accepted)
        )
    return [min(found, key=lambda a: a.different)]


def explain(
    search: Search, best: Wiring, base: Wiring, options: Callable[[Wiring], list[Wiring]]
) -> tuple[list[engine.Agreement], Wiring | None]:
    """Who explains the engine's rounds: this wiring, a policy of its cache, or another wiring.

    Returns all explanations, and the other wiring if it is the one that gives them all.
    """
    pack_ = search.material.pack
    if not pack_.pinned:
        return [], None
    chains = [pack_.chains[i] for i in search.many.chains]

    def of(wiring: Wiring, name: str) -> engine.Agreement:
        found = search.scores([wiring], search.many)[0]
        return engine.compare(name, chains, found.accepted, found.proposed)

    found = [of(best, "refresh")]
    if found[0].equal:
        return found, None
    if len(chains) == len(pack_.chains):
        found += [_followed(search, best, chains, policy) for policy in ("keep", "hole")]
    others = [w for w in dict.fromkeys((base, *options(best))) if w != best]
    few = [pack_.chains[i] for i in search.some.chains]

    def misfit(scores: Scores) -> int:
        return engine.compare("", few, scores.accepted, scores.proposed).different

    misfits = [misfit(scores) for scores in search.scores(others, search.some)]
    others = [others[i] for i in np.argsort(misfits, kind="stable")[:SHOWN]]
    named = {w.describe(best): w for w in others}
    found += [of(w, name) for name, w in named.items()]
    found.sort(key=lambda a: a.different)
    return found, named.get(found[0].name) if found[0].equal else None


def _followed(search: Search, wiring: Wiring, chains: list, policy: str) -> engine.Agreement:
    m, rung = search.material, search.many
    rows, weights, table, knobs = search.prepared(wiring, rung)
    accepted = np.zeros(rung.chains_padded, np.int32)
    accepted[: len(chains)] = [c.engine.accepted for c in chains]
    best = engine.follow(
        weights,
        rows,
        table,
        knobs,
        jnp.asarray(accepted),
        jnp.asarray(policy == "keep"),
        jnp.asarray(policy == "hole"),
        form=m.form,
        steps=rung.steps,
    )
    proposed = m.maps[wiring.vocab][np.asarray(best)[:, : len(chains)]]
    taken = np.cumprod(proposed == search.tokens(rung), axis=0).sum(axis=0)
    return engine.compare(policy, chains, taken, proposed)

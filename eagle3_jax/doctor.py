"""Why is the accept length low? Tries the wirings on a record and says which one explains it."""

import dataclasses
import itertools
from collections.abc import Callable, Mapping
from typing import Any, Literal

import jax.numpy as jnp
import numpy as np

from eagle3_jax.config import ConfigError, RopeConfig, TreeConfig, default_boundaries
from eagle3_jax.draft import Eagle3Draft, Shared
from eagle3_jax.record import Record, RecordError
from eagle3_jax.records.checks import check_fits
from eagle3_jax.wirings import engine
from eagle3_jax.wirings.candidates import neighbours, singles
from eagle3_jax.wirings.judge import Candidate, Judge
from eagle3_jax.wirings.material import Material
from eagle3_jax.wirings.pack import pack
from eagle3_jax.wirings.search import Search
from eagle3_jax.wirings.stats import paired, threshold
from eagle3_jax.wirings.wiring import Wiring, configured

Verdict = Literal[
    "as_configured",
    "not_acceptance",
    "wiring_differs",
    "engine_differs",
    "not_matched",
    "no_wiring_fits",
    "undecided",
]
HEALTHY: tuple[Verdict, ...] = ("as_configured", "not_acceptance")
WEAK = 1.4
"""An accept length below which a rightly wired draft counts as not matched to its target."""
SHOWN = 5


@dataclasses.dataclass(frozen=True)
class Diagnosis:
    """What was tried, what it showed, and the verdict.

    Attributes:
      rounds: chains scored; pinned: they are the engine's own rounds.
      table: configured, best, and the runners-up. shuffled: the draft with states of other tokens.
      tried: how many wirings. needed: standard errors a winner needs after that many.
      agreements: explanations beside the engine's rounds, best first. explained: the one that gives
        them all, if one does.
      undecided: what this record cannot decide. unobservable: what no record can.
      norms: root mean square of each boundary's states.
    """

    verdict: Verdict
    configured: Candidate
    best: Candidate
    table: list[Candidate]
    shuffled: Candidate
    tried: int
    needed: float
    rounds: int
    pinned: bool
    tree: TreeConfig
    agreements: list[engine.Agreement]
    explained: str | None
    undecided: list[str]
    norms: dict[str, float]

    @property
    def healthy(self) -> bool:
        """Nothing to change in the wiring."""
        return self.verdict in HEALTHY


def diagnose(
    record: Record,
    draft: Eagle3Draft,
    shared: Shared | None = None,
    *,
    wiring: Wiring | None = None,
    changes: Mapping[str, Any] | None = None,
    extra: Mapping[str, np.ndarray] | None = None,
    side_map: np.ndarray | None = None,
    rotation: np.ndarray | None = None,
    target_rope: RopeConfig | None = None,
    num_steps: int | None = None,
    max_tokens: int = 4096,
    say: Callable[[str], None] = lambda text: None,
) -> Diagnosis:
    """Tries every wiring of a draft on a record.

    Args:
      record: with more boundaries it decides more. shared: the target's embedding and head.
      wiring: what is served, None for what the draft's config says. changes: fields to change in
        it, such as `{"token_shift": 0}`.
      extra: tensors by canonical name that the config does not use (`input_norm.weight`, ...).
      side_map: another vocabulary map, [W] target ids. rotation: [E, E] orthogonal.
      target_rope: a candidate for the draft's. num_steps: drafts per round, None for the engine's.
      max_tokens: slots to score on; memory and time grow with its square.

    Raises:
      RecordError: nothing to score. ConfigError: the record lacks the configured boundaries or the
        draft needs a matrix of the target's that `shared` does not have.
    """
    check_fits(record, draft.config)
    steps = num_steps or _engine_steps(record) or 3
    packed = pack(record, steps=steps, max_tokens=max_tokens)
    material = Material(packed, record.boundaries, draft, shared, extra or {}, side_map, rotation)
    base = wiring or _configured(record, draft)
    base = dataclasses.replace(base, **(changes or {}))
    _check(material, base)

    def options(one: Wiring) -> list[Wiring]:
        return singles(material, one, num_layers=record.num_layers, target_rope=target_rope)

    search = Search(material, options, say)
    ranked = search.best(base)
    shuffled = dataclasses.replace(base, rows="shuffled")
    finalists = list(dict.fromkeys((base, *ranked[:SHOWN])))
    judge = Judge(search, base)
    best = judge.best(finalists)
    best = base if best == base else search.settled(best, base)
    needed = threshold(len(search.tried))
    winner = judge.candidate(best)
    if not (winner.z >= needed and winner.gain.low > 0 and judge.uses_states(best)):
        best, winner = base, judge.candidate(base)
    agreements, explained = _engine(search, best, base, options)
    if isinstance(explained, Wiring) and judge.candidate(explained).gain.low > 0:
        # every round of the engine as well: no luck explains that
        best, winner = explained, judge.candidate(explained)
        agreements, explained = _engine(search, best, base, options)
    table = [judge.candidate(w) for w in dict.fromkeys((base, best, *finalists))]
    chance = judge.candidate(shuffled)
    verdict = _verdict(judge, base, best, agreements)
    if verdict == "as_configured" and any(c.z >= needed and c.gain.high > 0 for c in table):
        verdict = "undecided"
    return Diagnosis(
        verdict=verdict,
        configured=judge.candidate(base),
        best=winner,
        table=table,
        shuffled=chance,
        tried=len(search.tried),
        needed=needed,
        rounds=len(search.many.chains),
        pinned=packed.pinned,
        tree=TreeConfig(steps),
        agreements=agreements,
        explained=agreements[0].name if agreements and agreements[0].equal else None,
        undecided=_undecided(search, record, base, best, options),
        norms=_norms(material),
    )


def _verdict(
    judge: Judge,
    base: Wiring,
    best: Wiring,
    agreements: list[engine.Agreement],
) -> Verdict:
    if best != base:
        return "wiring_differs"
    if not judge.uses_states(base):
        return "no_wiring_fits" if judge.at_chance(base) else "undecided"
    if agreements and not agreements[0].equal:
        return "engine_differs"
    if agreements and agreements[0].name != "refresh":
        return "engine_differs"
    if judge.candidate(base).accept_length < WEAK:
        return "not_matched"
    return "not_acceptance" if agreements else "as_configured"


def _engine(
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

    def misfit(wiring: Wiring) -> int:
        scores = search.scores([wiring], search.some)[0]
        return engine.compare("", few, scores.accepted, scores.proposed).different

    others = sorted(others, key=misfit)[:SHOWN]
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
        head_dim=m.config.head_dim,
        steps=rung.steps,
    )
    proposed = m.maps[wiring.vocab][np.asarray(best)[:, : len(chains)]]
    taken = np.cumprod(proposed == search.tokens(rung), axis=0).sum(axis=0)
    return engine.compare(policy, chains, taken, proposed)


def _configured(record: Record, draft: Eagle3Draft) -> Wiring:
    boundaries = draft.config.aux_boundaries
    if isinstance(boundaries, str):
        have = [b for b in record.boundaries if isinstance(b, int)]
        all_there = sorted(have) == list(range(len(have)))  # then the last is the depth
        if record.num_layers is None and not all_there:
            raise RecordError(
                f"the draft's boundaries are {boundaries} and the record does not know the "
                "target's depth L: say it with --num-layers when recording"
            )
        boundaries = default_boundaries(record.num_layers or max(have))
    return configured(draft.config, boundaries)


def _check(material: Material, base: Wiring):
    for boundary in base.boundaries:
        material.index(boundary)
    if base.vocab not in material.maps:
        raise ConfigError(f"vocab {base.vocab!r}: expected one of {', '.join(material.maps)}")
    for what in ("embed", "head"):
        if getattr(base, what) not in material.owns(what):
            raise ConfigError(
                f"the draft uses the {getattr(base, what)}'s {what}, which is not here: pass "
                "shared=, or --target"
            )


def _engine_steps(record: Record) -> int | None:
    steps = [
        max(item.accepted, len(item.proposed or ()))
        for sequence in itertools.islice(record.sequences, 64)
        for item in sequence.rounds or ()
    ]
    return max(steps, default=0) or None


def _undecided(
    search: Search,
    record: Record,
    base: Wiring,
    best: Wiring,
    options: Callable[[Wiring], list[Wiring]],
) -> list[str]:
    """Which alternatives to `best` this record does not tell from it, or cannot try at all."""
    found = []
    if len(record.boundaries) <= len(best.boundaries):
        found.append("boundaries: the record holds only those of one choice")
    if record.kind != "greedy":
        found.append(
            f"the accept length of greedy decoding: the tokens are {record.kind}, so this is how "
            "often the draft guesses them"
        )
    if not search.material.pack.pinned:
        found.append("cache policy and engine: the record has no rounds of an engine")
    if len(search.material.pack.pieces) < 2:
        found.append("states of another request: the record has one sequence")
    for what in ("embed", "head"):
        if len(search.material.owns(what)) == 1:
            owner = search.material.owns(what)[0]
            found.append(f"owner of the {what}: only the {owner}'s is here")
    if search.material.rotation is None:
        found.append("rotated states: no rotation was given")
    near = neighbours(search.material, best, reach=2)
    if near and best != base:
        block = search.material.pack.block
        length = search.scores([best], search.many)[0].accepted
        close = [
            str(w.boundaries)
            for w in near
            if paired(length, search.scores([w], search.many)[0].accepted, block).low <= 0
        ]
        if close:
            found.append(f"boundaries: {', '.join(close)} accept as much, within the noise")
    cost = search.costs([best], search.some)[0]
    same: dict[str, list[str]] = {}
    for other in options(best):
        (name, (_, value)) = next(iter(best.changes(other).items()))
        if search.z(search.costs([other], search.some)[0] - cost) < 2.0:
            shown = f"{value.kind} {value.theta:g}" if isinstance(value, RopeConfig) else str(value)
            same.setdefault(name, []).append(shown)
    for name, values in same.items():
        found.append(f"{name}: {', '.join(values)} would do as well on this record")
    return found


def _norms(material: Material) -> dict[str, float]:
    """Root mean square of each boundary's states over the first slots."""
    high = min(len(material.pack.tokens), 256)
    found = {}
    for i, boundary in enumerate(material.boundaries):
        x = material.pack.states([i], 0, high)
        found[str(boundary)] = float(np.sqrt(np.mean(np.square(x, dtype=np.float64))))
    return found


def gap(train_accuracy: float, replay: float, engine_length: float, num_steps: int = 3) -> str:
    """`"wiring or engine"`, `"training"` or `"healthy"` from three numbers.

    A trainer's per-position accuracy p promises 1 + p + p^2 + ...; an engine that stays far below
    the replay is at fault itself, a replay far below the promise is the draft's.
    """
    promised = sum(train_accuracy**i for i in range(1, num_steps + 1))
    if engine_length - 1 < 0.8 * (replay - 1):
        return "wiring or engine"
    return "training" if replay - 1 < 0.6 * promised else "healthy"

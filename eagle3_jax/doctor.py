"""Why is the accept length low? Tries the wirings on a record and says which one explains it."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, Literal

import numpy as np

from eagle3_jax.config import ConfigError, RopeConfig, TreeConfig, default_boundaries
from eagle3_jax.draft import Eagle3Draft, Shared
from eagle3_jax.record import Record, RecordError
from eagle3_jax.records.checks import check_fits
from eagle3_jax.wirings import engine
from eagle3_jax.wirings.candidates import singles
from eagle3_jax.wirings.explain import SHOWN, engine_steps, engine_tree, explain, explain_tree
from eagle3_jax.wirings.judge import Candidate, Judge
from eagle3_jax.wirings.learned import LearnedMap, learn
from eagle3_jax.wirings.material import Material
from eagle3_jax.wirings.not_tried import not_tried
from eagle3_jax.wirings.pack import pack
from eagle3_jax.wirings.search import Search
from eagle3_jax.wirings.stats import threshold
from eagle3_jax.wirings.trees import UnderTree, rival, under_tree
from eagle3_jax.wirings.undecided import undecided
from eagle3_jax.wirings.wiring import Wiring, configured

Verdict = Literal[
    "as_configured",
    "not_acceptance",
    "wiring_differs",
    "vocab_differs",
    "engine_differs",
    "not_matched",
    "no_wiring_fits",
    "undecided",
]
HEALTHY: tuple[Verdict, ...] = ("as_configured", "not_acceptance")
WEAK = 1.4
"""An accept length below which a rightly wired draft counts as not matched to its target."""


@dataclasses.dataclass(frozen=True)
class Diagnosis:
    """What was tried, what it showed, and the verdict.

    Attributes:
      rounds: chains scored; pinned: they are the engine's own rounds.
      table: configured, best, and the runners-up. shuffled: the draft with states of other tokens.
      tried: how many wirings. needed: standard errors a winner needs after that many.
      agreements: explanations beside the engine's rounds, best first. explained: the one that gives
        them all, if one does.
      tree: the engine's, else a chain of the drafts scored.
      undecided: what this record cannot decide.
      learned: the vocabulary map as the text shows it, when no wiring fits.
      stated: the configured wiring where the record lacks its boundaries, so that `configured` is
        the record's own.
      norms: root mean square of each boundary's states.
      under_tree: the best wiring beside the configured one under the tree that was asked for.
      not_tried: what could be wrong and was not tried, each with the reason.
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
    not_tried: list[str]
    learned: LearnedMap | None = None
    under_tree: UnderTree | None = None
    stated: Wiring | None = None
    num_layers: int = 1

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
    tree: TreeConfig | None = None,
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
      tree: what the record's engine drafted, None for what the record says, else a chain.
      max_tokens: slots to score on; memory and time grow with its square.

    Raises:
      RecordError: nothing to score. ConfigError: the record lacks the configured boundaries, the
        draft needs a matrix of the target's that `shared` does not have, `num_steps` is not the
        tree's, topk exceeds the draft's vocabulary, or a
        rope's sections do not share the head.
    """
    check_fits(record, draft.config)
    _check_tree(draft, tree, num_steps)
    tree = tree or engine_tree(record)
    steps = num_steps or (tree.num_steps if tree else None) or engine_steps(record) or 3
    packed = pack(record, steps=steps, max_tokens=max_tokens)
    material = Material(packed, record.boundaries, draft, shared, extra or {}, side_map, rotation)
    base = wiring or _configured(record, draft)
    base = dataclasses.replace(base, **(changes or {}))
    stated = None
    if any(b not in record.boundaries for b in base.boundaries):
        stated, base = base, _recorded(record, base)
    _check(material, base)
    ropes = [base.rope, *([target_rope] if target_rope else [])]
    for rope in ropes:
        rope.check_sections(draft.config.attention().rotary_dim)
    if any(rope.kind == "dynamic" for rope in ropes):
        material.form = dataclasses.replace(material.form, dynamic=True)

    def options(one: Wiring) -> list[Wiring]:
        return singles(material, one, num_layers=record.num_layers, target_rope=target_rope)

    search = Search(material, options, say)
    ranked = search.best(base)
    shuffled = dataclasses.replace(base, rows="shuffled")
    finalists = list(dict.fromkeys((base, *ranked[:SHOWN])))
    search.scores([*finalists, shuffled], search.many)  # side by side
    judge = Judge(search, base)
    best = judge.best(finalists)
    best = base if best == base else search.settled(best, base)
    needed = threshold(len(search.tried))
    winner = judge.candidate(best)
    drafted = tree if tree is not None and tree.topk > 1 else None
    if not (winner.z >= needed and winner.gain.low > 0 and judge.uses_states(best)):
        best = base
        if drafted is not None and drafted.num_steps == steps:
            best = rival(judge, finalists, drafted, draft, needed)
        winner = judge.candidate(best)
    agreements, explained, under, rejected = [], None, None, None
    if drafted is not None:
        if drafted.num_steps == steps:
            under, agreements = under_tree(search, base, best, drafted, draft)
        if under is not None and under.gain.high < 0:  # chains gain, the trees that are served lose
            under, agreements = under_tree(search, base, base, drafted, draft)
            rejected, best, winner = best, base, judge.candidate(base)
        if best == base and stated is None and not changes and wiring is None:
            agreements = explain_tree(packed, record, draft, shared, drafted)
    else:
        agreements, explained = explain(search, best, base, options)
    if explained is not None and judge.candidate(explained).gain.low > 0:
        # every round of the engine as well: no luck explains that
        best, winner = explained, judge.candidate(explained)
        agreements, explained = explain(search, best, base, options)
    table = [judge.candidate(w) for w in dict.fromkeys((base, best, *finalists))]
    chance = judge.candidate(shuffled)
    length = under.configured if under is not None else judge.candidate(base).accept_length
    verdict = _verdict(judge, base, best, agreements, length)
    likelier = [c for c in table if c.z >= needed and c.gain.high > 0 and c.wiring != rejected]
    if verdict == "as_configured" and likelier:
        verdict = "undecided"
    if stated is not None:
        if not judge.uses_states(best):
            material.index(next(b for b in stated.boundaries if b not in record.boundaries))
        served = bool(agreements) and agreements[0].equal
        verdict = "wiring_differs" if served else "undecided"
    learned = None
    if verdict in ("no_wiring_fits", "undecided", "not_matched") and stated is None:
        learned = learn(
            judge.rows(base), judge.rows(shuffled), search.tokens(search.many)[0], material.targets
        )
        verdict = "vocab_differs" if learned.clear else verdict
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
        tree=tree if tree is not None and tree.num_steps == steps else TreeConfig(steps),
        agreements=agreements,
        explained=agreements[0].name if agreements and agreements[0].equal else None,
        undecided=undecided(search, record, base, best, options),
        norms=_norms(material),
        not_tried=not_tried(material, base),
        learned=learned,
        under_tree=under,
        stated=stated,
        num_layers=draft.config.num_layers,
    )


def _verdict(
    judge: Judge,
    base: Wiring,
    best: Wiring,
    agreements: list[engine.Agreement],
    length: float,
) -> Verdict:
    if best != base:
        return "wiring_differs"
    if not judge.uses_states(base):
        return "no_wiring_fits" if judge.at_chance(base) else "undecided"
    if agreements and not agreements[0].equal:
        return "engine_differs"
    if agreements and agreements[0].name != "refresh":
        return "engine_differs"
    if length < WEAK:
        return "not_matched"
    return "not_acceptance" if agreements else "as_configured"


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


def _recorded(record: Record, base: Wiring) -> Wiring:
    """A wiring of boundaries the record has, as many as `base` reads, the wanted ones kept."""
    wanted = [b for b in base.boundaries if b in record.boundaries]
    spare = [b for b in record.boundaries if b not in wanted]
    if len(record.boundaries) < len(base.boundaries):
        raise ConfigError(
            f"the record has boundaries {list(record.boundaries)}, the draft reads "
            f"{len(base.boundaries)}: {list(base.boundaries)}"
        )
    if len(record.boundaries) == len(base.boundaries):
        return dataclasses.replace(base, boundaries=record.boundaries)
    filled = (b if b in wanted else spare.pop(0) for b in base.boundaries)
    return dataclasses.replace(base, boundaries=tuple(filled))


def _check_tree(draft: Eagle3Draft, tree: TreeConfig | None, num_steps: int | None):
    if tree is None:
        return
    if num_steps not in (None, tree.num_steps):
        raise ConfigError(f"num_steps is {num_steps}, the tree's is {tree.num_steps}: give one")
    if tree.topk > draft.config.draft_vocab_size:
        raise ConfigError(
            f"topk={tree.topk} exceeds the draft vocabulary of {draft.config.draft_vocab_size}"
        )


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

"""Why is the accept length low? Tries the wirings on a record and says which one explains it."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, Literal

import numpy as np

from eagle3_jax.config import RopeConfig, TreeConfig
from eagle3_jax.draft import Eagle3Draft, Shared
from eagle3_jax.record import Record
from eagle3_jax.wirings import engine
from eagle3_jax.wirings.explain import SHOWN, explain, explain_tree
from eagle3_jax.wirings.judge import Candidate, Judge
from eagle3_jax.wirings.learned import LearnedMap, learn
from eagle3_jax.wirings.not_tried import not_tried
from eagle3_jax.wirings.stats import threshold
from eagle3_jax.wirings.trees import UnderTree, rival, under_tree
from eagle3_jax.wirings.trial import Trial, prepare
from eagle3_jax.wirings.undecided import undecided
from eagle3_jax.wirings.wiring import Wiring

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
    trial = prepare(
        record,
        draft,
        shared,
        wiring=wiring,
        changes=changes or {},
        extra=extra or {},
        side_map=side_map,
        rotation=rotation,
        target_rope=target_rope,
        num_steps=num_steps,
        tree=tree,
        max_tokens=max_tokens,
        say=say,
    )
    search, base = trial.search, trial.base
    ranked = search.best(base)
    finalists = list(dict.fromkeys((base, *ranked[:SHOWN])))
    search.scores([*finalists, trial.shuffled], search.many)  # side by side
    judge = Judge(search, base)
    best, needed = _winner(trial, judge, finalists)
    served = _under_tree(trial, judge, best) if trial.drafted else _as_chains(trial, judge, best)
    table = [judge.candidate(w) for w in dict.fromkeys((base, served.best, *finalists))]
    verdict, learned = _conclusion(trial, judge, served, table, needed)
    agreements = served.agreements
    return Diagnosis(
        verdict=verdict,
        configured=judge.candidate(base),
        best=judge.candidate(served.best),
        table=table,
        shuffled=judge.candidate(trial.shuffled),
        tried=len(search.tried),
        needed=needed,
        rounds=len(search.many.chains),
        pinned=trial.packed.pinned,
        tree=trial.tree if trial.tree and trial.tree_is_scored else TreeConfig(trial.steps),
        agreements=agreements,
        explained=agreements[0].name if agreements and agreements[0].equal else None,
        undecided=undecided(search, record, base, served.best, trial.options),
        norms=trial.norms(),
        not_tried=not_tried(trial.material, base),
        learned=learned,
        under_tree=served.under,
        stated=trial.stated,
        num_layers=draft.config.num_layers,
    )


@dataclasses.dataclass(frozen=True)
class _Served:
    """The best wiring under the tree that is served, and how it stands beside the engine.

    `rejected`: gained as chains and lost under the tree.
    """

    best: Wiring
    agreements: list[engine.Agreement]
    under: UnderTree | None = None
    rejected: Wiring | None = None


def _winner(trial: Trial, judge: Judge, finalists: list[Wiring]) -> tuple[Wiring, float]:
    """The wiring clearly better than the configured one, else that; standard errors it needed."""
    search, base = trial.search, trial.base
    best = judge.best(finalists)
    best = base if best == base else search.settled(best, base)
    needed = threshold(len(search.tried))
    found = judge.candidate(best)
    if found.z >= needed and found.gain.low > 0 and judge.uses_states(best):
        return best, needed
    if trial.drafted is not None and trial.tree_is_scored:
        return rival(judge, finalists, trial.drafted, trial.draft, needed), needed
    return base, needed


def _under_tree(trial: Trial, judge: Judge, best: Wiring) -> _Served:
    """Chains may gain where the tree that is served loses: then the configured wiring stays."""
    search, base, tree = trial.search, trial.base, trial.drafted
    assert tree is not None
    agreements, under, rejected = [], None, None
    if trial.tree_is_scored:
        under, agreements = under_tree(search, base, best, tree, trial.draft)
        if under.gain.high < 0:
            under, agreements = under_tree(search, base, base, tree, trial.draft)
            rejected, best = best, base
    if best == base and trial.as_stated:
        agreements = explain_tree(trial.packed, trial.record, trial.draft, trial.shared, tree)
    return _Served(best, agreements, under, rejected)


def _as_chains(trial: Trial, judge: Judge, best: Wiring) -> _Served:
    """A wiring that gives every round of the engine as well as a gain: no luck explains that."""
    agreements, other = explain(trial.search, best, trial.base, trial.options)
    if other is not None and judge.candidate(other).gain.low > 0:
        agreements, _ = explain(trial.search, other, trial.base, trial.options)
        return _Served(other, agreements)
    return _Served(best, agreements)


def _conclusion(
    trial: Trial, judge: Judge, served: _Served, table: list[Candidate], needed: float
) -> tuple[Verdict, LearnedMap | None]:
    base, agreements, stated = trial.base, served.agreements, trial.stated
    length = served.under.configured if served.under else judge.candidate(base).accept_length
    verdict = _verdict(judge, base, served.best, agreements, length)
    likelier = [
        c for c in table if c.z >= needed and c.gain.high > 0 and c.wiring != served.rejected
    ]
    if verdict == "as_configured" and likelier:
        verdict = "undecided"
    if stated is not None:
        if not judge.uses_states(served.best):
            trial.refuse_missing_boundaries()
        equal = bool(agreements) and agreements[0].equal
        return ("wiring_differs" if equal else "undecided"), None
    if verdict not in ("no_wiring_fits", "undecided", "not_matched"):
        return verdict, None
    search = trial.search
    learned = learn(
        judge.rows(base),
        judge.rows(trial.shuffled),
        search.tokens(search.many)[0],
        trial.material.targets,
    )
    return ("vocab_differs" if learned.clear else verdict), learned


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


def gap(train_accuracy: float, replay: float, engine_length: float, num_steps: int = 3) -> str:
    """`"wiring or engine"`, `"training"` or `"healthy"` from three numbers.

    A trainer's per-position accuracy p promises 1 + p + p^2 + ...; an engine that stays far below
    the replay is at fault itself, a replay far below the promise is the draft's.
    """
    promised = sum(train_accuracy**i for i in range(1, num_steps + 1))
    if engine_length - 1 < 0.8 * (replay - 1):
        return "wiring or engine"
    return "training" if replay - 1 < 0.6 * promised else "healthy"

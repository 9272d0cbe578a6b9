"""What a sampled text follows instead of the distribution its parameters give."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from eagle3_jax.config import SamplingConfig
from eagle3_jax.crosscheck.emitted import Emitted, rounds_known
from eagle3_jax.crosscheck.goodness import (
    FEW,
    REJECT,
    TINY,
    log_likelihood,
    places,
    thresholds,
    uniform_p_value,
)
from eagle3_jax.crosscheck.noise import Noise
from eagle3_jax.crosscheck.ours import Ours
from eagle3_jax.crosscheck.processed import Placed, Texts, place
from eagle3_jax.crosscheck.result import Divergence
from eagle3_jax.crosscheck.round_penalties import CODE as COUNTED
from eagle3_jax.crosscheck.round_penalties import WAYS, WORDS, counted_in
from eagle3_jax.crosscheck.types import EngineRequest, Settings

AT_REST: dict[str, Any] = {
    "logit_bias": (),
    "min_p": 0.0,
    "top_p": 1.0,
    "top_k": None,
    "repetition_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
}
"""Processors by SGLang's names, and the values that change nothing."""
RATIOS = (0.25, 0.35, 0.5, 0.6, 0.7, 0.8, 0.9, 1.1, 1.25, 1.5, 2.0, 3.0)
"""Other temperatures, as multiples of the one asked for."""
GAIN = 5.0
"""Log-likelihood by which another distribution must be better to be named, and two to be told."""
THRESHOLDS = ("speculative_accept_threshold_single", "speculative_accept_threshold_acc")
SKIPPED, TEMPERATURE = "SAMPLING_PROCESSORS_SKIPPED", "SAMPLING_TEMPERATURE"


@dataclasses.dataclass
class Group:
    """Requests with the same parameters, and their rows under them.

    Attributes:
      forbidden: [R] rows that no rounding allows. skipped: of such a row, the processors without
        which it is allowed. counted: all rows, for each other way to count what penalties are for
        (round_penalties.py). relaxed: those ways under which every row is allowed.
    """

    config: SamplingConfig
    texts: Texts
    placed: Placed
    forbidden: np.ndarray | None = None
    skipped: dict[int, set[str]] = dataclasses.field(default_factory=dict)
    likelihoods: dict[str, float] = dataclasses.field(default_factory=dict)
    counted: dict[str, Placed] = dataclasses.field(default_factory=dict)
    relaxed: dict[str, Placed] = dataclasses.field(default_factory=dict)

    @property
    def active(self) -> list[str]:
        """Processors that change something; top_k 1 is greedy decoding itself."""
        names = [n for n, rest in AT_REST.items() if getattr(self.config, n) != rest]
        return [n for n in names if n != "top_k" or self.config.top_k != 1]

    def common(self) -> set[str]:
        """Processors without which every forbidden row is allowed."""
        rows = np.flatnonzero(self.forbidden) if self.forbidden is not None else ()
        sets = [self.skipped.get(int(row), set()) for row in rows]
        return set.intersection(*sets) if sets else set()


def without(config: SamplingConfig, names: Sequence[str]) -> SamplingConfig:
    """The same with these processors at rest."""
    return dataclasses.replace(config, **{name: AT_REST[name] for name in names})


def shown(p: float) -> str:
    """A probability."""
    return "0" if p < TINY else f"{p:.2g}"


class Causes:
    """Other distributions for the same tokens, by their likelihood."""

    def __init__(
        self,
        ours: Ours,
        groups: Sequence[Group],
        settings: Settings,
        noise: Noise,
        requests: Sequence[EngineRequest],
        emitted: Sequence[Emitted],
    ):
        self.ours, self.groups, self.settings, self.noise = ours, groups, settings, noise
        self.requests, self.emitted = requests, emitted
        self.reported = sum(log_likelihood(g.placed.p) for g in groups)
        self._found: list[tuple[float, str, str]] = []

    def greedy(self) -> tuple[str, str] | None:
        """Every verified token is the target's argmax, which sampling would not give."""
        chance, verified = 0.0, 0
        for g in self.groups:
            rows = g.texts.index > 0
            if (g.placed.gap[rows] < -self.noise.logit).any():
                return None
            chance += log_likelihood(g.placed.top[rows])
            verified += int(rows.sum())
        if not verified or chance > math.log(REJECT):
            return None
        return (
            "SAMPLING_GREEDY",
            f"all {verified} tokens after the first ones are the target's argmax: verified "
            "greedily, as SGLang does on CPU and XPU at any temperature (speculative/eagle_utils."
            "_verify_uses_greedy)",
        )

    def forbidden(self, found: Sequence[Divergence], tokens: int) -> tuple[str, str]:
        """Why tokens were sampled that the parameters forbid."""
        counting = self._counting()
        if counting is not None:
            count = f"{len(found)} of {tokens} tokens {'is' if len(found) == 1 else 'are'}"
            return COUNTED, f"{counting}: else {count} forbidden"
        skipped = [g.common() for g in self.groups if g.forbidden is not None and g.forbidden.any()]
        names = set.intersection(*skipped) if skipped else set()
        best = self._fits()
        if best and best[0][1] == TEMPERATURE and self._far(best, SKIPPED):
            return TEMPERATURE, best[0][2]
        if any(d.kind == "target differs" for d in found):
            return "LOSSLESS_LOGIC_ERROR", "no processor explains it"
        if not names:
            by = sorted(set().union(*(s for g in self.groups for s in g.skipped.values())))
            words = f"several processors are skipped: {', '.join(by)}"
        else:
            single = self._likely(names)
            words = f"{' or '.join(single) or 'all processors'} skipped"
            if single == ["min_p"]:
                words += ", as SGLang leaves it out while verifying (sgl-project/sglang#10617)"
        places = [(d.request, d.position or 0) for d in found]
        count = f"{len(found)} of {tokens} sampled tokens {'is' if len(found) == 1 else 'are'}"
        words = f"{words}: {count} forbidden"
        if all(self.emitted[n].inside(i) for n, i in places):
            words += ", inside accepted runs alone"
        elif all(i > 0 for _, i in places):
            words += ", no request's first token among them"
        return SKIPPED, words

    def _counting(self) -> str | None:
        """The other way to count penalised tokens that alone allows every token."""
        groups = [g for g in self.groups if g.forbidden is not None and g.forbidden.any()]
        ways = set.intersection(*(set(g.relaxed) for g in groups))
        if not ways:
            return None
        fits = {w: sum(log_likelihood(g.relaxed[w].p) for g in groups) for w in ways}
        skipped = set.intersection(*({*g.likelihoods} for g in groups))
        other = [sum(g.likelihoods[n] for g in groups) for n in skipped]
        most = max(fits.values())
        if other and most - max(other) < GAIN:
            return None
        near = [w for w in WAYS if w in fits and most - fits[w] < GAIN]
        return " or ".join(WORDS[w] for w in near)

    def _likely(self, names: set[str]) -> list[str]:
        """Of processors that each explain what is forbidden, those that fit the text best."""
        total = {n: sum(g.likelihoods.get(n, 0.0) for g in self.groups) for n in names & {*AT_REST}}
        return sorted(n for n, value in total.items() if max(total.values()) - value < GAIN)

    def best(self) -> tuple[str, str]:
        """What the text follows better: a code and words."""
        said = self._said_thresholds()
        if said:
            return "SAMPLING_THRESHOLDS", f"the server ran with {said}: not lossless"
        found = self._fits()
        if not found or found[0][0] - self.reported < GAIN:
            return "SAMPLING_DISTRIBUTION", "nothing that was tried fits better"
        near = [f for f in found[:4] if found[0][0] - f[0] < GAIN and f[1] != found[0][1]]
        words = " or ".join([found[0][2], *(f[2] for f in near)])
        return found[0][1], f"what fits better: {words}"

    def _far(self, found: list[tuple[float, str, str]], code: str) -> bool:
        others = [value for value, other, _ in found if other == code]
        return not others or found[0][0] - max(others) > GAIN

    def _fits(self) -> list[tuple[float, str, str]]:
        """(log-likelihood, code, words), the best first."""
        self._found = self._found or self._tried()
        return self._found

    def _tried(self) -> list[tuple[float, str, str]]:
        found: list[tuple[float, str, str]] = [self._temperature(), self._thresholds()]
        active = list(dict.fromkeys(n for g in self.groups for n in g.active))
        tried: list[tuple[str, ...]] = [(name,) for name in active]
        tried += [tuple(active)] if len(active) > 1 else []
        for names in tried:
            placed = [self._placed(g, without(g.config, names)) for g in self.groups]
            words = "all processors" if len(names) > 1 else "".join(names)
            found.append(self._entry(placed, SKIPPED, f"{words} ignored"))
        for way in WAYS if any(g.config.penalises for g in self.groups) else ():
            counting = [self.counting(g, way) for g in self.groups]
            known = [p for p in counting if p is not None]
            if len(known) == len(counting):
                found.append(self._entry(known, COUNTED, WORDS[way]))
        return sorted(found, reverse=True)

    def _temperature(self) -> tuple[float, str, str]:
        tried = []
        for ratio in RATIOS:
            configs = [
                dataclasses.replace(g.config, temperature=ratio * g.config.temperature)
                for g in self.groups
            ]
            placed = [self._placed(g, c) for g, c in zip(self.groups, configs, strict=True)]
            found = sorted({c.temperature for c in configs})
            words = f"another temperature, near {', '.join(f'{t:.2g}' for t in found)}"
            tried.append(self._entry(placed, TEMPERATURE, words))
        return max(tried)

    def counting_by_likelihood(self) -> tuple[bool, list[str]]:
        """Whether the text shows another way to count penalised tokens beyond `REJECT`, and which.

        Under the right distribution the ratio of another's likelihood to its own exceeds x with a
        probability of 1/x at most, whatever the number of tokens (Markov). That the parameters'
        distribution is not the right one does not make a way of `WAYS` it: none is named unless it
        is also more likely than everything else that is tried.
        """
        fits = {}
        for way in WAYS if any(g.config.penalises for g in self.groups) else ():
            placed = [self.counting(g, way) for g in self.groups]
            if all(p is not None for p in placed):
                fits[way] = sum(log_likelihood(p.p) for p in placed if p is not None)
        most = max(fits.values(), default=-math.inf)
        if not fits or most - self.reported < math.log(len(fits) / REJECT):
            return False, []
        if any(value > most - GAIN for value, code, _ in self._fits() if code != COUNTED):
            return True, []
        return True, [way for way in WAYS if way in fits and most - fits[way] < GAIN]

    def counting(self, group: Group, way: str, lift: float = 0.0) -> Placed | None:
        """All rows with penalties for what `way` counts; None where that is not known."""
        if not group.config.penalises:
            return group.placed
        if not lift and way in group.counted and self._known(group):
            return group.counted[way]
        found = counted_in(group.texts, self.requests, self.emitted, way)
        if found is None:
            return None
        placed = place(self.ours, group.texts, group.config, lift=lift, counted=found)
        if not lift:
            group.counted[way] = placed
        return placed

    def _known(self, group: Group) -> bool:
        """Whether the rounds of all its requests are."""
        numbers = set(group.texts.owner.tolist())
        return all(rounds_known(self.requests[i], self.emitted[i]) for i in numbers)

    def _placed(self, group: Group, config: SamplingConfig) -> Placed:
        return place(self.ours, group.texts, config)

    def _entry(self, placed: Sequence[Placed], code: str, words: str) -> tuple[float, str, str]:
        value = sum(log_likelihood(p.p) for p in placed)
        where = np.concatenate([places(p.p, p.likelier) for p in placed])
        chance = uniform_p_value(where)
        fits = f"p = {chance:.2g}" if len(where) >= FEW else "few tokens"
        gain = value - self.reported
        return value, code, f"{words} (log-likelihood {gain:+.0f}, {fits})"

    def _thresholds(self) -> tuple[float, str, str]:
        parts: Mapping[str, list[np.ndarray]] = {n: [] for n in ("p", "hit", "drafted", "verified")}
        for g in self.groups:
            drafted = g.placed.best if g.placed.drafted is None else g.placed.drafted
            chance = g.placed.top if g.placed.drafted_p is None else g.placed.drafted_p
            parts["p"].append(g.placed.p)
            parts["hit"].append(g.texts.tokens[: g.texts.rows] == drafted)
            parts["drafted"].append(chance)
            parts["verified"].append(g.texts.index > 0)
        single, acc, value = thresholds(**{n: np.concatenate(x) for n, x in parts.items()})
        which = f"single {single:g}" if single < 1 else f"acc {acc:g}"
        words = f"thresholds below 1, which favour likely drafts ({which} fits best"
        code = "SAMPLING_THRESHOLDS"
        return value, code, f"{words}, log-likelihood {value - self.reported:+.0f})"

    def _said_thresholds(self) -> str:
        other = self.settings.other
        rule = other.get("rule") or {}
        given = {name: other.get(name) for name in THRESHOLDS}
        given |= {n: rule[n] for n in ("threshold_single", "threshold_acc") if n in rule}
        return ", ".join(
            f"{n} {v:g}" for n, v in given.items() if isinstance(v, (int, float)) and v < 1
        )

"""Answers that were sampled: is every token allowed, do they follow the target, by which rule.

A text has no right or wrong token then, but a distribution before each. Drafts that are no random
draws are accepted exactly where the text goes on with them, so rounds and counts stay comparable.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from eagle3_jax.config import ConfigError, SamplingConfig
from eagle3_jax.crosscheck.conventions import (
    AFTER,
    BEFORE,
    convention,
    counted_logprobs,
    reported,
)
from eagle3_jax.crosscheck.emitted import emitted_of, rounds_known
from eagle3_jax.crosscheck.goodness import (
    FEW,
    REJECT,
    TINY,
    favoured_p_value,
    log_likelihood,
    places,
    uniform_p_value,
)
from eagle3_jax.crosscheck.measuring import dtype_of
from eagle3_jax.crosscheck.noise import Noise
from eagle3_jax.crosscheck.ours import Ours, Taught
from eagle3_jax.crosscheck.processed import place, texts_of
from eagle3_jax.crosscheck.result import Divergence
from eagle3_jax.crosscheck.round_penalties import CODE, WAYS, WORDS
from eagle3_jax.crosscheck.sampled_causes import (
    AT_REST,
    Causes,
    Group,
    shown,
    without,
)
from eagle3_jax.crosscheck.sampled_requests import (
    NO_EFFECT,
    NOT_COMPUTED,
    is_sampled,
    joint_rows,
    sampling_config,
    undecidable,
)
from eagle3_jax.crosscheck.sampled_rule import rounds_trusted
from eagle3_jax.crosscheck.tokens import listed_ids
from eagle3_jax.crosscheck.types import CrosscheckError, EngineRequest, EngineRun
from eagle3_jax.sampling import check_bias
from eagle3_jax.trace import Round

__all__ = ["Sampled", "sampling_config"]


class Sampled:
    """The sampled requests of a run, every token placed in its own distribution.

    Attributes:
      undecidable: number of a request -> why its distribution is not known.
      notes: what was assumed. said: what is worth saying of a run that is equal.
      walked: the engine's rounds on each text, ours where they are not known. emitted: none there.
      counting: number of a request -> what its penalties count by its logprobs, where that is not
        every token of the output.
    """

    def __init__(
        self,
        run: EngineRun,
        requests: Sequence[EngineRequest],
        ours: Ours,
        taught: Sequence[Taught],
        rounds: Sequence[Sequence[Round]] = (),
    ):
        self.run, self.requests, self.ours = run, requests, ours
        walked = list(zip(requests, rounds or [()] * len(requests), strict=True))
        self.walked = [emitted_of(request, own, True) for request, own in walked]
        self.emitted = [
            emitted_of(request, own, rounds_trusted(i, request, own, ours.tree))
            for i, (request, own) in enumerate(walked)
        ]
        self.counting: dict[int, str] = {}
        self.undecidable: dict[int, str] = {}
        self.notes: list[str] = []
        self.said = ""
        self.groups: list[Group] = []
        self._taught: dict[int, Taught] = {}
        configs: dict[SamplingConfig, list[int]] = {}
        for i, request in enumerate(requests):
            if not is_sampled(request):
                continue
            why = "no target was given" if ours.recorded else None
            why = why or undecidable(request, run.settings.engine)
            if why is not None:
                self.undecidable[i] = why
                continue
            self._note_unknown(i, request)
            configs.setdefault(sampling_config(request), []).append(i)
        for config, numbers in configs.items():
            try:
                check_bias(config, ours.target.config.vocab_size)
            except ConfigError as error:
                raise CrosscheckError(f"{run.source}: {error}") from None
            texts = texts_of(ours, numbers, requests, taught, [listed_ids(r) for r in requests])
            joint = joint_rows(config, run, requests, texts)
            texts = dataclasses.replace(texts, joint=joint)
            group = Group(config, texts, place(ours, texts, config, drafts=ours.draft is not None))
            self.groups.append(group)
            self._taught |= self._by_convention(numbers, group, taught)

    def __contains__(self, number: int) -> bool:
        return number in self._taught or number in self.undecidable

    def __bool__(self) -> bool:
        return bool(self._taught or self.undecidable)

    @property
    def tokens(self) -> int:
        """How many were placed."""
        return sum(group.texts.rows for group in self.groups)

    def taught(self, number: int) -> Taught | None:
        """The target on the text, its logprobs as the engine reports them; None undecidable."""
        return self._taught.get(number)

    def faults(self, noise: Noise) -> list[Divergence]:
        """Forbidden tokens; without any, a text that does not follow the target."""
        if not self.groups:
            return []
        causes = Causes(
            self.ours, self.groups, self.run.settings, noise, self.requests, self.emitted
        )
        found = [d for g in self.groups for d in self._forbidden(g, noise, causes)]
        if found:
            code, cause = causes.forbidden(found, self.tokens)
            return [dataclasses.replace(d, code=code, cause=cause) for d in found]
        surprising, ways = causes.counting_by_likelihood()
        counted = self._counted_otherwise(ways)
        if counted is not None:
            return [counted]
        chance = self._p_value()
        greedy = causes.greedy()
        if chance >= REJECT and greedy is None and not surprising:
            weak = ", too few to tell much" if self.tokens < FEW else ""
            self.said = (
                f"{self.tokens} sampled tokens, all allowed, distribution consistent (p = "
                f"{chance:.2g}{weak})"
            )
            return []
        code, cause = greedy or causes.best()
        return [
            Divergence(
                kind="acceptance differs",
                request=0 if len(self.requests) == 1 else -1,
                tensor="output_ids",
                detail=(
                    f"the text does not follow the target's distribution at {self._temperatures()} "
                    f"(p = {chance:.1g} over {self.tokens} sampled tokens)"
                ),
                code=code,
                cause=cause,
                order=(10**5, 0),
            )
        ]

    def _counted_otherwise(self, by_text: Sequence[str]) -> Divergence | None:
        """Every token is allowed, but logprobs or the text show other penalties."""
        number = next(iter(self.counting), 0)
        ways = [self.counting[number]] if self.counting else by_text
        if not ways:
            return None
        logged = number in self.counting
        what = f"the logprobs of {len(self.counting)} requests are" if logged else "the text is"
        return Divergence(
            kind="acceptance differs",
            request=number if logged or len(self.requests) == 1 else -1,
            tensor="output_logprobs" if logged else "output_ids",
            detail=f"{what} of other penalties",
            code=CODE,
            cause=" or ".join(WORDS[way] for way in ways),
            order=(10**5, 0),
        )

    def _p_value(self) -> float:
        """Of the places of all tokens, and of how often they are the draft's most likely one."""
        where = np.concatenate([places(g.placed.p, g.placed.likelier) for g in self.groups])
        hits, chances = [], []
        for g in self.groups:
            rows, drafted, chance = g.texts.index > 0, g.placed.drafted, g.placed.drafted_p
            if drafted is not None and chance is not None:
                hits.append((g.texts.tokens[: g.texts.rows] == drafted)[rows])
                chances.append(chance[rows])
        if not hits:
            return uniform_p_value(where)
        favoured = favoured_p_value(np.concatenate(hits), np.concatenate(chances))
        return min(1.0, 2 * min(uniform_p_value(where), favoured))

    def _temperatures(self) -> str:
        found = sorted({g.config.temperature for g in self.groups})
        return f"temperature{'s' if len(found) > 1 else ''} {', '.join(f'{t:g}' for t in found)}"

    def _forbidden(self, group: Group, noise: Noise, causes: Causes) -> list[Divergence]:
        config, texts = group.config, group.texts
        lifted = place(self.ours, texts, config, lift=2 * noise.logit)
        group.forbidden = ~(lifted.p >= TINY)
        if not group.forbidden.any():
            return []
        free = {n: place(self.ours, texts, without(config, (n,))) for n in group.active}
        group.likelihoods = {n: log_likelihood(p.p) for n, p in free.items()}
        for way in WAYS if config.penalises else ():
            lifted = causes.counting(group, way, 2 * noise.logit)
            placed = causes.counting(group, way)
            if lifted is not None and placed is not None and (lifted.p >= TINY).all():
                group.relaxed[way] = placed
        order = sorted(free, key=lambda n: -group.likelihoods[n])
        free["all processors"] = place(self.ours, texts, without(config, group.active))
        found = []
        for row in map(int, np.flatnonzero(group.forbidden)):
            number, i = int(texts.owner[row]), int(texts.index[row])
            token = self.requests[number].output[i]
            by = [n for n in (*order, "all processors") if free[n].p[row] >= TINY]
            index = self.emitted[number].round_of(i)
            common: dict[str, Any] = {
                "kind": "acceptance differs" if by else "target differs",
                "request": number,
                "round": index,
                "position": i,
                "tensor": "output_ids",
                "order": (-1 if index is None else index, 890),
            }
            if not by and group.relaxed:
                p = next(iter(group.relaxed.values())).p[row]
                detail = (
                    f"token {i} is {token}, forbidden by penalties: its probability is "
                    f"{shown(group.placed.p[row])}, counting other tokens {shown(p)}"
                )
                common["kind"] = "acceptance differs"
                found.append(Divergence(detail=detail, **common))
                continue
            if not by:
                p = free["all processors"].p[row]
                detail = f"token {i} is {token}, whose probability is {shown(p)} by the target"
                found.append(Divergence(detail=detail, **common))
                continue
            group.skipped.setdefault(row, set()).update(by)
            detail = (
                f"token {i} is {token}, forbidden by {_value(config, by[0])}: its probability is "
                f"{shown(group.placed.p[row])}, without {by[0]} {shown(free[by[0]].p[row])}"
            )
            found.append(Divergence(detail=detail, **common))
        return found

    def _note_unknown(self, number: int, request: EngineRequest):
        names = set(request.sampling or ()) - set(AT_REST) - NO_EFFECT - NOT_COMPUTED
        if names:
            self.notes.append(
                f"request {number}: unknown sampling parameters, taken to change nothing: "
                f"{', '.join(sorted(names))}"
            )

    def _by_convention(
        self, numbers: Sequence[int], group: Group, taught: Sequence[Taught]
    ) -> dict[int, Taught]:
        """SGLang returns logprobs after penalties, bias and temperature; others before them.

        After penalties they show what those count, too (conventions.py).
        """
        logged = [self.requests[i].output_logprobs for i in numbers]
        lengths = [len(self.requests[i].output) for i in numbers]
        name = AFTER
        if any(x is not None for x in logged):
            sized = zip(logged, lengths, strict=True)
            given = [np.full(n, np.nan) if x is None else x for x, n in sized]
            before = np.concatenate([taught[i].logprobs for i in numbers])
            tried = {AFTER: group.placed.logprobs, BEFORE: before}
            if group.config.penalises:
                tried |= counted_logprobs(self.ours, group, self.requests, self.walked)
            known = [rounds_known(self.requests[i], self.emitted[i]) for i in numbers]
            dtype = dtype_of(self.run, self.ours)
            name, sure = convention(np.concatenate(given), tried, np.repeat(known, lengths), dtype)
            if name in WAYS and sure:
                shown_by = zip(numbers, logged, known, strict=True)
                self.counting |= {i: name for i, x, k in shown_by if x is not None and k}
            elif name in WAYS:
                self.notes.append(f"too few logprobs to be sure, they fit if {WORDS[name]}")
        if name == BEFORE:
            self.notes.append("the engine's logprobs are those before temperature and processors")
            return {i: taught[i] for i in numbers}
        placed = group.counted.get(name, group.placed)
        found = {}
        for i, x in zip(numbers, logged, strict=True):
            of = group.placed if x is None else placed
            found[i] = reported(taught[i], of, group.texts.owner == i)
        return found


def _value(config: SamplingConfig, name: str) -> str:
    value = getattr(config, name, None)
    if value is None:
        return name
    return f"{name} {dict(value) if name == 'logit_bias' else format(value, 'g')}"

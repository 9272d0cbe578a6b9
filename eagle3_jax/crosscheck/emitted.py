"""Which round of an engine emitted which token."""

import dataclasses
from collections.abc import Sequence

from eagle3_jax.crosscheck.types import EngineRequest
from eagle3_jax.trace import Round


@dataclasses.dataclass(frozen=True)
class Emitted:
    """Which round emitted which output token: (number, output place of its root, drafts)."""

    rounds: tuple[tuple[int, int, int], ...] = ()

    def round_of(self, i: int) -> int | None:
        """The round that emitted token i; None the prefill's, or not known."""
        return next((n for n, at, k in self.rounds if at < i <= at + k + 1), None)

    def inside(self, i: int) -> bool:
        """Whether token i is an accepted draft."""
        return any(at < i <= at + k for _, at, k in self.rounds)


def emitted_of(request: EngineRequest, ours: Sequence[Round], trusted: bool) -> Emitted:
    """From the engine's rounds; from ours on its text where its counts are the same."""
    if request.accepts is not None:
        at, found = 0, []
        for number, correct in enumerate(request.accepts):
            found.append((number, at, correct))
            at += correct + 1
        return Emitted(tuple(found))
    start = len(request.prompt)
    return Emitted(
        tuple((r.index, r.length - start, r.num_correct_drafts) for r in ours if trusted)
    )


def rounds_known(request: EngineRequest, emitted: Emitted) -> bool:
    """Whether every token's round is known; the first one is the prefill's and has none."""
    return len(request.output) == 1 or bool(emitted.rounds)

"""What a cause is looked for in."""

import dataclasses
from collections.abc import Sequence

import numpy as np

from eagle3_jax.config import ConfigError, TreeConfig
from eagle3_jax.crosscheck.metrics import distance
from eagle3_jax.crosscheck.noise import Noise
from eagle3_jax.crosscheck.ours import Ours, Taught
from eagle3_jax.crosscheck.types import EngineRequest, EngineRun
from eagle3_jax.draft import Eagle3Draft
from eagle3_jax.trace import Round

Named = tuple[str, str] | None


@dataclasses.dataclass(frozen=True)
class Evidence:
    """What a cause is looked for in: everything of the run, and request `number` of it.

    Attributes:
      rounds: ours on that request's text.
    """

    ours: Ours
    requests: Sequence[EngineRequest]
    number: int
    taught: Sequence[Taught]
    noise: Noise
    rounds: Sequence[Round] = ()

    @property
    def request(self) -> EngineRequest:
        """The one that diverged."""
        return self.requests[self.number]

    def same(self, a: np.ndarray, b: np.ndarray) -> bool:
        """Equal up to rounding."""
        if np.shape(a) != np.shape(b):
            return False
        apart = distance(a, b)
        return self.noise.same(apart.rel_l2, apart.finite)


def to_target(draft: Eagle3Draft | None) -> np.ndarray | None:
    """[W] target id of each draft id."""
    return None if draft is None else np.asarray(draft.draft_to_target[...])


def tree_of(run: EngineRun) -> TreeConfig | None:
    """A chain's triple from its rounds or counters, when all of them agree; None otherwise."""
    sizes = set()
    for request in run.requests:
        for one in request.rounds or ():
            if one.tokens is not None:
                deepest = len(one.tokens) - 1
                if one.positions is not None:
                    deepest = max(one.positions) - one.length
                sizes.add((deepest, len(one.tokens)))
    if len(sizes) == 1:
        steps, nodes = sizes.pop()
        try:
            return TreeConfig(steps) if nodes == steps + 1 else None
        except ConfigError:
            return None
    return None

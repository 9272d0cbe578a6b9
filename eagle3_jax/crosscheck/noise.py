"""How far rounding can move a number of these very tensors; beyond it a difference is a fault."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from eagle3_jax.comparison import NEAR_TIE

STATE_CAP = {"float64": 1e-9, "float32": 2e-4, "float16": 2e-2, "bfloat16": 8e-2}
"""Relative L2 beyond which a state is another one, whatever was measured: about a thousand spacings
of float32 and ten to twenty of the half types, which a stack of layers adds up."""
FLOOR = {"float64": 1e-12, "float32": 2e-5, "float16": 1e-3, "bfloat16": 8e-3}
"""What is taken for rounding even where less was measured: one spacing of the half types, and of
float32 what another order of summing does."""
SAFETY = 8.0
"""Measured differences are those of a few places; others may be this much larger."""


@dataclasses.dataclass(frozen=True)
class Noise:
    """Bounds for one comparison.

    Attributes:
      dtype: the engine's. logit: two logits (or logprobs) closer than this may change places.
      state: relative L2 of a state or of logits that counts as equal.
      measured_logit, measured_state: what was seen. how: where.
    """

    dtype: str
    logit: float
    state: float
    measured_logit: float | None
    measured_state: float | None
    how: str

    def json(self) -> dict[str, Any]:
        """As a dictionary, the caps with it."""
        caps = {"cap_logit": NEAR_TIE[self.dtype], "cap_state": STATE_CAP[self.dtype]}
        return dataclasses.asdict(self) | caps

    def same(self, rel_l2: float, finite: bool = True) -> bool:
        """Whether two tensors so far apart are equal up to rounding."""
        return finite and rel_l2 <= self.state

    def tied(self, gap: float, levels: int = 1) -> bool:
        """Whether logits, or logarithms of products of `levels` of them, may change places."""
        return abs(gap) <= self.logit * max(1, levels)


def measure(
    dtype: str,
    logits: Sequence[np.ndarray] = (),
    states: Sequence[float] = (),
    how: str = "nothing measured",
) -> Noise:
    """Bounds from differences that rounding made.

    Args:
      logits: arrays of differences of logits or logprobs at places where both sides agree; the
        median counts, so that a fault in some of them does not hide itself.
      states: relative L2 of pairs of states, likewise.
    """
    cap, floor = NEAR_TIE[dtype], FLOOR[dtype]
    flat = np.concatenate([np.abs(np.asarray(x, np.float64)).reshape(-1) for x in logits] or [[]])
    flat = flat[np.isfinite(flat)]
    seen = float(np.median(flat)) if len(flat) else None
    finite = [s for s in states if np.isfinite(s)]
    moved = float(np.median(finite)) if finite else None
    return Noise(
        dtype=dtype,
        logit=min(cap, max(floor, SAFETY * (seen if seen is not None else cap / SAFETY))),
        state=min(STATE_CAP[dtype], max(floor, SAFETY * (moved or 0.0))),
        measured_logit=seen,
        measured_state=moved,
        how=how if seen is not None or moved is not None else "nothing measured: the cap holds",
    )

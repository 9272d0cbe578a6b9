"""Which logprobs an engine returns: before temperature and processors or after, and after which."""

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np

from eagle3_jax.crosscheck.emitted import Emitted
from eagle3_jax.crosscheck.noise import measure
from eagle3_jax.crosscheck.ours import Ours, Taught
from eagle3_jax.crosscheck.processed import Placed, place
from eagle3_jax.crosscheck.round_penalties import PENALTIES, WAYS, counted_in
from eagle3_jax.crosscheck.sampled_causes import Group, without
from eagle3_jax.crosscheck.types import EngineRequest

AFTER, BEFORE, SKIPPED = "after", "before", "skipped"
CLEAR = 5.0
"""Standard errors, paired over tokens, by which other penalties must come nearer to be named."""


def convention(
    given: np.ndarray, tried: Mapping[str, np.ndarray], known: np.ndarray, dtype: str
) -> tuple[str, bool]:
    """The nearest way to report logprobs, over all requests with the same parameters.

    One of `WAYS` must explain the logprobs up to rounding where those of the parameters do not, and
    come clearly nearer than all others: in a half type rounding alone brings one or another nearer.

    Args:
      given: [R] the engine's, NaN for none. tried: [R] ours, by `AFTER`, `BEFORE`, `SKIPPED` (all
        penalties ignored) and `WAYS`. known: [R] rows of requests whose rounds are known.
      dtype: the engine's.

    Returns:
      `AFTER`, `BEFORE` or one of `WAYS`, and whether that is sure: False for one of `WAYS` that too
      few tokens tell from the others.
    """
    seen = np.isfinite(given)
    if not seen.any():
        return AFTER, True
    off = {name: np.abs(given - logprobs) for name, logprobs in tried.items()}
    plain = min((AFTER, BEFORE), key=lambda name: off[name][seen].mean())
    rows = seen & known
    ways = [name for name in WAYS if name in tried]
    if not ways or not rows.any():
        return plain, True
    off = {name: x[rows] for name, x in off.items()}
    way = min(off, key=lambda name: off[name].mean())
    if way not in ways:
        return plain, True
    noise = measure(dtype, [off[way]])
    if np.median(off[way]) > noise.logit or off[AFTER].mean() <= noise.logit:
        return plain, True
    others = (x - off[way] for name, x in off.items() if name not in WAYS)
    return way, all(_clearly_above_0(x) for x in others)


def _clearly_above_0(x: np.ndarray) -> bool:
    """The mean of numbers [R] is at least `CLEAR` standard errors above 0."""
    if len(x) < 2:
        return False
    return float(x.mean()) * np.sqrt(len(x)) >= CLEAR * float(x.std(ddof=1)) and x.mean() > 0


def counted_logprobs(
    ours: Ours, group: Group, requests: Sequence[EngineRequest], emitted: Sequence[Emitted]
) -> dict[str, np.ndarray]:
    """[R] by each way to count penalised tokens and with no penalties; nothing without rounds.

    What is placed stays in `group.counted`.
    """
    for way in WAYS:
        counted = counted_in(group.texts, requests, emitted, way)
        if counted is None:
            return {}
        group.counted[way] = place(ours, group.texts, group.config, counted=counted)
    plain = place(ours, group.texts, without(group.config, PENALTIES))
    return {way: placed.logprobs for way, placed in group.counted.items()} | {
        SKIPPED: plain.logprobs
    }


def reported(taught: Taught, placed: Placed, rows: np.ndarray) -> Taught:
    """With the logprobs of these rows."""
    listed = None
    if taught.listed is not None:
        listed = placed.listed[rows][:, : taught.listed.shape[1]]
    return dataclasses.replace(taught, logprobs=placed.logprobs[rows], listed=listed)

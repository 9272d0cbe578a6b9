"""What a comparison starts from: requests that can be compared, noise between passes, settings."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from eagle3_jax.comparison import NEAR_TIE
from eagle3_jax.crosscheck.metrics import distance
from eagle3_jax.crosscheck.noise import Noise, measure
from eagle3_jax.crosscheck.ours import Ours, Taught
from eagle3_jax.crosscheck.types import CrosscheckError, EngineRequest, EngineRun
from eagle3_jax.targets.base import Target
from eagle3_jax.trace import Round


def usable(run: EngineRun, vocab_size: int) -> tuple[list[EngineRequest], list[str]]:
    """The requests that have a prompt and an output, and notes on the others.

    Raises:
      CrosscheckError: an id outside the vocabulary; no request is left.
    """
    kept, notes = [], []
    for i, request in enumerate(run.requests):
        wrong = next(
            (t for t in (*request.prompt, *request.output) if not 0 <= t < vocab_size), None
        )
        if wrong is not None:
            raise CrosscheckError(
                f"{run.source}: request {i} ({request.name}) has id {wrong}, the target's "
                f"vocabulary is 0..{vocab_size - 1}: another target, or ids of another tokenizer"
            )
        if request.prompt and request.output:
            kept.append(request)
        else:
            what = "output" if request.prompt else "prompt"
            notes.append(f"request {i} ({request.name}) has no {what}: left out")
    if not kept:
        raise CrosscheckError(f"{run.source}: no request with prompt and output ids")
    return kept, notes


def dtype_of(run: EngineRun, ours: Ours) -> str:
    """The engine's where bounds for it are known, else ours."""
    dtype = run.settings.dtype or ours.dtype
    return dtype if dtype in NEAR_TIE else ours.dtype


def measured(
    run: EngineRun,
    requests: Sequence[EngineRequest],
    ours: Ours,
    taught: Sequence[Taught],
    rounds: Sequence[Sequence[Round]],
    reference: Target | None,
) -> tuple[Noise, list[str]]:
    """The noise of one run beside ours, and what was assumed.

    Args:
      taught: the target on each text, its logprobs as the engine reports them.
      reference: the same target in another dtype, None for none.
    """
    notes: list[str] = []
    dtype = dtype_of(run, ours)
    if dtype != (run.settings.dtype or ours.dtype):
        notes.append(f"dtype {run.settings.dtype!r} is unknown here: bounds of {dtype}")
    logits: list[np.ndarray] = []
    states: list[float] = []
    how = []
    for request, own, walked in zip(requests, taught, rounds, strict=True):
        if request.output_logprobs is not None and not ours.recorded:
            logits.append(request.output_logprobs - own.logprobs)
            how.append("the engine's logprobs beside ours")
        elif dtype in ("float32", "float64") and not ours.recorded:
            logits.append(_between_passes(request, own, walked))
            how.append("one pass of ours beside another")
    if reference is not None and reference is not ours.target:
        other = Ours(reference, None, None)
        for request, own in zip(requests, taught, strict=True):
            exact = other.teach(request.prompt, request.output, ours.boundaries)
            logits.append(exact.margins - own.margins)
            states += [distance(a, b).rel_l2 for a, b in zip(own.aux, exact.aux, strict=True)]
        how.append(f"{dtype} beside {other.dtype}")
    said = ", ".join(dict.fromkeys(how)) or "nothing measured"
    return measure(dtype, logits, states, how=said), notes


def _between_passes(request: EngineRequest, taught: Taught, rounds: Sequence[Round]) -> np.ndarray:
    """Margins of the same tokens from the one long pass and from the verifications."""
    off = []
    for r in rounds:
        start = r.length - len(request.prompt)
        for depth, node in enumerate(r.accepted):
            i = start + depth + 1
            if i < len(request.output):
                off.append(r.margins[node] - taught.margins[i])
    return np.asarray(off)


def settings_of(run: EngineRun, ours: Ours) -> dict[str, Any]:
    """What both sides ran with, for a result."""
    made = dataclasses.asdict(run.settings)
    made.pop("other")
    made["tree"] = None if ours.tree is None else dataclasses.asdict(ours.tree)
    made["compared_as"] = None if ours.draft is None else ours.draft.engine
    made["draft_attention"] = ours.attention
    made["our_dtype"] = ours.dtype
    return made

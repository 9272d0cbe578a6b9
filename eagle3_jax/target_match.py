"""A draft's tensors beside its target's: which ones those are, and how far they differ."""

import dataclasses
from typing import Any

import numpy as np

from eagle3_jax.files.shards import TensorSource
from eagle3_jax.findings import Findings
from eagle3_jax.source_config import TargetFacts

EMBED_NAMES = (
    "embed_tokens.weight",
    "tok_embeddings.weight",
    "embeddings.weight",
    "word_embeddings.weight",
    "wte.weight",
    "embed_in.weight",
)
HEAD_NAMES = ("lm_head.weight", "output.weight", "embed_out.weight")
ROWS = 4096  # compared at a time, so that two vocabularies never sit in memory


@dataclasses.dataclass(frozen=True)
class TargetTensors:
    """Names of the target's embedding and head; None when not found, `head` None when tied."""

    embed: str | None
    head: str | None
    tied: bool


def find_target_tensors(
    source: TensorSource, target: TargetFacts, findings: Findings
) -> TargetTensors:
    """Finds both by the end of their names and their shapes, whatever the family's spelling.

    A missing or doubtful one is a warning (WEIGHT_TARGET_KEY): the conversion needs neither.
    """
    embed = _find(source, EMBED_NAMES, target, "embedding", findings)
    quiet = Findings()
    head = _find(source, HEAD_NAMES, target, "head", quiet)
    tied = head is None and target.tie_word_embeddings
    if head is None and not tied:
        findings.items += quiet.items
    return TargetTensors(embed, head, tied)


def compare_rows(ours: np.ndarray, theirs: np.ndarray) -> dict[str, Any]:
    """Largest difference over the rows both have, in float32, and which rows differ."""
    rows = min(len(ours), len(theirs))
    largest, different, first = 0.0, 0, None
    for start in range(0, rows, ROWS):
        stop = min(start + ROWS, rows)
        a, b = ours[start:stop].astype(np.float32), theirs[start:stop].astype(np.float32)
        with np.errstate(invalid="ignore", over="ignore"):
            gap = np.max(np.abs(a - b), axis=1)
        wrong = np.flatnonzero(~(gap == 0))
        if wrong.size:
            largest = float(np.fmax(largest, np.max(gap)))
            different += wrong.size
            first = start + int(wrong[0]) if first is None else first
    result: dict[str, Any] = {"rows": rows, "rows_different": different, "max_abs_diff": largest}
    return result if first is None else {**result, "first_different_row": first}


def _find(
    source: TensorSource, ends: tuple[str, ...], target: TargetFacts, what: str, findings: Findings
) -> str | None:
    least = target.vocab_size or 1
    named = [n for n in source.names() if any(n == e or n.endswith(f".{e}") for e in ends)]
    fits = []
    for name in named:
        shape = source.shape(name)
        if len(shape) == 2 and shape[0] >= least and shape[1] == target.hidden_size:
            fits.append(name)
    if len(fits) == 1:
        return fits[0]
    found = ", ".join(repr(name) for name in (fits or named)[:4]) or "nothing like it"
    findings.warn(
        "WEIGHT_TARGET_KEY",
        f"{target.where}: no single tensor is the target's {what} of shape [>= {least}, "
        f"{target.hidden_size}]: found {found}",
    )
    return None

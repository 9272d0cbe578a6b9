"""Runs single rows again with one thing wrong in their cache, mask or positions.

When a row's inputs are equal and its result is not, what it read is wrong. The candidates are the
faults reports name: a row never written, left from drafting, of another slot, not moved to the
front after a tree was verified; a wrong bit of the mask; a position off by one.
"""

import dataclasses

import numpy as np

from eagle3_jax.crosscheck.draft_pass import passed
from eagle3_jax.crosscheck.evidence import Evidence, Named
from eagle3_jax.crosscheck.probe_draft import DraftRows
from eagle3_jax.crosscheck.probe_rows import widened
from eagle3_jax.crosscheck.probe_target import TargetRows
from eagle3_jax.crosscheck.result import Divergence
from eagle3_jax.crosscheck.types import DumpedRound
from eagle3_jax.crosscheck.variants import flag_variants


def draft_cause(
    fault: Divergence, found: DumpedRound, expected: DumpedRound, evidence: Evidence
) -> Named:
    """Why a draft's rows with the right inputs give another result."""
    name = fault.tensor or ""
    ours = evidence.ours
    draft = ours.draft
    assert draft is not None
    theirs = np.asarray(found.tensors[name])
    rows = DraftRows.of(name, found, expected, evidence)
    if name.startswith(("prefill.", "extend_")):
        for variant in flag_variants(draft):
            made = passed(variant.draft, evidence, name, found)
            if made is not None and evidence.same(widened(theirs), made):
                return variant.code, variant.words
    if rows is not None:
        named = rows.search(widened(theirs), name, evidence)
        if named is not None:
            return named
    if name.startswith(("draft_", "extend_")):
        return (
            "KV_OTHER",
            "its inputs, tokens and positions are right: what it read of the draft's cache is not",
        )
    return None


def target_cause(
    fault: Divergence, found: DumpedRound, expected: DumpedRound, evidence: Evidence
) -> Named:
    """Why verified nodes with the right tokens and positions give another result."""
    if evidence.ours.recorded or expected.mask is None:
        return None
    name = fault.tensor or ""
    theirs = widened(np.asarray(found.tensors[name]))
    named = TargetRows(found, expected, evidence).search(theirs, name, evidence)
    return named or (
        "KV_OTHER",
        "the nodes' tokens and positions are right: what they read of the target's cache, or their "
        "mask, is not",
    )


def state_cause(rows: np.ndarray, index: int, length: int, evidence: Evidence) -> Named:
    """Why the states [r, A, E] of a round's accepted nodes are others, where only answers tell.

    Args:
      index, length: of our round that these nodes belong to.
    """
    if evidence.ours.recorded or evidence.ours.draft is None:
        return None
    theirs = DumpedRound(index, length)
    request = dataclasses.replace(evidence.request, rounds=[theirs])
    expected = next((mine for _, mine in evidence.ours.pinned(request)), None)
    if expected is None or expected.accepted is None or expected.mask is None:
        return None
    probe = TargetRows(theirs, expected, evidence)
    only = expected.accepted[: len(rows)]
    return probe.search(widened(rows[: len(only)]), "target_aux", evidence, only)

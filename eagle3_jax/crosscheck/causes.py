"""Names the cause of a divergence from what else the engine's tensors are equal to."""

import dataclasses
import itertools
from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np

from eagle3_jax.config import TreeConfig
from eagle3_jax.crosscheck import probes
from eagle3_jax.crosscheck.evidence import Evidence, Named
from eagle3_jax.crosscheck.metrics import distance
from eagle3_jax.crosscheck.result import Divergence
from eagle3_jax.crosscheck.states import known_states, name_states
from eagle3_jax.crosscheck.types import DumpedRound, EngineRequest
from eagle3_jax.crosscheck.variants import map_variants


def explain(
    fault: Divergence, found: DumpedRound, expected: DumpedRound, evidence: Evidence
) -> Divergence:
    """The divergence with its cause, where the tensors tell; the verdict's kind may follow it."""
    tensor = fault.tensor or ""
    named: Named = None
    kind = fault.kind
    value = found.tensors.get(tensor)
    if value is not None and value.dtype.kind == "f" and not np.isfinite(value).all():
        named = ("NUMERIC_NAN", f"NaN or infinity in {tensor}")
    elif tensor.endswith("_aux"):
        named, kind = _aux(fault, found, expected, evidence)
    elif tensor.endswith("positions") or tensor.startswith("draft_positions"):
        named = _positions(tensor, found, expected)
    elif tensor.startswith(("draft_tokens", "seed_ids", "candidate_tokens")) or tensor == "tokens":
        named = _ids(tensor, found, expected, evidence)
        if tensor == "tokens" and named is not None:
            kind = "draft differs"
    elif tensor.startswith("draft_input") or tensor == "seed_hidden":
        named = _input(tensor, found, expected, evidence)
    elif tensor == "mask":
        named = ("TREE_MASK", "a mask bit is wrong")
    elif tensor == "parents":
        named = ("TREE_PARENT", "a node hangs under another parent")
    elif tensor == "target_logits":
        named = probes.target_cause(fault, found, expected, evidence)
    elif tensor in ("accepted", "num_correct", "bonus", "extend_tokens"):
        named = _accepted(found, expected, evidence)
    elif tensor.startswith(("prefill.", "extend_", "draft_hidden", "draft_logits")):
        named = probes.draft_cause(fault, found, expected, evidence)
    if named is None:
        return fault
    if kind == "target differs" and named[0].startswith(("TREE_", "POS_")):
        kind = "tree differs"
    return dataclasses.replace(fault, kind=kind, code=named[0], cause=named[1])


def over_rounds(
    first: Divergence,
    faults: Sequence[Divergence],
    request: EngineRequest,
    tree: TreeConfig,
) -> Divergence:
    """What all differing rounds of a request have in common, where one alone shows no cause."""
    rounds = request.rounds or []
    wrong = {d.round for d in faults}
    full = {
        after.index
        for before, after in itertools.pairwise(rounds)
        if before.num_correct == tree.num_steps
    }
    known = first.code not in (None, "KV_OTHER")
    if known or not full or not wrong <= full or len(wrong) < 2:
        return first
    words = (
        f"only rounds after a full accept differ ({len(wrong)} of {len(full)}; the other "
        f"{len(rounds) - len(full)} are equal): the draft's cache lacks the last accepted row"
    )
    return dataclasses.replace(first, code="KV_FULL_ACCEPT_HOLE", cause=words)


def _aux(
    fault: Divergence, found: DumpedRound, expected: DumpedRound, evidence: Evidence
) -> tuple[Named, str]:
    name = fault.tensor or ""
    rows = np.asarray(found.tensors[name])
    wanted = np.asarray(expected.tensors[name])
    rows = rows.reshape(len(rows), -1, wanted.shape[-1])
    kind = fault.kind
    if name == "target_aux":
        named = probes.target_cause(fault, found, expected, evidence)
        if named is not None:
            return named, kind
    path = expected.accepted or []
    nodes = found.tensors.get("target_aux", expected.tensors.get("target_aux"))
    if name == "extend_aux" and nodes is not None and path != list(range(len(path))):
        nodes = np.asarray(nodes)
        nodes = nodes.reshape(len(nodes), rows.shape[1], -1)
        if evidence.same(rows, nodes[: len(rows)]):
            dense = list(range(len(rows)))
            return (
                "TREE_NOT_COMPACTED",
                f"dense prefix used: states of nodes {dense} went on instead of those of the "
                f"accepted path {path}",
            ), kind
    positions = np.arange(len(rows)) + (0 if name.startswith("prefill.") else found.length)
    if name == "target_aux":
        positions = np.asarray(expected.positions)[: len(rows)]
        on_path = np.isin(np.arange(len(rows)), path)
        rows, positions = rows[on_path], positions[on_path]
    known = known_states(evidence.number, evidence.requests, evidence.ours, evidence.taught)
    named = name_states(rows, positions, known, evidence.noise)
    if named is not None and named[0].startswith("AUX") and name.endswith("target_aux"):
        kind = "draft differs"
    return named, kind


def _positions(tensor: str, found: DumpedRound, expected: DumpedRound) -> Named:
    def get(one: DumpedRound) -> np.ndarray:
        value = one.positions if tensor == "positions" else one.tensors[tensor]
        return np.asarray(value)

    theirs, mine = get(found), get(expected)
    if theirs.shape != mine.shape:
        return None
    steps = set((theirs - mine).tolist())
    if len(steps) == 1:
        step = steps.pop()
        return "POS_OFF_BY_ONE" if abs(step) == 1 else "POS_OFFSET", f"positions off by {step:+d}"
    wrong = np.flatnonzero(theirs != mine).tolist()
    if len(steps - {0}) == 1:
        step = (steps - {0}).pop()
        code = "POS_OFF_BY_ONE" if abs(step) == 1 else "POS_OFFSET"
        return code, f"positions of rows {wrong} off by {step:+d}"
    return "POS_OFFSET", f"positions of rows {wrong} are others"


def _ids(tensor: str, found: DumpedRound, expected: DumpedRound, evidence: Evidence) -> Named:
    def get(one: DumpedRound) -> np.ndarray:
        value = one.tokens if tensor == "tokens" else one.tensors[tensor]
        return np.asarray(value).reshape(-1)

    theirs, mine = get(found), get(expected)
    if tensor == "tokens":
        theirs, mine = theirs[1:], mine[1:]
    draft = evidence.ours.draft
    assert draft is not None
    table = np.asarray(draft.draft_to_target[...])
    inverse = {int(t): i for i, t in enumerate(table)}
    if theirs.shape == mine.shape and all(int(t) in inverse for t in mine):
        rows = np.array([inverse[int(t)] for t in mine])
        upto = 1 if tensor == "tokens" else len(rows)  # later tokens follow from the first
        for variant in map_variants(draft):
            wrong = np.asarray(variant.draft.draft_to_target[...])[rows]
            if (theirs[:upto] == wrong[:upto]).all():
                return variant.code, variant.words
    topk = evidence.ours.tree.topk if evidence.ours.tree else 1
    if topk > 1 and (named := _own_scores(theirs, tensor, expected, topk)):
        return named
    for j, other in enumerate(evidence.requests):
        for one in other.rounds or () if j != evidence.number else ():
            value = one.tokens if tensor == "tokens" else one.tensors.get(tensor)
            if one.index != found.index or value is None:
                continue
            given = np.asarray(value).reshape(-1)
            if len(theirs) > 1 and np.array_equal(given[-len(theirs) :], theirs):
                return "BATCH_WRONG_ROW", f"they are the drafts of request {j}"
    if sorted(theirs.tolist()) == sorted(mine.tolist()):
        return "TREE_ORDER", "the right tokens in another order"
    return None


def _input(tensor: str, found: DumpedRound, expected: DumpedRound, evidence: Evidence) -> Named:
    """A drafted row's state: another request's, another row's."""
    theirs = np.asarray(found.tensors[tensor])
    theirs = theirs if theirs.ndim == 1 else theirs[0]
    for j, other in enumerate(evidence.requests):
        for one in other.rounds or ():
            value = one.tensors.get(tensor)
            if value is None or (j == evidence.number and one.index == found.index):
                continue
            given = np.asarray(value)
            given = given if given.ndim == 1 else given[0]
            if not evidence.same(theirs, given):
                continue
            if j != evidence.number:
                return "BATCH_WRONG_ROW", f"matches state of request {j}, round {one.index}"
            return "KV_STALE_STATE", f"it is still the state of round {one.index}"
    before = next((r for r in evidence.request.rounds or () if r.index == found.index - 1), None)
    if before is not None and "extend_hidden" in before.tensors:
        rows = np.asarray(before.tensors["extend_hidden"])
        for row, state in enumerate(rows[:-1]):
            if evidence.same(theirs, state):
                return (
                    "ALIGN_WRONG_ROW",
                    f"extended row {row} seeds the round, expected row {len(rows) - 1}",
                )
    own = expected.tensors.get(tensor)
    if own is not None and (named := _fed_back(theirs, np.asarray(own), evidence)):
        return named
    if own is not None:
        own = np.asarray(own)
        own = own if own.ndim == 1 else own[0]
        apart = distance(theirs, own)
        if apart.finite and apart.cosine > 0.999:
            return "NORM_FEEDBACK", f"the right direction, norm ratio {apart.norm_ratio:.4f}"
    return None


def _fed_back(theirs: np.ndarray, own: np.ndarray, evidence: Evidence) -> Named:
    """The other of the two states a draft may feed back."""
    draft = evidence.ours.draft
    assert draft is not None
    own = own if own.ndim == 1 else own[0]
    if draft.norm_final is None or draft.config.feedback != "pre_norm":
        return None
    normed = np.asarray(draft.norm_final(jnp.asarray(own)[None])[0])
    if evidence.same(theirs, normed):
        return (
            "NORM_FEEDBACK",
            "norm flag flipped: the state after the final norm is fed back (norm_output), not the "
            "one before it",
        )
    return None


def _own_scores(theirs: np.ndarray, tensor: str, expected: DumpedRound, topk: int) -> Named:
    """Beams by their own probability instead of the product along their path."""
    scores, tokens = (expected.tensors.get(f"candidate_{n}") for n in ("scores", "tokens"))
    parents = expected.tensors.get("candidate_parents")
    if (
        scores is None
        or tokens is None
        or parents is None
        or not tensor.startswith("draft_tokens.")
    ):
        return None
    level, k = int(tensor.split(".")[1]), topk
    if level < 1:
        return None
    part = np.arange(k + (level - 1) * k * k, k + level * k * k)
    own = np.asarray(scores)[part] / np.asarray(scores)[np.asarray(parents)[part]]
    best = np.asarray(tokens)[part][np.argsort(-own, kind="stable")[:k]]
    if np.array_equal(best, theirs):
        return (
            "TREE_SCORES",
            "nodes are ranked by their own probability, not by the product along their path",
        )
    return None


def _accepted(found: DumpedRound, expected: DumpedRound, evidence: Evidence) -> Named:
    """The engine's own target logits say what it should have committed."""
    logits = found.tensors.get("target_logits")
    path = expected.accepted if found.accepted is None else found.accepted
    text = [*evidence.request.prompt, *evidence.request.output]
    if logits is not None and path is not None:
        choice = np.asarray(logits).argmax(-1)
        for depth, node in enumerate(path):
            at = found.length + depth + 1
            if at < len(text) and node < len(choice) and choice[node] != text[at]:
                return (
                    "TOKEN_NOT_THE_ENGINES_CHOICE",
                    f"the engine's own target logits after node {node} say {choice[node]}, it "
                    f"committed {text[at]}: an accepted token was exchanged",
                )
    theirs = found.num_correct if found.num_correct is not None else len(found.accepted or [0]) - 1
    mine = expected.num_correct or 0
    if theirs < mine:
        return "UNDER_ACCEPTED", f"{mine} drafts match the target, {theirs} were accepted"
    if theirs > mine:
        return "OVER_ACCEPTED", f"{mine} drafts match the target, {theirs} were accepted"
    return None

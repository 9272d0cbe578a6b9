"""Our rounds against a recorded request of the real SGLang, number by number."""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import sglang_views as views
from sglang_goldens import Request

from eagle3_jax.config import TreeConfig
from eagle3_jax.trace import Round

SCORE_TOLERANCE = 1e-5
STATE_TOLERANCE = 1e-4
TIE = 1e-6
"""Candidates whose recorded scores are closer than this may come in either order."""


class Comparison:
    """Differences in words.

    Attributes:
      differences: what is not as recorded; empty when all is equal.
      tied: rounds in which candidates inside a gap under `TIE` came in another order; their nodes
        are not compared one by one, what was accepted is.
      compared: number of arrays looked at.
    """

    def __init__(self):
        self.differences: list[str] = []
        self.tied: list[int] = []
        self.compared = 0

    def matches(self, found: Any, expected: Any) -> bool:
        """Equality without a verdict: the caller decides what a difference means."""
        self.compared += 1
        return np.array_equal(found, expected)

    def same(self, what: str, found: Any, expected: Any) -> bool:
        self.compared += 1
        a, b = np.asarray(found), np.asarray(expected)
        if a.shape == b.shape and bool((a == b).all()):
            return True
        self.differences.append(f"{what}: {a.tolist()}, recorded {b.tolist()}")
        return False

    def close(self, what: str, found: Any, expected: Any, tolerance: float) -> bool:
        self.compared += 1
        a, b = np.asarray(found, np.float64), np.asarray(expected, np.float64)
        if a.shape != b.shape:
            self.differences.append(f"{what}: shape {a.shape}, recorded {b.shape}")
            return False
        worst = float(np.abs(a - b).max(initial=0.0))
        if worst <= tolerance:
            return True
        self.differences.append(f"{what}: off by {worst:.3g}, tolerance {tolerance:g}")
        return False


def compare_with_golden(
    golden: Request,
    rounds: Sequence[Round],
    *,
    tokens: list[int] | None = None,
    stats: dict[str, Any] | None = None,
) -> Comparison:
    """Every number of our rounds (with tensors) against the recorded request.

    Args:
      tokens: the new tokens, where the caller has them. stats: our statistics, likewise.
    """
    result = Comparison()
    result.same(f"{golden.name} verifications", len(rounds), golden.num_rounds)
    emitted = [rounds[0].tokens[0]] if rounds else []
    for index, (ours, number) in enumerate(zip(rounds, range(golden.num_rounds), strict=False)):
        assert index == number
        compare_round(result, golden, index, ours)
        emitted += ours.emitted
    result.same(f"{golden.name} output ids", emitted, golden.output_ids)
    if tokens is not None:
        result.same(f"{golden.name} returned ids", tokens, golden.output_ids)
    if stats is not None:
        for key in (*golden.statistics, "prompt_tokens", "completion_tokens", "finish_reason"):
            found = stats.get(key)
            result.compared += 1
            if found != golden.meta_info[key]:
                expected = golden.meta_info[key]
                result.differences.append(f"{golden.name} {key}: {found}, recorded {expected}")
    return result


def compare_round(result: Comparison, golden: Request, index: int, ours: Round):
    """One round: candidates, pruned tree, verification, extend."""
    assert ours.tensors is not None
    label = f"{golden.name} round {index}"
    result.same(f"{label} length", ours.length, golden.at("seq_len", index))
    result.same(f"{label} root", ours.tokens[0], golden.at("root", index))
    if index == 0:
        compare_prefill(result, golden, ours)
    state = compare_candidates(result, golden, index, ours, label)
    if state == "tied":
        result.tied.append(index)
    elif state == "equal":
        compare_tree(result, golden, index, ours, label)
    nodes = golden.at("accept_index", index)
    count = int(golden.at("accept_len", index))
    result.same(f"{label} accept length", ours.accept_length, count)
    result.same(f"{label} bonus", ours.bonus, golden.at("bonus", index))
    accepted = golden.at("predict", index)[nodes[nodes >= 0]]
    mine = np.asarray(ours.predicted)[ours.accepted]
    result.same(f"{label} committed tokens", mine, accepted)
    extended = golden.at("extend_tokens", index)[:count]
    result.same(f"{label} extend tokens", ours.tensors["extend_tokens"][:count], extended)
    if golden.has_tensors(index):
        for name in ("extend_hidden", "extend_logits"):
            found, expected = ours.tensors[name], golden.tensor(name, index)
            if name == "extend_hidden":
                found, expected = found[:count], expected[:count]
            result.close(f"{label} {name}", found, expected, STATE_TOLERANCE)


def compare_prefill(result: Comparison, golden: Request, ours: Round):
    """The prefill's target states and logits, and the draft's over the prompt."""
    assert ours.tensors is not None
    rows = len(golden.prompt)
    arrays = golden.arrays
    label = f"{golden.name} prefill"
    aux = ours.tensors["prefill.target_aux"][:rows].reshape(rows, -1)
    result.close(f"{label} states", aux, arrays["prefill/target_hidden"], STATE_TOLERANCE)
    logits = ours.tensors["prefill.target_logits"]
    result.close(f"{label} logits", logits, arrays["prefill/target_logits"], STATE_TOLERANCE)
    found = ours.tensors["prefill.extend_tokens"][:rows]
    result.same(f"{label} draft tokens", found, arrays["prefill/draft_tokens"])
    logits = ours.tensors["prefill.extend_logits"]
    result.close(f"{label} draft logits", logits, arrays["prefill/draft_logits"], STATE_TOLERANCE)
    hidden = ours.tensors["seed_hidden"]
    result.close(f"{label} draft state", hidden, arrays["prefill/draft_hidden"], STATE_TOLERANCE)


def compare_candidates(
    result: Comparison, golden: Request, index: int, ours: Round, label: str
) -> str:
    """Level by level: tokens, scores, expanded nodes, states; then the pruning.

    Returns:
      "equal", "different", or "tied" when the first difference is an order inside a gap under TIE.
    """
    assert ours.tensors is not None
    mine, tree = ours.tensors, golden.tree
    k = tree.topk
    scores, tokens = golden.candidates("scores", index), golden.candidates("tokens", index)
    expanded = views.parent_list(mine["candidate_parents"], tree)
    recorded = golden.at("parent_list", index)
    compare_seed(result, golden, index, ours, label)
    for level, part in levels(tree):
        found, expected = mine["candidate_tokens"][part], tokens[part]
        if not result.matches(found, expected):
            if k > 1 and tied_tokens(found, expected, scores[part], k):
                return "tied"
            result.same(f"{label} level {level} tokens", found, expected)
            return "different"
        if k > 1:
            values = mine["candidate_scores"][part]
            result.close(f"{label} level {level} scores", values, scores[part], SCORE_TOLERANCE)
        if level == tree.num_steps - 1:
            break
        chosen = slice(1 + level * k, 1 + (level + 1) * k)
        found, expected = expanded[chosen], recorded[chosen]
        if not result.matches(found, expected):
            if level and (np.abs(scores[found] - scores[expected]) < TIE).all():
                return "tied"
            result.same(f"{label} level {level} expanded nodes", found, expected)
            return "different"
        compare_forward(result, golden, index, ours, level, label)
    found, expected = mine["selected"], golden.at("selected", index)
    if not result.matches(found, expected):
        gaps = np.abs(np.sort(scores[found]) - np.sort(scores[expected]))
        if k > 1 and (gaps < TIE).all():
            return "tied"
        result.same(f"{label} selected", found, expected)
        return "different"
    return "equal"


def levels(tree: TreeConfig) -> Iterator[tuple[int, slice]]:
    """Each level's slice of the flat candidates."""
    k = tree.topk
    yield 0, slice(0, k)
    for level in range(1, tree.num_steps):
        yield level, slice(k + (level - 1) * k * k, k + level * k * k)


def tied_tokens(found: np.ndarray, expected: np.ndarray, scores: np.ndarray, k: int) -> bool:
    """Whether each beam's children are the same up to the order inside gaps under TIE."""
    for mine, theirs, score in zip(
        found.reshape(-1, k), expected.reshape(-1, k), scores.reshape(-1, k), strict=True
    ):
        place = {int(token): i for i, token in enumerate(theirs)}
        if sorted(map(int, mine)) != sorted(place):
            return False
        moved = score[[place[int(token)] for token in mine]]
        if (np.abs(moved - score) >= TIE).any():
            return False
    return True


def compare_seed(result: Comparison, golden: Request, index: int, ours: Round, label: str):
    """The state carried into the round. A later round of a chain has no probability: 1.0."""
    assert ours.tensors is not None
    probs = golden.at("seed_probs", index)
    if golden.tree.topk == 1 and index > 0:
        result.same(f"{label} chain scores", ours.scores, np.ones(golden.tree.num_draft_tokens))
        result.same(f"{label} recorded chain probability", probs, [1.0])
    else:
        found = ours.tensors["seed_probs"]
        result.close(f"{label} seed probabilities", found, probs, SCORE_TOLERANCE)
    if golden.has_tensors(index):
        found, expected = ours.tensors["seed_hidden"], golden.tensor("seed_hidden", index)
        result.close(f"{label} seed state", found, expected, STATE_TOLERANCE)


def compare_forward(
    result: Comparison, golden: Request, index: int, ours: Round, level: int, label: str
):
    """One draft forward: inputs exactly, outputs within the tolerance."""
    assert ours.tensors is not None
    for name in ("tokens", "positions"):
        found = ours.tensors[f"draft_{name}.{level}"]
        result.same(
            f"{label} forward {level} {name}", found, golden.at(f"step{level}/{name}", index)
        )
    if golden.has_tensors(index):
        for name in ("logits", "hidden"):
            found = ours.tensors[f"draft_{name}.{level}"]
            expected = golden.tensor(f"step{level}/{name}", index)
            result.close(f"{label} forward {level} {name}", found, expected, STATE_TOLERANCE)


def compare_tree(result: Comparison, golden: Request, index: int, ours: Round, label: str):
    """The verified nodes and what the target says about them."""
    assert ours.tensors is not None
    tree = golden.tree
    nodes = tree.num_draft_tokens
    result.same(f"{label} draft tokens", ours.tokens, golden.at("tokens", index))
    result.same(f"{label} positions", ours.positions, golden.at("positions", index))
    mask = views.ancestor_mask(ours.tensors["ancestors"], nodes)
    result.same(f"{label} mask", mask, golden.at("mask", index))
    names = ("retrieve_index", "retrieve_next_token", "retrieve_next_sibling")
    for name, found in zip(names, views.retrieve_arrays(ours.parents), strict=True):
        result.same(f"{label} {name}", found, golden.at(name, index))
    accepted = views.accept_index(ours.accepted, tree.num_steps)
    result.same(f"{label} accept index", accepted, golden.at("accept_index", index))
    if tree.topk > 1:
        chosen = golden.candidates("scores", index)[golden.at("selected", index)]
        found = ours.scores[1:]
        result.close(f"{label} node scores", found, chosen, SCORE_TOLERANCE)
    if golden.has_tensors(index):
        aux = ours.tensors["target_aux"].reshape(nodes, -1)
        expected = golden.tensor("target_hidden", index)
        result.close(f"{label} target states", aux, expected, STATE_TOLERANCE)
        logits, expected = ours.tensors["target_logits"], golden.tensor("target_logits", index)
        result.close(f"{label} target logits", logits, expected, STATE_TOLERANCE)

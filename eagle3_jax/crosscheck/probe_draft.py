"""Drafted and extended rows, run again under candidates."""

import dataclasses
from collections.abc import Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from eagle3_jax.cache import KVCache
from eagle3_jax.crosscheck.draft_pass import committed, draft_pass, draft_rows
from eagle3_jax.crosscheck.evidence import Evidence
from eagle3_jax.crosscheck.probe_rows import (
    TOGETHER,
    Candidate,
    ProbedRows,
    bucket,
    round_before,
    rows_from,
    stacked,
)
from eagle3_jax.crosscheck.types import DumpedRound
from eagle3_jax.modules import take_apart
from eagle3_jax.ops.bits import pack_bits


class DraftRows(ProbedRows):
    """Drafted rows of a chain or of a tree's first level, or extended rows."""

    def __init__(self, found: DumpedRound, evidence: Evidence, rows: dict[str, np.ndarray]):
        positions = np.asarray(rows["positions"]).astype(np.int32)
        beams = len(positions) > 1 and bool((positions == positions[0]).all())
        square = np.eye if beams else lambda n: np.tril(np.ones((n, n)))
        window = rows.get("window", square(len(positions)).astype(bool))
        super().__init__(found.length, positions, window, bucket(found.length + len(positions)))
        self.inputs = rows
        draft = evidence.ours.draft
        assert draft is not None
        self.draft = draft
        self.shared = evidence.ours.target.shared()
        self.leaves, self.structure = take_apart(draft)
        following, aux = committed(evidence, self.slots)
        self.cache, *_ = draft_pass(self.structure, self.leaves, self.shared, following, aux)
        self.before = round_before(evidence, found.index)
        self.left = None if self.before is None else self._drafted(self.before)

    @classmethod
    def of(
        cls, name: str, found: DumpedRound, expected: DumpedRound, evidence: Evidence
    ) -> "DraftRows | None":
        """None where the rows are no chain, or their inputs are not known."""
        draft = evidence.ours.draft
        assert draft is not None
        given = expected.tensors
        if name in ("extend_hidden", "extend_logits"):
            aux = np.asarray(given["target_aux"])[expected.accepted or [0]]
            fused = np.asarray(draft.fuse(jnp.asarray(aux)[None])[0])
            rows = {
                "tokens": given["extend_tokens"],
                "hidden": fused,
                "positions": given["extend_positions"],
            }
            return cls(found, evidence, rows)
        tree = evidence.ours.tree
        if not name.startswith(("draft_hidden.", "draft_logits.")) or tree is None:
            return None
        level = int(name.split(".")[1])
        if level and tree.topk > 1:
            return cls(found, evidence, _beams(given, level, tree.topk, evidence))
        return cls(found, evidence, _levels(given, level))

    def _drafted(self, before: DumpedRound) -> KVCache | None:
        """The committed rows of the round before as drafting wrote them."""
        levels = [n for n in before.tensors if n.startswith("draft_input.")]
        count = min(len(levels), self.length - before.length)
        if count < 1 or len(before.tensors["draft_tokens.0"]) > 1:
            return None
        rows = _levels(before.tensors, count - 1)
        sees = np.zeros((count, self.slots), bool)
        sees[:, : before.length] = True
        sees[:, before.length : before.length + count] = np.tril(np.ones((count, count), bool))
        _, _, cache = draft_rows(
            self.structure,
            self.leaves,
            self.shared,
            self.cache,
            jnp.asarray(rows["tokens"], jnp.int32)[None],
            jnp.asarray(rows["hidden"])[None],
            jnp.asarray(rows["positions"], jnp.int32)[None],
            jnp.asarray(pack_bits(sees)[None]),
            jnp.asarray([before.length], jnp.int32),
        )
        return cache

    def candidates(self) -> Iterator[Candidate]:
        """Also rows that drafting wrote, and those of another branch."""
        yield from map(self._renamed, super().candidates())
        if "window" in self.inputs:
            yield from self._of_another_branch()
        before, left = self.before, self.left
        if before is None or left is None:
            return
        count = min(self.length - before.length, len(self.drafted(before)))
        slots = [before.length + i for i in range(count)]
        if count:
            yield Candidate(
                "KV_NOT_REFRESHED",
                f"the draft's rows {slots} are still those drafting wrote, not rebuilt from target "
                "states",
                self.sees,
                self.positions,
                lambda cache: rows_from(cache, left, slots),
            )
        for slot in slots if count > 1 else ():
            yield Candidate(
                "KV_STALE_ROW",
                f"stale KV row: the draft's row {slot} is still what drafting wrote",
                self.sees,
                self.positions,
                lambda cache, slot=slot: rows_from(cache, left, [slot]),
            )

    def _renamed(self, one: Candidate) -> Candidate:
        """A last row that is missing after a full accept has a name of its own."""
        before = self.before
        last = one.code == "KV_ROW_MISSING" and f"row {self.length - 1} " in one.words
        if not last or before is None or not before.num_correct:
            return one
        if before.num_correct != len(before.tokens or [0]) - 1:
            return one
        words = f"hole after full accept: row {self.length - 1} of the draft's cache is missing"
        return dataclasses.replace(one, code="KV_FULL_ACCEPT_HOLE", words=words)

    def _of_another_branch(self) -> Iterator[Candidate]:
        """A branch that reads rows of another: pages shared without a copy."""
        k = int(self.inputs["topk"])
        levels = len(self.positions) // k
        for b in range(k):
            for c in range(k):
                for count in range(1, levels + 1) if b != c else ():
                    sees = self.sees.copy()
                    for row in range(b, len(sees), k):
                        last = row // k
                        for one in range(max(0, last + 1 - count), last + 1):
                            sees[row, self.length + one * k + c] = True
                    places = ", ".join(str(self.length + i) for i in range(levels - count, levels))
                    yield Candidate(
                        "TREE_PAGED_COPY",
                        f"branch {b} also sees positions {places} of branch {c}: a page that "
                        "branches share was not copied",
                        sees,
                        self.positions,
                    )

    def drafted(self, before: DumpedRound) -> list[str]:
        """Levels of the round before that a forward was run for."""
        return [n for n in before.tensors if n.startswith("draft_input.")]

    def run(self, chosen: Sequence[Candidate]) -> tuple[dict[str, np.ndarray], ...]:
        """States as fed back and logits of each, under the names of both kinds of rows."""
        cache, positions, bits = stacked(self.cache, chosen)
        tokens = np.asarray(self.inputs["tokens"], np.int32)
        hidden = jnp.asarray(self.inputs["hidden"])
        states, logits, _ = jax.device_get(
            draft_rows(
                self.structure,
                self.leaves,
                self.shared,
                cache,
                jnp.broadcast_to(jnp.asarray(tokens), (TOGETHER, len(tokens))),
                jnp.broadcast_to(hidden, (TOGETHER, *hidden.shape)),
                positions,
                bits,
                jnp.full((TOGETHER,), self.length, jnp.int32),
            )
        )
        found = []
        for i in range(len(chosen)):
            named: dict[str, np.ndarray] = {}
            for kind in ("draft", "extend"):
                named |= {f"{kind}_hidden": states[i], f"{kind}_logits": logits[i]}
            if "topk" in self.inputs:
                k = int(self.inputs["topk"])
                last = {key: v[-k:] for key, v in named.items() if key.startswith("draft_")}
                named |= last
            if "level" in self.inputs:
                last = {k: v[-1:] for k, v in named.items() if k.startswith("draft_")}
                named |= last
            found.append(named)
        return tuple(found)


def _levels(given: dict[str, np.ndarray], level: int) -> dict[str, np.ndarray]:
    """A chain's rows of levels 0 .. level, or the beams of a tree's level 0."""
    first = np.asarray(given["draft_tokens.0"]).reshape(-1)
    if level == 0 and len(first) > 1:
        names = ("draft_tokens.0", "draft_input.0", "draft_positions.0")
        values = [np.asarray(given[name]) for name in names]
        return dict(zip(("tokens", "hidden", "positions"), values, strict=True))
    span = range(level + 1)
    return {
        "tokens": np.array(
            [int(np.asarray(given[f"draft_tokens.{i}"]).reshape(-1)[0]) for i in span]
        ),
        "hidden": np.stack([np.asarray(given[f"draft_input.{i}"])[0] for i in span]),
        "positions": np.array(
            [int(np.asarray(given[f"draft_positions.{i}"]).reshape(-1)[0]) for i in span]
        ),
        "level": np.array(level),
    }


def _beams(
    given: dict[str, np.ndarray], level: int, k: int, evidence: Evidence
) -> dict[str, np.ndarray]:
    """All beams of levels 0 .. level, and which earlier rows each sees."""
    span = range(level + 1)
    window = np.zeros(((level + 1) * k,) * 2, bool)
    parents = given["candidate_parents"]
    for row in range(len(window)):
        at, beam = divmod(row, k)
        while True:
            window[row, at * k + beam] = True
            if not at:
                break
            if evidence.ours.attention == "ancestors":
                chosen = parents[k + at * k * k + beam * k]  # candidate this beam expands
                beam = int(chosen - (k + (at - 1) * k * k)) // k
            at -= 1
    join = {"tokens": "draft_tokens", "hidden": "draft_input", "positions": "draft_positions"}
    made = {
        ours: np.concatenate([np.asarray(given[f"{theirs}.{i}"]) for i in span])
        for ours, theirs in join.items()
    }
    return made | {"window": window, "topk": np.array(k)}

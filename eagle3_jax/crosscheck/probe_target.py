"""The nodes of a verification, run again under candidates."""

import functools
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from eagle3_jax.cache import KVCache
from eagle3_jax.config import Boundary
from eagle3_jax.crosscheck.evidence import Evidence
from eagle3_jax.crosscheck.probe_rows import (
    TOGETHER,
    Candidate,
    ProbedRows,
    bucket,
    round_before,
    row_moved,
    rows_from,
    stacked,
)
from eagle3_jax.crosscheck.types import DumpedRound
from eagle3_jax.layers import Rows
from eagle3_jax.modules import Structure, take_apart
from eagle3_jax.ops.bits import pack_bits


class TargetRows(ProbedRows):
    """The nodes of a verification."""

    def __init__(self, found: DumpedRound, expected: DumpedRound, evidence: Evidence):
        assert expected.mask is not None
        text = [*evidence.request.prompt, *evidence.request.output]
        window = expected.mask.astype(bool)
        slots = bucket(found.length + len(window))
        positions = np.asarray(expected.positions, np.int32)
        super().__init__(found.length, positions, window, slots)
        self.tokens = np.asarray(expected.tokens, np.int32)
        target = evidence.ours.target
        self.leaves, self.structure = take_apart(target)  # type: ignore[arg-type]
        self.boundaries = evidence.ours.boundaries
        self.cache = self._prefilled(text[: found.length])
        self.before = round_before(evidence, found.index)
        self.text = text
        self.kept = None
        if self.before is not None:
            self.kept = self._uncompacted(self.before)

    def _prefilled(self, text: Sequence[int]) -> KVCache:
        padded = np.zeros((1, self.slots), np.int32)
        padded[0, : len(text)] = text
        return _target_prefill(self.structure, self.leaves, padded)

    def _uncompacted(self, before: DumpedRound) -> KVCache | None:
        """The cache as the round before left it, nodes where they were verified."""
        if before.tokens is None or before.mask is None:
            return None
        n = len(before.tokens)
        sees = np.zeros((n, self.slots), bool)
        sees[:, : before.length] = True
        sees[:, before.length : before.length + n] = before.mask
        cache = self._prefilled(self.text[: before.length])
        _, _, cache = _target_rows(
            self.structure,
            self.leaves,
            cache,
            jnp.asarray([before.tokens], jnp.int32),
            jnp.asarray([before.positions], jnp.int32),
            jnp.asarray(pack_bits(sees)[None]),
            jnp.asarray([before.length], jnp.int32),
            boundaries=self.boundaries,
        )
        return cache

    def candidates(self) -> Iterator[Candidate]:
        """Also rows of the round before that were not moved, bits of the mask, single positions."""
        yield from super().candidates()
        before, left = self.before, self.kept
        if before is not None and left is not None and before.accepted is not None:
            count = self.length - before.length
            path = before.accepted[:count]
            moved = [d for d, node in enumerate(path) if node != d]
            nodes = len(before.tokens or ())
            if moved:
                slots = [before.length + d for d in range(count)]
                yield Candidate(
                    "TREE_NOT_COMPACTED",
                    f"dense prefix used: KV of nodes {list(range(count))} of the last round stays "
                    f"where the accepted path {path} belongs",
                    self.sees,
                    self.positions,
                    lambda cache: rows_from(cache, left, slots),
                )
            for d, node in ((d, n) for d in range(count) for n in range(nodes) if n != path[d]):
                slot = before.length + d
                yield Candidate(
                    "KV_STALE_ROW",
                    f"stale KV row: row {slot} holds node {node} of the round before, not the "
                    f"accepted node {path[d]}",
                    self.sees,
                    self.positions,
                    functools.partial(
                        row_moved, other=left, goal=slot, source=before.length + node
                    ),
                )
        nodes = len(self.positions)
        for i in range(nodes):
            for j in range(nodes):
                if i == j:
                    continue
                sees = self.sees.copy()
                sees[i, self.length + j] ^= True
                does = "sees" if sees[i, self.length + j] else "does not see"
                yield Candidate(
                    "TREE_MASK_BIT",
                    f"mask bit ({i}, {j}): node {i} {does} node {j}",
                    sees,
                    self.positions,
                )
            for step in (-1, 1):
                moved_to = self.positions.copy()
                moved_to[i] += step
                words = f"position of node {i} off by {step:+d}"
                yield Candidate("POS_OFF_BY_ONE", words, self.sees, moved_to)

    def run(self, chosen: Sequence[Candidate]) -> tuple[dict[str, np.ndarray], ...]:
        """`target_logits` and `target_aux` of each."""
        cache, positions, bits = stacked(self.cache, chosen)
        tokens = jnp.broadcast_to(jnp.asarray(self.tokens), (TOGETHER, len(self.tokens)))
        start = jnp.full((TOGETHER,), self.length, jnp.int32)
        logits, aux, _ = jax.device_get(
            _target_rows(
                self.structure,
                self.leaves,
                cache,
                tokens,
                positions,
                bits,
                start,
                boundaries=self.boundaries,
            )
        )
        return tuple({"target_logits": logits[i], "target_aux": aux[i]} for i in range(len(chosen)))


@functools.partial(jax.jit, static_argnames=("structure",))
def _target_prefill(
    structure: Structure, leaves: tuple[jax.Array, ...], tokens: jax.Array
) -> KVCache:
    target: Any = structure.build(leaves)
    S = tokens.shape[1]
    return target.states(tokens, Rows.prefill(1, S), target.new_cache(1, S), ())[2]


@functools.partial(jax.jit, static_argnames=("structure", "boundaries"))
def _target_rows(
    structure: Structure,
    leaves: tuple[jax.Array, ...],
    cache: KVCache,
    tokens: jax.Array,
    positions: jax.Array,
    bits: jax.Array,
    start: jax.Array,
    *,
    boundaries: tuple[Boundary, ...],
) -> tuple[jax.Array, jax.Array, KVCache]:
    target: Any = structure.build(leaves)
    rows = Rows(positions, start, jnp.zeros_like(start), bits)
    states, aux, cache = target.states(tokens, rows, cache, boundaries)
    return target.logits(states), aux, cache

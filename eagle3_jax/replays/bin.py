"""Replay of one bin: rows committed, chains and trees drafted where a round may start."""

import dataclasses
import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from eagle3_jax.config import TreeConfig
from eagle3_jax.draft import Eagle3Draft, Shared
from eagle3_jax.modules import take_apart
from eagle3_jax.replays.engine import Bin, Span, Steps, chain_level, commit, grow_at
from eagle3_jax.replays.rows import Rows, check_finite
from eagle3_jax.tree import Candidates, DraftAttention, Seed

UNKNOWN, OUTSIDE = -2, -1
"""Ranks that are none: not asked for, and a token the draft vocabulary lacks."""

SCORES_BYTES = 1 << 28


@dataclasses.dataclass(frozen=True)
class Runner:
    """A draft ready for bins.

    Attributes:
      slots: of the record's aux states, those the draft reads, in its order.
      boundaries: their names. chunk: rows a call.
    """

    draft: Eagle3Draft
    shared: Shared | None
    slots: Sequence[int]
    boundaries: Sequence[object]
    draft_attention: DraftAttention
    chunk: int

    def rows_per_call(self, slots: int) -> int:
        """`chunk`, or fewer where attention scores over that many slots would be large."""
        heads = self.draft.config.num_heads
        fit = SCORES_BYTES // (4 * heads * slots)
        return max(32, min(self.chunk, 1 << int(math.log2(max(fit, 1)))))


@dataclasses.dataclass
class Chains:
    """What the draft says along the record's own text, for every row where a round may start.

    Attributes:
      hits: [S] leading true drafts, at most `steps` and as many as can be judged.
      rank: [S, steps] of the true token at each level, UNKNOWN past the first miss.
      proposed: [S, steps] the drafted ids, -1 past the first miss.
      norms: [steps, 2] sum over rows of the state's norm going into step j, relative to the row's
        own at step 0, and the number of rows.
    """

    hits: np.ndarray
    rank: np.ndarray
    proposed: np.ndarray
    norms: np.ndarray


class BinReplay:
    """Commits the rows of a bin, then answers for its starts."""

    def __init__(self, runner: Runner, rows: Rows, *, topk: int):
        """Commits every row; chunks of rows where a round may start are judged too."""
        self.runner, self.rows = runner, rows
        self.leaves, self.structure = take_apart(runner.draft)
        self.C = runner.rows_per_call(rows.slots)
        self.fewer = max(32, self.C // 64 * 32)  # rows a chain's call: few are right so far
        self.topk = topk
        S, D = rows.slots, runner.draft.config.hidden_size
        self.tokens = np.zeros((S, topk), np.int32)
        self.probs = np.zeros((S, topk), np.float64)
        self.rank = np.full(S, UNKNOWN, np.int32)
        self.fused = np.zeros(S)
        self.aux_norm = np.zeros(len(runner.slots))
        self.largest = 0.0
        self.bin = Bin(runner.draft.new_cache(1, S), jnp.zeros((S, D), runner.draft.dtype))
        self._commit()

    def _commit(self):
        rows, C = self.rows, self.C
        answers = []
        for start in range(0, rows.used, C):
            here = slice(start, start + C)
            aux = rows.aux(start, start + C, self.runner.slots)
            largest = check_finite(aux, rows, start, self.runner.boundaries)
            self.largest = max(self.largest, largest)
            live = aux[: rows.used - start].astype(np.float64)
            self.aux_norm += np.sqrt((live * live).sum(axis=2)).sum(axis=0)
            judge = bool(rows.judged[here].any())
            self.bin, judged, norms = commit(
                self.structure,
                self.leaves,
                self.runner.shared,
                self.bin,
                aux,
                rows.tokens[here],
                rows.true[start + 1 : start + 1 + C],
                Span(
                    jnp.asarray(rows.positions[here]),
                    jnp.asarray(rows.low[here]),
                    jnp.arange(start + 1, start + 1 + C, dtype=jnp.int32),
                    None if rows.axes is None else jnp.asarray(rows.axes[:, here]),
                ),
                np.int32(start),
                top=self.topk if judge else 0,
                seen=self._seen(start + C),
            )
            answers.append((here, judged, norms))
        for here, judged, norms in jax.device_get(answers):
            self.fused[here] = norms
            if judged is not None:
                self.tokens[here], self.probs[here] = judged.tokens, judged.probs
                self.rank[here] = judged.rank
        self.rank[rows.used :] = UNKNOWN

    def _seen(self, high: int) -> int:
        """Slots a call looks at: few sizes, so that few programs are compiled."""
        size = max(256, self.C)
        while size < high:
            size *= 2
        return min(size, self.rows.slots)

    def _span(self, slots: np.ndarray, ahead: int, C: int) -> Span:
        padded = np.zeros((3, C), np.int32)
        n = len(slots)
        padded[0, :n] = self.rows.positions[slots] + ahead
        padded[1, :n] = self.rows.low[slots]
        padded[2, :n] = slots + 1
        padded[2, n:] = 1
        axes = None
        if self.rows.axes is not None:
            axes = np.zeros((3, C), np.int32)
            axes[:, :n] = self.rows.farthest[slots] + ahead
            axes = jnp.asarray(axes)
        positions, low, high = jnp.asarray(padded)
        return Span(positions, low, high, axes)

    def level0(self, slots: np.ndarray, topk: int) -> np.ndarray:
        """Whether the true token is among the topk best after each row."""
        true = self.rows.tokens[slots + 1]
        return (self.tokens[slots, :topk] == true[:, None]).any(axis=1)

    def chains(self, starts: np.ndarray, steps: int) -> Chains:
        """Drafts chains of `steps` at the rows `starts`, each until its first miss."""
        rows, S = self.rows, self.rows.slots
        found = Chains(
            np.zeros(S, np.int32),
            np.full((S, steps), UNKNOWN, np.int32),
            np.full((S, steps), -1, np.int32),
            np.zeros((steps, 2)),
        )
        found.norms[0] = len(starts), len(starts)
        found.rank[starts, 0] = self.rank[starts]
        found.proposed[starts, 0] = self.tokens[starts, 0]
        hit = self.tokens[starts, 0] == rows.tokens[starts + 1]
        alive = starts[hit & (rows.judged[starts] > 0)]
        found.hits[alive] = 1
        G = 8 * self.C
        if steps > 1:
            for first in range(0, len(alive), G):
                self._chain_block(found, alive[first : first + G], steps, G)
        return found

    def _chain_block(self, found: Chains, slots: np.ndarray, steps: int, G: int):
        rows = self.rows
        J, C = steps - 1, self.fewer
        padded = np.zeros(G, np.int32)
        padded[: len(slots)] = slots
        state = Steps(self.runner.draft.new_cache(J, G), self.bin.state[padded])
        alive = np.arange(len(slots))
        for level in range(J):
            alive = alive[rows.judged[slots[alive]] > level + 1]
            answers = []
            for first in range(0, len(alive), C):
                chosen = alive[first : first + C]
                at = slots[chosen]
                index = np.full(C, G, np.int32)
                index[: len(chosen)] = chosen
                inputs = np.zeros((2, C), np.int32)
                inputs[0, : len(chosen)] = rows.tokens[at + level + 1]
                inputs[1, : len(chosen)] = rows.true[at + level + 2]
                state, judged, norms = chain_level(
                    self.structure,
                    self.leaves,
                    self.runner.shared,
                    self.bin.cache,
                    state,
                    index,
                    inputs[0],
                    inputs[1],
                    self._span(at, level + 1, C),
                    np.int32(level),
                    seen=self._seen(int(at[-1]) + 1),
                )
                answers.append((chosen, judged, norms))
            kept = []
            for chosen, judged, norms in jax.device_get(answers):
                n, at = len(chosen), slots[chosen]
                found.rank[at, level + 1] = judged.rank[:n]
                found.proposed[at, level + 1] = judged.tokens[:n, 0]
                ratio = norms[:n] / np.maximum(self.fused[at], 1e-30)
                found.norms[level + 1] += ratio.sum(), n
                hit = judged.tokens[:n, 0] == rows.tokens[at + level + 2]
                found.hits[at[hit]] = level + 2
                kept.append(chosen[hit])
            alive = np.concatenate(kept) if kept else alive[:0]

    def starts_per_call(self, topk: int) -> int:
        """Trees drafted in one call; their rows fill whole words of bits."""
        count = max(1, self.C // topk)
        while count * topk % 32:
            count += 1
        return count

    def trees(
        self, starts: np.ndarray, tree: TreeConfig, *, whole: bool = False
    ) -> tuple[np.ndarray, np.ndarray, Candidates | None]:
        """`grow_at` for at most `starts_per_call` rows."""
        C, n = self.starts_per_call(tree.topk), len(starts)
        k, steps = tree.topk, tree.num_steps
        padded = np.zeros(C, np.int32)
        padded[:n] = starts
        offsets = padded[:, None] + 1 + np.arange(steps)
        limit = np.arange(steps) < self.rows.judged[padded][:, None]
        tokens = np.where(limit, self.rows.tokens[offsets], -1).astype(np.int32)
        true = np.where(limit, self.rows.true[offsets], OUTSIDE).astype(np.int32)
        dtype = self.bin.state.dtype
        wide = jnp.float64 if dtype == jnp.float64 else jnp.float32
        seed = Seed(
            jnp.asarray(self.probs[padded, :k], wide),
            jnp.asarray(self.tokens[padded, :k]),
            self.bin.state[padded],
        )
        place, rank, found = jax.device_get(
            grow_at(
                self.structure,
                self.leaves,
                self.runner.shared,
                self.bin.cache,
                seed,
                tokens,
                true,
                self._span(starts, 1, C),
                tree=tree,
                draft_attention=self.runner.draft_attention,
                seen=self._seen(int(starts.max()) + 1),
                whole=whole,
            )
        )
        rank = np.array(rank[:n])
        rank[:, 0] = self.rank[starts]
        if found is not None:
            found = jax.tree.map(lambda x: x[:n], found)
        return place[:n], rank, found

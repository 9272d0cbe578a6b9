"""Our own tensors as SGLang's dumper would write them, for SGLang's comparators to read.

Names, order of steps and shapes are those of `debug_utils/dumper.py` in SGLang 0.5.23 with its
hooks on: a step is one forward pass of either model (target prefill, draft extend; then each round
`num_steps - 1` drafted levels, verification, draft extend over all verified rows), a batch's
requests one after the other in its rows. What the engine puts into rows past the accepted ones is
repeated as it does it (ids 0, states of the nodes that stood there), so that whole tensors compare.

    python -m sglang.srt.debug_utils.dump_comparator --baseline-path SGLANG --target-path OURS
"""

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

import jax
import numpy as np

from eagle3_jax.config import TreeConfig
from eagle3_jax.crosscheck.folders import Named, Steps, new_folder
from eagle3_jax.draft import Eagle3Draft
from eagle3_jax.generation import rounds
from eagle3_jax.layers import Rows
from eagle3_jax.targets.base import Target
from eagle3_jax.trace import Round
from eagle3_jax.tree import DraftAttention

FED, FUSED, FROM_TARGET = (
    "model.layers.0.hidden_norm.inputs.0",
    "model.fc.output",
    "model.fc.inputs.0",
)
RESULT, LOGITS = "logits_processor.inputs.4", "logits_processor.output.next_token_logits"
EMBEDDED = "model.embed_tokens.output"


def write_sglang_dump(
    folder: Path,
    target: Target,
    draft: Eagle3Draft,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    tree: TreeConfig,
    batch_size: int = 1,
    draft_attention: DraftAttention | None = None,
    stop_token_ids: Sequence[int] | None = None,
    follow: Sequence[Sequence[int]] | None = None,
    on_round: Callable[[int], None] = lambda done: None,
) -> int:
    """Generates and writes every forward pass as `step=S___rank=0___dump_index=I___name=N...pt`.

    Args:
      folder: must not exist; written whole or not at all.
      batch_size: prompts that run together, the others after them; as the engine had them.
      follow: as in `rounds`: tokens that count as the target's choice.
      on_round: called with the number of rounds written.

    Returns:
      The number of files.

    Raises:
      CrosscheckError: the folder exists. ConfigError: as `rounds` does.
    """
    follow = [[] for _ in prompts] if follow is None else follow
    with new_folder(folder) as made:
        out, done = Steps(made), 0
        passes = _Passes(target, draft, tree, [list(p) for p in prompts], max_new_tokens)
        for first in range(0, len(prompts), batch_size):
            part = slice(first, first + batch_size)
            found = rounds(
                target,
                draft,
                prompts[part],
                max_new_tokens=max_new_tokens,
                tree=tree,
                draft_attention=draft_attention,
                stop_token_ids=stop_token_ids,
                tensors=True,
                follow=follow[part],
            )
            moved = (dataclasses.replace(r, sequence=first + r.sequence) for r in found)
            for index, batch in enumerate(_by_index(moved)):
                if index == 0:
                    passes.prefill(batch, out)
                passes.round(batch, out)
                done += 1
                on_round(done)
    return out.files


def _by_index(found: Iterable[Round]) -> Iterator[list[Round]]:
    """Rounds of the sequences that still ran, together."""
    batch: list[Round] = []
    for item in found:
        if batch and item.index != batch[0].index:
            yield batch
            batch = []
        batch.append(item)
    if batch:
        yield batch


class _Passes:
    """Puts the tensors of rounds together as the engine's passes had them."""

    def __init__(
        self,
        target: Target,
        draft: Eagle3Draft,
        tree: TreeConfig,
        prompts: list[list[int]],
        max_new_tokens: int,
    ):
        self._draft, self._tree, self._prompts = draft, tree, prompts
        self._shared = target.shared()
        self._table = np.asarray(self._shared.embedding)
        longest = max(map(len, prompts)) + max_new_tokens
        self._slots = -(-(longest + tree.num_draft_tokens + 1) // 32) * 32
        self._ids = [list(prompt) for prompt in prompts]
        self._aux: dict[int, np.ndarray] = {}
        self._extended = jax.jit(self._extend)

    def prefill(self, batch: list[Round], out: Steps):
        """Both models over the prompts; SGLang keeps the logits of the last rows only."""
        tensors = [_tensors(item) for item in batch]
        lengths = [len(self._prompts[item.sequence]) for item in batch]
        aux = [t["prefill.target_aux"][:n] for t, n in zip(tensors, lengths, strict=True)]
        for item, rows in zip(batch, aux, strict=True):
            self._aux[item.sequence] = rows
        ids = [self._prompts[item.sequence] for item in batch]
        logits = np.stack([t["prefill.target_logits"] for t in tensors])
        positions = [np.arange(n) for n in lengths]
        core = _core(ids, positions, lengths, batch)
        out.write(core, self._target(ids, aux, logits), {})
        following = [[*prompt[1:], item.tokens[0]] for prompt, item in zip(ids, batch, strict=True)]
        parts = []
        for item, after in zip(batch, following, strict=True):
            parts.append(self._rows(item.sequence, after, self._aux[item.sequence], len(after)))
        logits = np.stack([t["prefill.extend_logits"] for t in tensors])
        core = _core(following, positions, lengths, batch)
        out.write(core, *self._extend_step(following, parts, aux, logits))

    def round(self, batch: list[Round], out: Steps):
        """The drafted levels, the verification, the extend over its rows."""
        tensors = [_tensors(item) for item in batch]
        lengths = [item.length for item in batch]
        for level in range(self._tree.num_steps - 1):
            out.write(*self._level(batch, tensors, lengths, level))
        ids = [item.tokens for item in batch]
        aux = [t["target_aux"] for t in tensors]
        logits = np.concatenate([t["target_logits"] for t in tensors])
        core = _core(ids, [np.asarray(item.positions) for item in batch], lengths, batch)
        out.write(core, self._target(ids, aux, logits), {})

        ids, rows = self._windows(batch, aux)
        parts = []
        for item, after, states in zip(batch, ids, rows, strict=True):
            held = self._aux[item.sequence]
            before = self._ids[item.sequence][1:]
            everything = np.concatenate((held, states))
            following = [*before, item.tokens[0], *after]
            parts.append(self._rows(item.sequence, following, everything, len(after)))
            kept = len(item.accepted)
            self._aux[item.sequence] = everything[: len(held) + kept]
            self._ids[item.sequence] += [item.tokens[0], *after[: kept - 1]]
        nodes = self._tree.num_draft_tokens
        positions = [n + np.arange(nodes) for n in lengths]
        core = _core(ids, positions, [n + nodes for n in lengths], batch)
        out.write(core, *self._extend_step(ids, parts, rows, None))

    def _level(self, batch: list[Round], tensors: list[Named], lengths: list[int], level: int):
        ids = [t[f"draft_tokens.{level}"] for t in tensors]
        positions = [t[f"draft_positions.{level}"] for t in tensors]
        fed = np.concatenate([self._fed(t, level) for t in tensors])
        hooked = {
            EMBEDDED: self._embedded(np.concatenate(ids)),
            RESULT: np.concatenate([t[f"draft_hidden.{level}"] for t in tensors]),
            LOGITS: np.concatenate([t[f"draft_logits.{level}"] for t in tensors]),
        }
        return _core(ids, positions, lengths, batch), hooked, {FED: fed}

    def _fed(self, tensors: Named, level: int) -> np.ndarray:
        """The states that went into a level: each beam's parent's."""
        k = self._tree.topk
        if level == 0:
            return np.repeat(tensors["seed_hidden"][None], k, axis=0)
        parents = tensors["candidate_parents"]
        first = k + level * k * k  # candidates that this level proposed: k of each beam
        beams = parents[first : first + k * k : k]
        return tensors[f"draft_hidden.{level - 1}"][(beams - k - (level - 1) * k * k) // k]

    def _windows(
        self, batch: list[Round], aux: list[np.ndarray]
    ) -> tuple[list[list[int]], list[np.ndarray]]:
        """Ids and states of the rows an extend sees: each accepted path first.

        Only accepted nodes have ids. A chain's rows stay where they are; in a tree the path is
        moved to the front, and where it is shorter the batch's first row stands in
        (`_compact_accept_to_front`).
        """
        ids = [np.zeros(len(item.tokens), np.int64) for item in batch]
        for item, row in zip(batch, ids, strict=True):
            row[item.accepted] = np.asarray(item.predicted)[item.accepted]
        if self._tree.topk == 1:
            return [row.tolist() for row in ids], aux
        front = self._tree.num_steps + 1
        moved, states = [], []
        for item, row, held in zip(batch, ids, aux, strict=True):
            spare = front - len(item.accepted)
            path = row[item.accepted]
            moved.append([*path.tolist(), *[int(ids[0][0])] * spare, *row[front:].tolist()])
            first = np.repeat(aux[0][:1], spare, axis=0)
            states.append(np.concatenate((held[item.accepted], first, held[front:])))
        return moved, states

    def _rows(self, sequence: int, following: list[int], aux: np.ndarray, last: int) -> Named:
        """The draft over a whole text from the target's states; its last rows."""
        count = len(following)
        assert len(aux) == count, (sequence, len(aux), count)
        ids = np.zeros((1, self._slots), np.int32)
        ids[0, :count] = following
        padded = np.zeros((1, self._slots, *aux.shape[1:]), aux.dtype)
        padded[0, :count] = aux
        found = jax.device_get(self._extended(ids, padded))
        return {name: value[0, count - last : count] for name, value in found.items()}

    def _extend(self, ids: jax.Array, aux: jax.Array) -> dict[str, jax.Array]:
        draft = self._draft
        fused = draft.fuse(aux)
        cache = draft.new_cache(1, self._slots)
        rows = Rows.prefill(1, self._slots)
        states, _ = draft.step(ids, fused, rows, cache, shared=self._shared)
        logits = draft.logits(states, shared=self._shared)
        return {"fused": fused, "fed_back": draft.feedback(states), "logits": logits}

    def _extend_step(
        self,
        ids: list[list[int]],
        parts: list[Named],
        aux: list[np.ndarray],
        logits: np.ndarray | None,
    ) -> tuple[Named, Named]:
        fused = np.concatenate([part["fused"] for part in parts])
        if logits is None:
            logits = np.concatenate([part["logits"] for part in parts])
        hooked = {EMBEDDED: self._embedded(np.concatenate([np.asarray(i) for i in ids]))}
        if self._draft.fc is not None:
            flat = np.concatenate(aux)
            hooked |= {FROM_TARGET: flat.reshape(len(flat), -1), FUSED: fused}
        hooked |= {RESULT: np.concatenate([p["fed_back"] for p in parts]), LOGITS: logits}
        return hooked, {FED: fused}

    def _target(self, ids: list[list[int]], aux: list[np.ndarray], logits: np.ndarray) -> Named:
        rows = np.concatenate(aux)
        flat = np.concatenate([np.asarray(i) for i in ids])
        hooked = {EMBEDDED: self._table[flat]}
        hooked |= {f"{RESULT}.{i}": rows[:, i] for i in range(rows.shape[1])}
        return hooked | {LOGITS: logits}

    def _embedded(self, ids: np.ndarray) -> np.ndarray:
        own = self._draft.embed
        return (self._table if own is None else np.asarray(own.weight[...]))[ids]


def _tensors(item: Round) -> Named:
    assert item.tensors is not None
    return item.tensors


def _core(
    ids: Sequence[Sequence[int] | np.ndarray],
    positions: Sequence[np.ndarray],
    lengths: Sequence[int],
    batch: Sequence[Round],
) -> Named:
    return {
        "input_ids": np.concatenate([np.asarray(i, np.int64) for i in ids]),
        "seq_lens": np.asarray(lengths, np.int64),
        "positions": np.concatenate([np.asarray(p, np.int64) for p in positions]),
        "req_pool_indices": np.asarray([item.sequence + 1 for item in batch], np.int64),
    }

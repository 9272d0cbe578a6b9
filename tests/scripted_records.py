"""Records whose accept lengths are known before anything is replayed.

States are random and free of the tokens, so whoever writes the tokens decides what is accepted:
the reference draft proposes, its first a proposals are copied into the text, then another token
follows. Replayed under the wiring that made it, a record gives exactly its script.
"""

import dataclasses
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

import jax.numpy as jnp
import numpy as np
from safetensors.numpy import save_file
from scripted_checkpoint import canonical_tensors, draft_config, raw_config, torch_tensors
from scripted_draft import ReferenceDraft, Row, Sizes, Tensors, Truth, weights

from eagle3_jax.config import TreeConfig
from eagle3_jax.draft import Eagle3Draft, Shared
from eagle3_jax.record import EngineRound, Record, RecordSequence

SCRIPT = (3, 0, 1, 2, 3, 0, 2, 1)
"""Accepted drafts by round; accept length 2.50."""

Misses = Literal["any", "inside", "outside"]


@dataclasses.dataclass(frozen=True)
class Request:
    """One sequence to script.

    Attributes:
      script: accepted drafts by round, repeated; or a function of (round, length). A tree that was
        pruned to fewer levels accepts as many as it has.
      rounds: how many; None for as many as `tokens` need.
      prompt: its ids; None for random ones. first: position of the first state.
      misses: where the token after the accepted ones is drawn: anywhere, inside the draft
        vocabulary, or outside it (after a full accept: inside).
      image: where it begins in the prompt, its rows and columns; gives positions on three axes.
    """

    script: Sequence[int] | Callable[[int, int], int] = SCRIPT
    rounds: int | None = None
    tokens: int = 160
    prompt_length: int = 24
    prompt: Sequence[int] | None = None
    first: int = 0
    misses: Misses = "any"
    image: tuple[int, int, int] | None = None
    name: str = ""
    tags: tuple[str, ...] = ()

    def axes(self) -> np.ndarray | None:
        """[3, prompt_length] by time, height, width: an image's patches share one time."""
        if self.image is None:
            return None
        begin, rows, columns = self.image
        patches = [(begin, begin + r, begin + c) for r in range(rows) for c in range(columns)]
        after = begin + max(rows, columns)
        left = self.prompt_length - begin - len(patches)
        text = [(t,) * 3 for t in range(begin)], [(after + t,) * 3 for t in range(left)]
        return np.array([*text[0], *patches, *text[1]]).T

    def accepted(self, index: int, length: int) -> int:
        """Drafts the round accepts."""
        if callable(self.script):
            return self.script(index, length)
        return self.script[index % len(self.script)]


@dataclasses.dataclass(frozen=True)
class Scripted:
    """A record, its draft, and the target's matrices.

    Attributes:
      accepted: the script as it was played, per sequence.
      weights: every tensor under PyTorch's names, for any claim. states: per sequence
        [T, layers + 1, E], boundary k at [:, k].
    """

    record: Record
    accepted: list[list[int]]
    truth: Truth
    sizes: Sizes
    tree: TreeConfig
    weights: Tensors = dataclasses.field(repr=False)
    embedding: np.ndarray = dataclasses.field(repr=False)
    head: np.ndarray = dataclasses.field(repr=False)
    states: list[np.ndarray] = dataclasses.field(repr=False)

    @property
    def accept_length(self) -> float:
        """Of the script: 1 + its mean."""
        played = [a for row in self.accepted for a in row]
        return 1 + sum(played) / len(played)

    def captured(self, boundaries: Sequence[Any]) -> Record:
        """The same record with other boundaries."""
        sequences = [
            dataclasses.replace(s, aux=_stack(x, boundaries, self.weights, self.sizes)[s.first :])
            for s, x in zip(self.record.sequences, self.states, strict=True)
        ]
        return dataclasses.replace(self.record, boundaries=tuple(boundaries), sequences=sequences)

    def checkpoint(self, claim: Truth | None = None) -> tuple[dict[str, Any], Tensors]:
        """config.json and tensors of a draft that claims this wiring; None for the truth."""
        claim = claim or self.truth
        return raw_config(claim, self.sizes), torch_tensors(claim, self.weights)

    def write_draft(self, folder: Path, claim: Truth | None = None, **changes: Any) -> Path:
        """The checkpoint on disk; `changes` edit config.json, None removes a key."""
        config, tensors = self.checkpoint(claim)
        config = {k: v for k, v in (config | changes).items() if v is not None}
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(json.dumps(config))
        save_file({k: np.ascontiguousarray(v) for k, v in tensors.items()}, _weights_of(folder))
        return folder

    def write_target(self, folder: Path, **config: Any) -> Path:
        """A target of a family nobody knows, with its embedding and head and nothing else."""
        s = self.sizes
        known = {
            "architectures": ["FooMoeForCausalLM"],
            "model_type": "foo_moe",
            "hidden_size": s.target_hidden,
            "num_hidden_layers": s.layers,
            "vocab_size": s.vocab,
        }
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(json.dumps(known | config))
        made = {"model.embed_tokens.weight": self.embedding, "lm_head.weight": self.head}
        save_file(made, _weights_of(folder))
        return folder

    def draft(self, claim: Truth | None = None, dtype: str = "float32", **fields: Any):
        """The draft as the package builds it, without the converter; `fields` of DraftConfig."""
        claim = claim or self.truth
        return Eagle3Draft.from_tensors(
            dataclasses.replace(draft_config(claim, self.sizes), **fields),
            canonical_tensors(claim, self.weights),
            dtype,
        )

    def shared(self, dtype: str = "float32") -> Shared:
        """The target's embedding and head."""
        return Shared(jnp.asarray(self.embedding, dtype), jnp.asarray(self.head, dtype))


REQUEST, TRUTH, TINY, CHAIN = Request(), Truth(), Sizes(), TreeConfig(3)


def make(
    requests: Sequence[Request] | Request = REQUEST,
    *,
    truth: Truth = TRUTH,
    sizes: Sizes = TINY,
    tree: TreeConfig = CHAIN,
    draft_attention: str = "ancestors",
    seed: int = 0,
    capture: Sequence[Any] | None = None,
    edit: Callable[[Tensors], None] = lambda weights: None,
    states: Callable[[np.ndarray], np.ndarray] = lambda x: x,
    top: int = 0,
) -> Scripted:
    """Writes the texts; every round ends inside them.

    Args:
      truth: the wiring. seed: of weights, states, prompts and misses.
      capture: boundaries the record holds; None for all, 0 .. layers.
      edit: changes the weights before anything is computed. states: [T, layers + 1, E] likewise.
      top: target's best next tokens and their logprobs to record, the true one first.
    """
    requests = [requests] if isinstance(requests, Request) else list(requests)
    rng = np.random.default_rng([seed, 5])
    w = weights(sizes, len(truth.boundaries), seed)
    edit(w)
    embedding = rng.standard_normal((sizes.vocab, sizes.hidden)).astype(np.float32)
    head = rng.standard_normal((sizes.vocab, sizes.hidden)).astype(np.float32)
    head /= np.sqrt(sizes.hidden, dtype=np.float32)
    sequences, accepted, all_states = [], [], []
    for number, request in enumerate(requests):
        draft = ReferenceDraft(w, truth, sizes, embedding, head)
        draft.axes = request.axes()
        longest = request.tokens + (request.rounds or 0) * (tree.num_steps + 1) + 64
        x = states(_states(np.random.default_rng([seed, number, 7]), longest, sizes))
        tokens, rounds = _play(
            draft, request, _stack(x, truth.boundaries, w, sizes), tree, draft_attention, rng
        )
        x = x[: len(tokens)]
        sequence = RecordSequence(
            tokens=np.asarray(tokens, np.int32),
            aux=_stack(x, _all(capture, sizes), w, sizes)[request.first :],
            prompt_length=request.prompt_length,
            first=request.first,
            positions=_continued(draft.axes, len(tokens)),
            rounds=tuple(rounds),
            name=request.name or f"request {number}",
            tags=request.tags,
        )
        sequences.append(_with_top(sequence, top, sizes, rng) if top else sequence)
        accepted.append([r.accepted for r in rounds])
        all_states.append(x)
    record = Record(
        boundaries=_all(capture, sizes),
        kind="greedy",
        sequences=sequences,
        vocab_size=sizes.vocab,
        num_layers=sizes.layers,
        partial_context=any(r.first for r in requests),
    )
    return Scripted(record, accepted, truth, sizes, tree, w, embedding, head, all_states)


def _continued(axes: np.ndarray | None, total: int) -> np.ndarray | None:
    """[3, total]: text after the prompt counts on from the largest position."""
    if axes is None:
        return None
    more = axes.max() + 1 + np.arange(total - axes.shape[1])
    return np.concatenate([axes, np.repeat(more[None], 3, axis=0)], axis=1).astype(np.int32)


def _play(
    draft: ReferenceDraft, request: Request, aux: np.ndarray, tree: TreeConfig, attention: str, rng
) -> tuple[list[int], list[EngineRound]]:
    truth, P = draft.truth, request.prompt_length
    V = draft.sizes.vocab
    prompt = request.prompt
    tokens = list(prompt) if prompt is not None else rng.integers(2, V, P).tolist()
    tokens.append(int(rng.integers(2, V)))

    def commit(t: int, kept: Row | None = None):
        shift = truth.shift
        if truth.chunk is not None and t < P and (t + 1) % truth.chunk == 0:
            shift = 0
        draft.commit(t, tokens[t + shift], aux[t], kept)

    for t in range(request.first, P):
        commit(t)
    rounds: list[EngineRound] = []
    while len(tokens) < request.tokens if request.rounds is None else len(rounds) < request.rounds:
        length = len(tokens) - 1
        found = draft.draft(length, tree, attention)
        depths = {n: len(found.path(n)) for n in found.selected}
        a = min(request.accepted(len(rounds), length), max(depths.values()))
        ends = [-1] if a == 0 else [n for n, depth in depths.items() if depth == a]
        end = int(rng.choice(ends))
        path = found.path(end)
        tokens += [int(found.tokens[n]) for n in path]
        tokens.append(_other(found.children(end), request.misses, a == tree.num_steps, draft, rng))
        for i in range(a + 1):
            kept = found.rows[i] if truth.kv == "keep" and i < min(a, len(found.rows)) else None
            if truth.kv == "hole" and a == tree.num_steps and i == a - 1:
                kept = [(0 * key, 0 * value) for key, value in draft.rows[-1]]
            commit(length + i, kept)
        proposed = tuple(int(t) for t in found.tokens) if tree.topk == 1 else None
        rounds.append(EngineRound(length, a, proposed, tokens[-1]))
    return tokens, rounds


def _other(taken: list[int], misses: Misses, full: bool, draft: ReferenceDraft, rng) -> int:
    inside = set(draft.to_target.tolist())
    allowed = set(range(2, draft.sizes.vocab))
    if misses == "inside" or (misses == "outside" and full):
        allowed &= inside
    elif misses == "outside":
        allowed -= inside
    return int(rng.choice(sorted(allowed - set(taken))))


def _states(rng, length: int, sizes: Sizes) -> np.ndarray:
    """[T, layers + 1, E]: a residual stream that grows."""
    x = rng.standard_normal((length, sizes.layers + 1, sizes.target_hidden))
    x[:, 1:] *= (0.6 + 0.25 * np.arange(1, sizes.layers + 1))[None, :, None]
    return np.cumsum(x, axis=1).astype(np.float32)


def _all(capture: Sequence[Any] | None, sizes: Sizes) -> tuple[Any, ...]:
    return tuple(range(sizes.layers + 1)) if capture is None else tuple(capture)


def _stack(x: np.ndarray, boundaries: Sequence[Any], w: Tensors, sizes: Sizes) -> np.ndarray:
    """[T, A, E]; `"final_norm"` is the last boundary under a norm of the target's own."""
    rng = np.random.default_rng(3)
    weight = (1 + 0.2 * rng.standard_normal(sizes.target_hidden)).astype(np.float32)
    last = x[:, -1]
    normed = last / np.sqrt((last * last).mean(-1, keepdims=True) + np.float32(1e-5)) * weight
    return np.stack([normed if b == "final_norm" else x[:, b] for b in boundaries], axis=1)


def _with_top(sequence: RecordSequence, top: int, sizes: Sizes, rng) -> RecordSequence:
    R = len(sequence.tokens) - sequence.first
    ids = np.stack([rng.permutation(sizes.vocab)[:top] for _ in range(R)]).astype(np.int32)
    probs = -np.sort(-rng.dirichlet(np.full(top + 1, 0.5), R)[:, :top], axis=1)
    for r in range(R - 1):
        true = sequence.tokens[sequence.first + r + 1]
        ids[r, np.flatnonzero(ids[r] == true)] = ids[r, 0]
        ids[r, 0] = true
    logprobs = np.log(np.maximum(probs, 1e-9)).astype(np.float32)
    return dataclasses.replace(sequence, top_ids=ids, top_logprobs=logprobs)


def _weights_of(folder: Path) -> Path:
    return folder / "model.safetensors"

"""What this implementation does on an engine's own text: its target's choices and its rounds.

The engine's text is followed (teacher forcing), so a tie that went the other way hides nothing
behind it; a round depends only on the text before it, so each can be judged at the engine's start.
"""

import copy
import dataclasses
import functools
from collections.abc import Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from eagle3_jax.checks import check_draft_attention, check_pair
from eagle3_jax.config import Boundary, TreeConfig
from eagle3_jax.crosscheck.types import DumpedRound, EngineRequest
from eagle3_jax.draft import Eagle3Draft
from eagle3_jax.generation import rounds
from eagle3_jax.layers import Rows
from eagle3_jax.modules import Structure, take_apart
from eagle3_jax.targets.base import Target
from eagle3_jax.trace import Round
from eagle3_jax.tree import DraftAttention, unpack

CHUNK = 64
BATCH = 8
RECORDED = "recorded"
"""The architecture of a target of which only one text's states are known."""


@dataclasses.dataclass(frozen=True)
class Taught:
    """The target on a whole text in one pass; entry i is about output token i.

    Attributes:
      predicted: [n] the target's own choice. margins: [n] the text's logit minus the best of the
        others: below 0 where the text is not the target's choice.
      logprobs: [n] of the text's token. second: [n] the best other token.
      size: largest absolute logit.
      before: [P - 1] logprobs of the prompt's tokens from 1 on. listed: [n, k] of the tokens asked.
      aux: [P + n - 1, A, E] states of every token but the last.
    """

    predicted: np.ndarray
    margins: np.ndarray
    logprobs: np.ndarray
    second: np.ndarray
    size: float
    aux: np.ndarray
    before: np.ndarray | None = None
    listed: np.ndarray | None = None


class Ours:
    """A pair and a tree, run on the texts of an engine.

    Args:
      draft, tree: None for an engine without a draft.
      draft_attention: as for `speculate`.
    """

    def __init__(
        self,
        target: Target,
        draft: Eagle3Draft | None,
        tree: TreeConfig | None,
        draft_attention: DraftAttention | None = None,
    ):
        self.target, self.draft, self.tree = target, draft, tree
        self.recorded = target.config.architecture == RECORDED
        self.attention: DraftAttention | None = None
        self.boundaries: tuple[Boundary, ...] = ()
        if draft is not None:
            self.attention = check_draft_attention(draft, draft_attention)
            assert tree is not None
            self.boundaries = check_pair(target, draft, tree)

    @property
    def dtype(self) -> str:
        """Of the target's weights and activations."""
        return str(self.target.dtype)

    def with_draft(self, draft: Eagle3Draft) -> "Ours":
        """The same with another draft."""
        other = copy.copy(self)
        other.draft = draft
        assert self.tree is not None
        other.boundaries = check_pair(self.target, draft, self.tree)
        return other

    def teach(
        self,
        prompt: Sequence[int],
        output: Sequence[int],
        boundaries: Sequence[Boundary] | None = None,
        listed: np.ndarray | None = None,
    ) -> Taught:
        """Runs prompt and output once; `boundaries` as the draft has them, unless given.

        Args:
          listed: [n, k] ids whose logprobs to give at each output place.
        """
        text = [*prompt, *output]
        rows = len(text) - 1
        padded = np.zeros((1, -(-max(rows, 1) // CHUNK) * CHUNK), np.int32)
        padded[0, :rows] = text[:-1]
        following = np.zeros(padded.shape[1], np.int32)
        following[:rows] = text[1:]
        leaves, structure = take_apart(self.target)  # type: ignore[arg-type]
        chosen = tuple(self.boundaries if boundaries is None else boundaries)
        part = slice(len(prompt) - 1, rows)
        asked = np.zeros((len(following), 0 if listed is None else listed.shape[1]), np.int32)
        if listed is not None:
            asked[part] = listed
        found = jax.device_get(
            _teach(structure, leaves, padded, following, asked, boundaries=chosen)
        )
        second, predicted, margins, logprobs, size, theirs, aux = found
        return Taught(
            predicted[part],
            margins[part],
            logprobs[part],
            second[part],
            float(size[part].max(initial=0.0)),
            aux[:rows],
            logprobs[: len(prompt) - 1],
            None if listed is None else theirs[part],
        )

    def free(self, requests: Sequence[EngineRequest]) -> list[list[Round]]:
        """Our rounds on each request's text, from its first token to its last.

        Those of dumped requests keep their tensors, for `pinned`.
        """
        found: list[list[Round]] = [[] for _ in requests]
        dumped = [i for i, r in enumerate(requests) if r.rounds]
        plain = [i for i in range(len(requests)) if i not in dumped]
        plain.sort(key=lambda i: len(requests[i].prompt))
        batch = 1 if self.recorded else BATCH
        groups = [plain[at : at + batch] for at in range(0, len(plain), batch)]
        for chosen in [*groups, *([i] for i in dumped)]:
            part = [requests[i] for i in chosen]
            for one in self._rounds([r.prompt for r in part], [r.output for r in part]):
                request = part[one.sequence]
                if one.length - len(request.prompt) + 1 < len(request.output):
                    kept = one if request.rounds else dataclasses.replace(one, tensors=None)
                    found[chosen[one.sequence]].append(kept)
        return found

    def accepts_from(
        self, request: EngineRequest, start: int, known: dict[int, int]
    ) -> list[tuple[int, int]]:
        """(start, correct drafts) of our rounds from any start in the text to its end.

        Args:
          known: what earlier calls on this request found; filled.
        """
        text = [*request.prompt, *request.output]
        at, walk = start, []
        while at < len(text) - 1:
            if at not in known:
                for one in self._rounds([text[:at]], [text[at:]]):
                    known[one.length] = one.num_correct_drafts
                    if one.length + one.accept_length in known:
                        break
            walk.append((at, known[at]))
            at += known[at] + 1
        return walk

    def pinned(
        self, request: EngineRequest, known: Sequence[Round] = ()
    ) -> Iterator[tuple[DumpedRound, DumpedRound]]:
        """The engine's dumped rounds, each with ours from the same start, tensors and all.

        Args:
          known: ours from `free`; where the engine's start is another, ours begin anew there.
        """
        assert request.rounds is not None
        text = [*request.prompt, *request.output]
        ours = iter(known)
        at = len(request.prompt)
        for theirs in request.rounds:
            if theirs.length >= len(text):
                return
            one = next(ours, None) if theirs.length == at else None
            if one is None:
                at = theirs.length
                ours = self._rounds([text[:at]], [text[at:]])
                one = next(ours)
            keep = theirs.index == 0 and at == len(request.prompt)
            yield theirs, self.described(one, prefill=keep, index=theirs.index)
            at += one.accept_length

    def _rounds(
        self, prompts: Sequence[Sequence[int]], outputs: Sequence[Sequence[int]]
    ) -> Iterator[Round]:
        """One prompt with tensors, which is one program for all uses; more of them without."""
        assert self.draft is not None
        assert self.tree is not None
        return rounds(
            self.target,
            self.draft,
            [list(p) for p in prompts],
            max_new_tokens=max(2, *map(len, outputs)),
            tree=self.tree,
            draft_attention=self.attention,
            stop_token_ids=(),
            tensors=len(prompts) == 1,
            follow=outputs,
        )

    def described(self, one: Round, *, prefill: bool, index: int) -> DumpedRound:
        """A round of ours under the names of a dump."""
        assert self.tree is not None
        assert self.draft is not None
        assert one.tensors is not None
        given = one.tensors
        rows, k = one.accept_length, self.tree.topk
        made = {
            name: given[name]
            for name in given
            if name.startswith(("seed_", "draft_", "candidate_")) or name == "selected"
        }
        made |= {"target_aux": given["target_aux"], "target_logits": given["target_logits"]}
        parents = given["candidate_parents"]
        state = np.broadcast_to(given["seed_hidden"], (k, len(given["seed_hidden"])))
        for level in range(self.tree.num_steps - 1):
            if level:
                expanded = k + level * k * k  # whose children are proposed next
                chosen = parents[expanded : expanded + k * k : k] - (expanded - k * k)
                state = given[f"draft_hidden.{level - 1}"][chosen // k]
            made[f"draft_input.{level}"] = state
        made |= {
            "extend_tokens": given["extend_tokens"][:rows],
            "extend_positions": np.arange(one.length, one.length + rows),
            "extend_aux": self._fc_input(given["target_aux"][one.accepted]),
            "extend_hidden": self._fed_back(given["extend_hidden"][:rows]),
            "extend_logits": given["extend_logits"],
        }
        if prefill and "prefill.target_aux" in given:
            length = one.length
            for name in ("target_aux", "extend_tokens", "fused"):
                made[f"prefill.{name}"] = given[f"prefill.{name}"][:length]
            made["prefill.extend_positions"] = np.arange(length)
            made["prefill.extend_aux"] = self._fc_input(made["prefill.target_aux"])
            made["prefill.target_logits"] = given["prefill.target_logits"]
            made["prefill.extend_logits"] = given["prefill.extend_logits"]
        bits = jnp.asarray(given["ancestors"])[None]
        return DumpedRound(
            index=index,
            length=one.length,
            tokens=one.tokens,
            parents=one.parents,
            positions=one.positions,
            scores=np.asarray(one.scores[1:]),
            mask=np.asarray(unpack(bits, len(one.tokens))[0]),
            accepted=one.accepted,
            bonus=one.bonus,
            num_correct=one.num_correct_drafts,
            tensors=made,
        )

    def _fc_input(self, aux: np.ndarray) -> np.ndarray:
        """States [rows, A, E] after the draft's norm before `fc`, if it has one."""
        assert self.draft is not None
        x = jnp.asarray(aux).astype(self.draft.dtype)
        if self.draft.fc_norm is not None:
            x = self.draft.fc_norm(x)
        if self.draft.input_norm is not None:
            x = self.draft.input_norm(x.reshape(len(x), -1)).reshape(x.shape)
        return np.asarray(x)

    def _fed_back(self, states: np.ndarray) -> np.ndarray:
        assert self.draft is not None
        return np.asarray(self.draft.feedback(jnp.asarray(states)))


@functools.partial(jax.jit, static_argnames=("structure", "boundaries"))
def _teach(
    structure: Structure,
    leaves: tuple[jax.Array, ...],
    tokens: jax.Array,  # [1, P]
    following: jax.Array,  # [P] the text's next token
    listed: jax.Array,  # [P, k] other ids to give logprobs of
    *,
    boundaries: tuple[Boundary, ...],
) -> tuple[jax.Array, ...]:
    """Per row: second and best token, margin, logprob, size, listed logprobs; aux [P, A, E]."""
    target: Target = structure.build(leaves)
    P = tokens.shape[1]
    cache = target.new_cache(1, P)
    states, aux, _ = target.states(tokens, Rows.prefill(1, P), cache, boundaries)

    def judge(part: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        x, given, asked = part
        logits = target.logits(x)
        predicted = jnp.argmax(logits, axis=-1).astype(jnp.int32)
        index = jnp.arange(logits.shape[-1], dtype=jnp.int32)[None]
        taken = index == given[:, None]
        chosen = jnp.max(jnp.where(taken, logits, -jnp.inf), axis=-1)
        others = jnp.where(taken, -jnp.inf, logits)
        margin = chosen - jnp.max(others, axis=-1)
        total = jax.nn.logsumexp(logits, axis=-1)
        theirs = jnp.take_along_axis(logits, asked, axis=-1) - total[:, None]
        second = jnp.argmax(others, axis=-1).astype(jnp.int32)
        size = jnp.max(jnp.abs(logits), axis=-1)
        return second, predicted, margin, chosen - total, size, theirs

    chunks = (
        states[0].reshape(P // CHUNK, CHUNK, -1),
        following.reshape(P // CHUNK, CHUNK),
        listed.reshape(P // CHUNK, CHUNK, -1),
    )
    found = jax.tree.map(lambda x: x.reshape(P, *x.shape[2:]), lax.map(judge, chunks))
    return (*found, aux[0] if boundaries else jnp.zeros((P, 0, 0), states.dtype))

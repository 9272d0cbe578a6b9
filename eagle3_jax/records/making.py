"""Records from our own target: it writes the text, then one pass over all of it is captured."""

import functools
from collections.abc import Callable, Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from eagle3_jax.cache import KVCache
from eagle3_jax.config import Boundary
from eagle3_jax.generation import generate
from eagle3_jax.layers import Rows
from eagle3_jax.modules import Structure, take_apart
from eagle3_jax.records.types import RecordError, RecordSequence
from eagle3_jax.targets.base import Target

CHUNK = 128
"""Rows a pass takes: one compiled program serves prompts of any length in one bucket of slots."""


class Maker:
    """Captures texts under one target.

    Args:
      boundaries: of the aux slots, in order.
      top: best next tokens to keep for each row, 0 for none.

    Attributes:
      disagreements: output tokens that are not the best of the capturing pass, near ties that
        rounding decided otherwise than in decoding. worst_margin: the largest gap among them.
    """

    def __init__(self, target: Target, boundaries: Sequence[Boundary], top: int = 0):
        self._target, self._boundaries, self._top = target, tuple(boundaries), top
        self._leaves, self._structure = take_apart(target)  # type: ignore[arg-type]
        self.disagreements, self.worst_margin = 0, 0.0

    def sequences(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        max_new_tokens: int,
        stop_token_ids: Sequence[int] | None = None,
        batch_size: int = 8,
        tags: tuple[str, ...] = (),
        on_done: Callable[[int], None] = lambda done: None,
    ) -> Iterator[RecordSequence]:
        """Greedy output of each prompt, `batch_size` at a time, with the states of all its tokens.

        `max_new_tokens` 0 captures the prompts as they stand, as plain text.
        """
        for first in range(0, len(prompts), batch_size):
            batch = [list(p) for p in prompts[first : first + batch_size]]
            new = [[] for _ in batch]
            if max_new_tokens:
                new = generate(
                    self._target,
                    batch,
                    max_new_tokens=max_new_tokens,
                    stop_token_ids=stop_token_ids,
                ).tokens
            for number, (prompt, output) in enumerate(zip(batch, new, strict=True), first):
                length = len(prompt) if output else 0
                yield self.capture(prompt + output, length, f"prompt {number}", tags)
                on_done(number + 1)

    def capture(
        self, tokens: Sequence[int], prompt_length: int, name: str, tags: tuple[str, ...] = ()
    ) -> RecordSequence:
        """The states of all tokens but the last, which needs none."""
        total = len(tokens) - 1
        if total < 1:
            raise RecordError(f"{name}: {total + 1} tokens, expected at least 2 to record a state")
        ids = np.zeros((-(-total // CHUNK) * CHUNK,), np.int32)
        ids[:total] = tokens[:-1]
        cache = self._target.new_cache(1, _slots(len(ids)))
        parts = []
        for start in range(0, len(ids), CHUNK):
            aux, best, logprobs, cache = _pass(
                self._structure,
                self._boundaries,
                max(self._top, 2),
                self._leaves,
                ids[None, start : start + CHUNK],
                np.array([start], np.int32),
                cache,
            )
            parts.append(jax.device_get((aux, best, logprobs)))
        aux, best, logprobs = (np.concatenate(part)[:total] for part in zip(*parts, strict=True))
        array = np.asarray(tokens, np.int32)
        if prompt_length:
            self._compare(array, best, logprobs, prompt_length)
        return RecordSequence(
            tokens=array,
            aux=aux,
            prompt_length=prompt_length,
            top_ids=best[:, : self._top] if self._top else None,
            top_logprobs=logprobs[:, : self._top] if self._top else None,
            name=name,
            tags=tags,
        )

    def _compare(self, tokens: np.ndarray, best: np.ndarray, logprobs: np.ndarray, prompt: int):
        rows = slice(prompt - 1, None)
        wrong = tokens[prompt:] != best[rows, 0]
        margins = (logprobs[rows, 0] - logprobs[rows, 1])[wrong]
        self.disagreements += int(wrong.sum())
        self.worst_margin = max([self.worst_margin, *margins.tolist()])


@functools.partial(jax.jit, static_argnums=(0, 1, 2), donate_argnums=(6,))
def _pass(
    structure: Structure,
    boundaries: tuple[Boundary, ...],
    top: int,
    leaves: tuple[jax.Array, ...],
    tokens: jax.Array,  # [1, CHUNK]
    start: jax.Array,  # [1]
    cache: KVCache,
) -> tuple[jax.Array, jax.Array, jax.Array, KVCache]:
    """States [CHUNK, A, E], ids and log-probabilities of the best next tokens [CHUNK, top]."""
    target: Target = structure.build(leaves)
    states, aux, cache = target.states(tokens, Rows.chain(start, CHUNK), cache, boundaries)
    logprobs, best = lax.top_k(jax.nn.log_softmax(target.logits(states[0]), axis=-1), top)
    return aux[0], best, logprobs.astype(jnp.float32), cache


def _slots(rows: int) -> int:
    """Of a cache for `rows` rows: powers of two chunks, so that few programs are compiled."""
    return CHUNK * (1 << (-(-rows // CHUNK) - 1).bit_length())

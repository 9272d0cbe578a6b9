"""The draft over a whole text in one pass, and over rows after it."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from eagle3_jax.cache import KVCache
from eagle3_jax.crosscheck.evidence import Evidence
from eagle3_jax.crosscheck.probe_rows import bucket
from eagle3_jax.crosscheck.types import DumpedRound
from eagle3_jax.draft import Eagle3Draft, Shared
from eagle3_jax.layers import Rows
from eagle3_jax.modules import Structure, take_apart


def committed(evidence: Evidence, slots: int) -> tuple[jax.Array, jax.Array]:
    """What the draft's rows of the text are made of: tokens [1, S] and states [1, S, A, E]."""
    text = [*evidence.request.prompt, *evidence.request.output]
    aux = evidence.taught[evidence.number].aux
    count = min(len(text) - 1, slots, len(aux))
    following = np.zeros((1, slots), np.int32)
    following[0, :count] = text[1 : count + 1]
    states = np.zeros((1, slots, *aux.shape[1:]), aux.dtype)
    states[0, :count] = aux[:count]
    return jnp.asarray(following), jnp.asarray(states)


def passed(
    draft: Eagle3Draft, evidence: Evidence, name: str, found: DumpedRound
) -> np.ndarray | None:
    """A tensor of the prefill or an extend as another draft would have it."""
    text = [*evidence.request.prompt, *evidence.request.output]
    following, aux = committed(evidence, bucket(len(text)))
    leaves, structure = take_apart(draft)
    shared = evidence.ours.target.shared()
    _, fused, states, logits = draft_pass(structure, leaves, shared, following, aux)
    theirs = found.tensors[name]
    begin = 0 if name.startswith("prefill.") else found.length
    count = len(evidence.request.prompt)
    if not name.startswith("prefill."):
        count = len(found.tensors.get("extend_tokens", theirs))
    end = begin + count
    whole = {"fused": fused, "extend_hidden": states, "extend_logits": logits}
    value = np.asarray(whole[name.split(".")[-1]][0])
    if name.endswith("extend_logits"):
        return value[end - 1] if theirs.ndim == 1 else None
    return value[begin:end] if len(theirs) == count else None


@functools.partial(jax.jit, static_argnames=("structure",))
def draft_pass(
    structure: Structure,
    leaves: tuple[jax.Array, ...],
    shared: Shared,
    following: jax.Array,  # [1, S]
    aux: jax.Array,  # [1, S, A, E]
) -> tuple[KVCache, jax.Array, jax.Array, jax.Array]:
    """A whole text: the cache, what `fuse` gave, states as fed back, logits [1, S, W]."""
    draft: Eagle3Draft = structure.build(leaves)
    S = following.shape[1]
    fused = draft.fuse(aux)
    out, cache = draft.step(
        following, fused, Rows.prefill(1, S), draft.new_cache(1, S), shared=shared
    )
    return cache, fused, draft.feedback(out), draft.logits(out, shared=shared)


@functools.partial(jax.jit, static_argnames=("structure",))
def draft_rows(
    structure: Structure,
    leaves: tuple[jax.Array, ...],
    shared: Shared,
    cache: KVCache,
    tokens: jax.Array,  # [C, T]
    hidden: jax.Array,  # [C, T, D]
    positions: jax.Array,
    bits: jax.Array,  # [C, T, words] over all slots
    start: jax.Array,  # [C]
) -> tuple[jax.Array, jax.Array, KVCache]:
    """States as fed back [C, T, D], logits [C, T, W], and the cache with the rows."""
    draft: Eagle3Draft = structure.build(leaves)
    rows = Rows(positions, start, jnp.zeros_like(start), bits)
    out, cache = draft.step(tokens, hidden, rows, cache, shared=shared)
    return draft.feedback(out), draft.logits(out, shared=shared), cache

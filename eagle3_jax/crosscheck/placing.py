"""The programs that place tokens in their distributions, one for all parameters."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from eagle3_jax.crosscheck.ours import CHUNK
from eagle3_jax.layers import Rows
from eagle3_jax.modules import Structure
from eagle3_jax.sampling import SamplingPlan, SamplingValues, adjust, probabilities
from eagle3_jax.sampling_config import GREEDY
from eagle3_jax.targets.base import Target

EVERYTHING = SamplingPlan(GREEDY, True, True, True, True, True)
"""All processors are compiled in and the numbers say which are at rest: one program for all."""
NO_TOP_P = 2.0
"""A sum that rounding never reaches."""


def acceptance_by_rule(p: jax.Array, q: jax.Array) -> dict[str, jax.Array]:
    """With what chance the first drafted token is accepted, by each rule of a chain.

    - `strict`: it is drawn from q and must be the token drawn from p: sum p q.
    - `one_hot`: it is q's argmax, accepted with its probability (SGLang `target_only`): p there.
    - `full`: it is drawn from q and accepted with min(1, p/q): sum min(p, q).

    In all three the emitted token follows p (vllm-project/vllm#40551).

    Args:
      p, q: [..., V] of the target, processed, and of the draft over the target's ids.

    Returns:
      Arrays [...] by those names.
    """
    best = jnp.argmax(q, axis=-1)[..., None]
    return {
        "strict": jnp.sum(p * q, axis=-1),
        "one_hot": jnp.take_along_axis(p, best, axis=-1)[..., 0],
        "full": jnp.sum(jnp.minimum(p, q), axis=-1),
    }


@functools.partial(jax.jit, static_argnames=("structure",))
def states_of(structure: Structure, leaves: tuple[jax.Array, ...], tokens: jax.Array) -> jax.Array:
    """[P, E] of tokens [1, P]."""
    target: Target = structure.build(leaves)
    rows = Rows.prefill(1, tokens.shape[1])
    states, _, _ = target.states(tokens, rows, target.new_cache(1, tokens.shape[1]), ())
    return states[0]


@functools.partial(jax.jit, static_argnames=("structure",))
def placed(
    structure: Structure,
    leaves: tuple[jax.Array, ...],
    states: jax.Array,  # [R, E]
    tokens: jax.Array,  # [R]
    first: jax.Array,  # [R] bool
    listed: jax.Array,  # [R, k]
    values: SamplingValues,
    lift: jax.Array,  # []
    proposals: tuple[jax.Array, jax.Array] | None,  # draft logits [R, W], target ids [W]
    counted: tuple[jax.Array, ...],  # [R] bool; [R, k] and [R, k] ids, V for none
    joint: jax.Array | None,  # [R] bool: top-p of the whole distribution
) -> list[jax.Array]:
    """The fields of `Placed`, [R / CHUNK, CHUNK, ...] each."""
    target: Target = structure.build(leaves)
    V, row = target.config.vocab_size, jnp.arange(CHUNK, dtype=jnp.int32)

    def chunk(before: jax.Array, part: tuple[Any, ...]):
        x, given, fresh, asked, drafted, kept, left_out, also, whole = part
        request = jnp.cumsum(fresh.astype(jnp.int32))  # 0: the one of the chunk before
        which = jax.nn.one_hot(jnp.where(kept, given, V), V, dtype=before.dtype)
        same = request[:, None] == request[None, :]
        earlier = same & (row[:, None] > row[None, :])
        goes_on = (request == 0).astype(before.dtype)
        counts = earlier.astype(before.dtype) @ which + goes_on[:, None] * before[None]
        counts = counts.at[row[:, None], left_out].add(-1, mode="drop")
        counts = counts.at[row[:, None], also].add(1, mode="drop")
        after = same[-1].astype(before.dtype) @ which + goes_on[-1] * before
        z = adjust(target.logits(x)[None], counts[None].astype(jnp.int32), EVERYTHING, values)[0]
        z = z.at[row, given].add(lift)
        p = probabilities(z[None], EVERYTHING, values)[0]
        if whole is not None:
            p = jnp.where(whole[:, None], _joint(z, values), p)
        return after, [*_judged(z, p, given, asked, values), *_proposed(p, drafted, V, values)]

    def parts(x: jax.Array) -> jax.Array:
        return x.reshape(x.shape[0] // CHUNK, CHUNK, *x.shape[1:])

    chunks: tuple[Any, ...] = (
        parts(states),
        parts(tokens),
        parts(first),
        parts(listed),
        None if proposals is None else (parts(proposals[0]), _each(proposals[1], states)),
        *map(parts, counted),
        None if joint is None else parts(joint),
    )
    return lax.scan(chunk, jnp.zeros((V,), jnp.float32), chunks)[1]


def _joint(z: jax.Array, values: SamplingValues) -> jax.Array:
    """[P, V] with top-p taken of the whole distribution beside top-k, not of what top-k left."""

    def only(**rest: jax.Array) -> jax.Array:
        return probabilities(z[None], EVERYTHING, dataclasses.replace(values, **rest))[0]

    cut = only(top_p=jnp.full_like(values.top_p, NO_TOP_P))
    kept = only(top_k=jnp.full_like(values.top_k, z.shape[1]), min_p=jnp.zeros_like(values.min_p))
    cut = jnp.where(kept > 0, cut, 0)
    return cut / jnp.sum(cut, axis=-1, keepdims=True)


def _each(ids: jax.Array, states: jax.Array) -> jax.Array:
    """One copy a chunk."""
    return jnp.broadcast_to(ids[None], (states.shape[0] // CHUNK, len(ids)))


def _judged(
    z: jax.Array, p: jax.Array, given: jax.Array, asked: jax.Array, values: SamplingValues
) -> list[jax.Array]:
    index = jnp.arange(z.shape[1], dtype=jnp.int32)[None]
    taken = index == given[:, None]
    own = jnp.sum(jnp.where(taken, p, 0), axis=-1)
    ahead = (p > own[:, None]) | ((p == own[:, None]) & (index < given[:, None]))
    likelier = jnp.sum(jnp.where(ahead, p, 0), axis=-1)
    chosen = jnp.max(jnp.where(taken, z, -jnp.inf), axis=-1)
    gap = chosen - jnp.max(jnp.where(taken, -jnp.inf, z), axis=-1)
    logs = jax.nn.log_softmax(z / values.temperature, axis=-1)
    log = jnp.max(jnp.where(taken, logs, -jnp.inf), axis=-1)
    theirs = jnp.take_along_axis(logs, asked, axis=-1)
    best = jnp.argmax(p, axis=-1).astype(jnp.int32)
    return [own, likelier, best, jnp.max(p, axis=-1), gap, log, theirs]


def _proposed(p: jax.Array, drafted, V: int, values: SamplingValues) -> list[jax.Array]:
    if drafted is None:
        return []
    logits, ids = drafted
    narrow = jax.nn.softmax(logits.astype(p.dtype) / values.temperature, axis=-1)
    q = jnp.zeros((len(logits), V), p.dtype).at[:, ids].set(narrow)
    rules = acceptance_by_rule(p, q)
    best = jnp.argmax(q, axis=-1).astype(jnp.int32)
    return [best, rules["one_hot"], rules["strict"], rules["one_hot"], rules["full"]]

"""Prefill, one round, a whole generation: pure functions over one state, jitted once a shape.

Counting: `length` is the number of slots that hold target KV (SGLang's `seq_len`); the pending
bonus token has none yet, so prompt + new tokens == length + 1 always holds. The root of a round is
that bonus token, at slot and position `length`. Draft slot t holds the pair (states of token t,
token t + 1), so the draft's length is the target's.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from eagle3_jax import verify
from eagle3_jax.cache import KVCache
from eagle3_jax.draft import Eagle3Draft
from eagle3_jax.layers import Rows
from eagle3_jax.state import Limits, LoopState, Program, RoundRecord, Weights
from eagle3_jax.targets.base import Target
from eagle3_jax.tree import Seed, Tree, grow, select, top_probabilities


def start(
    program: Program,
    weights: Weights,
    prompts: jax.Array,  # [B, P] int32, right padded
    lengths: jax.Array,  # [B]
    limits: Limits,
    *,
    slots: int,
    capacity: int,
) -> tuple[LoopState, dict[str, jax.Array]]:
    """Runs the prompts through target and draft.

    The draft sees row t as the states of token t with token t + 1, the last row with the token the
    target just chose (SGLang `_draft_extend_for_prefill`).

    Returns:
      The state before the first round, and with `program.tensors` what was computed on the way.
    """
    target: Target = program.target.build(weights.target)
    B, P = prompts.shape
    cache = target.new_cache(B, slots)
    rows = Rows.prefill(B, P)
    states, aux, cache = target.states(prompts, rows, cache, program.boundaries)
    last = (lengths - 1)[:, None, None]
    logits = target.logits(jnp.take_along_axis(states, last, axis=1)[:, 0])
    bonus = _choose(logits[:, None], lengths[:, None] - 1, limits)[:, 0]
    tensors = {"target_aux": aux, "target_logits": logits}

    draft_cache, seed = None, None
    if program.draft is not None:
        draft: Eagle3Draft = program.draft.build(weights.draft)
        shared = target.shared()
        index = jnp.arange(P, dtype=jnp.int32)[None]
        following = jnp.concatenate((prompts[:, 1:], prompts[:, :1]), axis=1)
        following = jnp.where(index == (lengths - 1)[:, None], bonus[:, None], following)
        fused = draft.fuse(aux)
        out, draft_cache = draft.step(
            following, fused, rows, draft.new_cache(B, slots), shared=shared
        )
        out = jnp.take_along_axis(out, last, axis=1)
        seed, draft_logits = _seed(program, draft, out[:, 0], shared)
        tensors |= {"fused": fused, "extend_tokens": following, "extend_logits": draft_logits}

    new = jnp.zeros((B, capacity + program.rows), jnp.int32).at[:, 0].set(bonus)
    stopped = jnp.any(bonus[:, None] == limits.stop_ids[None], axis=1)
    state = LoopState(
        target_cache=cache,
        draft_cache=draft_cache,
        length=lengths,
        bonus=bonus,
        seed=seed,
        out=new,
        num_new=jnp.ones((B,), jnp.int32),
        done=stopped | (limits.max_new_tokens <= 1),
        rounds=jnp.zeros((), jnp.int32),
        correct=jnp.full((capacity, B), -1, jnp.int32),
        log=None,
    )
    if program.trace:
        shape = jax.eval_shape(lambda s: round_(program, weights, s, limits)[1], state)
        log = jax.tree.map(lambda x: jnp.zeros((capacity, *x.shape), x.dtype), shape)
        state = dataclasses.replace(state, log=log)
    return state, tensors if program.tensors else {}


def round_(
    program: Program, weights: Weights, state: LoopState, limits: Limits
) -> tuple[LoopState, RoundRecord, dict[str, jax.Array]]:
    """Drafts a tree, verifies it in one target pass, keeps the accepted path, reseeds the draft."""
    target: Target = program.target.build(weights.target)
    tensors: dict[str, jax.Array] = {}
    draft_cache, draft = state.draft_cache, None
    if program.draft is not None and program.tree is not None:
        draft = program.draft.build(weights.draft)
        tree, draft_cache, tensors = _draft_tree(program, draft, target, state)
    else:
        tree = Tree.root(state.bonus, jnp.float32)

    positions = state.length[:, None] + tree.depths
    rows = Rows(positions, state.length, state.length, tree.ancestors)
    states, aux, target_cache = target.states(
        tree.tokens, rows, state.target_cache, program.boundaries
    )
    logits = target.logits(states)
    predicted = _choose(logits, positions, limits)
    path, num_correct = verify.greedy(tree, predicted, program.rows - 1)
    if program.tree is not None and program.tree.topk > 1:
        target_cache = target_cache.keep(path, state.length)

    tokens = jnp.take_along_axis(predicted, path, axis=1)  # [B, rows]
    kept, stopped = _cut(tokens, num_correct, state, limits)
    num_new = state.num_new + kept
    seed = state.seed
    if draft is not None:
        assert draft_cache is not None
        seed, draft_cache, extended = _extend(
            program, draft, target, state.length, tokens, path, aux, num_correct, draft_cache
        )
        tensors |= extended | {"target_logits": logits, "target_aux": aux}

    record = RoundRecord(
        active=~state.done,
        length=state.length,
        tree=tree,
        positions=positions,
        predicted=predicted,
        margins=_margins(logits, predicted) if program.trace else jnp.zeros_like(tree.scores),
        path=path,
        num_correct=num_correct,
        kept=kept,
    )
    bonus = jnp.take_along_axis(tokens, num_correct[:, None], axis=1)[:, 0]
    write = jax.vmap(lambda o, t, i: lax.dynamic_update_slice(o, t, (i,)))
    state = dataclasses.replace(
        state,
        target_cache=target_cache,
        draft_cache=draft_cache,
        length=state.length + kept,
        bonus=jnp.where(state.done, state.bonus, bonus),
        seed=seed,
        out=write(state.out, tokens, state.num_new),
        num_new=num_new,
        done=state.done | stopped | (num_new >= limits.max_new_tokens),
        rounds=state.rounds + 1,
        correct=lax.dynamic_update_slice(
            state.correct,
            jnp.where(state.done, -1, num_correct)[None],
            (state.rounds, jnp.zeros((), jnp.int32)),
        ),
    )
    return state, record, tensors if program.tensors else {}


def _draft_tree(
    program: Program, draft: Eagle3Draft, target: Target, state: LoopState
) -> tuple[Tree, KVCache, dict[str, jax.Array]]:
    config, shared = program.tree, target.shared()
    assert config is not None
    assert state.seed is not None
    assert state.draft_cache is not None
    cache = state.draft_cache
    tensors = {
        "seed_probs": state.seed.probs,
        "seed_ids": state.seed.tokens,
        "seed_hidden": state.seed.hidden,
    }

    def forward(level, tokens, hidden, bits):
        nonlocal cache
        positions = jnp.broadcast_to(state.length[:, None] + level, tokens.shape)
        rows = Rows(positions, state.length + level * config.topk, state.length, bits)
        out, cache = draft.step(tokens, hidden, rows, cache, shared=shared)
        logits, fed_back = draft.logits(out, shared=shared), draft.feedback(out)
        tensors[f"draft_tokens.{level}"] = tokens
        tensors[f"draft_positions.{level}"] = positions
        tensors[f"draft_logits.{level}"] = logits
        tensors[f"draft_hidden.{level}"] = fed_back
        return logits, fed_back

    candidates = grow(state.seed, forward, draft.to_target, config, program.draft_attention)
    tree, selected = select(candidates, state.bonus, config)
    tensors |= {
        "candidate_tokens": candidates.tokens,
        "candidate_scores": candidates.scores,
        "candidate_parents": candidates.parents,
        "selected": selected,
        "ancestors": tree.ancestors,
    }
    return tree, cache, tensors


def _extend(
    program: Program,
    draft: Eagle3Draft,
    target: Target,
    length: jax.Array,  # [B]
    tokens: jax.Array,  # [B, rows] the target's token after each accepted node
    path: jax.Array,  # [B, rows]
    aux: jax.Array,  # [B, N, A, E]
    num_correct: jax.Array,  # [B]
    cache: KVCache,
) -> tuple[Seed, KVCache, dict[str, jax.Array]]:
    """Writes the accepted tokens' draft KV from target states; the last row seeds the next round.

    Rows past the accepted ones hold leftovers that the next round overwrites before anything sees
    them (SGLang `_draft_extend_for_decode`).
    """
    shared = target.shared()
    accepted = jnp.take_along_axis(aux, path[:, :, None, None], axis=1)
    out, cache = draft.step(
        tokens, draft.fuse(accepted), Rows.chain(length, program.rows), cache, shared=shared
    )
    last = jnp.take_along_axis(out, num_correct[:, None, None], axis=1)[:, 0]
    seed, logits = _seed(program, draft, last, shared)
    return seed, cache, {"extend_tokens": tokens, "extend_hidden": out, "extend_logits": logits}


def _seed(program: Program, draft: Eagle3Draft, out: jax.Array, shared) -> tuple[Seed, jax.Array]:
    assert program.tree is not None
    logits = draft.logits(out, shared=shared)
    probs, ids = top_probabilities(logits, program.tree.topk)
    return Seed(probs, draft.to_target(ids), draft.feedback(out)), logits


def _cut(
    tokens: jax.Array, num_correct: jax.Array, state: LoopState, limits: Limits
) -> tuple[jax.Array, jax.Array]:
    """How many of a round's tokens [B, rows] are kept, and whether the last is a stop id."""
    rows = tokens.shape[1]
    index = jnp.arange(rows, dtype=jnp.int32)[None]
    is_stop = jnp.any(tokens[:, :, None] == limits.stop_ids[None, None], axis=2)
    first_stop = jnp.min(jnp.where(is_stop, index, rows), axis=1)
    room = limits.max_new_tokens - state.num_new
    kept = jnp.minimum(jnp.minimum(num_correct + 1, first_stop + 1), room)
    kept = jnp.where(state.done, 0, kept)
    return kept, kept == first_stop + 1


def _choose(logits: jax.Array, positions: jax.Array, limits: Limits) -> jax.Array:
    """The target's token after rows at positions [B, T]: the text's where one is given."""
    predicted = jnp.argmax(logits, axis=-1).astype(jnp.int32)
    if limits.forced is None:
        return predicted
    given = jnp.take_along_axis(limits.forced, positions + 1, axis=1, mode="clip")
    return jnp.where(given >= 0, given, predicted)


def _margins(logits: jax.Array, predicted: jax.Array) -> jax.Array:
    """The chosen logit minus the best of the others; below 0 where a text chose another."""
    taken = jnp.arange(logits.shape[-1], dtype=jnp.int32)[None, None] == predicted[:, :, None]
    chosen = jnp.max(jnp.where(taken, logits, -jnp.inf), axis=-1)
    return (chosen - jnp.max(jnp.where(taken, -jnp.inf, logits), axis=-1)).astype(jnp.float32)


def finish(program: Program, weights: Weights, state: LoopState, limits: Limits) -> LoopState:
    """Round after round on the device until every sequence has ended."""

    def body(state: LoopState) -> LoopState:
        index = state.rounds
        after, record, _ = round_(program, weights, state, limits)
        if state.log is None:
            return after
        log = jax.tree.map(
            lambda all_, one: lax.dynamic_update_index_in_dim(all_, one, index, 0),
            state.log,
            record,
        )
        return dataclasses.replace(after, log=log)

    return lax.while_loop(lambda s: ~jnp.all(s.done), body, state)


@functools.partial(jax.jit, static_argnames=("program", "slots", "capacity"))
def start_jit(
    program: Program,
    weights: Weights,
    prompts: Any,
    lengths: Any,
    limits: Limits,
    *,
    slots,
    capacity,
):
    """`start`, compiled once per batch, padded prompt length and capacity."""
    return start(program, weights, prompts, lengths, limits, slots=slots, capacity=capacity)


@functools.partial(jax.jit, static_argnames=("program",), donate_argnames=("state",))
def round_jit(program: Program, weights: Weights, state: LoopState, limits: Limits):
    """`round_`, compiled once per batch and capacity; the state is donated."""
    return round_(program, weights, state, limits)


@functools.partial(jax.jit, static_argnames=("program",), donate_argnames=("state",))
def finish_jit(program: Program, weights: Weights, state: LoopState, limits: Limits):
    """`finish`, compiled once per batch and capacity; the state is donated."""
    return finish(program, weights, state, limits)

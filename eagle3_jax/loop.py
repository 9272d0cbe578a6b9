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

from eagle3_jax import choice, sampling, sharding
from eagle3_jax.cache import KVCache
from eagle3_jax.draft import Eagle3Draft
from eagle3_jax.layers import Rows
from eagle3_jax.state import Limits, LoopState, Program, RoundRecord, Weights
from eagle3_jax.targets.base import Target
from eagle3_jax.tree import Seed, Tree, grow, select
from eagle3_jax.verify import Accepted


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
    bonus = choice.first_token(program, logits, lengths, limits)
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
        seed, draft_logits = _seed(program, draft, out[:, 0], shared, lengths, limits)
        tensors |= {"fused": fused, "extend_tokens": following, "extend_logits": draft_logits}

    new = jnp.zeros((B, capacity + program.rows), jnp.int32).at[:, 0].set(bonus)
    stopped = jnp.any(bonus[:, None] == limits.stop_ids[None], axis=1)
    counts = None
    if program.sampling is not None and program.sampling.penalties:
        counts = jnp.zeros(logits.shape, jnp.int32)
        counts = sampling.count(counts, bonus[:, None], jnp.ones((B,), jnp.int32))
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
        counts=counts,
        log=None,
    )
    if program.trace:
        shape = jax.eval_shape(lambda s: round_(program, weights, s, limits)[1], state)
        log = jax.tree.map(lambda x: jnp.zeros((capacity, *x.shape), x.dtype), shape)
        state = dataclasses.replace(state, log=log)
    return sharding.pinned(state), tensors if program.tensors else {}


def round_(
    program: Program, weights: Weights, state: LoopState, limits: Limits
) -> tuple[LoopState, RoundRecord, dict[str, jax.Array]]:
    """Drafts a tree, verifies it in one target pass, keeps the accepted path, reseeds the draft."""
    target: Target = program.target.build(weights.target)
    tensors: dict[str, jax.Array] = {}
    draft_cache, draft, draft_probs = state.draft_cache, None, None
    if program.draft is not None and program.tree is not None:
        draft = program.draft.build(weights.draft)
        tree, draft_cache, draft_probs, tensors = _draft_tree(program, draft, target, state, limits)
    else:
        tree = Tree.root(state.bonus, jnp.float32)

    positions = state.length[:, None] + tree.depths
    rows = Rows(positions, state.length, state.length, tree.ancestors)
    states, aux, target_cache = target.states(
        tree.tokens, rows, state.target_cache, program.boundaries
    )
    logits = target.logits(states)
    verified = choice.verified(program, tree, logits, positions, state, limits, draft_probs)
    path, num_correct = verified.accepted.path, verified.accepted.num_correct
    tokens = verified.accepted.tokens  # [B, rows]
    if program.tree is not None and program.tree.topk > 1:
        target_cache = target_cache.keep(path, state.length)

    kept, stopped = choice.cut(tokens, num_correct, state, limits)
    num_new = state.num_new + kept
    seed = state.seed
    if draft is not None:
        assert draft_cache is not None
        seed, draft_cache, extended = _extend(
            program, draft, target, limits, state.length, verified.accepted, aux, draft_cache
        )
        tensors |= extended
    tensors |= {"target_logits": logits, "target_aux": aux}

    record = RoundRecord(
        active=~state.done,
        length=state.length,
        tree=tree,
        positions=positions,
        predicted=verified.predicted,
        margins=verified.margins,
        target_probs=verified.target_probs,
        expected_drafts=verified.expected_drafts,
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
        counts=None if state.counts is None else sampling.count(state.counts, tokens, kept),
    )
    return sharding.pinned(state), record, tensors if program.tensors else {}


def _draft_tree(
    program: Program, draft: Eagle3Draft, target: Target, state: LoopState, limits: Limits
) -> tuple[Tree, KVCache, jax.Array | None, dict[str, jax.Array]]:
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

    drawn_from = [state.seed.drawn_from]

    def propose(level, logits):
        probs, ids, whole = choice.propose(program, limits, state.length, level, logits)
        drawn_from.append(whole)
        return probs, ids

    candidates = grow(
        state.seed, forward, draft.to_target, config, program.draft_attention, propose
    )
    tree, selected = select(candidates, state.bonus, config)
    tensors |= {
        "candidate_tokens": candidates.tokens,
        "candidate_scores": candidates.scores,
        "candidate_parents": candidates.parents,
        "selected": selected,
        "ancestors": tree.ancestors,
    }
    return tree, cache, _over_target(draft, target, drawn_from), tensors


def _over_target(
    draft: Eagle3Draft, target: Target, drawn_from: list[jax.Array | None]
) -> jax.Array | None:
    """[B, num_steps, V] from each level's [B, W]: draft ids are moved to target ids."""
    levels = [q for q in drawn_from if q is not None]
    if not levels:
        return None
    narrow = jnp.stack(levels, axis=1)
    wide = jnp.zeros((*narrow.shape[:2], target.config.vocab_size), narrow.dtype)
    ids = draft.to_target(jnp.arange(narrow.shape[2], dtype=jnp.int32))
    return wide.at[:, :, ids].set(narrow)


def _extend(
    program: Program,
    draft: Eagle3Draft,
    target: Target,
    limits: Limits,
    length: jax.Array,  # [B]
    accepted: Accepted,
    aux: jax.Array,  # [B, N, A, E]
    cache: KVCache,
) -> tuple[Seed, KVCache, dict[str, jax.Array]]:
    """Writes the accepted tokens' draft KV from target states; the last row seeds the next round.

    Rows past the accepted ones hold leftovers that the next round overwrites before anything sees
    them (SGLang `_draft_extend_for_decode`).
    """
    shared, tokens, count = target.shared(), accepted.tokens, accepted.num_correct
    states = jnp.take_along_axis(aux, accepted.path[:, :, None, None], axis=1)
    out, cache = draft.step(
        tokens, draft.fuse(states), Rows.chain(length, program.rows), cache, shared=shared
    )
    last = jnp.take_along_axis(out, count[:, None, None], axis=1)[:, 0]
    seed, logits = _seed(program, draft, last, shared, length + count + 1, limits)
    return seed, cache, {"extend_tokens": tokens, "extend_hidden": out, "extend_logits": logits}


def _seed(
    program: Program, draft: Eagle3Draft, out: jax.Array, shared, length: jax.Array, limits: Limits
) -> tuple[Seed, jax.Array]:
    """Level 0 of the round that starts at `length` [B], from the draft's last row out [B, D]."""
    logits = draft.logits(out, shared=shared)
    probs, ids, drawn_from = choice.propose(program, limits, length, 0, logits)
    return Seed(probs, draft.to_target(ids), draft.feedback(out), drawn_from), logits


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

    return sharding.pinned(lax.while_loop(lambda s: ~jnp.all(s.done), body, state))


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

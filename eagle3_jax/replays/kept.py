"""Rounds of a draft whose committed rows keep what drafting wrote: one after the other.

The fault of an engine that never rebuilds draft KV from target states. Rows that no drafting wrote
(the last one of a round, and before it the one a full accept leaves open) come from target states.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from eagle3_jax.cache import KVCache
from eagle3_jax.config import TreeConfig
from eagle3_jax.draft import Eagle3Draft, Shared
from eagle3_jax.layers import Rows
from eagle3_jax.modules import Structure, take_apart
from eagle3_jax.ops.bits import chain_bits
from eagle3_jax.record import RecordSequence
from eagle3_jax.replays.bin import BinReplay, Runner
from eagle3_jax.replays.rows import Part, Run, committed_rows


@functools.partial(
    jax.jit, static_argnames=("structure", "num_steps"), donate_argnames=("cache", "state")
)
def kept_round(
    structure: Structure,
    leaves: tuple[jax.Array, ...],
    shared: Shared | None,
    cache: KVCache,
    state: jax.Array,  # [D] what the seed row feeds back
    token: jax.Array,  # [] its drafted target id
    true: jax.Array,  # [num_steps + 1] the tokens after the bonus token, -1 past the judged ones
    aux: jax.Array,  # [num_steps + 1, A, E] of the bonus token and those after it
    slot: jax.Array,  # [] of the bonus token
    position: jax.Array,  # []
    axes: jax.Array | None,  # [3, num_steps + 1] rotary positions of the rows over `aux`
    ahead: jax.Array | None,  # [] rotary position of the bonus token
    *,
    num_steps: int,
) -> tuple[KVCache, jax.Array, jax.Array, jax.Array]:
    """One round: cache, state and first draft of the next, and the true drafts [] of this one."""
    draft: Eagle3Draft = structure.build(leaves)
    drafted, hidden = [token], state
    for i in range(num_steps - 1):
        at = (slot + i)[None]
        one = None if ahead is None else jnp.broadcast_to((ahead + i)[None, None, None], (1, 3, 1))
        rows = Rows((position + i)[None, None], at, at, jnp.asarray(chain_bits(1))[None], one)
        out, cache = draft.step(
            drafted[-1][None, None], hidden[None, None], rows, cache, shared=shared
        )
        hidden = draft.feedback(out)[0, 0]
        drafted.append(_best(draft, out[0, 0], shared))
    hit = jnp.stack(drafted) == true[:num_steps]
    accepted = jnp.sum(jnp.cumprod(hit.astype(jnp.int32)), dtype=jnp.int32)
    first = jnp.minimum(accepted, num_steps - 1)
    at = (slot + first)[None]
    places = first + jnp.arange(2, dtype=jnp.int32)
    two = None if axes is None else axes[None, :, places]
    rows = Rows((position + places)[None], at, at, jnp.asarray(chain_bits(2))[None], two)
    out, cache = draft.step(
        true[places][None], draft.fuse(aux[places][None]), rows, cache, shared=shared
    )
    last = jax.lax.dynamic_index_in_dim(out[0], accepted - first, keepdims=False)
    return cache, draft.feedback(last[None, None])[0, 0], _best(draft, last, shared), accepted


def _best(draft: Eagle3Draft, out: jax.Array, shared: Shared | None) -> jax.Array:
    ids = jnp.argmax(draft.logits(out[None], shared=shared), axis=-1).astype(jnp.int32)
    return draft.to_target(ids)[0]


def kept_rounds(
    runner: Runner, sequence: RecordSequence, run: Run, tree: TreeConfig
) -> tuple[list[tuple[int, int]], int]:
    """(start, true drafts) of every whole round of one output, and how many the end cut."""
    rows = committed_rows(
        Part(run.sequence, sequence, 0, [run]),
        run,
        slots=-(-(len(sequence.tokens) + tree.num_steps + 2) // 256) * 256,
        multi_axis=bool(runner.draft.config.rope.mrope_section),
    )
    placed = np.asarray(sequence.positions) if rows.axes is not None else None
    start = BinReplay(runner, rows, topk=1)
    leaves, structure = take_apart(runner.draft)
    cache, slot = start.bin.cache, run.begin - sequence.first
    state = start.bin.state[slot - 1]
    token = jnp.asarray(start.tokens[slot - 1, 0])
    found, position = [], run.begin
    width = tree.num_steps + 1
    while position < run.end - 1:
        judged = min(width, run.end - 1 - position)
        true = np.full(width, -1, np.int32)
        true[:judged] = sequence.tokens[position + 1 : position + 1 + judged]
        first = position - sequence.first
        states = np.asarray(sequence.aux[first : first + width])[:, list(runner.slots)]
        aux = np.zeros((width, *states.shape[1:]), states.dtype)
        aux[: len(states)] = states
        axes = ahead = None
        if placed is not None:
            here = placed[:, position : position + width].astype(np.int32)
            axes = np.pad(here, ((0, 0), (0, width - here.shape[1])), mode="edge")
            ahead = np.int32(placed[:, :position].max() + 1)
        cache, state, token, accepted = kept_round(
            structure,
            leaves,
            runner.shared,
            cache,
            state,
            token,
            true,
            aux,
            np.int32(first),
            np.int32(position),
            axes,
            ahead,
            num_steps=tree.num_steps,
        )
        count = int(accepted)
        if count == min(tree.num_steps, judged) < tree.num_steps:
            return found, 1
        found.append((position, count))
        position += count + 1
    return found, 0

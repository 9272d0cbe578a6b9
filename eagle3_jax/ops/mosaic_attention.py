"""The tree kernel on Pallas's Mosaic GPU backend, for Hopper: TMA copies and wgmma by hand.

The algorithm of `tree_attention`, written a second time for the backend that jax keeps. It is a
choice (`use_attention("mosaic")`), not the default: it compiles for an H200 with both jax lines and
nobody has run it on a card. Its matrix products take 64 query rows, so fewer are padded; queries
are folded and results unfolded by XLA, two launches more than the Triton kernel has.

TMA copies tiles of 8 slots, so the tree's part starts at the tile its first node is in: up to 7
committed slots, which every row sees, stand before the nodes.
"""

import functools
import inspect
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from eagle3_jax.ops.kernel_plan import MULTIPROCESSORS
from eagle3_jax.ops.merge import LOG2E, merge
from eagle3_jax.ops.tree_step import NOTHING

ROWS, KEYS = 64, 64  # of one matrix product; keys are two words of the tree
TILE = 8  # slots: where a copy may start
WIDTHS = (64, 128, 256)
ROW = plgpu.Layout.WGMMA.reduce(1)


def takes(q: jax.Array, k: jax.Array, v: jax.Array | None, *, plain: bool) -> bool:
    """16 bits, widths and slots of whole tiles; `plain`: without window and sinks."""
    if q.dtype not in (jnp.bfloat16, jnp.float16) or k.dtype != q.dtype or v is None:
        return False
    return plain and q.shape[3] in WIDTHS and k.shape[1] % TILE == 0 and v.shape == k.shape


@functools.partial(jax.jit, static_argnames=("scale", "softcap"))
def mosaic_attention(
    q: jax.Array,  # [B, T, N, H]
    k: jax.Array,  # [B, S, K, H]
    v: jax.Array,  # [B, S, K, H]
    lengths: jax.Array,  # [B] int32
    ancestors: jax.Array,  # [B, T, words] uint32
    *,
    scale: float,
    softcap: float | None = None,
) -> jax.Array:  # [B, T, N, H]
    """`ops.attention.attend` of what `takes` says.

    Slots of a step that nobody sees weigh nothing, but are read: a NaN there would show.
    """
    B, T, N, H = q.shape
    S, K = k.shape[1:3]
    G, rows = N // K, T * (N // K)
    blocks = -(-rows // ROWS)
    folded = q.reshape(B, T, K, G, H).swapaxes(1, 2).reshape(B, K, rows, H)
    pad = blocks * ROWS - rows
    folded = jnp.pad(folded, ((0, 0), (0, 0), (0, pad), (0, 0)))
    words = jnp.repeat(ancestors.swapaxes(1, 2), G, axis=2)
    words = jnp.pad(words, ((0, 0), (0, 0), (0, pad)))
    # Ones before the first word: committed slots are seen. A step loads its two words and the one
    # below, which the slots ahead of the tree push up into them.
    words = jnp.pad(words, ((0, 0), (1, 0), (0, 0)), constant_values=np.uint32(0xFFFFFFFF))
    words = jnp.pad(words, ((0, 0), (0, 2 - ancestors.shape[2] % 2), (0, 0)))
    splits = MULTIPROCESSORS // (B * K * blocks)
    splits = max(1, min(splits, -(-S // max(KEYS, 2 * ROWS)) + 1))
    stages = 2 if H == 256 else 4
    shape = (splits, B, K, blocks * ROWS)
    sums = jax.ShapeDtypeStruct(shape, jnp.float32)
    tiles = plgpu.TilingTransform((TILE, 64)), plgpu.SwizzleTransform(128)
    o, m, total = plgpu.kernel(
        _kernel(S, H, ancestors.shape[2], splits, stages, scale, softcap),
        out_type=[jax.ShapeDtypeStruct((*shape, H), jnp.float32), sums, sums],
        grid=(blocks, K, B, splits),
        grid_names=("block", "head", "batch", "part"),
        scratch_types=[
            plgpu.SMEM((ROWS, H), q.dtype, transforms=tiles),
            *[plgpu.SMEM((stages, KEYS, H), q.dtype, transforms=tiles)] * 2,
            plgpu.Barrier(),
            *[plgpu.Barrier(num_barriers=stages)] * 2,
        ],
        compiler_params=plgpu.CompilerParams(
            approx_math=True, lowering_semantics=plgpu.LoweringSemantics.Lane
        ),
    )(folded, k, v, lengths, words)
    found = merge(o, m, total, None, q.dtype)[:, :, :rows]
    return found.reshape(B, K, T, G, H).swapaxes(1, 2).reshape(B, T, N, H)


def _kernel(
    slots: int,
    width: int,
    words: int,
    splits: int,
    stages: int,
    scale: float,
    softcap: float | None,
) -> Callable:
    def mosaic_attention_kernel(
        q_ref, k_ref, v_ref, lengths_ref, words_ref, o_ref, m_ref, total_ref, *scratch
    ):
        q_smem, k_smem, v_smem, q_here, k_here, v_here = scratch
        block, head, batch, part = map(lax.axis_index, ("block", "head", "batch", "part"))
        rows = pl.ds(block * ROWS, ROWS)
        length = lengths_ref[batch]
        ahead = length & (TILE - 1)  # committed slots in the tile of the first node
        start = length - ahead
        end = jnp.minimum(length + 32 * words, slots)
        low, prefix, count = _share(start, end, splits, part)

        def fetch(i: jax.Array) -> None:
            first = jnp.where(i < prefix, (low + i) * KEYS, start + (i - prefix) * KEYS)
            slot = lax.rem(i, jnp.int32(stages))
            where = (batch, pl.ds(first, KEYS), head)
            plgpu.copy_gmem_to_smem(k_ref.at[where], k_smem.at[slot], k_here.at[slot])
            plgpu.copy_gmem_to_smem(v_ref.at[where], v_smem.at[slot], v_here.at[slot])

        def step(i: jax.Array, carry: tuple, seen: Callable) -> tuple:
            acc, m, total = carry
            slot = lax.rem(i, jnp.int32(stages))
            plgpu.barrier_wait(k_here.at[slot])

            def multiply(ref):
                plgpu.wgmma(ref, q_smem, k_smem.at[slot].transpose((1, 0)))
                return ref[...]

            scores = pl.run_scoped(multiply, plgpu.WGMMAAccumulatorRef((ROWS, KEYS), jnp.float32))
            if softcap is None:
                scores = scores * (scale * LOG2E)
            else:
                scores = jnp.tanh(scores * (scale / softcap)) * (softcap * LOG2E)
            column = plgpu.broadcasted_iota(jnp.int32, (ROWS, KEYS), 1, layout=plgpu.Layout.WGMMA)
            scores = jnp.where(seen(i, column), scores, -jnp.inf)
            top = jnp.maximum(m, scores.max(axis=1))
            shrink = jnp.exp2(m - top)
            weights = jnp.exp2(scores - _wide(top, KEYS))
            acc, total = acc * _wide(shrink, width), total * shrink + weights.sum(axis=1)
            narrow = weights.astype(k_ref.dtype)
            plgpu.barrier_wait(v_here.at[slot])

            def weigh(ref):
                plgpu.wgmma(ref, narrow, v_smem.at[slot])

            acc = pl.run_state(weigh)(plgpu.WGMMAAccumulatorRef.init(acc))
            pl.when(i + stages < count)(lambda: fetch(i + stages))
            return acc, top, total

        def in_prefix(i, column):
            return column < start - (low + i) * KEYS

        def in_tree(i, column):
            pair = i - prefix
            # The 64 bits that end `ahead` bits before the second of these words does.
            below, here, next_ = (_load(words_ref, (batch, 2 * pair + n, rows)) for n in range(3))
            shift = ahead.astype(jnp.uint32)
            bits = jnp.where(
                column < 32,
                _wide(_shifted(below, here, shift), KEYS),
                _wide(_shifted(here, next_, shift), KEYS),
            )
            bits = lax.shift_right_logical(bits, (column & 31).astype(jnp.uint32))
            named = (bits & jnp.uint32(1)) == jnp.uint32(1)
            return named & (column < end - start - pair * KEYS)

        plgpu.copy_gmem_to_smem(q_ref.at[batch, head, rows], q_smem, q_here)
        for i in range(stages):
            pl.when(i < count)(functools.partial(fetch, jnp.int32(i)))
        plgpu.barrier_wait(q_here)
        carry = (
            plgpu.layout_cast(jnp.zeros((ROWS, width), jnp.float32), plgpu.Layout.WGMMA),
            plgpu.layout_cast(jnp.full((ROWS,), NOTHING, jnp.float32), ROW),
            plgpu.layout_cast(jnp.zeros((ROWS,), jnp.float32), ROW),
        )
        carry = lax.fori_loop(0, prefix, functools.partial(step, seen=in_prefix), carry)
        carry = lax.fori_loop(prefix, count, functools.partial(step, seen=in_tree), carry)
        for ref, x in zip((o_ref, m_ref, total_ref), carry, strict=True):
            ref[part, batch, head, rows] = x

    return mosaic_attention_kernel


def _share(
    start: jax.Array, end: jax.Array, splits: int, part: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The first prefix step of this program, how many it takes, and how many with the tree's."""
    steps, tree = _steps(start), _steps(jnp.maximum(end - start, 0))
    if splits == 1:
        return jnp.int32(0), steps, steps + tree
    share = lax.div(steps + (splits - 2), jnp.int32(splits - 1))
    low = jnp.minimum(part * share, steps)
    prefix = jnp.minimum(share, steps - low)
    last = part == splits - 1
    prefix = jnp.where(last, 0, prefix)
    return low, prefix, prefix + jnp.where(last, tree, 0)


def _steps(slots: jax.Array) -> jax.Array:
    return lax.div(slots + (KEYS - 1), jnp.int32(KEYS))


def _shifted(below: jax.Array, word: jax.Array, by: jax.Array) -> jax.Array:
    """`word` moved up by fewer than 32 bits, those of the word below it first."""
    # In two steps: a shift by 32 is not defined.
    carried = lax.shift_right_logical(below, jnp.uint32(1))
    carried = lax.shift_right_logical(carried, _each(jnp.uint32(31) - by))
    return lax.shift_left(word, _each(by)) | carried


def _each(x: jax.Array) -> jax.Array:
    return lax.broadcast_in_dim(x, (ROWS,), ())


def _wide(x: jax.Array, columns: int) -> jax.Array:
    """[rows] -> [rows, columns]."""
    return lax.broadcast_in_dim(x, (ROWS, columns), (0,))


def _load(ref, index: tuple) -> jax.Array:
    """A row vector from global memory; jax 0.11 moved the index into the reference."""
    if "idx" in inspect.signature(plgpu.load).parameters:
        return plgpu.load(ref, index, layout=ROW, optimized=False)
    return plgpu.load(ref.at[index], layout=ROW, optimized=False)  # pyright: ignore[reportCallIssue]

"""Split-KV attention over a ragged cache whose last rows form a tree, as one Pallas kernel.

Nothing of size `T * S` exists outside registers: a program holds the rows of one sequence and KV
head, walks over the slots it has to see, and keeps their softmax as it goes (FlashAttention-2, Dao
2023; splits as in Flash-Decoding). `ops.attention.attend` has the semantics and is the oracle.
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from eagle3_jax.ops.kernel_plan import WORD, Plan, pieces, plan
from eagle3_jax.ops.merge import load_sink, merge, normalised
from eagle3_jax.ops.pallas_backend import call, load, store
from eagle3_jax.ops.tree_step import NOTHING, Sizes, Step, bits_of, columns, iota

WIDEST, WIDEST_FLOAT32 = 576, 256  # key widths; 576 is DeepSeek's latent and rotary key


def takes(q: jax.Array, k: jax.Array) -> bool:
    """Whether the kernel computes these: one dtype of 16 or 32 bits, keys that registers hold."""
    if q.dtype not in (jnp.bfloat16, jnp.float16, jnp.float32) or k.dtype != q.dtype:
        return False
    return q.shape[3] <= (WIDEST if q.dtype.itemsize == 2 else WIDEST_FLOAT32)


@functools.partial(jax.jit, static_argnames=("scale", "softcap", "window", "width", "interpret"))
def tree_attention(
    q: jax.Array,  # [B, T, N, H]
    k: jax.Array,  # [B, S, K, H]
    v: jax.Array | None,  # [B, S, K, any width]; None: the first `width` elements of the keys
    lengths: jax.Array,  # [B] int32
    ancestors: jax.Array,  # [B, T, words] uint32
    positions: tuple[jax.Array, jax.Array] | None = None,  # [B, T] and [B, S], with a window
    sinks: jax.Array | None = None,  # [N]
    *,
    scale: float,
    softcap: float | None = None,
    window: int | None = None,
    width: int | None = None,
    interpret: bool = False,
) -> jax.Array:  # [B, T, N, width of v]
    """`ops.attention.attend` by the kernel; bfloat16, float16 or float32.

    `interpret` runs it as ordinary array operations, on any platform.
    """
    B, T, N, H = q.shape
    S, K = k.shape[1:3]
    value = v.shape[3] if v is not None else width
    assert value is not None
    sizes = Sizes(T, N // K, S, ancestors.shape[2], H, value, v is None, scale, softcap, window)
    reach = S if window is None else min(S, window + WORD * sizes.words)
    cut = plan(B, K, T * sizes.group, reach, H, q.dtype.itemsize)
    inputs = [q.reshape(B, T, K, N // K, H), k, lengths, ancestors]
    if v is not None:
        inputs.append(v)
    if positions is not None:
        inputs += [_first_near(positions, window), *positions]
    if sinks is not None:
        inputs.append(sinks)
    return run(sizes, cut, inputs, sinks, interpret)


def run(
    sizes: Sizes, cut: Plan, inputs: list, sinks: jax.Array | None, interpret: bool
) -> jax.Array:  # [B, T, N, width of v]
    """The kernel and, of several splits, the merge.

    Args:
      inputs: q [B, T, K, G, H], keys, lengths, ancestors and what else there is, in `_call`'s order
        of specs.
    """
    B, T, K, G, _ = inputs[0].shape
    found = _call(sizes, cut, B, K, inputs, sinks is not None, interpret)
    if cut.splits == 1:
        return found[0].reshape(B, T, K * G, sizes.value)
    o, m, total = (x.reshape(cut.splits, B, T, K * G, *x.shape[5:]) for x in found)
    return merge(o, m, total, sinks, inputs[0].dtype, interpret=interpret)


def _first_near(positions: tuple[jax.Array, jax.Array], window: int | None) -> jax.Array:
    """[B] the first slot that any row sees through the window, S where there is none."""
    queries, keys = positions
    assert window is not None
    near = jnp.min(queries, axis=1, keepdims=True) - keys < window
    first = jnp.argmax(near, axis=1).astype(jnp.int32)
    return jnp.where(jnp.any(near, axis=1), first, keys.shape[1])


def _call(
    s: Sizes, cut: Plan, batch: int, kv_heads: int, inputs: list, sinks: bool, interpret: bool
) -> list[jax.Array]:
    """o, m and the sums [splits, B, T, K, G, ...], or of one split the result in q's dtype."""
    node, slot = (None, s.nodes, None, s.group), (None, s.slots, None)

    def cache(b):
        return b if s.chunks == 1 else lax.div(b, jnp.int32(s.chunks))

    specs = {
        "q": pl.BlockSpec((*node, s.key), lambda r, h, b, p: (b, 0, h, 0, 0)),
        "k": pl.BlockSpec((*slot, s.key), lambda r, h, b, p: (cache(b), 0, h, 0)),
        "lengths": pl.BlockSpec((1,), lambda r, h, b, p: (b,)),
        "ancestors": pl.BlockSpec((None, s.nodes, s.words), lambda r, h, b, p: (b, 0, 0)),
    }
    if not s.shared:
        specs["v"] = pl.BlockSpec((*slot, s.value), lambda r, h, b, p: (cache(b), 0, h, 0))
    if s.window is not None:
        specs["first"] = pl.BlockSpec((1,), lambda r, h, b, p: (b,))
        specs["at"] = pl.BlockSpec((None, s.nodes), lambda r, h, b, p: (b, 0))
        specs["key_at"] = pl.BlockSpec((None, s.slots), lambda r, h, b, p: (cache(b), 0))
    if sinks:
        specs["sinks"] = pl.BlockSpec((s.group,), lambda r, h, b, p: (h,))
    rows = (cut.splits, batch, s.nodes, kv_heads, s.group)
    wide = pl.BlockSpec((None, *node, s.value), lambda r, h, b, p: (p, b, 0, h, 0, 0))
    one = pl.BlockSpec((None, *node), lambda r, h, b, p: (p, b, 0, h, 0))
    alone = cut.splits == 1
    out = {"o": (wide, (*rows, s.value), inputs[0].dtype if alone else jnp.float32)}
    if not alone:
        out |= {"m": (one, rows, jnp.float32), "total": (one, rows, jnp.float32)}
    return call(
        _kernel(s, cut, (*specs, *out)),
        grid=(cut.row_blocks, kv_heads, batch, cut.splits),
        in_specs=list(specs.values()),
        out_specs=[spec for spec, _, _ in out.values()],
        out_shape=[jax.ShapeDtypeStruct(shape, dtype) for _, shape, dtype in out.values()],
        warps=cut.warps,
        stages=cut.stages,
        interpret=interpret,
    )(*inputs)


def _kernel(sizes: Sizes, cut: Plan, names: tuple[str, ...]) -> Callable:
    s = sizes

    def tree_attention_kernel(*refs):
        ref = dict(zip(names, refs, strict=True))
        row = pl.program_id(0) * cut.rows + iota(cut.rows)
        node, head = lax.div(row, jnp.int32(s.group)), lax.rem(row, jnp.int32(s.group))
        real = row < s.nodes * s.group
        step = Step(s, ref, node, real)
        queries = tuple(
            load(
                ref["q"].at[node[:, None], head[:, None], columns(start, size)],
                mask=real[:, None] & (columns(start, size) < s.key),
                other=0.0,
            )
            for start, size in pieces(s.key)
        )
        length = ref["lengths"][0]
        first = ref["first"][0] if s.window is not None else jnp.int32(0)
        low, high, words = _share(s, cut, first, length)

        def prefix(i, state):
            slot = first + i * cut.keys + iota(cut.keys)
            inside = slot < jnp.minimum(length, s.slots)
            return step(queries, slot, inside, inside[None, :], state)

        def tree(w, state):
            slot = length + w * WORD + iota(WORD)
            inside = slot < s.slots
            word = load(ref["ancestors"].at[node, w], mask=real, other=jnp.uint32(0))
            named = bits_of(word) & inside[None, :]
            return step(queries, slot, inside, named, state)

        state = (
            jnp.full((cut.rows,), NOTHING, jnp.float32),
            jnp.zeros((cut.rows,), jnp.float32),
            *(jnp.zeros((cut.rows, size), jnp.float32) for _, size in pieces(s.value)),
        )
        state = lax.fori_loop(low, high, prefix, state)
        m, total, *o = lax.fori_loop(0, words, tree, state)
        if cut.splits == 1:
            sink = load_sink(ref["sinks"], head, real) if "sinks" in ref else None
            o = _alone(m, total, o, sink)
        else:
            store(ref["m"].at[node, head], m, mask=real)
            store(ref["total"].at[node, head], total, mask=real)
        for (start, size), piece in zip(pieces(s.value), o, strict=True):
            column = columns(start, size)
            mask = real[:, None] & (column < s.value)
            out = ref["o"].at[node[:, None], head[:, None], column]
            store(out, piece.astype(ref["o"].dtype), mask=mask)

    return tree_attention_kernel


def _share(
    s: Sizes, cut: Plan, first: jax.Array, length: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The steps [low, high) of the prefix and the words of the tree that this program takes."""
    steps = lax.div(jnp.maximum(length - first, 0) + (cut.keys - 1), jnp.int32(cut.keys))
    left = jnp.maximum(s.slots - length, 0) + (WORD - 1)
    words = jnp.minimum(s.words, lax.div(left, jnp.int32(WORD)))
    if cut.splits == 1:
        return jnp.int32(0), steps, words
    part = pl.program_id(3)
    share = lax.div(steps + (cut.splits - 2), jnp.int32(cut.splits - 1))
    low = part * share
    return low, jnp.minimum(low + share, steps), jnp.where(part == cut.splits - 1, words, 0)


def _alone(
    m: jax.Array, total: jax.Array, o: list[jax.Array], sink: jax.Array | None
) -> list[jax.Array]:
    """What `merge` would make of one split."""
    if sink is None:
        return [normalised(x, total[:, None], m[:, None], None) for x in o]
    top = jnp.maximum(m, sink)
    shrink = jnp.exp2(m - top)[:, None]
    total = total[:, None] * shrink
    return [normalised(x * shrink, total, top[:, None], sink[:, None]) for x in o]

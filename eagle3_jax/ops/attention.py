"""Attention over a cache whose last rows form a tree: the reference, and which program runs.

The einsum is the oracle for the kernels, and what a CPU runs.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from eagle3_jax.ops import which
from eagle3_jax.ops.blockwise import blockwise_causal, rows_of_a_block
from eagle3_jax.ops.causal import causal_attention
from eagle3_jax.ops.over_mesh import axes_for, over_mesh
from eagle3_jax.ops.prefill import cudnn_causal, cudnn_takes
from eagle3_jax.ops.tree_attention import takes, tree_attention
from eagle3_jax.ops.which import Implementation, use_attention
from eagle3_jax.precision import accum_dtype

__all__ = ["Implementation", "Window", "attend", "attend_causal", "use_attention"]


@dataclasses.dataclass(frozen=True)
class Window:
    """A sliding window: a query sees keys less than `size` positions behind it.

    Positions, not slots: the nodes of a tree stand side by side in slots, level by level.
    """

    size: int
    queries: jax.Array  # [B, T] positions
    keys: jax.Array  # [B, S] positions

    def near(self) -> jax.Array:
        """[B, T, S] bool."""
        return self.queries[:, :, None] - self.keys[:, None, :] < self.size


def attend(
    q: jax.Array,  # [B, T, N, H]
    k: jax.Array,  # [B, S, K, H]
    v: jax.Array | None,  # [B, S, K, any width]; None: the first `width` elements of the keys
    lengths: jax.Array,  # [B] int32, slots every query sees
    ancestors: jax.Array,  # [B, T, words] uint32; bit j of row i: query i sees slot length + j
    *,
    scale: float,
    window: Window | None = None,
    softcap: float | None = None,
    sinks: jax.Array | None = None,  # [N] logits
    width: int | None = None,
    implementation: Implementation | None = None,
) -> jax.Array:  # [B, T, N, width of v]
    """Query i of a sequence sees slots below its length and the slots its ancestor bits name.

    Scores and softmax are in float32 (float64 for float64); probabilities are rounded to q's dtype
    before they weigh the values, as flash kernels do. A row that sees nothing is zeros, never NaN;
    the loop has no such row.

    Args:
      softcap: scores become `softcap * tanh(score / softcap)` (Gemma 2).
      sinks: one logit a head that takes its share of the softmax and weighs nothing (gpt-oss).
      implementation: `"xla"`, the einsum; `"pallas"`, the kernel; `"mosaic"`, its twin for Hopper
        (`mosaic_attention`) where that takes the arguments; `"interpret"`, the kernel as plain
        array operations, on any platform. None: what `use_attention` says, else the kernel
        in programs for CUDA and the einsum in others; an installation without a GPU and without
        jax's plugin for one has the einsum in all. What the kernel does not take (float64, very
        wide keys: `tree_attention.takes`) is the einsum's in any case. The kernel has no
        derivative.

    Raises:
      ValueError: an unknown implementation.
    """

    def einsum(q, k, v, lengths, ancestors, positions, sinks):
        seen, some = _visible(lengths, ancestors, k.shape[1])
        if window is not None:
            seen = seen & window.near()
            some = jnp.any(seen, axis=2)
        out = _weigh(q, k, k[..., :width] if v is None else v, seen, scale, softcap, sinks)
        return jnp.where(some[:, :, None, None], out, jnp.zeros((), out.dtype))

    def kernel(*arrays, interpret):
        if mosaic:
            from eagle3_jax.ops.mosaic_attention import mosaic_attention

            run = functools.partial(mosaic_attention, scale=scale, softcap=softcap)
            return _over_mesh(lambda *a: run(*a[:-2]), arrays)
        run = functools.partial(
            tree_attention,
            scale=scale,
            softcap=softcap,
            window=None if window is None else window.size,
            width=width,
            interpret=interpret,
        )
        return _over_mesh(run, arrays)

    mosaic = which.chosen(implementation) == "mosaic" and _mosaic_takes(
        q, k, v, plain=window is None and sinks is None
    )
    positions = None if window is None else (window.queries, window.keys)
    arrays = (q, k, v, lengths, ancestors, positions, sinks)
    return which.run(einsum, kernel, arrays, takes=takes(q, k), implementation=implementation)


def _mosaic_takes(*arrays, plain: bool) -> bool:
    # Imported where it is asked for: a program for a CPU does without Mosaic's packages.
    from eagle3_jax.ops.mosaic_attention import takes

    return takes(*arrays, plain=plain)


def _over_mesh(kernel, arrays) -> jax.Array:
    """Of q, k, v, arrays by sequence, and sinks."""
    k, between = arrays[1], len(arrays) - 4
    data, model = axes = axes_for(k.shape[0], k.shape[2])
    heads = P(data, None, model)
    specs = (heads, heads, heads, *[P(data)] * between, P(model))
    return over_mesh(kernel, arrays, axes, specs, heads)


def attend_causal(
    q: jax.Array,  # [B, T, N, H]
    k: jax.Array,  # [B, T, K, H]
    v: jax.Array | None,  # [B, T, K, any width]; None: the first `width` elements of the keys
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: jax.Array | None = None,  # [N] logits
    width: int | None = None,
    implementation: Implementation | None = None,
) -> jax.Array:  # [B, T, N, width of v]
    """Prefill from an empty cache: query t sees rows 0..t.

    Right padding needs no mask: no real row sees a padded one. The same arithmetic as `attend`.
    No array of T x T exists for a long prompt: the kernel has none, and the einsum goes block by
    block (`blockwise`).

    Args:
      window: of those only the last so many, for rows at positions 0, 1, 2 and so on.
      implementation: as for `attend`. Where jax has a GPU and cuDNN takes these arguments
        (`prefill.cudnn_takes`; bfloat16 and float16 only), its flash attention comes before the
        kernel. (`jax.nn.dot_product_attention` would leave float32 products at the backend's
        default precision, and takes its softmax in float32 even for float64.)

    Raises:
      ValueError: an unknown implementation.
    """

    def einsum(q, k, v, sinks):
        v = k[..., :width] if v is None else v
        rows = rows_of_a_block(q)
        if rows < q.shape[1]:
            return blockwise_causal(q, k, v, sinks, scale, window, softcap, rows)
        T = q.shape[1]
        seen = jnp.tril(jnp.ones((1, T, T), bool))
        if window is not None:
            seen &= ~jnp.tril(jnp.ones((1, T, T), bool), -window)
        return _weigh(q, k, v, seen, scale, softcap, sinks)

    def kernel(q, k, v, sinks, *, interpret):
        if not interpret and cudnn:
            return cudnn_causal(q, k, v, scale=scale, window=window)
        run = functools.partial(
            causal_attention,
            scale=scale,
            softcap=softcap,
            window=window,
            width=width,
            interpret=interpret,
        )
        return _over_mesh(run, (q, k, v, sinks))

    cudnn = softcap is None and sinks is None and v is not None and cudnn_takes(q, k, v)
    return which.run(
        einsum,
        kernel,
        (q, k, v, sinks),
        takes=cudnn or takes(q, k),
        implementation=implementation,
    )


def _weigh(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    seen: jax.Array,
    scale: float,
    softcap: float | None,
    sinks: jax.Array | None,
) -> jax.Array:
    """Attention under a mask [B or 1, T, S].

    Heads go to the front first: on a CPU that moves q, and spares a transposed copy of the scores.
    """
    B, T, N, H = q.shape
    K = k.shape[2]
    accum = jnp.dtype(accum_dtype(q.dtype))
    scores = jnp.einsum(
        "bkgth,bskh->bkgts",
        q.reshape(B, T, K, N // K, H).transpose(0, 2, 3, 1, 4),
        k,
        precision="highest",
        preferred_element_type=accum,
    )
    scores = scores * scale
    if softcap is not None:
        scores = softcap * jnp.tanh(scores / softcap)
    scores = jnp.where(seen[:, None, None], scores, jnp.finfo(accum).min)
    if sinks is None:
        weights = jax.nn.softmax(scores, axis=-1)
    else:
        top = jnp.max(scores, axis=-1, keepdims=True)
        sink = jnp.broadcast_to(sinks.astype(accum).reshape(1, K, N // K, 1, 1), top.shape)
        highest = jnp.maximum(top, sink)
        weights = jnp.exp(scores - highest)
        weights /= jnp.sum(weights, axis=-1, keepdims=True) + jnp.exp(sink - highest)
    out = jnp.einsum(
        "bkgts,bskh->bkgth",
        weights.astype(q.dtype),
        v,
        precision="highest",
        preferred_element_type=accum,
    )
    return out.transpose(0, 3, 1, 2, 4).reshape(B, T, N, v.shape[3]).astype(q.dtype)


def _visible(lengths: jax.Array, ancestors: jax.Array, slots: int) -> tuple[jax.Array, jax.Array]:
    """What a row sees [B, T, S] by the two conditions of `attend`, and whether anything [B, T]."""
    B, T, words = ancestors.shape
    offset = jnp.arange(slots, dtype=jnp.int32)[None, :] - lengths[:, None]  # [B, S]
    word = jnp.clip(offset >> 5, 0, words - 1)
    bits = jnp.take_along_axis(ancestors, jnp.broadcast_to(word[:, None, :], (B, T, slots)), axis=2)
    bit = (bits >> (offset & 31).astype(jnp.uint32)[:, None, :]) & jnp.uint32(1)
    inside = (offset >= 0) & (offset < 32 * words)
    seen = ((offset < 0)[:, None, :]) | (inside[:, None, :] & (bit == 1))
    # Of an empty prefix, bits j < slots name a slot: no look at the mask itself is needed.
    there = np.clip(slots - 32 * np.arange(words), 0, 32).astype(np.uint64)
    named = ancestors & ((np.uint64(1) << there) - np.uint64(1)).astype(np.uint32)[None, None]
    return seen, (lengths > 0)[:, None] | jnp.any(named != 0, axis=2)

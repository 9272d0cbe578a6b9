"""New rows of one layer: head norms, rotation and the writes to the cache, as one kernel.

XLA makes three launches of it (five with head norms), since each array it writes in place is a
program of its own. At batch 1 a launch costs more than what it moves.
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.sharding import PartitionSpec as P

from eagle3_jax.ops import which
from eagle3_jax.ops.kernel_plan import power
from eagle3_jax.ops.norm import rms_norm
from eagle3_jax.ops.over_mesh import axes_for, over_mesh
from eagle3_jax.ops.pallas_backend import call, load, store
from eagle3_jax.rope import rotate

Norms = tuple[jax.Array, jax.Array] | None
"""Weights [H] of the norms of each query and key head."""


def append_rows(
    grouped: jax.Array,  # [B, T, K, G + 2, H]: G query heads, a key, a value
    rotation: tuple[jax.Array, jax.Array],  # [B, T, 1, H / 2]
    norms: Norms,
    k: jax.Array,  # [B, S, K, H]
    v: jax.Array,  # [B, S, K, H]
    start: jax.Array,  # [B] int32
    eps: float,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Queries [B, T, N, H], and the cache with keys and values at slots start .. start + T - 1.

    The kernel runs where `attend`'s does, and rounds where the plain lines do.
    """
    arrays = (grouped, *rotation, norms, k, v, start)
    takes = grouped.dtype in (jnp.bfloat16, jnp.float16, jnp.float32) and k.dtype == grouped.dtype

    def plain(grouped, cos, sin, norms, k, v, start):
        q, key, value = queries_keys_values(grouped, (cos, sin), norms, eps)
        return q, put_rows(k, key, start), put_rows(v, value, start)

    def kernel(*arrays, interpret):
        def run(*arrays):
            return _append(*arrays, eps=eps, interpret=interpret)

        data, model = axes = axes_for(k.shape[0], k.shape[2])
        heads = P(data, None, model)
        specs = (heads, P(data), P(data), P(), heads, heads, P(data))
        return over_mesh(run, arrays, axes, specs, (heads, heads, heads))

    return which.run(plain, kernel, arrays, takes=takes)


def queries_keys_values(
    grouped: jax.Array, rotation: tuple[jax.Array, jax.Array], norms: Norms, eps: float
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Queries [B, T, N, H], keys and values [B, T, K, H], normed and rotated by XLA."""
    B, T, _, _, H = grouped.shape
    qk, v = grouped[:, :, :, :-1], grouped[:, :, :, -1]
    if norms is None:
        qk = rotate(qk.reshape(B, T, -1, H), *rotation).reshape(qk.shape)
        return qk[:, :, :, :-1].reshape(B, T, -1, H), qk[:, :, :, -1], v
    # Rejoined for one rotation, jax 0.10.2 makes a Triton fusion that XLA itself refuses.
    q = rms_norm(qk[:, :, :, :-1].reshape(B, T, -1, H), norms[0], eps)
    k = rms_norm(qk[:, :, :, -1], norms[1], eps)
    return rotate(q, *rotation), rotate(k, *rotation), v


def put_rows(buffer: jax.Array, rows: jax.Array, start: jax.Array) -> jax.Array:
    """The buffer [B, S, ...] with rows [B, T, ...] at slots start[b] .. start[b] + T - 1.

    The caller guarantees that they fit: an update past the end would be moved, not refused.
    """
    if rows.size == 0:  # latent attention has no values of its own
        return buffer
    if buffer.shape[0] == 1:
        zero = jnp.zeros((), start.dtype)
        return lax.dynamic_update_slice(buffer, rows, (zero, start[0], *[zero] * (buffer.ndim - 2)))
    return jax.vmap(lambda b, r, s: lax.dynamic_update_slice_in_dim(b, r, s, axis=0))(
        buffer, rows, start
    )


@functools.partial(jax.jit, static_argnames=("eps", "interpret"))
def _append(grouped, cos, sin, norms, k, v, start, *, eps: float, interpret: bool):
    B, T, K, G, H = grouped.shape
    G, S, half = G - 2, k.shape[1], H // 2
    one = pl.BlockSpec((None, None, None, half), lambda b, t, h: (b, t, 0, 0))
    slots = pl.BlockSpec((None, S, None, H), lambda b, t, h: (b, 0, h, 0))
    in_specs = [
        pl.BlockSpec((None, None, None, G + 2, H), lambda b, t, h: (b, t, h, 0, 0)),
        one,
        one,
        *[pl.BlockSpec((H,), lambda b, t, h: (0,))] * (0 if norms is None else 2),
        slots,
        slots,
        pl.BlockSpec((1,), lambda b, t, h: (b,)),
    ]
    inputs = [grouped, cos, sin, *(norms or ()), k, v, start]
    at = len(inputs) - 3
    q, k, v = call(
        _kernel(G, H, norms is not None, eps),
        grid=(B, T, K),
        in_specs=in_specs,
        out_specs=[
            pl.BlockSpec((None, None, None, G, H), lambda b, t, h: (b, t, h, 0, 0)),
            slots,
            slots,
        ],
        out_shape=[
            jax.ShapeDtypeStruct((B, T, K, G, H), grouped.dtype),
            jax.ShapeDtypeStruct(k.shape, k.dtype),
            jax.ShapeDtypeStruct(v.shape, v.dtype),
        ],
        warps=4 if G * H > 512 else 2,
        stages=1,
        interpret=interpret,
        aliases={at: 1, at + 1: 2},
    )(*inputs)
    return q.reshape(B, T, K * G, H), k, v


def _kernel(G: int, H: int, normed: bool, eps: float) -> Callable:
    half = H // 2
    column = power(half)

    def append_rows_kernel(x_ref, cos_ref, sin_ref, *refs):
        *weights, _, _, start_ref, q_ref, k_ref, v_ref = refs
        low = lax.iota(jnp.int32, column)
        inside = low < half
        cos = load(cos_ref.at[low], mask=inside, other=0.0)
        sin = load(sin_ref.at[low], mask=inside, other=0.0)

        def turned(head: jax.Array, mask: jax.Array, weight):
            """Both halves of heads [n], normed and rotated."""
            index, mask = head[:, None], mask[:, None] & inside[None]
            parts = [
                load(x_ref.at[index, low[None] + start], mask=mask, other=0.0)
                for start in (0, half)
            ]
            if normed:
                parts = _normed(parts, H, eps, _halves(weight, low, inside, half))
            first, second = (x.astype(cos.dtype) for x in parts)
            c, s = cos[None], sin[None]
            return (first * c - second * s, second * c + first * s), mask

        query = lax.iota(jnp.int32, power(G))
        halves, mask = turned(query, query < G, weights[0] if normed else None)
        for x, start in zip(halves, (0, half), strict=True):
            out = q_ref.at[query[:, None], low[None] + start]
            store(out, x.astype(q_ref.dtype), mask=mask)
        alone = lax.iota(jnp.int32, 1)
        slot = start_ref[0] + pl.program_id(1)
        halves, mask = turned(alone + G, alone < 1, weights[1] if normed else None)
        for x, start in zip(halves, (0, half), strict=True):
            out = k_ref.at[(alone + slot)[:, None], low[None] + start]
            store(out, x.astype(k_ref.dtype), mask=mask)
        whole = lax.iota(jnp.int32, power(H))
        value = load(x_ref.at[G + 1, whole], mask=whole < H, other=0.0)
        store(v_ref.at[slot, whole], value, mask=whole < H)

    return append_rows_kernel


def _halves(ref, low: jax.Array, inside: jax.Array, half: int) -> list[jax.Array]:
    return [load(ref.at[low + start], mask=inside, other=0.0)[None] for start in (0, half)]


def _normed(
    parts: list[jax.Array], width: int, eps: float, weights: list[jax.Array]
) -> list[jax.Array]:
    """`rms_norm` of heads in two halves [n, columns]; columns past the width are 0."""
    dtype = parts[0].dtype
    wide = [x.astype(jnp.float32) for x in parts]
    total = sum(jnp.sum(x * x, axis=1) for x in wide)
    scale = lax.rsqrt(total * (1.0 / width) + eps)[:, None]
    return [(x * scale).astype(dtype) * weight for x, weight in zip(wide, weights, strict=True)]

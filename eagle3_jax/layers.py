"""The blocks a draft and its target share: norm, rotary embedding, grouped-query attention, MLP."""

import dataclasses
import math
from collections.abc import Mapping

import jax
import jax.numpy as jnp
from flax import nnx

from eagle3_jax.attention_config import AttentionConfig
from eagle3_jax.cache import KVCache
from eagle3_jax.ops.append import append_rows, queries_keys_values
from eagle3_jax.ops.attention import Window, attend, attend_causal
from eagle3_jax.ops.bits import chain_bits
from eagle3_jax.ops.norm import rms_norm, row
from eagle3_jax.precision import matmul

MLP_GROUPS = 8
"""Devices over which the fused gate and up weight can be split without moving its halves."""


class Buffer(nnx.Variable):
    """An array that is stored and loaded but never trained."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Rows:
    """Where T new rows of each sequence go and what they see."""

    positions: jax.Array  # [B, T] int32, for windows and rotary embedding
    start: jax.Array  # [B] int32, slot of the first row
    lengths: jax.Array  # [B] int32, slots that all of them see
    ancestors: jax.Array | None  # [B, T, words] uint32 over slots lengths + j; None: prefill
    axes: jax.Array | None = None  # [B, 3, T] int32, multi-axis rotary positions; None: positions

    @classmethod
    def prefill(cls, batch: int, rows: int) -> "Rows":
        """Rows 0 .. rows - 1 of an empty cache, each seeing itself and those before it."""
        zeros = jnp.zeros((batch,), jnp.int32)
        positions = jnp.broadcast_to(jnp.arange(rows, dtype=jnp.int32), (batch, rows))
        return cls(positions, zeros, zeros, None)

    @classmethod
    def chain(cls, lengths: jax.Array, rows: int) -> "Rows":
        """`rows` rows after `lengths` slots, each seeing those before it."""
        bits = jnp.asarray(chain_bits(rows))
        return cls(
            lengths[:, None] + jnp.arange(rows, dtype=jnp.int32)[None],
            lengths,
            lengths,
            jnp.broadcast_to(bits, (lengths.shape[0], *bits.shape)),
        )


class Unfilled(nnx.Rngs):
    """For a module that is only traced, and filled from a checkpoint: nothing random is made."""


def _initial(rngs: nnx.Rngs, shape: tuple[int, ...], scale: float) -> jax.Array:
    if isinstance(rngs, Unfilled):
        return jnp.zeros(shape, jnp.float32)
    return jax.random.normal(rngs.params(), shape, jnp.float32) * scale


class Linear(nnx.Module):
    """`x @ weight.T + bias`; the result has x's dtype.

    Checkpoints hold PyTorch's `[out, in]`. Here a weight that makes its input wider stays so, and
    any other is kept as `[in, out]`: with 2 to 8 rows on a CPU either is the faster of the two, up
    to twice (bench/matmul.py).

    Args:
      size: out and in.
      parts: name -> rows, when several checkpoint tensors stacked along `out` are one weight here
        (`modules.build` reads them): one product instead of two or three.
      groups: the parts are dealt out in as many groups: first the first share of each part, then
        the second of each, and so on. Split over devices by groups, each has its share of all.
    """

    def __init__(
        self,
        size: tuple[int, int],
        *,
        bias: bool = False,
        parts: Mapping[str, int] | None = None,
        groups: int = 1,
        rngs: nnx.Rngs,
    ):
        scale = 1.0 / math.sqrt(size[1])
        self.narrows = size[0] <= size[1]
        stored = size[::-1] if self.narrows else size
        names = None if parts is None else tuple(parts.items())
        self.weight = nnx.Param(
            _initial(rngs, stored, scale),
            parts=names,
            groups=groups,
            transposed=self.narrows,
        )
        self.bias = nnx.data(
            nnx.Param(
                jnp.zeros(size[:1], jnp.float32), parts=names, groups=groups, transposed=False
            )
            if bias
            else None
        )

    def __call__(self, x: jax.Array) -> jax.Array:
        """[..., in] -> [..., out]."""
        y = matmul(x, self.weight[...], transposed=self.narrows).astype(x.dtype)
        return y if self.bias is None else y + row(self.bias[...], y.ndim)


class Table(nnx.Module):
    """An embedding or a head: [V, E], one row a token, used as it is stored."""

    def __init__(self, size: tuple[int, int], *, rngs: nnx.Rngs):
        scale = 1.0 / math.sqrt(size[1])
        self.weight = nnx.Param(_initial(rngs, size, scale))


class RMSNorm(nnx.Module):
    """Root-mean-square norm over the last axis: normalise in float32, round, then multiply.

    That order is transformers' `LlamaRMSNorm`. The weight may have leading axes (one norm per aux
    state: [A, E]).
    """

    def __init__(self, shape: tuple[int, ...], eps: float):
        self.weight = nnx.Param(jnp.ones(shape, jnp.float32))
        self.eps = eps

    def __call__(self, x: jax.Array) -> jax.Array:
        """Any shape whose last axes fit the weight's."""
        return rms_norm(x, self.weight[...], self.eps)


class Attention(nnx.Module):
    """Grouped-query attention; the input may be wider than the output (2D -> D in a draft)."""

    def __init__(self, config: AttentionConfig, *, rngs: nnx.Rngs):
        self.config = config
        query, key = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        parts = {"q": query, "k": key, "v": key}
        self.qkv = Linear(
            (query + 2 * key, config.input_size),
            bias=config.qkv_bias,
            parts=parts,
            groups=config.num_kv_heads,
            rngs=rngs,
        )
        self.o = Linear((config.output_size, query), bias=config.output_bias, rngs=rngs)
        norms = config.qk_norm
        self.q_norm = nnx.data(RMSNorm((config.head_dim,), config.norm_eps) if norms else None)
        self.k_norm = nnx.data(RMSNorm((config.head_dim,), config.norm_eps) if norms else None)

    def __call__(
        self,
        x: jax.Array,  # [B, T, input_size]
        rotation: tuple[jax.Array, jax.Array],
        rows: Rows,
        cache: KVCache,
        layer: int,
    ) -> tuple[jax.Array, KVCache]:
        """Writes the rows' keys and values to the cache, then attends: [B, T, output_size]."""
        B, T, _ = x.shape
        N, K, H = self.config.num_heads, self.config.num_kv_heads, self.config.head_dim
        grouped = self.qkv(x).reshape(B, T, K, N // K + 2, H)  # G query heads, a key, a value
        norms = None
        if self.q_norm is not None and self.k_norm is not None:
            norms = self.q_norm.weight[...], self.k_norm.weight[...]
        eps = self.config.norm_eps
        if rows.ancestors is None:
            q, k, v = queries_keys_values(grouped, rotation, norms, eps)
            cache = cache.write(layer, k, v, rows.start)
            out = attend_causal(q, k, v, scale=H**-0.5, window=self.config.window)
        else:
            k, v = cache.k[layer], cache.v[layer]
            q, k, v = append_rows(grouped, rotation, norms, k, v, rows.start, eps)
            cache = cache.written(layer, k, v)
            out = attend_rows(q, cache, layer, rows, H**-0.5, self.config.window)
        return self.o(out.reshape(B, T, -1)), cache


def attend_rows(
    q: jax.Array,  # [B, T, N, H]
    cache: KVCache,
    layer: int,
    rows: Rows,
    scale: float,
    window: int | None,
    width: int | None = None,
) -> jax.Array:  # [B, T, N, width]
    """Attention over the cache of rows that are in it already, by their ancestors.

    `width`: values are the first elements of the keys, as many as this.
    """
    assert rows.ancestors is not None
    near = None
    if window is not None:
        assert cache.positions is not None
        near = Window(window, rows.positions, cache.positions)
    return attend(
        q,
        cache.k[layer],
        cache.v[layer] if width is None else None,
        rows.lengths,
        rows.ancestors,
        scale=scale,
        window=near,
        width=width,
    )


class MLP(nnx.Module):
    """`down(silu(gate(x)) * up(x))`."""

    def __init__(self, hidden: int, width: int, *, bias: bool = False, rngs: nnx.Rngs):
        parts = {"gate": width, "up": width}
        self.groups = math.gcd(width, MLP_GROUPS)
        self.gate_up = Linear(
            (2 * width, hidden), bias=bias, parts=parts, groups=self.groups, rngs=rngs
        )
        self.down = Linear((hidden, width), bias=bias, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        """[..., hidden] -> [..., hidden]."""
        both = self.gate_up(x)
        both = both.reshape(*x.shape[:-1], self.groups, 2, -1)
        gated = jax.nn.silu(both[..., 0, :]) * both[..., 1, :]
        return self.down(gated.reshape(*x.shape[:-1], -1))

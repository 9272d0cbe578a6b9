"""Multi-head latent attention: keys and values of all heads come from one short latent a token."""

import jax
import jax.numpy as jnp
from flax import nnx

from eagle3_jax.attention_config import AttentionConfig, LatentAttentionConfig
from eagle3_jax.cache import KVCache
from eagle3_jax.layers import Attention, Linear, RMSNorm, Rows, Table, attend_rows
from eagle3_jax.ops.attention import attend_causal
from eagle3_jax.precision import accum_dtype
from eagle3_jax.rope import rotate


class LatentAttention(nnx.Module):
    """DeepSeek-V2's MLA (transformers `DeepseekV3Attention`, SGLang `kimi_k25_eagle3.py`).

    The cache holds the normed latent and the one rotary key, not the expanded heads: 576 values a
    slot instead of 20480 for Kimi. `kv_b` is therefore applied to the queries and to the result
    ("absorbed", as engines decode): in exact arithmetic the same, and one attention function over
    tree bits serves both kinds.
    """

    def __init__(self, config: LatentAttentionConfig, *, rngs: nnx.Rngs):
        self.config = config
        s, N, D = config.sizes, config.num_heads, config.input_size
        query = N * (s.qk_nope_head_dim + s.qk_rope_head_dim)
        direct = s.q_lora_rank is None
        rank = s.q_lora_rank or D
        self.q = nnx.data(Linear((query, D), rngs=rngs) if direct else None)
        self.q_a = nnx.data(None if direct else Linear((rank, D), rngs=rngs))
        self.q_a_norm = nnx.data(None if direct else RMSNorm((rank,), config.norm_eps))
        self.q_b = nnx.data(None if direct else Linear((query, rank), rngs=rngs))
        self.kv_a = Linear((s.kv_lora_rank + s.qk_rope_head_dim, D), rngs=rngs)
        self.kv_a_norm = RMSNorm((s.kv_lora_rank,), config.norm_eps)
        self.kv_b = Table((N * (s.qk_nope_head_dim + s.v_head_dim), s.kv_lora_rank), rngs=rngs)
        self.o = Linear((config.output_size, N * s.v_head_dim), rngs=rngs)

    def __call__(
        self,
        x: jax.Array,  # [B, T, input_size]
        rotation: tuple[jax.Array, jax.Array],
        rows: Rows,
        cache: KVCache,
        layer: int,
    ) -> tuple[jax.Array, KVCache]:
        """Writes the rows' latents to the cache, then attends: [B, T, output_size]."""
        s, N = self.config.sizes, self.config.num_heads
        B, T, _ = x.shape
        R, nope = s.kv_lora_rank, s.qk_nope_head_dim
        q, turning = jnp.split(self._queries(x).reshape(B, T, N, -1), [nope], axis=3)
        latent, key = jnp.split(self.kv_a(x)[:, :, None], [R], axis=3)
        latent = self.kv_a_norm(latent)
        turning = rotate(turning, *rotation, interleaved=s.interleaved)
        key = rotate(key, *rotation, interleaved=s.interleaved)
        up_k, up_v = jnp.split(self.kv_b.weight[...].reshape(N, -1, R), [nope], axis=1)
        q = jnp.concatenate((_each_head("btnh,nhr->btnr", q, up_k), turning), axis=3)
        key = jnp.concatenate((latent, key), axis=3)
        empty = jnp.zeros((B, T, 1, 0), x.dtype)
        cache = cache.write(layer, key, empty, rows.start)
        scale = (nope + s.qk_rope_head_dim) ** -0.5 * self.config.sharpness
        window = self.config.window
        if rows.ancestors is None:
            mixed = attend_causal(q, key, None, scale=scale, window=window, width=R)
        else:
            mixed = attend_rows(q, cache, layer, rows, scale, window, R)
        out = _each_head("btnr,nvr->btnv", mixed, up_v)
        return self.o(out.reshape(B, T, -1)), cache

    def _queries(self, x: jax.Array) -> jax.Array:
        if self.q is not None:
            return self.q(x)
        assert self.q_a is not None
        assert self.q_a_norm is not None
        assert self.q_b is not None
        return self.q_b(self.q_a_norm(self.q_a(x)))


def make_attention(
    config: AttentionConfig | LatentAttentionConfig, *, rngs: nnx.Rngs
) -> Attention | LatentAttention:
    """The attention module of a config; all have the same call."""
    kind = LatentAttention if isinstance(config, LatentAttentionConfig) else Attention
    return kind(config, rngs=rngs)  # type: ignore[arg-type]


def _each_head(equation: str, x: jax.Array, weight: jax.Array) -> jax.Array:
    accum = jnp.dtype(accum_dtype(x.dtype))
    out = jnp.einsum(equation, x, weight, precision="highest", preferred_element_type=accum)
    return out.astype(x.dtype)

"""The Llama family: RMSNorm, rotary halves, grouped-query attention, gated MLP."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from flax import nnx

from eagle3_jax.cache import KVCache
from eagle3_jax.config import Boundary, TargetConfig
from eagle3_jax.draft import Shared
from eagle3_jax.layers import MLP, Attention, RMSNorm, Rows, Table
from eagle3_jax.modules import Folder
from eagle3_jax.precision import matmul
from eagle3_jax.rope import rotations

BLOCK_NAMES = {
    "norm_in": "input_layernorm",
    "norm_post": "post_attention_layernorm",
    "attn.q": "self_attn.q_proj",
    "attn.k": "self_attn.k_proj",
    "attn.v": "self_attn.v_proj",
    "attn.o": "self_attn.o_proj",
    "mlp.gate": "mlp.gate_proj",
    "mlp.up": "mlp.up_proj",
    "mlp.down": "mlp.down_proj",
}


def checkpoint_name(name: str) -> str:
    """Our dotted name -> the Hugging Face tensor name."""
    top = {
        "embed.weight": "model.embed_tokens.weight",
        "norm.weight": "model.norm.weight",
        "lm_head.weight": "lm_head.weight",
    }
    if name in top:
        return top[name]
    _, index, rest = name.split(".", 2)
    block, kind = rest.rsplit(".", 1)
    return f"model.layers.{index}.{BLOCK_NAMES[block]}.{kind}"


def tensor_shapes(config: TargetConfig) -> dict[str, tuple[int, ...]]:
    """Hugging Face name -> shape of every tensor the target owns; linear weights are [out, in]."""
    D, F, V = config.hidden_size, config.intermediate_size, config.vocab_size
    query, key = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    linear = {
        "attn.q": ((query, D), config.qkv_bias),
        "attn.k": ((key, D), config.qkv_bias),
        "attn.v": ((key, D), config.qkv_bias),
        "attn.o": ((D, query), config.output_bias),
        "mlp.gate": ((F, D), config.mlp_bias),
        "mlp.up": ((F, D), config.mlp_bias),
        "mlp.down": ((D, F), config.mlp_bias),
    }
    block: dict[str, tuple[int, ...]] = {"norm_in.weight": (D,), "norm_post.weight": (D,)}
    for name, (shape, bias) in linear.items():
        block[f"{name}.weight"] = shape
        if bias:
            block[f"{name}.bias"] = shape[:1]
    shapes: dict[str, tuple[int, ...]] = {"embed.weight": (V, D), "norm.weight": (D,)}
    if not config.tie_word_embeddings:
        shapes["lm_head.weight"] = (V, D)
    for index in range(config.num_layers):
        shapes |= {f"layers.{index}.{name}": shape for name, shape in block.items()}
    return {checkpoint_name(name): shape for name, shape in shapes.items()}


class LlamaBlock(nnx.Module):
    """`a = x + attention(norm_in(x))`, `a + mlp(norm_post(a))`."""

    def __init__(self, config: TargetConfig, *, rngs: nnx.Rngs):
        D = config.hidden_size
        self.norm_in = RMSNorm((D,), config.rms_norm_eps)
        self.norm_post = RMSNorm((D,), config.rms_norm_eps)
        self.attn = Attention(config.attention, rngs=rngs)
        self.mlp = MLP(D, config.intermediate_size, bias=config.mlp_bias, rngs=rngs)

    def __call__(
        self, x: jax.Array, rotation, rows: Rows, cache: KVCache, layer: int
    ) -> tuple[jax.Array, KVCache]:
        """States [B, T, D] -> states [B, T, D], the layer's cache written."""
        attended, cache = self.attn(self.norm_in(x), rotation, rows, cache, layer)
        a = x + attended
        return a + self.mlp(self.norm_post(a)), cache


class LlamaTarget(nnx.Module):
    """`LlamaForCausalLM` (transformers `modeling_llama.py`), with every boundary within reach.

    Layers are unrolled and hold their own weights: a scan over stacked weights copies them, which
    made a decode step of a 135M model several times slower on a CPU.
    """

    def __init__(self, config: TargetConfig, *, rngs: nnx.Rngs):
        self.config = config
        self.folder = Folder()
        V, D = config.vocab_size, config.hidden_size
        self.embed = Table((V, D), rngs=rngs)
        self.layers = nnx.List([LlamaBlock(config, rngs=rngs) for _ in range(config.num_layers)])
        self.norm = RMSNorm((D,), config.rms_norm_eps)
        self.lm_head = nnx.data(None if config.tie_word_embeddings else Table((V, D), rngs=rngs))

    @property
    def dtype(self) -> jnp.dtype:
        """Of weights and activations."""
        return self.embed.weight[...].dtype

    def new_cache(self, batch: int, slots: int) -> KVCache:
        """An empty cache for all layers."""
        c = self.config
        return KVCache.zeros(c.num_layers, batch, slots, c.num_kv_heads, c.head_dim, self.dtype)

    def states(
        self, tokens: jax.Array, rows: Rows, cache: KVCache, boundaries: Sequence[Boundary] = ()
    ) -> tuple[jax.Array, jax.Array, KVCache]:
        """See `Target.states`."""
        config = self.config
        x = jnp.take(self.embed.weight[...], tokens, axis=0, mode="clip")
        rotation = rotations(config.rope, config.head_dim, rows.positions, x.dtype)
        captured: dict[Boundary, jax.Array] = {}
        for index, block in enumerate(self.layers):
            if index in boundaries:
                captured[index] = x
            x, cache = block(x, rotation, rows, cache, index)
        captured[config.num_layers] = x
        normed = self.norm(x)
        captured["final_norm"] = normed
        if boundaries:
            aux = jnp.stack([captured[b] for b in boundaries], axis=2)
        else:
            aux = jnp.zeros((*x.shape[:2], 0, x.shape[2]), x.dtype)
        return normed, aux, cache

    def logits(self, states: jax.Array) -> jax.Array:
        """See `Target.logits`."""
        return matmul(states, self.shared().head)

    def shared(self) -> Shared:
        """See `Target.shared`; a tied head is the embedding."""
        embedding = self.embed.weight[...]
        return Shared(embedding, embedding if self.lm_head is None else self.lm_head.weight[...])

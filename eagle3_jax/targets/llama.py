"""Llama and its relatives: RMSNorm, rotary halves, grouped-query attention, gated MLP."""

import dataclasses
from collections.abc import Sequence
from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx

from eagle3_jax.cache import KVCache
from eagle3_jax.config import Boundary, TargetConfig
from eagle3_jax.draft import Shared
from eagle3_jax.layers import MLP, Attention, RMSNorm, Rows, Table
from eagle3_jax.modules import Folder, Structure, take_apart
from eagle3_jax.precision import matmul
from eagle3_jax.rope import rotations

BLOCK_NAMES = {
    "norm_in": "input_layernorm",
    "norm_post": "post_attention_layernorm",
    "attn.q": "self_attn.q_proj",
    "attn.k": "self_attn.k_proj",
    "attn.v": "self_attn.v_proj",
    "attn.o": "self_attn.o_proj",
    "attn.q_norm": "self_attn.q_norm",
    "attn.k_norm": "self_attn.k_norm",
    "mlp.gate": "mlp.gate_proj",
    "mlp.up": "mlp.up_proj",
    "mlp.down": "mlp.down_proj",
}


@dataclasses.dataclass(frozen=True)
class Names:
    """Where a folder's tensors stand: the stem of all but the head, the head, what is not text."""

    stem: str = "model."
    head: str = "lm_head.weight"
    beside: frozenset[str] = frozenset()

    def of(self, name: str) -> str:
        """Our dotted name -> the Hugging Face tensor name."""
        top = {
            "embed.weight": f"{self.stem}embed_tokens.weight",
            "norm.weight": f"{self.stem}norm.weight",
            "lm_head.weight": self.head,
        }
        if name in top:
            return top[name]
        _, index, rest = name.split(".", 2)
        block, kind = rest.rsplit(".", 1)
        return f"{self.stem}layers.{index}.{BLOCK_NAMES[block]}.{kind}"


def tensor_shapes(config: TargetConfig) -> dict[str, tuple[int, ...]]:
    """Our name -> shape of every tensor the target owns; linear weights are [out, in]."""
    D, F, V = config.hidden_size, config.intermediate_size, config.vocab_size
    block: dict[str, tuple[int, ...]] = {"norm_in.weight": (D,), "norm_post.weight": (D,)}
    attention = config.attention().tensor_shapes()
    block |= {f"attn.{name}": shape for name, shape in attention.items()}
    for name, shape in {"mlp.gate": (F, D), "mlp.up": (F, D), "mlp.down": (D, F)}.items():
        block[f"{name}.weight"] = shape
        if config.mlp_bias:
            block[f"{name}.bias"] = shape[:1]
    shapes: dict[str, tuple[int, ...]] = {"embed.weight": (V, D), "norm.weight": (D,)}
    if not config.tie_word_embeddings:
        shapes["lm_head.weight"] = (V, D)
    for index in range(config.num_layers):
        shapes |= {f"layers.{index}.{name}": shape for name, shape in block.items()}
    return shapes


class LlamaBlock(nnx.Module):
    """`a = x + attention(norm_in(x))`, `a + mlp(norm_post(a))`."""

    def __init__(self, config: TargetConfig, layer: int, *, rngs: nnx.Rngs):
        D = config.hidden_size
        self.norm_in = RMSNorm((D,), config.rms_norm_eps)
        self.norm_post = RMSNorm((D,), config.rms_norm_eps)
        self.attn = Attention(config.attention(layer), rngs=rngs)
        self.mlp = MLP(D, config.intermediate_size, bias=config.mlp_bias, rngs=rngs)

    def __call__(
        self, x: jax.Array, rotation, rows: Rows, cache: KVCache, layer: int
    ) -> tuple[jax.Array, KVCache]:
        """States [B, T, D] -> states [B, T, D], the layer's cache written."""
        attended, cache = self.attn(self.norm_in(x), rotation, rows, cache, layer)
        a = x + attended
        return a + self.mlp(self.norm_post(a)), cache


@partial(jax.jit, static_argnums=0)
def _run_block(
    structure: Structure,
    leaves: tuple[jax.Array, ...],
    x: jax.Array,
    rotation: tuple[jax.Array, jax.Array],
    rows: Rows,
    cache: KVCache,
) -> tuple[jax.Array, KVCache]:
    """A block by its arrays, on its own cache: blocks of one structure are traced once.

    XLA inlines the calls. Tracing and lowering a round of 30 layers takes half as long.
    """
    return structure.build(leaves)(x, rotation, rows, cache, 0)


class LlamaTarget(nnx.Module):
    """A model of one of `families.FAMILIES`, with every boundary within reach.

    They are all the same blocks; `TargetConfig` says which biases, head norms and windows they have
    (transformers `modeling_llama.py`, `modeling_mistral.py`, `modeling_qwen2.py`, `_qwen3.py`).

    Layers are unrolled and hold their own weights: a scan over stacked weights copies them, which
    made a decode step of a 135M model several times slower on a CPU.
    """

    def __init__(self, config: TargetConfig, *, rngs: nnx.Rngs):
        self.config = config
        self.folder = Folder()
        V, D = config.vocab_size, config.hidden_size
        self.embed = Table((V, D), rngs=rngs)
        self.layers = nnx.List(
            [LlamaBlock(config, layer, rngs=rngs) for layer in range(config.num_layers)]
        )
        self.norm = RMSNorm((D,), config.rms_norm_eps)
        self.lm_head = nnx.data(None if config.tie_word_embeddings else Table((V, D), rngs=rngs))

    @property
    def dtype(self) -> jnp.dtype:
        """Of weights and activations."""
        return self.embed.weight[...].dtype

    def new_cache(self, batch: int, slots: int) -> KVCache:
        """An empty cache for all layers; with positions where one of them has a window."""
        layers = [self.config.attention().cache_shapes] * self.config.num_layers
        windowed = any(window is not None for window in self.config.windows)
        return KVCache.of(layers, batch, slots, self.dtype, positions=windowed)

    def states(
        self, tokens: jax.Array, rows: Rows, cache: KVCache, boundaries: Sequence[Boundary] = ()
    ) -> tuple[jax.Array, jax.Array, KVCache]:
        """See `Target.states`."""
        config = self.config
        x = jnp.take(self.embed.weight[...], tokens, axis=0, mode="clip")
        rotation = rotations(config.rope, config.head_dim, rows.positions, x.dtype)
        cache = cache.place(rows.positions, rows.start)
        captured: dict[Boundary, jax.Array] = {}
        for index, block in enumerate(self.layers):
            if index in boundaries:
                captured[index] = x
            leaves, structure = take_apart(block)
            x, own = _run_block(structure, leaves, x, rotation, rows, cache.layer(index))
            cache = cache.written(index, own.k[0], own.v[0])
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

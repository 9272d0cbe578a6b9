"""The EAGLE-3 draft: a decoder layer, seldom more, that reads the target's states, or its own."""

import dataclasses
from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from eagle3_jax.attention_mla import make_attention
from eagle3_jax.cache import KVCache
from eagle3_jax.config import ConfigError, DraftConfig
from eagle3_jax.layers import MLP, Buffer, Linear, RMSNorm, Rows, Table, Unfilled
from eagle3_jax.modules import build
from eagle3_jax.precision import matmul
from eagle3_jax.rope import rotations


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Shared:
    """The target's matrices a draft may use instead of its own."""

    embedding: jax.Array  # [V, E]
    head: jax.Array  # [V, E]


class DraftLayer(nnx.Module):
    """`a = residual + attention(x)`; `a + mlp(norm_post(a))`.

    The first layer reads `x = [norm_embed(e); norm_hidden(g)]`. A later one reads the state alone,
    under the norm `DraftConfig.next_layers` names, or as the first does (`"wide"`).
    """

    def __init__(self, config: DraftConfig, index: int = 0, *, rngs: nnx.Rngs):
        self.config = config
        self.index = index
        D, norms = config.hidden_size, config.layer_norms(index)

        def norm(name: str) -> RMSNorm | None:
            return nnx.data(RMSNorm((D,), config.rms_norm_eps) if name in norms else None)

        self.norm_embed, self.norm_hidden = norm("norm_embed"), norm("norm_hidden")
        self.norm_post = RMSNorm((D,), config.rms_norm_eps)
        self.attn = make_attention(config.attention(index), rngs=rngs)
        self.mlp = MLP(D, config.intermediate_size, bias=config.mlp_bias, rngs=rngs)

    def __call__(
        self, embedded: jax.Array, hidden: jax.Array, rotation, rows: Rows, cache: KVCache
    ) -> tuple[jax.Array, KVCache]:
        """Embeddings and states [B, T, D] -> states [B, T, D]."""
        x, residual = self._inputs(embedded, hidden)
        attended, cache = self.attn(x, rotation, rows, cache, self.index)
        a = residual + attended
        return a + self.mlp(self.norm_post(a)), cache

    def _inputs(self, embedded: jax.Array, hidden: jax.Array) -> tuple[jax.Array, jax.Array]:
        """What attention reads, and what its result is added to."""
        config = self.config
        if not config.is_wide(self.index):
            by_name = {"input_layernorm": self.norm_embed, "hidden_norm": self.norm_hidden}
            norm = by_name[config.next_layers]
            assert norm is not None
            return norm(hidden), hidden
        assert self.norm_embed is not None
        normed = self.norm_embed(hidden) if config.double_norm else hidden
        if self.norm_hidden is not None:
            normed = self.norm_hidden(normed)
        x = jnp.concatenate((self.norm_embed(embedded), normed), axis=-1)
        return x, normed if config.norm_before_residual else hidden


class Eagle3Draft(nnx.Module):
    """EAGLE-3 paper, section 3; SafeAILab/EAGLE `cnets.py`, SGLang `llama_eagle3.py`.

    Two ways in, and nothing guesses between them: `fuse` takes target states, `step` takes a state
    of width D, either what `fuse` returned or what the last `step` fed back.

    Attributes:
      config: sizes and switches. engine: the profile it runs as, None as trained.
      draft_attention: `"ancestors"` or `"beam_slots"`, the default when it drafts trees.
    """

    def __init__(
        self,
        config: DraftConfig,
        *,
        rngs: nnx.Rngs,
        engine: str | None = None,
        draft_attention: str = "ancestors",
    ):
        self.config = config
        self.engine = engine
        self.draft_attention = draft_attention
        D, E, A = config.hidden_size, config.target_hidden_size, config.num_aux
        eps = config.rms_norm_eps
        fc = config.fuse == "fc"
        self.fc = nnx.data(Linear((D, A * E), bias=config.fc_bias, rngs=rngs) if fc else None)
        self.input_norm = nnx.data(RMSNorm((A * E,), eps) if fc and config.norm_before_fc else None)
        self.fc_norm = nnx.data(RMSNorm((A, E), eps) if fc and config.fc_norm else None)
        self.layers = nnx.List(
            [DraftLayer(config, index, rngs=rngs) for index in range(config.num_layers)]
        )
        self.norm_final = nnx.data(RMSNorm((D,), eps) if config.final_norm else None)
        W, V = config.draft_vocab_size, config.vocab_size
        self.lm_head = nnx.data(Table((W, D), rngs=rngs) if config.head == "draft" else None)
        self.embed = nnx.data(Table((V, D), rngs=rngs) if config.embed == "draft" else None)
        self.draft_to_target = Buffer(jnp.arange(W, dtype=jnp.int32))

    @classmethod
    def from_tensors(
        cls,
        config: DraftConfig,
        tensors: Mapping[str, np.ndarray],
        dtype: str,
        *,
        engine: str | None = None,
        draft_attention: str = "ancestors",
    ) -> "Eagle3Draft":
        """Builds the draft from canonical tensors (`DraftConfig.tensor_shapes`), cast to `dtype`.

        Raises:
          ConfigError: a tensor is missing, has another shape, or `draft_to_target` names an id
            outside the vocabulary or one id twice.
        """
        ids = np.asarray(tensors["draft_to_target"])
        if ids.min() < 0 or ids.max() >= config.vocab_size:
            raise ConfigError(
                f"draft_to_target spans {ids.min()}..{ids.max()}, outside the target vocabulary "
                f"0..{config.vocab_size - 1}"
            )
        if len(np.unique(ids)) != len(ids):
            raise ConfigError("draft_to_target names a target id twice")
        return build(
            lambda: cls(config, rngs=Unfilled(0), engine=engine, draft_attention=draft_attention),
            lambda name: np.asarray(tensors[name]),
            tensors,
            dtype,
        )

    @property
    def dtype(self) -> jnp.dtype:
        """Of weights and activations."""
        return self.layers[0].norm_post.weight[...].dtype

    def new_cache(self, batch: int, slots: int) -> KVCache:
        """An empty cache for all layers."""
        config = self.config
        shapes = [config.attention(i).cache_shapes for i in range(config.num_layers)]
        windowed = any(window is not None for window in config.windows)
        return KVCache.of(shapes, batch, slots, self.dtype, positions=windowed)

    def fuse(self, aux: jax.Array) -> jax.Array:
        """Target states [B, T, A, E], in boundary order -> [B, T, D].

        Raises:
          ConfigError: another number or width of states.
        """
        expected = (self.config.num_aux, self.config.target_hidden_size)
        if aux.shape[2:] != expected:
            raise ConfigError(
                f"aux states have shape {list(aux.shape)}, expected [B, T, A, E] with A, E = "
                f"{list(expected)}"
            )
        x = aux.astype(self.dtype)
        if self.fc_norm is not None:
            x = self.fc_norm(x)
        x = x.reshape(*x.shape[:2], -1)
        if self.input_norm is not None:
            x = self.input_norm(x)
        return x if self.fc is None else self.fc(x)

    def step(
        self,
        tokens: jax.Array,  # [B, T] target ids: row t holds the token after state t
        hidden: jax.Array,  # [B, T, D] from `fuse` or `feedback`
        rows: Rows,
        cache: KVCache,
        *,
        shared: Shared | None = None,
    ) -> tuple[jax.Array, KVCache]:  # [B, T, D]
        """One pass of the layers: states in, states out, before the final norm.

        Raises:
          ConfigError: a state of another width, or `shared` is missing though the draft has no
            embedding of its own.
        """
        if hidden.shape[2:] != (self.config.hidden_size,):
            raise ConfigError(
                f"states have shape {list(hidden.shape)}, expected [B, T, "
                f"{self.config.hidden_size}]: target states go through fuse first"
            )
        table = self._own_or_shared(self.embed, shared, "embedding")
        embedded = jnp.take(table, tokens, axis=0, mode="clip").astype(self.dtype)
        turning = self.config.attention().rotary_dim
        positions = rows.positions if rows.axes is None else rows.axes
        rotation = rotations(self.config.rope, turning, positions, self.dtype)
        hidden = hidden.astype(self.dtype)
        cache = cache.place(rows.positions, rows.start)
        for layer in self.layers:
            hidden, cache = layer(embedded, hidden, rotation, rows, cache)
        return hidden, cache

    def feedback(self, out: jax.Array) -> jax.Array:
        """What the next `step` takes: `out`, or its final norm (EAGLE-3.1, `norm_output`)."""
        if self.config.feedback == "post_norm" and self.norm_final is not None:
            return self.norm_final(out)
        return out

    def logits(self, out: jax.Array, *, shared: Shared | None = None) -> jax.Array:
        """[..., D] -> [..., W] over the draft vocabulary, in float32 (float64 for float64)."""
        head = self._own_or_shared(self.lm_head, shared, "head")
        x = out if self.norm_final is None else self.norm_final(out)
        return matmul(x.astype(head.dtype), head)

    def to_target(self, draft_ids: jax.Array) -> jax.Array:
        """Draft ids -> target ids, `i + d2t[i]` (SGLang's `hot_token_id[i]`)."""
        return jnp.take(self.draft_to_target[...], draft_ids, mode="clip")

    def _own_or_shared(self, own: Table | None, shared: Shared | None, what: str) -> jax.Array:
        if own is not None:
            return own.weight[...]
        if shared is None:
            raise ConfigError(f"this draft uses the target's {what}: pass shared=target.shared()")
        return shared.embedding if what == "embedding" else shared.head

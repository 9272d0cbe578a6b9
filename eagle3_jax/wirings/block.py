"""The draft's layers as the scorer runs them: one wiring's numbers are arguments, not a retrace."""

import dataclasses
from typing import Any, Literal

import jax
import jax.numpy as jnp

from eagle3_jax.config import DraftConfig, LatentSizes
from eagle3_jax.precision import matmul

UNSEEN = -1e30
Layer = dict[str, jax.Array]
"""A layer's tensors in float32 by canonical name without `layers.i.` and the module's parts:
`norm_embed`, `q`, `q.bias`, `kv_b`, `gate`. What the file lacks is not there."""


@dataclasses.dataclass(frozen=True)
class Form:
    """What of a draft no wiring changes, static for the compiled functions.

    Attributes:
      layers: what each reads: `"wide"` embedding and state, `"state"` the state alone.
      latent: sizes of latent attention, None for grouped-query attention of `head_dim`.
      dynamic: whether the rope's base grows with the position.
    """

    layers: tuple[Literal["wide", "state"], ...]
    head_dim: int
    latent: LatentSizes | None
    dynamic: bool = False

    @classmethod
    def of(cls, config: DraftConfig) -> "Form":
        """Of a draft."""
        kinds = ["wide" if config.is_wide(i) else "state" for i in range(config.num_layers)]
        dynamic = config.rope.kind == "dynamic"
        return cls(tuple(kinds), config.head_dim, config.latent, dynamic)  # type: ignore[arg-type]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Weights:
    """A draft's tensors in float32."""

    layers: tuple[Layer, ...]
    fc_bias: jax.Array  # [D], zeros without one
    norm_final: jax.Array  # [D], ones without one
    head: jax.Array  # [W', D], the rows in use
    eps: jax.Array  # []


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Knobs:
    """One wiring as arrays."""

    slots: jax.Array  # [A] row of the projections
    concat: jax.Array  # [] bool
    embed: jax.Array  # [] 0 the target's, 1 the draft's
    before_residual: jax.Array
    double_norm: jax.Array
    final_norm: jax.Array
    post_norm: jax.Array
    embedding_residual: jax.Array
    next_hidden_norm: jax.Array  # [] bool: later layers read the state under norm_hidden
    depth: jax.Array  # [] layers that run
    fed_first: jax.Array  # [] bool: the first layer's state is fed back
    frequency: jax.Array  # [H / 2] of the elements that turn
    amplitude: jax.Array  # [] factor on cos and sin
    growth: jax.Array  # [2] factor of a dynamic rope, and the length past which its base grows
    scale: jax.Array  # [] of the attention scores
    pairs: jax.Array  # [H] order of a head's elements
    lanes: jax.Array  # [H / 2] what turns a pair: 0 the token's number, 1 .. 3 an axis
    window: jax.Array  # [layers]
    clamp: jax.Array
    token_shift: jax.Array
    row_shift: jax.Array
    zero_first: jax.Array
    first_seen: jax.Array  # [] position of the first row in the cache
    no_prompt: jax.Array
    chunk: jax.Array
    order: jax.Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Place:
    """Where n rows stand."""

    position: jax.Array  # [n] their token's number
    axes: jax.Array | None = None  # [3, n] rotary positions, where the record has them

    def __getitem__(self, index: Any) -> "Place":
        return jax.tree.map(lambda x: x[..., index], self)

    def ahead(self, farthest: jax.Array | None, step: int) -> "Place":
        """Of rows drafted `step` tokens later; `farthest` [n]: the largest axis so far."""
        if self.axes is None:
            return Place(self.position + step)
        assert farthest is not None
        axes = jnp.broadcast_to(farthest[None] + step, self.axes.shape)
        return Place(self.position + step, axes)


KeyValue = tuple[jax.Array, jax.Array]


def rms(x: jax.Array, weight: jax.Array, eps: jax.Array) -> jax.Array:
    """RMSNorm of [..., D]."""
    scale = jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + eps)
    return x * scale * weight.reshape((1,) * (x.ndim - weight.ndim) + weight.shape)


def linear(layer: Layer, name: str, x: jax.Array) -> jax.Array:
    """[n, in] -> [n, out], with the bias if there is one."""
    y = matmul(x, layer[name])
    bias = layer.get(f"{name}.bias")
    return y if bias is None else y + bias[None]


class Run:
    """One wiring's layers. Rows are [n, D]; `k` and `w` are arrays or tracers."""

    def __init__(self, form: Form, w: Weights, k: Knobs):
        self.form, self.w, self.k = form, w, k

    def inputs(
        self, index: int, embedded: jax.Array, hidden: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        """What a layer's attention reads, and what its result is added to."""
        layer, k, eps = self.w.layers[index], self.k, self.w.eps
        if self.form.layers[index] == "state":
            names = [n for n in ("norm_embed", "norm_hidden") if n in layer]
            normed = [rms(hidden, layer[n], eps) for n in names]
            if len(names) == 1:
                return normed[0], hidden
            return jnp.where(k.next_hidden_norm, normed[1], normed[0]), hidden
        normed = jnp.where(k.double_norm, rms(hidden, layer["norm_embed"], eps), hidden)
        if "norm_hidden" in layer:
            normed = rms(normed, layer["norm_hidden"], eps)
        x = jnp.concatenate((rms(embedded, layer["norm_embed"], eps), normed), axis=-1)
        residual = jnp.where(k.before_residual, normed, hidden)
        return x, jnp.where(k.embedding_residual, embedded, residual)

    def key_value(self, index: int, x: jax.Array, place: Place) -> KeyValue:
        """What rows that read `x` leave in the cache, [n, K, H] and [n, K, width]."""
        layer, s = self.w.layers[index], self.form.latent
        if s is None:
            key = self._heads(layer, "k", x)
            return self._turn(key, place), linear(layer, "v", x).reshape(*key.shape)
        latent, key = jnp.split(linear(layer, "kv_a", x)[:, None], [s.kv_lora_rank], axis=2)
        latent = rms(latent, layer["kv_a_norm"], self.w.eps)
        return jnp.concatenate((latent, self._turn(key, place)), axis=2), latent

    def query(self, index: int, x: jax.Array, place: Place) -> jax.Array:
        """[n, N, H], scaled; of latent attention with `kv_b` applied."""
        layer, s = self.w.layers[index], self.form.latent
        if s is None:
            return self._turn(self._heads(layer, "q", x), place) * self.k.scale
        low = rms(linear(layer, "q_a", x), layer["q_a_norm"], self.w.eps) if "q_a" in layer else x
        q = linear(layer, "q_b" if "q_a" in layer else "q", low)
        plain, turning = jnp.split(
            q.reshape(len(x), -1, s.qk_nope_head_dim + s.qk_rope_head_dim),
            [s.qk_nope_head_dim],
            axis=2,
        )
        up = self._up(layer)[:, : s.qk_nope_head_dim]
        plain = jnp.einsum("tnh,nhr->tnr", plain, up, precision="highest")
        return jnp.concatenate((plain, self._turn(turning, place)), axis=2) * self.k.scale

    def finish(self, index: int, mixed: jax.Array, residual: jax.Array) -> jax.Array:
        """The rest of a layer, from what attention mixed [n, N, width]: [n, D]."""
        layer, s = self.w.layers[index], self.form.latent
        if s is not None:
            up = self._up(layer)[:, s.qk_nope_head_dim :]
            mixed = jnp.einsum("tnr,nvr->tnv", mixed, up, precision="highest")
        a = residual + linear(layer, "o", mixed.reshape(len(mixed), -1))
        y = rms(a, layer["norm_post"], self.w.eps)
        gated = jax.nn.silu(linear(layer, "gate", y)) * linear(layer, "up", y)
        return a + linear(layer, "down", gated)

    def kept(self, index: int, out: jax.Array, before: jax.Array) -> jax.Array:
        """A later layer's result, or what it read where it does not run."""
        return out if index == 0 else jnp.where(index < self.k.depth, out, before)

    def feedback(self, out: jax.Array, first: jax.Array) -> jax.Array:
        """What the next step takes; `first` is the first layer's result."""
        fed = out if out is first else jnp.where(self.k.fed_first, first, out)
        return jnp.where(self.k.post_norm, rms(fed, self.w.norm_final, self.w.eps), fed)

    def logits(self, out: jax.Array) -> jax.Array:
        """[n, rows of the head]."""
        normed = rms(out, self.w.norm_final, self.w.eps)
        return matmul(jnp.where(self.k.final_norm, normed, out), self.w.head)

    def _up(self, layer: Layer) -> jax.Array:
        s = self.form.latent
        assert s is not None
        return layer["kv_b"].reshape(-1, s.qk_nope_head_dim + s.v_head_dim, s.kv_lora_rank)

    def _heads(self, layer: Layer, name: str, x: jax.Array) -> jax.Array:
        heads = linear(layer, name, x).reshape(len(x), -1, self.form.head_dim)
        weight = layer.get(f"{name}_norm")
        return heads if weight is None else rms(heads, weight, self.w.eps)

    def _turn(self, x: jax.Array, place: Place) -> jax.Array:
        """Rotary embedding of [n, heads, H]; the order of elements is left permuted."""
        k = self.k
        at = place.position[:, None]
        if place.axes is not None:
            at = jnp.concatenate((place.position[None], place.axes))[k.lanes].T
        at = jnp.minimum(at, k.clamp).astype(jnp.float32)
        frequency = k.frequency[None]
        if self.form.dynamic:
            frequency = frequency * self._grown(jnp.max(at, axis=1, keepdims=True))
        angle = (at * frequency)[:, None]
        first, second = jnp.split(x[..., k.pairs], 2, axis=-1)
        cos, sin = jnp.cos(angle) * k.amplitude, jnp.sin(angle) * k.amplitude
        return jnp.concatenate((first * cos - second * sin, second * cos + first * sin), axis=-1)

    def _grown(self, at: jax.Array) -> jax.Array:
        """[n, H / 2] what frequencies of rows at positions [n, 1] are multiplied with."""
        factor, original = self.k.growth
        raised = factor * jnp.maximum(at + 1.0, original) / original - (factor - 1.0)
        count = self.k.frequency.shape[0]
        power = jnp.arange(count, dtype=jnp.float32) * (-2.0 / max(2 * count - 2, 1))
        return raised ** power[None]


def attend(
    query: jax.Array,  # [M, N, H], scaled
    cache: KeyValue,  # [T, K, H] and [T, K, width]
    seen: jax.Array,  # [M, T]
    own: list[KeyValue],  # of the row's earlier steps and itself, [M, K, ...] each
) -> jax.Array:  # [M, N, width]
    """Attention over the rows seen and the chain's own."""
    keys, values = cache
    (M, N, H), K = query.shape, keys.shape[1]
    grouped = query.reshape(M, K, N // K, H).transpose(1, 2, 0, 3)  # [K, G, M, H]
    scores: Any = jnp.einsum("kgmh,tkh->kgmt", grouped, keys, precision="highest")
    scores = jnp.where(seen[None, None], scores, UNSEEN)
    mine = [
        jnp.sum(grouped * key.transpose(1, 0, 2)[:, None], axis=-1)[..., None] for key, _ in own
    ]
    weights = jax.nn.softmax(jnp.concatenate((scores, *mine), axis=-1), axis=-1)
    T = keys.shape[0]
    mixed = jnp.einsum("kgmt,tkh->kgmh", weights[..., :T], values, precision="highest")
    for i, (_, value) in enumerate(own):
        mixed = mixed + weights[..., T + i, None] * value.transpose(1, 0, 2)[:, None]
    return mixed.transpose(2, 0, 1, 3).reshape(M, N, -1)

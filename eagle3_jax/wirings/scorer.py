"""How well a draft predicts a record under many wirings: one compiled function, wirings as data.

A chain starts at a slot c: step 0 is the row of slot c, computed from target states, step j the
draft's own j-th row after it. Until the first miss its tokens are the record's, so step j of every
chain is one pass: all see step 0's rows up to c and their own earlier steps (training-time test).
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp

from eagle3_jax.precision import matmul

UNSEEN = -1e30
SHARPNESS = (0.5, 1.0, 2.0, 4.0)
"""Factors on the logits: acceptance asks which token is best, not how sure the draft is."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class LayerWeights:
    """A draft's tensors in float32; biases and norms it lacks are zeros and ones."""

    norm_embed: jax.Array  # [D], like the three below
    norm_hidden: jax.Array
    norm_post: jax.Array
    norm_final: jax.Array
    q: jax.Array  # [N H, 2D]
    k: jax.Array  # [K H, 2D]
    v: jax.Array
    o: jax.Array  # [D, N H]
    gate: jax.Array  # [F, D]
    up: jax.Array
    down: jax.Array  # [D, F]
    head: jax.Array  # [W', D], the rows in use
    biases: dict[str, jax.Array]  # of fc, q, k, v, o, gate, up, down
    q_norm: jax.Array  # [H], in use if qk_norm
    k_norm: jax.Array
    qk_norm: jax.Array  # [] bool
    hidden_norm: jax.Array  # [] bool: whether norm_hidden is in use
    eps: jax.Array  # []


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Rows:
    """Sequences side by side, T slots in all; padded slots are sequences of their own."""

    embedded: jax.Array  # [2, T, D]: the tokens in the target's embedding, and in the draft's own
    labels: jax.Array  # [maps, T] each token as a row of the head in use, -1 for none
    start: jax.Array  # [T] first slot of its sequence
    end: jax.Array  # [T] slot after its last
    position: jax.Array  # [T] position in its sequence
    prompt: jax.Array  # [T] tokens of its prompt
    orders: jax.Array  # [orders, T] where slot t's states stand in the record
    chains: jax.Array  # [M] slots where chains start


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
    frequency: jax.Array  # [H / 2]
    amplitude: jax.Array  # [] factor on cos and sin
    pairs: jax.Array  # [H] order of a head's elements
    window: jax.Array
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
class Projections:
    """`fc` applied to each boundary alone: a sum over slots is `fc` of that choice."""

    table: jax.Array  # [A, boundaries, T, D]
    squares: jax.Array  # [boundaries, T] sum of squares, for the norm over all features
    count: jax.Array  # [] how many features that norm has


@functools.partial(jax.jit, static_argnames=("head_dim", "steps"))
def score(
    w: LayerWeights,
    rows: Rows,
    projections: Projections,
    knobs: Knobs,  # every field with a leading axis [C]
    *,
    head_dim: int,
    steps: int,
) -> tuple[jax.Array, jax.Array]:
    """Scores C wirings on the same chains.

    Returns:
      Negative log-likelihood of the record's token [C, SHARPNESS, maps, steps, M], 0 where the map
      lacks it, and the best row of the head [C, steps, M].
    """
    one = functools.partial(_one, w, rows, projections, head_dim, steps)
    return jax.vmap(one)(knobs)


def _one(w: LayerWeights, rows: Rows, projections: Projections, H: int, steps: int, k: Knobs):
    chains = rows.chains
    embedded, hidden = first_rows(w, rows, projections, k)
    keys, values = keys_values(w, k, H, embedded, hidden, rows.position)
    seen = visible(rows, k, chains)
    embedded, hidden = embedded[chains], hidden[chains]
    own_keys, own_values, nll, best = [], [], [], []
    for step in range(steps):
        position = rows.position[chains] + step
        if step:
            at = jnp.minimum(chains + 1 + step, rows.end[chains] - 1)
            embedded = rows.embedded[k.embed, at]
            key, value = keys_values(w, k, H, embedded, hidden, position)
            own_keys.append(key)
            own_values.append(value)
        query = queries(w, k, H, embedded, hidden, position)
        attended = attend_chain(query, keys, values, seen(position), own_keys, own_values)
        out = layer(w, k, embedded, hidden, attended)
        logits = to_logits(w, k, out)
        labels = rows.labels[:, jnp.minimum(chains + 2 + step, rows.end[chains] - 1)]
        chosen = jnp.take_along_axis(logits[None], jnp.maximum(labels, 0)[:, :, None], axis=2)
        chosen = chosen[:, :, 0]
        loss = [f * -chosen + jax.nn.logsumexp(f * logits, axis=-1)[None] for f in SHARPNESS]
        nll.append(jnp.where((labels >= 0)[None], jnp.stack(loss), 0.0))
        best.append(jnp.argmax(logits, axis=-1).astype(jnp.int32))
        hidden = feedback(w, k, out)
    return jnp.stack(nll, axis=2), jnp.stack(best)


def first_rows(
    w: LayerWeights, rows: Rows, projections: Projections, k: Knobs
) -> tuple[jax.Array, jax.Array]:
    """Embeddings and fused states [T, D] of every slot, before any drafting."""
    A, T = projections.table.shape[0], rows.start.shape[0]
    chosen = projections.table[jnp.arange(A, dtype=jnp.int32), k.slots]
    squares = jnp.sum(projections.squares[k.slots], axis=0)
    scale = jnp.where(k.concat, jax.lax.rsqrt(squares / projections.count + w.eps), 1.0)
    fused = jnp.sum(chosen, axis=0) * scale[:, None] + w.biases["fc"][None]
    slot = jnp.arange(T, dtype=jnp.int32)
    source = jnp.clip(slot + k.row_shift, rows.start, rows.end - 1)
    fused = fused[rows.orders[k.order][source]]
    chunk = jnp.maximum(k.chunk, 1)
    border = (k.chunk > 0) & (rows.position < rows.prompt) & ((rows.position + 1) % chunk == 0)
    at = jnp.clip(slot + jnp.where(border, 0, k.token_shift), rows.start, rows.end - 1)
    embedded = rows.embedded[k.embed, at]
    zeroed = k.zero_first & (rows.position == 0)
    return jnp.where(zeroed[:, None], 0.0, embedded), fused


def visible(rows: Rows, k: Knobs, chains: jax.Array):
    """A function of the queries' positions [M] -> which of the T first rows they see, [M, T]."""
    slot = jnp.arange(rows.start.shape[0], dtype=jnp.int32)
    first = jnp.where(k.no_prompt, rows.prompt - 1, k.first_seen)
    causal = (slot[None] >= rows.start[chains][:, None]) & (slot[None] <= chains[:, None])
    present = (rows.position >= first)[None] | (slot[None] == chains[:, None])

    def seen(position: jax.Array) -> jax.Array:
        near = position[:, None] - rows.position[None] < k.window
        return causal & present & near

    return seen


def rms(x: jax.Array, weight: jax.Array, eps: jax.Array) -> jax.Array:
    """RMSNorm of [..., D]."""
    scale = jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + eps)
    return x * scale * weight[None]


def _input(w: LayerWeights, k: Knobs, embedded: jax.Array, hidden: jax.Array) -> jax.Array:
    normed = _normed(w, k, hidden)
    return jnp.concatenate((rms(embedded, w.norm_embed, w.eps), normed), axis=-1)


def _normed(w: LayerWeights, k: Knobs, hidden: jax.Array) -> jax.Array:
    inner = jnp.where(k.double_norm, rms(hidden, w.norm_embed, w.eps), hidden)
    return jnp.where(w.hidden_norm, rms(inner, w.norm_hidden, w.eps), inner)


def _head_norm(w: LayerWeights, weight: jax.Array, x: jax.Array) -> jax.Array:
    return jnp.where(w.qk_norm, rms(x, weight[None], w.eps), x)


def _linear(w: LayerWeights, name: str, x: jax.Array) -> jax.Array:
    return matmul(x, getattr(w, name)) + w.biases[name][None]


def _turn(k: Knobs, x: jax.Array, position: jax.Array) -> jax.Array:
    """Rotary embedding of [rows, heads, H]; the order of elements is left permuted."""
    angle = (
        jnp.minimum(position, k.clamp).astype(jnp.float32)[:, None, None] * k.frequency[None, None]
    )
    first, second = jnp.split(x[..., k.pairs], 2, axis=-1)
    cos, sin = jnp.cos(angle) * k.amplitude, jnp.sin(angle) * k.amplitude
    return jnp.concatenate((first * cos - second * sin, second * cos + first * sin), axis=-1)


def keys_values(
    w: LayerWeights, k: Knobs, H: int, embedded: jax.Array, hidden: jax.Array, position: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """What rows leave in the cache, [rows, K, H] each."""
    x = _input(w, k, embedded, hidden)
    key = _head_norm(w, w.k_norm, _linear(w, "k", x).reshape(len(x), -1, H))
    return _turn(k, key, position), _linear(w, "v", x).reshape(len(x), -1, H)


def queries(w: LayerWeights, k: Knobs, H: int, embedded, hidden, position) -> jax.Array:
    """[rows, N, H]."""
    x = _input(w, k, embedded, hidden)
    query = _head_norm(w, w.q_norm, _linear(w, "q", x).reshape(len(x), -1, H))
    return _turn(k, query, position)


def attend_chain(
    query: jax.Array,  # [M, N, H]
    keys: jax.Array,  # [T, K, H]
    values: jax.Array,
    seen: jax.Array,  # [M, T]
    own_keys: list[jax.Array],  # of the chain's earlier steps and this one, [M, K, H] each
    own_values: list[jax.Array],
) -> jax.Array:  # [M, N H]
    """Attention over the rows seen and the chain's own."""
    (M, N, H), K = query.shape, keys.shape[1]
    grouped = query.reshape(M, K, N // K, H).transpose(1, 2, 0, 3)  # [K, G, M, H]
    scores: Any = jnp.einsum("kgmh,tkh->kgmt", grouped, keys, precision="highest") * H**-0.5
    scores = jnp.where(seen[None, None], scores, UNSEEN)
    own = [
        jnp.sum(grouped * key.transpose(1, 0, 2)[:, None], axis=-1)[..., None] * H**-0.5
        for key in own_keys
    ]
    weights = jax.nn.softmax(jnp.concatenate((scores, *own), axis=-1), axis=-1)
    T = keys.shape[0]
    mixed = jnp.einsum("kgmt,tkh->kgmh", weights[..., :T], values, precision="highest")
    for i, value in enumerate(own_values):
        mixed = mixed + weights[..., T + i, None] * value.transpose(1, 0, 2)[:, None]
    return mixed.transpose(2, 0, 1, 3).reshape(M, N * H)


def layer(
    w: LayerWeights, k: Knobs, embedded: jax.Array, hidden: jax.Array, attended: jax.Array
) -> jax.Array:
    """The rest of the layer: [M, D]."""
    residual = jnp.where(k.before_residual, _normed(w, k, hidden), hidden)
    residual = jnp.where(k.embedding_residual, embedded, residual)
    a = residual + _linear(w, "o", attended)
    y = rms(a, w.norm_post, w.eps)
    return a + _linear(w, "down", jax.nn.silu(_linear(w, "gate", y)) * _linear(w, "up", y))


def feedback(w: LayerWeights, k: Knobs, out: jax.Array) -> jax.Array:
    """What the next step takes."""
    return jnp.where(k.post_norm, rms(out, w.norm_final, w.eps), out)


def to_logits(w: LayerWeights, k: Knobs, out: jax.Array) -> jax.Array:
    """[M, rows of the head]."""
    return matmul(jnp.where(k.final_norm, rms(out, w.norm_final, w.eps), out), w.head)

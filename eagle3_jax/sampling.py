"""The target's distribution after penalties, bias, temperature and cuts; and the coins."""

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from eagle3_jax.config import ConfigError
from eagle3_jax.precision import accum_dtype
from eagle3_jax.sampling_config import GREEDY, AcceptRule, SamplingConfig
from eagle3_jax.tree import Tree, unpack

FLAT = 1e30
"""A temperature at which all are equally likely; more would overflow float32, as dividing by less
than its inverse would."""


@dataclasses.dataclass(frozen=True)
class SamplingPlan:
    """What of it is compiled in: which processors run, and the rule."""

    rule: AcceptRule = GREEDY
    penalties: bool = False
    bias: bool = False
    top_k: bool = False
    top_p: bool = False
    min_p: bool = False

    @classmethod
    def of(cls, config: SamplingConfig, rule: AcceptRule) -> "SamplingPlan":
        """The processors whose parameters are not at rest."""
        cuts = not config.greedy
        return cls(
            rule,
            config.penalises,
            bool(config.logit_bias),
            cuts and config.top_k is not None,
            cuts and config.top_p < 1,
            cuts and config.min_p > 0,
        )

    @property
    def sorts(self) -> bool:
        """Whether the vocabulary has to be sorted."""
        return self.top_k or self.top_p or self.min_p


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class SamplingValues:
    """The numbers: another temperature compiles nothing anew."""

    temperature: jax.Array  # []
    top_k: jax.Array  # [] int32
    top_p: jax.Array  # []
    min_p: jax.Array  # []
    repetition: jax.Array  # []
    presence: jax.Array  # []
    frequency: jax.Array  # []
    bias: jax.Array | None  # [V]
    keys: jax.Array  # [B] keys, one a sequence

    @classmethod
    def of(
        cls, config: SamplingConfig, batch: int, vocab_size: int, dtype: np.dtype
    ) -> "SamplingValues":
        """As arrays of the accumulation dtype.

        Raises:
          ConfigError: a biased token outside the vocabulary, or not one seed a prompt.
        """
        check_bias(config, vocab_size)
        seeds: Sequence[int]
        if isinstance(config.seed, int):
            seeds = [config.seed] * batch
        else:
            seeds = config.seed
        if len(seeds) != batch:
            raise ConfigError(f"{len(seeds)} seeds for {batch} prompts, expected one or one each")
        bias = None
        if config.logit_bias:
            dense = np.zeros((vocab_size,), dtype)
            for token, value in config.logit_bias:
                dense[token] = value
            bias = jnp.asarray(dense)
        keys = jax.vmap(jax.random.key)(jnp.asarray(np.asarray(seeds, np.uint32)))

        def scalar(value) -> jax.Array:
            return jnp.asarray(value, dtype)

        return cls(
            scalar(1.0 if config.greedy else min(config.temperature, FLAT)),
            jnp.asarray(min(config.top_k or vocab_size, vocab_size), jnp.int32),
            scalar(config.top_p),
            scalar(config.min_p),
            scalar(max(config.repetition_penalty, 1 / FLAT)),
            scalar(config.presence_penalty),
            scalar(config.frequency_penalty),
            bias,
            keys,
        )


def check_bias(config: SamplingConfig | None, vocab_size: int):
    """Raises `ConfigError` for a biased token outside the vocabulary."""
    biased = () if config is None else config.logit_bias
    outside = next((token for token, _ in biased if token >= vocab_size), None)
    if outside is not None:
        raise ConfigError(
            f"logit_bias names token {outside}, the target's vocabulary is 0..{vocab_size - 1}"
        )


def adjust(
    logits: jax.Array, counts: jax.Array | None, plan: SamplingPlan, values: SamplingValues
) -> jax.Array:
    """Penalties and bias on logits [B, T, V]; counts [B, T, V] of new tokens before each row.

    First what is subtracted, then what scales (SGLang `penaltylib.orchestrator.apply`), then the
    bias.
    """
    logits = logits.astype(accum_dtype(logits.dtype))
    if plan.penalties:
        assert counts is not None
        often = counts.astype(logits.dtype)
        seen = counts > 0
        logits = logits - values.frequency * often - jnp.where(seen, values.presence, 0)
        scaled = jnp.where(logits < 0, logits * values.repetition, logits / values.repetition)
        logits = jnp.where(seen, scaled, logits)
    if plan.bias:
        assert values.bias is not None
        logits = logits + values.bias[None, None]
    return logits


def probabilities(logits: jax.Array, plan: SamplingPlan, values: SamplingValues) -> jax.Array:
    """Adjusted logits [B, T, V] as the distribution to sample from.

    Softmax at the temperature, then top-k, top-p and min-p, each on what the one before left and
    renormalised (SGLang `eagle_sample`; there min-p is left out while verifying, issue 10617).
    """
    probs = jax.nn.softmax(logits / values.temperature, axis=-1)
    if not plan.sorts:
        return probs
    # Only values are sorted: to carry ids along and to sort back by them costs three sorts.
    ordered = best = jnp.sort(probs, axis=-1, descending=True)
    sums = []
    if plan.top_k:
        rank = jnp.arange(best.shape[-1], dtype=jnp.int32)
        best = _only(best, (rank < values.top_k)[None, None], sums)
    if plan.top_p:
        best = _only(best, _running(best) - best < values.top_p, sums)
    if plan.min_p:
        best = _only(best, best >= values.min_p * best[..., :1], sums)
    probs = jnp.where(_first(probs, ordered, jnp.sum(best > 0, axis=-1)), probs, 0)
    for total in sums:
        probs = probs / total
    return probs


def _only(best: jax.Array, kept: jax.Array, sums: list[jax.Array]) -> jax.Array:
    """What is kept, summing to one; the most likely always is. Its sum joins `sums`."""
    first = jnp.arange(best.shape[-1], dtype=jnp.int32)[None, None] == 0
    best = jnp.where(kept | first, best, 0)
    sums.append(jnp.sum(best, axis=-1, keepdims=True))
    return best / sums[-1]


def _first(probs: jax.Array, ordered: jax.Array, count: jax.Array) -> jax.Array:
    """Which of probs [B, T, V] are the `count` [B, T] largest; of equal ones the lower ids.

    Args:
      ordered: the same, largest first.
    """
    count = count.astype(jnp.int32)[..., None]
    least = jnp.take_along_axis(ordered, count - 1, axis=-1)
    room = count - jnp.sum(ordered > least, axis=-1, keepdims=True, dtype=jnp.int32)
    equal = probs == least
    earlier = _running(equal.astype(jnp.int32))
    return (probs > least) | (equal & (earlier <= room))


def path_counts(tree: Tree, counts: jax.Array) -> jax.Array:
    """[B, N, V] new tokens before each node's successor: counts [B, V] and the node's own path.

    The root is the pending bonus token, which `counts` holds already.
    """
    B, N = tree.tokens.shape
    on_path = unpack(tree.ancestors, N) & (jnp.arange(N, dtype=jnp.int32) > 0)[None, None]
    batch = jnp.arange(B, dtype=jnp.int32)[:, None, None]
    node = jnp.arange(N, dtype=jnp.int32)[None, :, None]
    base = jnp.broadcast_to(counts[:, None], (B, N, counts.shape[-1]))
    return base.at[batch, node, tree.tokens[:, None, :]].add(on_path.astype(counts.dtype))


def count(counts: jax.Array, tokens: jax.Array, kept: jax.Array) -> jax.Array:
    """counts [B, V] with the first `kept` [B] of tokens [B, rows] added."""
    B, rows = tokens.shape
    added = jnp.arange(rows, dtype=jnp.int32)[None] < kept[:, None]
    batch = jnp.arange(B, dtype=jnp.int32)[:, None]
    return counts.at[batch, tokens].add(added.astype(counts.dtype))


def coins(keys: jax.Array, length: jax.Array, shape: tuple[int, ...], stream: int, dtype):
    """Uniform numbers [B, *shape] in [0, 1) for one sequence's round at `length` [B].

    A sequence never has two rounds at one length, so no coin decides twice. `stream` tells the
    coins of one round apart by what they are for.
    """

    def of_one(key: jax.Array, length: jax.Array) -> jax.Array:
        key = jax.random.fold_in(jax.random.fold_in(key, length), stream)
        return jax.random.uniform(key, shape, dtype)

    return jax.vmap(of_one)(keys, length)


FINAL, NODES, DRAFTS = range(3)
"""Streams of `coins`: the token after the last accepted node, acceptance, drafts by level."""


BLOCK = 256


def draw(weights: jax.Array, coin: jax.Array) -> jax.Array:
    """[...] int32: the first id where the running sum of weights [..., V] exceeds coin x total.

    Rounding can leave none: then the last id of any weight (SGLang
    `tree_speculative_sampling_target_only`). A large vocabulary is added up by blocks of ids, and
    only the block where the sum is reached id by id: half the launches on a GPU, where the running
    sum of all of them also ran out of registers.
    """
    size = weights.shape[-1]
    if size <= 2 * BLOCK:
        total = jnp.cumsum(weights, axis=-1)
        return _reached(total, weights, coin * total[..., -1])
    parts = _blocks(weights)
    sums = jnp.sum(parts, axis=-1)
    total = jnp.cumsum(sums, axis=-1)
    goal = coin * total[..., -1]
    block = _reached(total, sums, goal)[..., None]
    before = jnp.where(block > 0, jnp.take_along_axis(total, jnp.maximum(block - 1, 0), axis=-1), 0)
    part = jnp.take_along_axis(parts, block[..., None], axis=-2)[..., 0, :]
    within = _reached(before + jnp.cumsum(part, axis=-1), part, goal)
    return block[..., 0] * BLOCK + within


def _blocks(x: jax.Array) -> jax.Array:
    """[..., V] -> [..., blocks, BLOCK], zeros at the end."""
    blocks = -(-x.shape[-1] // BLOCK)
    pad = [(0, 0)] * (x.ndim - 1) + [(0, blocks * BLOCK - x.shape[-1])]
    return jnp.pad(x, pad).reshape(*x.shape[:-1], blocks, BLOCK)


def _running(x: jax.Array) -> jax.Array:
    """`cumsum` over the last axis; of a large vocabulary by blocks, as in `draw`."""
    if x.shape[-1] <= 2 * BLOCK:
        return jnp.cumsum(x, axis=-1, dtype=x.dtype)
    parts = _blocks(x)
    total = jnp.cumsum(jnp.sum(parts, axis=-1, dtype=x.dtype), axis=-1, dtype=x.dtype)
    before = jnp.concatenate((jnp.zeros_like(total[..., :1]), total[..., :-1]), axis=-1)
    within = jnp.cumsum(parts, axis=-1, dtype=x.dtype) + before[..., None]
    return within.reshape(*x.shape[:-1], -1)[..., : x.shape[-1]]


def _reached(total: jax.Array, weights: jax.Array, goal: jax.Array) -> jax.Array:
    """[...] int32: where the running sum of weights [..., n] first exceeds the goal [...]."""
    exceeds = (total > goal[..., None]) & (weights > 0)
    index = lax.broadcasted_iota(jnp.int32, weights.shape, weights.ndim - 1)
    last = jnp.max(jnp.where(weights > 0, index, 0), axis=-1)
    return jnp.where(
        jnp.any(exceeds, axis=-1), jnp.argmax(exceeds, axis=-1).astype(jnp.int32), last
    )

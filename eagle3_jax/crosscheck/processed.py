"""Every output token in the distribution its sampling parameters leave.

The target's last states are kept, so that other parameters need no other target pass.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from eagle3_jax.config import SamplingConfig
from eagle3_jax.crosscheck.draft_pass import draft_pass
from eagle3_jax.crosscheck.ours import CHUNK, Ours, Taught
from eagle3_jax.crosscheck.types import EngineRequest
from eagle3_jax.layers import Rows
from eagle3_jax.modules import Structure, take_apart
from eagle3_jax.precision import accum_dtype
from eagle3_jax.sampling import SamplingPlan, SamplingValues, adjust, probabilities
from eagle3_jax.sampling_config import GREEDY
from eagle3_jax.targets.base import Target

EVERYTHING = SamplingPlan(GREEDY, True, True, True, True, True)
"""All processors are compiled in and the numbers say which are at rest: one program for all."""
NO_TOP_P = 2.0
"""A sum that rounding never reaches."""


@dataclasses.dataclass(frozen=True)
class Placed:
    """Of each row, one an output token, under one set of parameters.

    Attributes:
      p: [R] the token's probability. likelier: [R] that of all tokens that stand before it.
      best: [R] the most likely token. top: [R] its probability. gap: [R] the token's logit above
        the best of the others, after penalties and bias.
      logprobs: [R] of the token, [R, k] of the listed ones: after penalties, bias and temperature,
        before anything is cut.
      drafted: [R] the target id of the draft's argmax, `drafted_p` its probability; `strict`,
        `one_hot`, `full`: `acceptance_by_rule`. None without a draft.
    """

    p: np.ndarray
    likelier: np.ndarray
    best: np.ndarray
    top: np.ndarray
    gap: np.ndarray
    logprobs: np.ndarray
    listed: np.ndarray
    drafted: np.ndarray | None = None
    drafted_p: np.ndarray | None = None
    strict: np.ndarray | None = None
    one_hot: np.ndarray | None = None
    full: np.ndarray | None = None


@dataclasses.dataclass(frozen=True)
class Texts:
    """The output tokens of several requests one after the other, padded to whole chunks.

    Attributes:
      owner, index: [R] request and output place of each row. first: [R] where a request begins.
      states: [R, E] of the target before each token. draft_logits: [R, W] of the draft for the
        first token of a round that begins there; rows of index 0 mean nothing. None without draft.
    """

    owner: np.ndarray
    index: np.ndarray
    rows: int
    states: np.ndarray
    tokens: np.ndarray
    first: np.ndarray
    listed: np.ndarray
    draft_logits: np.ndarray | None = None


def texts_of(
    ours: Ours,
    numbers: Sequence[int],
    requests: Sequence[EngineRequest],
    taught: Sequence[Taught],
    listed: Sequence[np.ndarray | None],
) -> Texts:
    """One target pass a request, and one draft pass when there is a draft."""
    states, drafts = [], []
    for number in numbers:
        request = requests[number]
        text = [*request.prompt, *request.output]
        part = slice(len(request.prompt) - 1, len(text) - 1)
        padded = np.zeros((1, -(-(len(text) - 1) // CHUNK) * CHUNK), np.int32)
        padded[0, : len(text) - 1] = text[:-1]
        leaves, structure = take_apart(ours.target)  # type: ignore[arg-type]
        states.append(np.asarray(_states(structure, leaves, padded))[part])
        if ours.draft is not None:
            logits = _drafts(ours, text, taught[number].aux)
            rows = np.arange(part.start, part.stop) - 1  # the row before the one that verifies
            drafts.append(logits[np.maximum(rows, 0)])
    owner = np.concatenate([np.full(len(requests[i].output), i) for i in numbers])
    index = np.concatenate([np.arange(len(requests[i].output)) for i in numbers])
    rows = len(owner)
    size = -(-rows // CHUNK) * CHUNK
    width = max([0, *(x.shape[1] for x in listed if x is not None)])
    asked = np.zeros((size, width), np.int32)
    at = 0
    for i in numbers:
        given, n = listed[i], len(requests[i].output)
        if given is not None:
            asked[at : at + n, : given.shape[1]] = given
        at += n
    tokens = np.concatenate([np.asarray(requests[i].output, np.int32) for i in numbers])
    return Texts(
        owner,
        index,
        rows,
        _filled(np.concatenate(states), size),
        _filled(tokens, size),
        _filled(index == 0, size, True),
        asked,
        _filled(np.concatenate(drafts), size) if drafts else None,
    )


def place(
    ours: Ours, texts: Texts, config: SamplingConfig, *, lift: float = 0.0, drafts: bool = False
) -> Placed:
    """All rows under `config`.

    Args:
      lift: added to each token's own logit, and top-p is widened by as much on the logit's scale:
        what is still forbidden then is so beyond that much rounding.
      drafts: also what `acceptance_by_rule` says, the draft at the same temperature.
    """
    vocab_size = ours.target.config.vocab_size
    leaves, structure = take_apart(ours.target)  # type: ignore[arg-type]
    dtype = np.dtype(accum_dtype(ours.target.dtype))
    values = _values(config, vocab_size, dtype, lift)
    proposals = None
    if drafts:
        assert texts.draft_logits is not None
        assert ours.draft is not None
        proposals = (texts.draft_logits, ours.draft.draft_to_target[...])
    found = _place(
        structure,
        leaves,
        texts.states,
        texts.tokens,
        texts.first,
        texts.listed,
        values,
        jnp.asarray(lift, dtype),
        proposals,
    )
    found = [np.concatenate(np.asarray(x))[: texts.rows] for x in found]
    return Placed(*found)


def acceptance_by_rule(p: jax.Array, q: jax.Array) -> dict[str, jax.Array]:
    """With what chance the first drafted token is accepted, by each rule of a chain.

    - `strict`: it is drawn from q and must be the token drawn from p: sum p q.
    - `one_hot`: it is q's argmax, accepted with its probability (SGLang `target_only`): p there.
    - `full`: it is drawn from q and accepted with min(1, p/q): sum min(p, q).

    In all three the emitted token follows p (vllm-project/vllm#40551).

    Args:
      p, q: [..., V] of the target, processed, and of the draft over the target's ids.

    Returns:
      Arrays [...] by those names.
    """
    best = jnp.argmax(q, axis=-1)[..., None]
    return {
        "strict": jnp.sum(p * q, axis=-1),
        "one_hot": jnp.take_along_axis(p, best, axis=-1)[..., 0],
        "full": jnp.sum(jnp.minimum(p, q), axis=-1),
    }


def _values(
    config: SamplingConfig, vocab_size: int, dtype: np.dtype, lift: float
) -> SamplingValues:
    values = SamplingValues.of(config, 1, vocab_size, dtype)
    top_p = NO_TOP_P if config.top_p == 1 else config.top_p
    if top_p < 1 and lift:
        odds = top_p / (1 - top_p) * np.exp(2 * lift / (config.temperature or 1.0))
        top_p = min(1.0, odds / (1 + odds) + 1e-6)
    bias = values.bias
    if bias is None:
        bias = jnp.zeros((vocab_size,), dtype)
    return dataclasses.replace(values, bias=bias, top_p=jnp.asarray(top_p, dtype))


def _drafts(ours: Ours, text: Sequence[int], aux: np.ndarray) -> np.ndarray:
    """[P, W] of the draft over a text; row t has the states of token t and token t + 1."""
    assert ours.draft is not None
    count = len(text) - 1
    slots = -(-count // CHUNK) * CHUNK
    following = np.zeros((1, slots), np.int32)
    following[0, :count] = text[1:]
    states = np.zeros((1, slots, *aux.shape[1:]), aux.dtype)
    states[0, :count] = aux[:count]
    leaves, structure = take_apart(ours.draft)
    shared, given = ours.target.shared(), (jnp.asarray(following), jnp.asarray(states))
    return np.asarray(draft_pass(structure, leaves, shared, *given)[3][0])


def _filled(x: np.ndarray, size: int, value: bool | int = 0) -> np.ndarray:
    made = np.full((size, *x.shape[1:]), value, x.dtype)
    made[: len(x)] = x
    return made


@functools.partial(jax.jit, static_argnames=("structure",))
def _states(structure: Structure, leaves: tuple[jax.Array, ...], tokens: jax.Array) -> jax.Array:
    """[P, E] of tokens [1, P]."""
    target: Target = structure.build(leaves)
    rows = Rows.prefill(1, tokens.shape[1])
    states, _, _ = target.states(tokens, rows, target.new_cache(1, tokens.shape[1]), ())
    return states[0]


@functools.partial(jax.jit, static_argnames=("structure",))
def _place(
    structure: Structure,
    leaves: tuple[jax.Array, ...],
    states: jax.Array,  # [R, E]
    tokens: jax.Array,  # [R]
    first: jax.Array,  # [R] bool
    listed: jax.Array,  # [R, k]
    values: SamplingValues,
    lift: jax.Array,  # []
    proposals: tuple[jax.Array, jax.Array] | None,  # draft logits [R, W], target ids [W]
) -> list[jax.Array]:
    """The fields of `Placed`, [R / CHUNK, CHUNK, ...] each."""
    target: Target = structure.build(leaves)
    V, row = target.config.vocab_size, jnp.arange(CHUNK, dtype=jnp.int32)

    def chunk(before: jax.Array, part: tuple[Any, ...]):
        x, given, fresh, asked, drafted = part
        request = jnp.cumsum(fresh.astype(jnp.int32))  # 0: the one of the chunk before
        which = jax.nn.one_hot(given, V, dtype=before.dtype)
        same = request[:, None] == request[None, :]
        earlier = same & (row[:, None] > row[None, :])
        goes_on = (request == 0).astype(before.dtype)
        counts = earlier.astype(before.dtype) @ which + goes_on[:, None] * before[None]
        after = same[-1].astype(before.dtype) @ which + goes_on[-1] * before
        z = adjust(target.logits(x)[None], counts[None].astype(jnp.int32), EVERYTHING, values)[0]
        z = z.at[row, given].add(lift)
        p = probabilities(z[None], EVERYTHING, values)[0]
        return after, [*_judged(z, p, given, asked, values), *_proposed(p, drafted, V, values)]

    def parts(x: jax.Array) -> jax.Array:
        return x.reshape(x.shape[0] // CHUNK, CHUNK, *x.shape[1:])

    chunks: tuple[Any, ...] = (
        parts(states),
        parts(tokens),
        parts(first),
        parts(listed),
        None if proposals is None else (parts(proposals[0]), _each(proposals[1], states)),
    )
    return lax.scan(chunk, jnp.zeros((V,), jnp.float32), chunks)[1]


def _each(ids: jax.Array, states: jax.Array) -> jax.Array:
    """One copy a chunk."""
    return jnp.broadcast_to(ids[None], (states.shape[0] // CHUNK, len(ids)))


def _judged(
    z: jax.Array, p: jax.Array, given: jax.Array, asked: jax.Array, values: SamplingValues
) -> list[jax.Array]:
    index = jnp.arange(z.shape[1], dtype=jnp.int32)[None]
    taken = index == given[:, None]
    own = jnp.sum(jnp.where(taken, p, 0), axis=-1)
    ahead = (p > own[:, None]) | ((p == own[:, None]) & (index < given[:, None]))
    likelier = jnp.sum(jnp.where(ahead, p, 0), axis=-1)
    chosen = jnp.max(jnp.where(taken, z, -jnp.inf), axis=-1)
    gap = chosen - jnp.max(jnp.where(taken, -jnp.inf, z), axis=-1)
    logs = jax.nn.log_softmax(z / values.temperature, axis=-1)
    log = jnp.max(jnp.where(taken, logs, -jnp.inf), axis=-1)
    theirs = jnp.take_along_axis(logs, asked, axis=-1)
    best = jnp.argmax(p, axis=-1).astype(jnp.int32)
    return [own, likelier, best, jnp.max(p, axis=-1), gap, log, theirs]


def _proposed(p: jax.Array, drafted, V: int, values: SamplingValues) -> list[jax.Array]:
    if drafted is None:
        return []
    logits, ids = drafted
    narrow = jax.nn.softmax(logits.astype(p.dtype) / values.temperature, axis=-1)
    q = jnp.zeros((len(logits), V), p.dtype).at[:, ids].set(narrow)
    rules = acceptance_by_rule(p, q)
    best = jnp.argmax(q, axis=-1).astype(jnp.int32)
    return [best, rules["one_hot"], rules["strict"], rules["one_hot"], rules["full"]]

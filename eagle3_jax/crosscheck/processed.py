"""Every output token in the distribution its sampling parameters leave.

The target's last states are kept, so that other parameters need no other target pass.
"""

import dataclasses
from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np

from eagle3_jax.config import SamplingConfig
from eagle3_jax.crosscheck.draft_pass import draft_pass
from eagle3_jax.crosscheck.ours import CHUNK, Ours, Taught
from eagle3_jax.crosscheck.placing import NO_TOP_P, placed, states_of
from eagle3_jax.crosscheck.types import EngineRequest
from eagle3_jax.modules import take_apart
from eagle3_jax.precision import accum_dtype
from eagle3_jax.sampling import SamplingValues


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
      joint: [R] the tokens of SGLang's plain sampler, which takes top-p of the whole distribution
        and not of what top-k left (`layers/sampler.py`, filter_apply_order "joint"); None for none.
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
    joint: np.ndarray | None = None


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
        states.append(np.asarray(states_of(structure, leaves, padded))[part])
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


@dataclasses.dataclass(frozen=True)
class Counted:
    """Which tokens before each one its penalties count, where that is not all of the output's.

    Attributes:
      kept: [R] whether later tokens count this one. left_out, also: [R, k] ids that are counted
        once less and once more for this one, -1 for none.
    """

    kept: np.ndarray
    left_out: np.ndarray
    also: np.ndarray


def place(
    ours: Ours,
    texts: Texts,
    config: SamplingConfig,
    *,
    lift: float = 0.0,
    drafts: bool = False,
    counted: Counted | None = None,
) -> Placed:
    """All rows under `config`.

    Args:
      counted: by the penalties; None for every token of the output before.
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
    found = placed(
        structure,
        leaves,
        texts.states,
        texts.tokens,
        texts.first,
        texts.listed,
        values,
        jnp.asarray(lift, dtype),
        proposals,
        _counted(texts, counted, vocab_size),
        None if texts.joint is None else _filled(texts.joint, len(texts.tokens)),
    )
    found = [np.concatenate(np.asarray(x))[: texts.rows] for x in found]
    return Placed(*found)


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


def _counted(texts: Texts, counted: Counted | None, vocab_size: int) -> tuple[np.ndarray, ...]:
    """Its fields padded to the texts' rows, `vocab_size` for no id."""
    size = len(texts.tokens)
    if counted is None:
        nothing = np.full((size, 1), vocab_size, np.int32)
        return np.ones(size, bool), nothing, nothing
    ids = [
        np.where(x < 0, vocab_size, x).astype(np.int32) for x in (counted.left_out, counted.also)
    ]
    return _filled(counted.kept, size, True), *(_filled(x, size, vocab_size) for x in ids)


def _filled(x: np.ndarray, size: int, value: bool | int = 0) -> np.ndarray:
    made = np.full((size, *x.shape[1:]), value, x.dtype)
    made[: len(x)] = x
    return made

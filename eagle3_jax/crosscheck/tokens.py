"""An engine's text beside the target's own choices: ties, faults, stop rules."""

import dataclasses
from collections.abc import Sequence

import numpy as np

from eagle3_jax.comparison import NEAR_TIE
from eagle3_jax.crosscheck.noise import Noise
from eagle3_jax.crosscheck.ours import Taught
from eagle3_jax.crosscheck.result import Divergence, Tie
from eagle3_jax.crosscheck.types import EngineRequest
from eagle3_jax.trace import Round


@dataclasses.dataclass
class Checked:
    """What the tokens of one request showed."""

    faults: list[Divergence] = dataclasses.field(default_factory=list)
    ties: list[Tie] = dataclasses.field(default_factory=list)
    equal_until: int = 0


def check_tokens(
    number: int, request: EngineRequest, taught: Taught, noise: Noise, rounds: Sequence[Round]
) -> Checked:
    """Every output token against the target's choice after the text before it.

    Args:
      rounds: ours on the engine's text, to say which round emitted a token; may be empty.
    """
    checked = Checked(equal_until=len(request.output))
    wrong = np.flatnonzero(taught.margins < 0)
    faults = []
    for i in map(int, wrong):
        margin = float(taught.margins[i])
        token, own = request.output[i], int(taught.predicted[i])
        where = f"token {i} is {token}, the target's choice {own}"
        if noise.tied(margin):
            detail = f"{where}: {-margin:.2e} below the best logit"
            checked.ties.append(Tie(number, detail, -margin, noise.logit, position=i))
        else:
            faults.append(i)
    if faults:
        checked.equal_until = faults[0]
        checked.faults = [_fault(number, request, taught, i, faults, rounds, noise) for i in faults]
    return checked


def _fault(
    number: int,
    request: EngineRequest,
    taught: Taught,
    i: int,
    faults: Sequence[int],
    rounds: Sequence[Round],
    noise: Noise,
) -> Divergence:
    token, own = request.output[i], int(taught.predicted[i])
    detail = (
        f"token {i} is {token}, the target's choice {own}, whose logit is "
        f"{-taught.margins[i]:.3g} higher: no near tie (below {noise.logit:.2g})"
    )
    index = emitting_round(request, i, rounds)
    found = Divergence(
        kind="target differs",
        request=number,
        round=index,
        position=i,
        tensor="output_ids",
        detail=detail,
        code="LOSSLESS_LOGIC_ERROR",
        order=(-1 if index is None else index, 890),
    )
    cause = _cause(request, taught, i, rounds, index, noise)
    if cause is None:
        return found
    code, words = cause
    kind = "acceptance differs" if index is not None else "target differs"
    return dataclasses.replace(found, kind=kind, code=code, cause=words)


def _cause(
    request: EngineRequest,
    taught: Taught,
    i: int,
    rounds: Sequence[Round],
    index: int | None,
    noise: Noise,
) -> tuple[str, str] | None:
    token, own = request.output[i], int(taught.predicted[i])
    if request.output_top is not None and i < len(request.output_top):
        best = request.output_top[i][0]
        listed = dict(request.output_top[i])
        gap = best[1] - listed.get(token, -np.inf)
        if best[0] == own and gap > noise.logit:
            return (
                "TOKEN_NOT_THE_ENGINES_CHOICE",
                f"the engine's own logprobs have {own} first: its target agrees, what it committed "
                "does not",
            )
    own_round = next((r for r in rounds if r.index == index), None)
    if own_round is not None:
        depth = i - (own_round.length - len(request.prompt))
        path = own_round.accepted
        if depth < len(path) and own_round.tokens[path[depth]] == token:
            return (
                "OVER_ACCEPTED",
                f"{token} is the draft's proposal, accepted although the target says {own}",
            )
    if request.output[i + 1 : i + 2] == [own]:
        return ("TOKENS_SWAPPED", f"{own} comes one token later: two tokens changed places")
    return None


def emitting_round(request: EngineRequest, i: int, rounds: Sequence[Round]) -> int | None:
    """The round that emitted output token i, None for the prefill's or when rounds are unknown."""
    for r in rounds:
        start = r.length - len(request.prompt)
        if start < i <= start + r.accept_length:
            return r.index
    return None


def check_logprobs(
    number: int, request: EngineRequest, taught: Taught, dtype: str, rounds: Sequence[Round]
) -> list[Divergence]:
    """The engine's logprobs against the target's: its own tokens, the prompt's, the best listed.

    A difference beyond the cap shows a wrong state even where it changed no token.
    """
    if request.output_logprobs is None:
        return _other_logprobs(number, request, taught, dtype)
    off = np.abs(request.output_logprobs - taught.logprobs)
    far = np.flatnonzero(~(off <= NEAR_TIE[dtype]))
    if not len(far):
        return _other_logprobs(number, request, taught, dtype)
    i = int(far[0])
    found, expected = float(request.output_logprobs[i]), float(taught.logprobs[i])
    index = emitting_round(request, i, rounds)
    return [
        Divergence(
            kind="target differs",
            request=number,
            round=index,
            position=i,
            tensor="output_logprobs",
            detail=(
                f"the logprob of token {i} ({request.output[i]}) is {found:.6g}, expected "
                f"{expected:.6g}; {len(far)} of {len(off)} differ by more than {NEAR_TIE[dtype]:g}"
            ),
            cause="NaN logits" if not np.isfinite(found) else "",
            code="NUMERIC_NAN" if not np.isfinite(found) else None,
            order=(-1 if index is None else index, 950),
        )
    ]


def listed_ids(request: EngineRequest) -> np.ndarray | None:
    """[n, k] ids of the engine's best tokens at each output place, a short list filled up."""
    if request.output_top is None:
        return None
    most = max(map(len, request.output_top))
    return np.array(
        [[t for t, _ in (*top, *top[-1:] * (most - len(top)))] for top in request.output_top],
        np.int32,
    )


def _other_logprobs(
    number: int, request: EngineRequest, taught: Taught, dtype: str
) -> list[Divergence]:
    """Of the prompt's tokens and of the best tokens at each place."""
    lists: list[tuple[str, str, np.ndarray, np.ndarray]] = []
    if request.input_logprobs is not None and taught.before is not None:
        given = request.input_logprobs[1:]  # null where none was asked for
        pair = (np.where(np.isnan(given), taught.before, given), taught.before)
        lists.append(("input_token_logprobs", "prompt token", *pair))
    if request.output_top is not None and taught.listed is not None:
        most = taught.listed.shape[1]
        theirs = [[v for _, v in (*t, *t[-1:] * (most - len(t)))] for t in request.output_top]
        gaps = np.abs(np.array(theirs) - taught.listed)
        worst = np.argmax(np.where(np.isnan(gaps), np.inf, gaps), axis=1)[:, None]
        found = np.take_along_axis(np.array(theirs), worst, 1)[:, 0]
        expected = np.take_along_axis(taught.listed, worst, 1)[:, 0]
        lists.append(("output_top_logprobs", "a listed token at place", found, expected))
    for tensor, what, found, expected in lists:
        far = np.flatnonzero(~(np.abs(found - expected) <= NEAR_TIE[dtype]))
        if len(far):
            i = int(far[0])
            place = i + 1 if tensor.startswith("input") else i
            return [
                Divergence(
                    kind="target differs",
                    request=number,
                    position=i if tensor.startswith("output") else None,
                    tensor=tensor,
                    detail=(
                        f"the logprob of {what} {place} is {found[i]:.6g}, expected "
                        f"{expected[i]:.6g}; {len(far)} of {len(found)} places differ by more than "
                        f"{NEAR_TIE[dtype]:g}"
                    ),
                    order=(-1 if tensor.startswith("input") else 10**6, 951),
                )
            ]
    return []


def check_stop(
    number: int,
    request: EngineRequest,
    stop_ids: Sequence[int],
    rounds: Sequence[Round],
) -> tuple[list[Divergence], list[str]]:
    """Where the text must end: the first stop token, or max_new_tokens.

    A stop token that generation went on after for rounds was no stop token to the engine
    (`ignore_eos`); one inside an accepted run with the rest of the run after it is a fault.

    Args:
      stop_ids: the target's eos and the request's own, none with ignore_eos.
    """
    output, faults, notes = request.output, [], []
    first = next((i for i, t in enumerate(output) if t in stop_ids), None)
    limit = request.max_new_tokens
    if first is not None and first < len(output) - 1:
        after = len(output) - 1 - first
        index = emitting_round(request, first, rounds)
        inside = index is not None and emitting_round(request, len(output) - 1, rounds) == index
        stopped = request.finish_reason == "stop" or (limit is not None and len(output) < limit)
        if inside or stopped or (request.ignore_eos is False):
            faults.append(
                Divergence(
                    kind="target differs" if index is None else "acceptance differs",
                    request=number,
                    round=index,
                    position=first + 1,
                    tensor="output_ids",
                    detail=(
                        f"{after} token{'s' if after > 1 else ''} after EOS: stop token "
                        f"{output[first]} is output token {first} of {len(output)}"
                    ),
                    cause="an accepted run is not cut at its stop token",
                    code="LOSSLESS_AFTER_STOP",
                    order=(-1 if index is None else index, 910),
                )
            )
        else:
            notes.append(
                f"request {number}: generation goes on after stop token {output[first]} (output "
                f"token {first}): taken for ignore_eos"
            )
    if limit is not None and len(output) > limit:
        faults.append(
            Divergence(
                kind="target differs",
                request=number,
                position=limit,
                tensor="output_ids",
                detail=f"{len(output)} tokens, max_new_tokens is {limit}",
                cause="the last run is not cut at max_new_tokens",
                code="LOSSLESS_LENGTH",
                order=(-1, 911),
            )
        )
    short = limit is not None and len(output) < limit and request.finish_reason == "length"
    if short:
        faults.append(
            Divergence(
                kind="target differs",
                request=number,
                position=len(output),
                tensor="output_ids",
                detail=f"{len(output)} tokens ended by length, max_new_tokens is {limit}",
                cause="the last run is cut too early",
                code="LOSSLESS_LENGTH",
                order=(-1, 912),
            )
        )
    return faults, notes

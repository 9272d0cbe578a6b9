"""Fields of answers: logprobs, top tokens, hidden states, sampling parameters."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from eagle3_jax.crosscheck.types import CrosscheckError, Top

BULKY = (
    "hidden_states",
    "input_token_logprobs",
    "output_token_logprobs",
    "input_top_logprobs",
    "output_top_logprobs",
    "logprobs",
    "output_ids",
    "input_ids",
    "prompt_token_ids",
    "token_ids",
)


COUNTS = (
    "prompt_tokens",
    "completion_tokens",
    "cached_tokens",
    "spec_verify_ct",
    "spec_num_correct_drafts",
    "spec_num_proposed_drafts",
)
RATES = ("spec_accept_rate", "spec_accept_length")
HISTOGRAM = "spec_correct_drafts_histogram"


def check_numbers(stats: Mapping[str, Any], where: str):
    """Refuses statistics that are no numbers.

    Raises:
      CrosscheckError: names the field and what it holds.
    """
    for name in COUNTS:
        value = stats.get(name)
        if value is not None and (type(value) is not int or value < 0):
            raise CrosscheckError(f"{where}: {name} is {value!r}, expected a count")
    for name in RATES:
        value = stats.get(name)
        if value is not None and type(value) not in (int, float):
            raise CrosscheckError(f"{where}: {name} is {value!r}, expected a number")
    value = stats.get(HISTOGRAM)
    if value is not None and (
        not isinstance(value, list) or not all(type(n) is int and n >= 0 for n in value)
    ):
        raise CrosscheckError(f"{where}: {HISTOGRAM} is {str(value)[:60]}, expected counts")


def states_of(
    meta: Mapping[str, Any], prompt: int, output: int, where: str
) -> tuple[np.ndarray | None, int, str | None]:
    """`hidden_states` as rows, where they begin, and what they are.

    A cached prefix has no rows and of a prompt in chunks only the last chunk's are sent. Under
    EAGLE3 a row holds aux states, in plain decoding the last state.
    """
    blocks = meta.get("hidden_states")
    if blocks is not None and not isinstance(blocks, list):
        raise CrosscheckError(f"{where}: hidden_states is {str(blocks)[:40]}, expected a list")
    if not blocks:
        return None, 0, None
    try:
        with np.errstate(over="ignore"):
            arrays = [np.asarray(block, np.float32) for block in blocks]
        rows = np.concatenate([a[None] if a.ndim == 1 else a for a in arrays])
    except (TypeError, ValueError):
        raise CrosscheckError(
            f"{where}: hidden_states holds no rows of numbers of one width"
        ) from None
    if rows.ndim != 2:
        raise CrosscheckError(f"{where}: hidden_states has rank {rows.ndim}, expected rows")
    first = prompt + output - 1 - len(rows)
    if first < 0 or first >= prompt:
        return None, 0, None  # the last row only, or rows sent twice after a retraction
    spec = "spec_verify_ct" in meta or "spec_accept_length" in meta
    return rows, first, "aux" if spec else None


def logprobs_of(entries: Any, output: Sequence[int], where: str) -> np.ndarray | None:
    """Of each output token, from `[logprob, id, text]`."""
    if entries is not None and not isinstance(entries, list):
        raise CrosscheckError(
            f"{where}: output_token_logprobs is {str(entries)[:40]}, expected a list"
        )
    if not entries:
        return None
    try:
        pairs = [(number_of(entry[0]), int(entry[1])) for entry in entries]
    except (TypeError, ValueError, IndexError):
        raise CrosscheckError(
            f"{where}: output_token_logprobs are no [logprob, id, text]"
        ) from None
    if [token for _, token in pairs] != list(output):
        raise CrosscheckError(f"{where}: output_token_logprobs are of other tokens than output_ids")
    return np.array([value for value, _ in pairs])


def inputs_of(entries: Any, prompt: int) -> np.ndarray | None:
    """Of each prompt token, the first NaN; None unless all are there."""
    if not isinstance(entries, list) or len(entries) != prompt:
        return None
    return np.array([number_of(entry[0]) for entry in entries])


def tops_of(entries: Any, output: int, where: str) -> list[Top] | None:
    """The best tokens at each output place."""
    if entries is not None and not isinstance(entries, list):
        raise CrosscheckError(
            f"{where}: output_top_logprobs is {str(entries)[:40]}, expected a list"
        )
    if not entries or not all(entries):
        return None
    if len(entries) != output:
        raise CrosscheckError(
            f"{where}: output_top_logprobs has {len(entries)} places, the output {output}"
        )
    try:
        return [tuple((int(e[1]), number_of(e[0])) for e in place) for place in entries]
    except (TypeError, ValueError, IndexError):
        raise CrosscheckError(f"{where}: top logprobs are no [logprob, id, text]") from None


def number_of(value: Any) -> float:
    """NaN for null."""
    return math.nan if value is None else float(value)


NO_PARAMETERS = ("model", "messages", "prompt", "input_ids", "text", "stream", "stream_options")
"""What an OpenAI-style request holds beside its sampling parameters."""


def sampling_of(params: Any) -> dict[str, Any]:
    """Fields of `EngineRequest` from sampling parameters of any engine."""
    if not isinstance(params, dict):
        return {}
    limit = params.get(
        "max_new_tokens", params.get("max_tokens", params.get("max_completion_tokens"))
    )
    stop = params.get("stop_token_ids")
    if limit is not None and type(limit) is not int:
        raise CrosscheckError(f"max_new_tokens is {limit!r}, expected a number")
    temperature = params.get("temperature")
    if temperature is not None and type(temperature) not in (int, float):
        raise CrosscheckError(f"temperature is {temperature!r}, expected a number")
    return {
        "temperature": temperature,
        "max_new_tokens": limit,
        "ignore_eos": params.get("ignore_eos"),
        "stop_token_ids": tuple(stop) if isinstance(stop, list) else None,
        "sampling": {k: v for k, v in params.items() if k not in NO_PARAMETERS} or None,
    }

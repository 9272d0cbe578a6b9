"""The sampling parameters of an engine's requests, and which of them give a known distribution."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from eagle3_jax.config import ConfigError, SamplingConfig
from eagle3_jax.crosscheck.processed import Texts
from eagle3_jax.crosscheck.sampled_causes import AT_REST
from eagle3_jax.crosscheck.types import CrosscheckError, EngineRequest, EngineRun
from eagle3_jax.sampling_config import LEAST_TEMPERATURE

NO_EFFECT = {
    *("temperature", "max_new_tokens", "max_tokens", "max_completion_tokens", "ignore_eos", "n"),
    *("stop", "stop_token_ids", "stop_regex", "skip_special_tokens", "no_stop_trim", "seed"),
    *("spaces_between_special_tokens", "stream_interval", "sampling_seed", "rule", "logprobs"),
    *("return_token_ids", "top_logprobs", "detokenize", "include_stop_str_in_output", "user"),
}
NOT_COMPUTED = {
    *("json_schema", "regex", "ebnf", "structural_tag", "min_new_tokens", "min_tokens"),
    *("beam_width", "custom_params", "watermark", "response_format", "bad_words"),
    *("allowed_token_ids", "logits_processors", "guided_decoding", "structured_outputs"),
}
"""They change the distribution in ways that nothing here computes."""


def sampling_config(request: EngineRequest) -> SamplingConfig:
    """The parameters of a request by SGLang's names and defaults; greedy is `top_k=1`.

    Raises:
      CrosscheckError: a value that SGLang refuses, or no parameters.
    """
    given = {k: v for k, v in (request.sampling or {}).items() if v is not None}
    found: dict[str, Any] = {name: given[name] for name in AT_REST if name in given}
    temperature = request.temperature if request.temperature is not None else 1.0
    if temperature < LEAST_TEMPERATURE:
        found["top_k"], temperature = 1, 1.0
    try:
        return SamplingConfig(temperature, **found)
    except ConfigError as error:
        raise CrosscheckError(f"request {request.name}: sampling parameters: {error}") from None


def is_sampled(request: EngineRequest) -> bool:
    """At a temperature, or greedy on logits that penalties or a bias change."""
    if request.temperature is None or request.temperature >= LEAST_TEMPERATURE:
        return bool(request.temperature)
    config = sampling_config(request)
    return config.penalises or bool(config.logit_bias)


def undecidable(request: EngineRequest, engine: str) -> str | None:
    """Why a request's distribution is not known."""
    if request.sampling is None:
        return "its sampling parameters are not in the results"
    given = {k for k, v in request.sampling.items() if v and k in NOT_COMPUTED}
    if given:
        return f"{', '.join(sorted(given))} changes the distribution in ways not computed here"
    config = sampling_config(request)
    if engine == "vllm":
        if config.repetition_penalty != 1 or (config.logit_bias and config.penalises):
            return "vLLM's repetition penalty counts the prompt, and its bias comes first"
        if config.min_p and (config.top_k is not None or config.top_p < 1):
            return "vLLM applies min_p before top_k and top_p"
    return None


def joint_rows(
    config: SamplingConfig, run: EngineRun, requests: Sequence[EngineRequest], texts: Texts
) -> np.ndarray | None:
    """[R] the tokens that SGLang's plain sampler drew with top-k and top-p at once; None none.

    Its verification, and with min-p its CUDA kernels, cut one after the other.
    """
    both = config.top_k not in (None, 1) and config.top_p < 1
    kernels = run.settings.other.get("sampling_backend") != "pytorch"
    if run.settings.engine != "sglang" or not both or (config.min_p and kernels):
        return None
    verifies = [
        run.settings.tree is not None or bool(r.rounds) or "spec_verify_ct" in r.stats
        for r in requests
    ]
    return (texts.index == 0) | ~np.asarray(verifies)[texts.owner]

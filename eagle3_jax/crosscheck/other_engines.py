"""Answers of vLLM and of OpenAI-style servers, where they carry token ids."""

from collections.abc import Sequence
from typing import Any

from eagle3_jax.crosscheck.fields import BULKY, check_numbers, sampling_of
from eagle3_jax.crosscheck.stats import translate
from eagle3_jax.crosscheck.types import CrosscheckError, EngineRequest
from eagle3_jax.records.capture import flat_ids


def choices_of(
    answer: dict[str, Any], request: dict[str, Any], where: str, prompt: Sequence[int] | None
) -> list[EngineRequest]:
    """OpenAI-style completions that carry token ids (`return_token_ids`)."""
    found = []
    for i, choice in enumerate(answer["choices"]):
        here = f"{where}, choice {i}"
        ids = next(
            (p[k] for p in (choice, answer) for k in ("token_ids", "output_ids") if p.get(k)), None
        )
        if ids is None:
            raise CrosscheckError(
                f"{here}: an OpenAI-style answer without token ids: text cannot be compared token "
                "by token; ask with return_token_ids true (vLLM), or SGLang's /generate"
            )
        given = prompt or choice.get("prompt_token_ids") or answer.get("prompt_token_ids")
        given = given or (request.get("prompt") if _is_ids(request.get("prompt")) else None)
        if given is None:
            raise CrosscheckError(
                f"{here}: no prompt_token_ids: ask with return_token_ids true, or give --prompts"
            )
        usage = answer.get("usage") or {}
        output = flat_ids(ids, here, "token_ids").tolist()
        meta = {
            "finish_reason": choice.get("finish_reason"),
            "prompt_tokens": usage.get("prompt_tokens"),
            "completion_tokens": usage.get("completion_tokens"),
        } | (choice.get("meta_info") or {})
        stats, missing = translate({k: v for k, v in meta.items() if v is not None})
        check_numbers(stats, here)
        details = usage.get("prompt_tokens_details") or {}
        found.append(
            EngineRequest(
                name=f"{answer.get('id') or where}.{i}",
                prompt=flat_ids(given, here, "prompt ids").tolist(),
                output=output,
                stats=stats,
                original={k: v for k, v in answer.items() if k != "choices" and k not in BULKY}
                | {k: v for k, v in choice.items() if k not in BULKY},
                missing=missing,
                cached_tokens=int(details.get("cached_tokens") or 0),
                **sampling_of(request),
            )
        )
    return found


def _is_ids(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(type(v) is int for v in value)


def outputs_of(
    answer: dict[str, Any], request: dict[str, Any], where: str, prompt: Sequence[int] | None
) -> list[EngineRequest]:
    """vLLM's RequestOutput as JSON."""
    given = prompt or answer.get("prompt_token_ids")
    if given is None:
        raise CrosscheckError(f"{where}: no prompt_token_ids: give --prompts")
    found = []
    for i, output in enumerate(answer["outputs"]):
        ids = flat_ids(output.get("token_ids"), where, "token_ids").tolist()
        stats: dict[str, Any] = {"completion_tokens": len(ids), "prompt_tokens": len(given)}
        if output.get("finish_reason"):
            stats["finish_reason"] = {"type": output["finish_reason"]}
        found.append(
            EngineRequest(
                name=f"{answer.get('request_id') or where}.{i}",
                prompt=flat_ids(given, where, "prompt ids").tolist(),
                output=ids,
                stats=stats,
                original={k: v for k, v in output.items() if k not in BULKY},
                missing=() if output.get("finish_reason") else ("finish_reason",),
                cached_tokens=int(answer.get("num_cached_tokens") or 0),
                **sampling_of(request.get("sampling_params") or {}),
            )
        )
    return found

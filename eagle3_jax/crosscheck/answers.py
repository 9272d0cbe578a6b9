"""Engine runs from saved answers, above all SGLang's `/generate` and `Engine.generate`."""

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from eagle3_jax.config import ConfigError, TreeConfig
from eagle3_jax.crosscheck.fields import (
    BULKY,
    check_numbers,
    inputs_of,
    logprobs_of,
    sampling_of,
    states_of,
    tops_of,
)
from eagle3_jax.crosscheck.other_engines import choices_of, outputs_of
from eagle3_jax.crosscheck.stats import from_vllm, translate
from eagle3_jax.crosscheck.types import CrosscheckError, EngineRequest, EngineRun, Settings
from eagle3_jax.records.capture import flat_ids
from eagle3_jax.records.types import RecordError

MALFORMED = (TypeError, ValueError, KeyError, AttributeError, IndexError, OverflowError)
"""What a value of another type than expected raises where it is used."""


def run_of(
    items: Sequence[tuple[str, Any]],
    source: Path,
    prompts: Sequence[Sequence[int]] | None = None,
    settings: Settings | None = None,
) -> EngineRun:
    """A run from parsed answers, each with the place it came from.

    Args:
      prompts: prompt ids in the answers' order, for answers that do not hold them.
      settings: of the server, where they are known.

    Raises:
      CrosscheckError: naming file, answer, and what is missing.
    """
    try:
        for where, item in items:
            if not isinstance(item, dict):
                raise CrosscheckError(
                    f"{where}: a {type(item).__name__}, expected an answer of an engine"
                )
        return _run_of(items, source, prompts, settings)
    except CrosscheckError:
        raise
    except MALFORMED as error:
        raise CrosscheckError(
            f"{source}: a field has another type than engines give it: {type(error).__name__}: "
            f"{error}"
        ) from None


def _run_of(
    items: Sequence[tuple[str, Any]],
    source: Path,
    prompts: Sequence[Sequence[int]] | None,
    settings: Settings | None,
) -> EngineRun:
    requests: list[EngineRequest] = []
    engine, notes, totals = None, [], {}
    for where, item in items:
        if isinstance(item, dict) and _is_summary(item):
            engine, more, counters = _summary(item, where, prompts)
            requests += more
            totals |= counters
            settings = settings or _summary_settings(item)
            continue
        prompt = None
        if prompts is not None:
            if len(requests) >= len(prompts):
                raise CrosscheckError(
                    f"{where}: answer {len(requests) + 1}, {len(prompts)} prompts"
                )
            prompt = prompts[len(requests)]
        kind, more = read_answer(item, where, prompt)
        engine = engine or kind
        requests += more
    if not requests:
        raise CrosscheckError(f"{source}: no answers in it")
    if prompts is not None and len(prompts) != len(requests):
        raise CrosscheckError(f"{source}: {len(requests)} answers, {len(prompts)} prompts")
    found = settings or Settings(engine=engine or "sglang")
    return EngineRun(str(source), _shared(found, requests), requests, tuple(notes), totals)


def read_answer(
    item: Any, where: str, prompt: Sequence[int] | None = None
) -> tuple[str, list[EngineRequest]]:
    """One answer of any known form -> the engine's name and its requests (one a choice).

    Raises:
      CrosscheckError: no known form, or one that lacks ids.
    """
    request: dict[str, Any] = {}
    if isinstance(item, dict) and isinstance(item.get("response"), (dict, list)):
        request = item["request"] if isinstance(item.get("request"), dict) else {}
        item = item["response"]
        if isinstance(item, list):
            found: list[EngineRequest] = []
            for i, one in enumerate(item):
                own = _part(request, i, len(item))
                ids = prompt if len(item) == 1 else None
                found += read_answer({"request": own, "response": one}, f"{where}[{i}]", ids)[1]
            return "sglang", found
    if not isinstance(item, dict):
        raise CrosscheckError(f"{where}: a {type(item).__name__}, expected an answer of an engine")
    if "error" in item and "output_ids" not in item:
        raise CrosscheckError(f"{where}: the engine's error: {str(item['error'])[:200]}")
    try:
        if "choices" in item:
            return "openai", choices_of(item, request, where, prompt)
        if isinstance(item.get("outputs"), list):
            return "vllm", outputs_of(item, request, where, prompt)
        return "sglang", [_generate(item, request, where, prompt)]
    except RecordError as error:
        raise CrosscheckError(str(error)) from None


def _part(request: Mapping[str, Any], i: int, count: int) -> dict[str, Any]:
    """What of a batched request belongs to answer i."""
    part = dict(request)
    for name, value in request.items():
        if not isinstance(value, list) or len(value) != count:
            continue
        if name != "input_ids" or (value and isinstance(value[0], list)):
            part[name] = value[i]
    return part


def _generate(
    answer: dict[str, Any], request: dict[str, Any], where: str, prompt: Sequence[int] | None
) -> EngineRequest:
    meta = answer.get("meta_info")
    if not isinstance(meta, dict):
        raise CrosscheckError(
            f"{where}: no meta_info, choices or outputs: expected an answer of SGLang's /generate, "
            f"of vLLM or of an OpenAI-style server; it has {', '.join(list(answer)[:8])}"
        )
    if "output_ids" not in answer:
        raise CrosscheckError(
            f"{where}: no output_ids: start the server with --skip-tokenizer-init, or ask with "
            "return_output_ids"
        )
    output = flat_ids(answer["output_ids"], where, "output_ids").tolist()
    logged = meta.get("input_token_logprobs") or []
    if prompt is None:
        for value in (
            answer.get("prompt_token_ids"),
            answer.get("input_ids"),
            meta.get("prompt_token_ids"),
            request.get("input_ids"),
        ):
            if isinstance(value, list) and value:
                prompt = value
                break
        else:
            if logged and len(logged) == meta.get("prompt_tokens"):
                prompt = [entry[1] for entry in logged]
    if prompt is None:
        raise CrosscheckError(
            f"{where}: the prompt's ids are not in the answer: give them with --prompts, or ask "
            "with return_prompt_token_ids, or with return_logprob and logprob_start_len 0"
        )
    ids = flat_ids(prompt, where, "prompt ids").tolist()
    if meta.get("prompt_tokens") not in (None, len(ids)):
        raise CrosscheckError(
            f"{where}: {len(ids)} prompt ids, meta_info counts {meta['prompt_tokens']}: another "
            "request's prompt, or ids without what the server's tokenizer adds"
        )
    stats, missing = translate(meta)
    check_numbers(stats | {"cached_tokens": meta.get("cached_tokens")}, where)
    aux, first, kind = states_of(meta, len(ids), len(output), where)
    return EngineRequest(
        name=str(meta.get("id") or where),
        prompt=ids,
        output=output,
        stats=stats,
        original={k: v for k, v in meta.items() if k not in BULKY},
        missing=missing,
        cached_tokens=int(meta.get("cached_tokens") or 0),
        output_logprobs=logprobs_of(meta.get("output_token_logprobs"), output, where),
        output_top=tops_of(meta.get("output_top_logprobs"), len(output), where),
        input_logprobs=inputs_of(logged, len(ids)),
        aux=aux,
        first=first,
        hidden_kind=kind,
        **sampling_of(
            request.get("sampling_params")
            or answer.get("sampling_params")
            or meta.get("sampling_params")
            or {}
        ),
    )


def _is_summary(item: Mapping[str, Any]) -> bool:
    """One object for a whole run: `{"results": [...], ...}` with ids, counters, a tree."""
    return isinstance(item.get("results"), list) and "output_ids" not in item


def _summary(
    item: dict[str, Any], where: str, prompts: Sequence[Sequence[int]] | None
) -> tuple[str, list[EngineRequest], dict[str, Any]]:
    engine = "vllm" if "vllm" in item or "num_drafts" in item else "sglang"
    prompts = prompts if prompts is not None else item.get("prompts")
    found = []
    for i, result in enumerate(item["results"]):
        here = f"{where}, result {i}"
        prompt = result.get("prompt_token_ids") or result.get("input_ids")
        if prompt is None:
            if prompts is None or i >= len(prompts):
                raise CrosscheckError(f"{here}: its prompt's ids are missing: give --prompts")
            prompt = prompts[i]
        if "meta_info" in result or "outputs" in result:
            found += read_answer(result, here, prompt)[1]
            continue
        output = flat_ids(result.get("output_ids"), here, "output_ids").tolist()
        counters = result.get("spec") or {}
        stats = from_vllm(counters)
        if stats.get("spec_verify_ct"):
            stats["spec_accept_length"] = len(output) / stats["spec_verify_ct"]
        found.append(
            EngineRequest(
                name=f"{i}",
                prompt=flat_ids(prompt, here, "prompt ids").tolist(),
                output=output,
                stats=stats | {"completion_tokens": len(output), "prompt_tokens": len(prompt)},
                original={k: v for k, v in result.items() if k not in BULKY},
                missing=("finish_reason",) if "finish_reason" not in result else (),
                **sampling_of(item.get("sampling_params") or {}),
            )
        )
    totals = from_vllm(item.get("spec") or item.get("metrics") or {})
    return engine, found, totals


def _summary_settings(item: dict[str, Any]) -> Settings:
    tree = item.get("tree")
    if isinstance(tree, dict):
        tree = TreeConfig(**tree)
    elif isinstance(item.get("k"), int):
        tree = TreeConfig(item["k"])
    version = item.get("vllm") or item.get("sglang") or item.get("version")
    return Settings(
        engine="vllm" if "vllm" in item else "sglang",
        version=version if isinstance(version, str) else None,
        tree=tree if isinstance(tree, TreeConfig) else None,
        dtype=item.get("dtype"),
        other={k: v for k, v in item.items() if k not in ("results", "prompts")},
    )


def settings_of_server(info: Mapping[str, Any], where: str) -> Settings:
    """SGLang's `/server_info` (or `get_server_info()`), of any version.

    Raises:
      CrosscheckError: a triple that no tree has.
    """
    if not isinstance(info, dict):
        raise CrosscheckError(f"{where}: a {type(info).__name__}, expected what a server says")
    args = info.get("server_args") if isinstance(info.get("server_args"), dict) else info
    assert isinstance(args, Mapping)
    steps = args.get("speculative_num_steps")
    tree = None
    if args.get("speculative_algorithm") and steps:
        topk = args.get("speculative_eagle_topk") or 1
        nodes = args.get("speculative_num_draft_tokens")
        for name, value in (
            ("num_steps", steps),
            ("eagle_topk", topk),
            ("num_draft_tokens", nodes),
        ):
            if value is not None and type(value) is not int:
                raise CrosscheckError(
                    f"{where}: speculative_{name} is {str(value)[:60]!r}, expected a number"
                )
        try:
            tree = TreeConfig(steps, topk, None if topk == 1 else nodes)
        except ConfigError as error:
            raise CrosscheckError(f"{where}: {error}") from None
    dtype = args.get("dtype")
    return Settings(
        engine="sglang",
        version=info.get("version"),
        tree=tree,
        speculative=bool(args.get("speculative_algorithm")),
        dtype=dtype if dtype != "auto" else None,
        target=args.get("model_path"),
        draft=args.get("speculative_draft_model_path"),
        page_size=args.get("page_size"),
        tp_size=args.get("tp_size"),
        other={k: v for k, v in args.items() if isinstance(v, (str, int, float, bool))},
    )


def _shared(settings: Settings, requests: Sequence[EngineRequest]) -> Settings:
    """Sampling parameters that all requests have in common."""
    changes = {}
    for name in ("temperature", "max_new_tokens", "ignore_eos", "stop_token_ids"):
        values = {getattr(r, name) for r in requests}
        if len(values) == 1 and getattr(settings, name) is None:
            changes[name] = values.pop()
    return dataclasses.replace(settings, **changes)

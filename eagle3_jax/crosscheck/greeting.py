"""Who a server is, before it is asked anything: what it runs, and what it will not take."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from eagle3_jax.crosscheck.types import CrosscheckError
from eagle3_jax.records.live import Server
from eagle3_jax.records.types import RecordError

SECRET = re.compile(r"api_key|password|secret|watermark_key")


def greet(
    server: Server, target: Mapping[str, Any] | None
) -> tuple[dict[str, Any], dict[str, Any]]:
    """`/server_info` and `/model_info`, or their older names.

    Raises:
      CrosscheckError, RecordError: no answer, no SGLang server, another architecture than the
        target's `config.json` names.
    """
    try:
        info = server.info()
    except RecordError as error:
        if "HTTP 404" in str(error):
            raise CrosscheckError(
                f"{server.url}: no SGLang server: it has neither /server_info nor /get_server_info"
            ) from None
        raise
    nested = info.get("server_args")
    args = nested if isinstance(nested, dict) else info
    if "model_path" not in args:
        raise CrosscheckError(f"{server.url}/server_info: no model_path in it: no SGLang server")
    model = _either(server, "/model_info", "/get_model_info")
    mine = target.get("architectures") if target is not None else None
    theirs = model.get("architectures")
    if mine and theirs and list(mine) != list(theirs):
        raise CrosscheckError(
            f"{server.url} runs {args['model_path']!r}, a {_words(theirs)}; the target given is a "
            f"{_words(mine)}: another model"
        )
    return info, model


def _either(server: Server, path: str, older: str) -> dict[str, Any]:
    try:
        found = server.ask(path)
    except RecordError as error:
        if "HTTP 404" not in str(error):
            raise
        found = server.ask(older)
    return found if isinstance(found, dict) else {}


def limits(
    info: Mapping[str, Any],
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    target: Mapping[str, Any] | None,
) -> list[str]:
    """Refuses prompts the server cannot take; says what it will leave out of its answers.

    An id outside the vocabulary is never sent: SGLang 0.5.23 does not check, and on a CPU its
    scheduler dies of it.

    Raises:
      CrosscheckError: naming the prompt, found and allowed.
    """
    size = (target or {}).get("vocab_size")
    for number, prompt in enumerate(prompts):
        if not prompt:
            raise CrosscheckError(f"prompt {number} has no tokens")
        wrong = next((i for i in prompt if i < 0 or (size is not None and i >= size)), None)
        if wrong is not None:
            most = "" if size is None else f" 0..{size - 1}"
            raise CrosscheckError(f"prompt {number} has id {wrong}, outside the vocabulary{most}")
    longest = max(map(len, prompts))
    most = info.get("max_req_input_len")
    if isinstance(most, int) and longest > most:
        number = next(i for i, prompt in enumerate(prompts) if len(prompt) == longest)
        raise CrosscheckError(f"prompt {number} has {longest} tokens, the server takes {most}")
    context = info.get("context_length")
    if isinstance(context, int) and longest + max_new_tokens > context:
        raise CrosscheckError(
            f"{longest} prompt tokens and {max_new_tokens} new ones are more than the "
            f"server's context of {context}"
        )
    chunk = info.get("chunked_prefill_size")
    if isinstance(chunk, int) and 0 < chunk < longest:
        return [
            f"prompts over {chunk} tokens are prefilled in chunks: of their hidden states only "
            "the last chunk's are compared"
        ]
    return []


def flush(server: Server) -> list[str]:
    """Empties the prefix cache; a note where the server would not."""
    try:
        server.ask("/flush_cache", {})
    except RecordError as error:
        if "not JSON" in str(error):  # it answers in plain words
            return []
        return [f"the prefix cache was not emptied: {error}"]
    return []


def without_secrets(value: Any) -> Any:
    """What may be kept on disk: keys and passwords of the server's arguments are not."""
    if isinstance(value, dict):
        return {
            key: "<redacted>" if SECRET.search(key) and item else without_secrets(item)
            for key, item in value.items()
        }
    if isinstance(value, list):
        return [without_secrets(item) for item in value]
    return value


def _words(names: Any) -> str:
    return ", ".join(map(str, names)) if isinstance(names, list) else str(names)

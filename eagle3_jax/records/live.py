"""Records from a running SGLang server, one request at a time, through `/generate`."""

import http.client
import json
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from eagle3_jax.records.capture import Described
from eagle3_jax.records.sglang import read_answer
from eagle3_jax.records.types import RecordError, RecordSequence

MAX_ANSWER_BYTES = 8 << 30
RETRIED = (408, 429, 500, 502, 503, 504)


class Server:
    """An SGLang server.

    Args:
      url: such as http://host:30000. timeout: seconds without a byte before a request is given up.
      retries: further tries after a lost connection or a status that may pass.
      api_key: sent as a bearer token.
    """

    def __init__(
        self, url: str, *, timeout: float = 600.0, retries: int = 3, api_key: str | None = None
    ):
        if not url.startswith(("http://", "https://")):
            raise RecordError(f"--url {url}: expected http://HOST:PORT")
        self.url, self._timeout, self._retries = url.rstrip("/"), timeout, retries
        self._headers = {"Content-Type": "application/json"}
        if api_key:
            self._headers["Authorization"] = f"Bearer {api_key}"

    def ask(self, path: str, body: dict[str, Any] | None = None) -> Any:
        """JSON of one request, POST when there is a body.

        Raises:
          RecordError: no answer after all tries, a refusal with the server's reason, not JSON.
        """
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data, self._headers)
        reason = ""
        for attempt in range(self._retries + 1):
            if attempt:
                time.sleep(min(2.0**attempt, 30.0) / 2)
            try:
                with urllib.request.urlopen(request, timeout=self._timeout) as answer:
                    text = answer.read(MAX_ANSWER_BYTES + 1)
                if len(text) > MAX_ANSWER_BYTES:
                    raise RecordError(
                        f"{request.full_url}: an answer over {MAX_ANSWER_BYTES} bytes"
                    )
                if answer.length:  # the connection ended before all that was promised
                    raise http.client.IncompleteRead(text, answer.length)
                return json.loads(text)
            except urllib.error.HTTPError as error:
                reason = f"HTTP {error.code}: {_reason(error)}"
                if error.code not in RETRIED:
                    break
            except ValueError as error:
                if isinstance(error, RecordError):
                    raise
                raise RecordError(f"{request.full_url}: the answer is not JSON: {error}") from None
            except (OSError, http.client.HTTPException) as error:
                reason = str(getattr(error, "reason", None) or error) or type(error).__name__
        tries = "" if not self._retries else f" ({self._retries} more tries)"
        raise RecordError(f"{request.full_url}: {reason}{tries}")

    def info(self) -> dict[str, Any]:
        """`/server_info`, or its older name."""
        try:
            found = self.ask("/server_info")
        except RecordError as error:
            if "HTTP 404" not in str(error):
                raise
            found = self.ask("/get_server_info")
        if not isinstance(found, dict):
            raise RecordError(f"{self.url}/server_info: holds no object: not an SGLang server")
        return found


def check_server(
    info: dict[str, Any], longest_prompt: int, partial_context: bool
) -> dict[str, Any]:
    """Refuses a server that cannot give aux states; returns what goes into the provenance.

    Raises:
      RecordError: hidden states are off, neither EAGLE3 nor the aux-only mode is on, or the prefix
        cache or chunked prefill would leave out rows and partial context is not declared.
    """
    aux_only = bool(info.get("enable_return_aux_hidden_states"))
    mode = info.get("return_hidden_states_mode")
    if not (info.get("enable_return_hidden_states") or aux_only or mode == "full"):
        raise RecordError("the server returns no hidden states: --enable-return-hidden-states")
    algorithm = info.get("speculative_algorithm")
    if not aux_only and str(algorithm).upper() != "EAGLE3":
        raise RecordError(
            f"the server's speculative algorithm is {algorithm!r}, so it returns the last state "
            "only: start it with EAGLE3 and a draft, or with --enable-return-aux-hidden-states "
            "--speculative-algorithm EAGLE3 and no draft"
        )
    if info.get("disable_radix_cache") is False and not partial_context:
        raise RecordError(
            "the server's prefix cache is on, so that rows of a cached prefix are not returned: "
            "--disable-radix-cache, or declare --partial-context"
        )
    chunk = info.get("chunked_prefill_size")
    if isinstance(chunk, int) and 0 < chunk < longest_prompt and not partial_context:
        raise RecordError(
            f"a prompt has {longest_prompt} tokens, the server prefills {chunk} at a time and "
            "returns the last chunk's rows only: --chunked-prefill-size -1, or declare "
            "--partial-context"
        )
    keys = (
        "version",
        "model_path",
        "dtype",
        "speculative_algorithm",
        "speculative_draft_model_path",
        "speculative_num_steps",
        "speculative_eagle_topk",
        "speculative_num_draft_tokens",
        "enable_return_aux_hidden_states",
        "return_aux_hidden_state_layer_ids",
        "chunked_prefill_size",
        "disable_radix_cache",
    )
    return {key: info[key] for key in keys if key in info}


def capture(
    server: Server,
    prompts: Sequence[Sequence[int]],
    described: Described,
    *,
    max_new_tokens: int,
    temperature: float = 0.0,
    ignore_eos: bool = False,
    top: int = 0,
    on_done: Callable[[int], None] = lambda done: None,
) -> Iterator[RecordSequence]:
    """Each prompt's answer as a sequence, in order; nothing is kept.

    Args:
      top: best next tokens to ask for with their logprobs, 0 for none.

    Raises:
      RecordError: whatever the server refuses, and what `read_answer` does.
    """
    for number, prompt in enumerate(prompts):
        body: dict[str, Any] = {
            "input_ids": list(prompt),
            "sampling_params": {
                "temperature": temperature,
                "max_new_tokens": max_new_tokens,
                "ignore_eos": ignore_eos,
            },
            "return_hidden_states": True,
        }
        if top:
            body |= {"return_logprob": True, "top_logprobs_num": top, "logprob_start_len": 0}
        answer = server.ask("/generate", body)
        where = f"{server.url}/generate, prompt {number}"
        answer = answer[0] if isinstance(answer, list) and len(answer) == 1 else answer
        if isinstance(answer, dict) and isinstance(answer.get("error"), dict):
            raise RecordError(f"{where}: {str(answer['error'].get('message'))[:300]}")
        yield read_answer(answer, described, where, prompt)
        on_done(number + 1)


def _reason(error: urllib.error.HTTPError) -> str:
    try:
        text = error.read(2000).decode("utf-8", "replace")
    except (OSError, http.client.HTTPException):
        return error.reason
    try:
        found = json.loads(text)
        message = found.get("error", found) if isinstance(found, dict) else text
        message = message.get("message", message) if isinstance(message, dict) else message
    except ValueError:
        message = text
    return " ".join(str(message).split())[:300] or str(error.reason)

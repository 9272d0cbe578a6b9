"""Asks a running SGLang server for everything it tells, and keeps it as a folder of answers.

The folder is what `read_run` takes, so that a comparison repeats without the server:
`server_info.json` and `model_info.json` as the server sent them (secrets left out), `answers.jsonl`
with `{"request", "response"}` a line in the prompts' order, and `driven.json` with what was asked
for and what had to be left out. Requests are greedy.
"""

import dataclasses
import json
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from eagle3_jax.crosscheck.folders import new_folder
from eagle3_jax.crosscheck.greeting import flush, greet, limits, without_secrets
from eagle3_jax.crosscheck.types import CrosscheckError
from eagle3_jax.records.live import Server
from eagle3_jax.records.types import RecordError

ANSWERS, SERVER_INFO, MODEL_INFO = "answers.jsonl", "server_info.json", "model_info.json"
DRIVEN, FORMAT = "driven.json", 1
REFUSED = re.compile(r": HTTP (400|422): (.*)$", re.DOTALL)


@dataclasses.dataclass(frozen=True)
class Wish:
    """Something asked for beside the tokens; a server may refuse it.

    Attributes:
      name: as a message says it. fields: of the request. word: that a refusal mentions.
    """

    name: str
    fields: dict[str, Any]
    word: str


@dataclasses.dataclass(frozen=True)
class Asking:
    """What is asked of the server for every prompt.

    Attributes:
      top_logprobs: best tokens at each place, 0 for none.
      batch_size: prompts in one request, which the engine runs as one batch.
      flush_cache: empty the server's prefix cache first.
    """

    max_new_tokens: int = 64
    ignore_eos: bool = False
    stop_token_ids: tuple[int, ...] = ()
    top_logprobs: int = 5
    batch_size: int = 1
    flush_cache: bool = False

    def wishes(self) -> list[Wish]:
        """In the order in which they are given up when a refusal names none of them."""
        found = [Wish("hidden states", {"return_hidden_states": True}, "hidden")]
        if self.top_logprobs:
            fields: dict[str, Any] = {"top_logprobs_num": self.top_logprobs}
            found.append(Wish("top logprobs", fields, "top_logprob"))
        logged = {"return_logprob": True, "logprob_start_len": 0}
        return [*found, Wish("logprobs", logged, "logprob")]

    def body(self, prompts: Sequence[Sequence[int]], wishes: Sequence[Wish]) -> dict[str, Any]:
        """One request; a single prompt as plain ids."""
        sampling: dict[str, Any] = {
            "temperature": 0,
            "max_new_tokens": self.max_new_tokens,
            "ignore_eos": self.ignore_eos,
        }
        if self.stop_token_ids:
            sampling["stop_token_ids"] = list(self.stop_token_ids)
        ids = [list(prompt) for prompt in prompts]
        body: dict[str, Any] = {
            "input_ids": ids[0] if len(ids) == 1 else ids,
            "sampling_params": sampling,
        }
        for wish in wishes:
            body |= wish.fields
        return body


def drive(
    server: Server,
    prompts: Sequence[Sequence[int]],
    folder: Path,
    asking: Asking | None = None,
    *,
    target: Mapping[str, Any] | None = None,
    on_done: Callable[[int], None] = lambda done: None,
) -> tuple[str, ...]:
    """Sends all prompts and writes `folder`, which must not exist: all of it or nothing.

    Args:
      target: the `config.json` that the answers will be compared with; another architecture than
        the server's, or an id outside its vocabulary, is an error.
      on_done: called with the number of prompts answered.

    Returns:
      What is worth saying: what the server refused, cached prefixes.

    Raises:
      CrosscheckError: no server, none of SGLang's, another model, a prompt it cannot take, an
        answer that is none; the message holds the server's own words.
    """
    asking = asking or Asking()
    with new_folder(folder) as made:
        try:
            info, model = greet(server, target)
            notes = limits(info, prompts, asking.max_new_tokens, target)
            if asking.flush_cache:
                notes += flush(server)
            answers, refused = _ask_all(server, prompts, asking, on_done)
        except RecordError as error:
            raise CrosscheckError(str(error)) from None
        notes += refused + _cached(answers)
        _write(made / SERVER_INFO, without_secrets(info))
        _write(made / MODEL_INFO, without_secrets(model))
        with (made / ANSWERS).open("w", encoding="utf-8") as file:
            for answer in answers:
                file.write(json.dumps(answer, separators=(",", ":")) + "\n")
        asked = dataclasses.asdict(asking) | {"url": server.url}
        _write(made / DRIVEN, {"format": FORMAT, "asked": asked, "notes": notes})
    return tuple(notes)


def saved_notes(folder: Path) -> tuple[str, ...]:
    """The notes of `drive`, from the folder it wrote; none of a folder that something else wrote.

    Raises:
      CrosscheckError: `driven.json` is damaged or of a newer format.
    """
    path = folder / DRIVEN
    if not path.is_file():
        return ()
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        if found["format"] != FORMAT:
            raise CrosscheckError(f"{path}: format {found['format']}, expected {FORMAT}")
        return tuple(map(str, found["notes"]))
    except CrosscheckError:
        raise
    except (ValueError, KeyError, TypeError) as error:
        raise CrosscheckError(f"{path}: not what a driven server leaves: {error!r}") from None


def _ask_all(
    server: Server,
    prompts: Sequence[Sequence[int]],
    asking: Asking,
    on_done: Callable[[int], None],
) -> tuple[list[dict[str, Any]], list[str]]:
    wishes, notes = asking.wishes(), []
    answers: list[dict[str, Any]] = []
    while len(answers) < len(prompts):
        part = prompts[len(answers) : len(answers) + asking.batch_size]
        where = f"{server.url}/generate, prompt {len(answers)}"
        try:
            found = _error_raised(server.ask("/generate", asking.body(part, wishes)), where)
        except RecordError as error:
            refusal = REFUSED.search(str(error))
            if refusal is None or not wishes:
                raise
            given_up = _named(wishes, refusal[2])
            wishes.remove(given_up)
            reason = refusal[2].rstrip(". ")
            notes.append(f"{given_up.name} are not compared, the server refuses them: {reason}")
            continue
        found = found if isinstance(found, list) else [found]
        if len(found) != len(part):
            raise CrosscheckError(f"{where}: {len(found)} answers to {len(part)} prompts")
        for ids, answer in zip(part, found, strict=True):
            request = asking.body([ids], wishes)
            answers.append({"request": request, "response": _with_ids(answer, where, notes)})
        on_done(len(answers))
    return answers, notes


def _named(wishes: Sequence[Wish], reason: str) -> Wish:
    words = reason.lower()
    return next((wish for wish in wishes if wish.word in words), wishes[0])


def _error_raised(answer: Any, where: str) -> Any:
    error = answer.get("error") if isinstance(answer, dict) else None
    if error is not None:
        message = error.get("message") if isinstance(error, dict) else error
        raise CrosscheckError(f"{where}: {str(message)[:300]}")
    return answer


def _with_ids(answer: Any, where: str, notes: list[str]) -> dict[str, Any]:
    """Output ids out of the logprobs where an older server with a tokenizer sends its text only."""
    if not isinstance(answer, dict) or not isinstance(answer.get("meta_info"), dict):
        raise CrosscheckError(f"{where}: no meta_info: not an answer of SGLang's /generate")
    if "output_ids" in answer:
        return answer
    logged = answer["meta_info"].get("output_token_logprobs")
    if not logged:
        raise CrosscheckError(
            f"{where}: neither output_ids nor logprobs in it: start the server with "
            "--skip-tokenizer-init"
        )
    note = "output ids were read out of output_token_logprobs: the server sends none"
    if note not in notes:
        notes.append(note)
    try:
        return answer | {"output_ids": [entry[1] for entry in logged]}
    except (TypeError, IndexError, KeyError):
        raise CrosscheckError(
            f"{where}: output_token_logprobs are no [logprob, id, text]"
        ) from None


def _cached(answers: Sequence[Mapping[str, Any]]) -> list[str]:
    counts = [answer["response"]["meta_info"].get("cached_tokens") or 0 for answer in answers]
    cached = [count for count in counts if type(count) is int and count > 0]
    if not cached:
        return []
    return [
        f"{len(cached)} of {len(counts)} prompts began in the server's prefix cache "
        f"({sum(cached)} tokens): states of those tokens are not in the answers; --flush-cache or "
        "--disable-radix-cache"
    ]


def _write(path: Path, value: Any):
    path.write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")

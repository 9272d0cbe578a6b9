"""Records from SGLang's answers: `/generate` and `Engine.generate` with `return_hidden_states`.

Layout and meaning as in SGLang 0.5.23 (`managers/scheduler_components/batch_result_processor.py`,
`output_streamer.py`), checked against recorded answers and a running server token by token.
`meta_info.hidden_states` is a list: one block of the prompt's rows, then one row for each output
token but the last. Rows of a cached prefix, and of all chunks of a prompt but the last, are not in
it, nor are those of rejected drafts. Under EAGLE3, and in the aux-only mode
(`--enable-return-aux-hidden-states`), a row holds the aux states of its token; in plain decoding
the one state after the final norm.
"""

import itertools
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from eagle3_jax.records.capture import Described, flat_ids, fold
from eagle3_jax.records.types import RecordError, RecordSequence

DROPS_ROWS = (
    "SGLang before the fix of its issue 26163 (June 2026) drops and mixes up rows when drafting: "
    "use 0.5.23 or later, or its aux-only mode"
)


def read_responses(
    paths: Sequence[Path], described: Described, prompts: Sequence[Sequence[int]] | None = None
) -> Iterator[RecordSequence]:
    """Sequences from saved answers: JSON (one answer or a list) or JSON lines, a file at a time.

    An answer's prompt ids are its own `prompt_token_ids` or `input_ids`, those of its request
    (`{"request": ..., "response": ...}`), its input logprobs when they begin at 0, or `prompts` in
    order.

    Raises:
      RecordError: naming file, answer, and what is missing or does not fit.
    """
    number = 0
    for path in paths:
        for where, answer in _answers(path):
            given = None
            if prompts is not None:
                if number >= len(prompts):
                    raise RecordError(
                        f"{where}: answer {number + 1}, but only {len(prompts)} prompts are given"
                    )
                given = prompts[number]
            yield read_answer(answer, described, where, given)
            number += 1
    if prompts is not None and number < len(prompts):
        raise RecordError(f"{len(prompts)} prompts are given, found {number} answers")


def read_answer(
    answer: Any, described: Described, where: str, prompt: Sequence[int] | None = None
) -> RecordSequence:
    """One answer of `/generate`.

    Args:
      prompt: its prompt ids, where they are known.

    Raises:
      RecordError: no states, ids or rows that do not fit each other, with the likely cause.
    """
    request: dict[str, Any] = {}
    if isinstance(answer, dict) and isinstance(answer.get("response"), dict):
        request = answer["request"] if isinstance(answer.get("request"), dict) else {}
        answer = answer["response"]
    if not isinstance(answer, dict) or not isinstance(answer.get("meta_info"), dict):
        openai = isinstance(answer, dict) and "choices" in answer
        hint = ": an OpenAI-style answer holds the last row only; ask /generate" if openai else ""
        raise RecordError(f"{where}: no meta_info, expected an answer of /generate{hint}")
    meta = answer["meta_info"]
    if not isinstance(meta.get("hidden_states"), list) or not meta["hidden_states"]:
        raise RecordError(
            f"{where}: no hidden_states in meta_info: start the server with "
            "--enable-return-hidden-states and ask with return_hidden_states true"
        )
    output = flat_ids(answer.get("output_ids"), where, "output_ids")
    if prompt is None:
        prompt = _prompt_ids(answer, request, meta, where)
    ids = flat_ids(prompt, where, "prompt ids")
    if meta.get("prompt_tokens") not in (None, len(ids)):
        raise RecordError(
            f"{where}: {len(ids)} prompt ids, meta_info counts {meta['prompt_tokens']}: another "
            "request's prompt, or ids without what the server's tokenizer adds"
        )
    slots = described.slots()
    blocks = [_block(item, where) for item in meta["hidden_states"]]
    rows = np.concatenate(blocks)
    first = _first(len(ids), len(output), blocks, meta, where)
    aux = fold(rows, len(slots), where, described.hidden_size)
    top_ids, top_logprobs = _top(meta, len(ids), first, len(aux), where)
    return RecordSequence(
        tokens=np.concatenate([ids, output]),
        aux=aux,
        prompt_length=len(ids),
        first=first,
        top_ids=top_ids,
        top_logprobs=top_logprobs,
        name=str(meta.get("id", "")),
        tags=described.tags,
    )


def _first(
    prompt: int, output: int, blocks: list[np.ndarray], meta: dict[str, Any], where: str
) -> int:
    """Where the rows begin: at 0, unless the prompt's block lacks its first rows.

    A cached prefix has no rows, and of a prompt in chunks only the last chunk's are sent.
    """
    cached, total = meta.get("cached_tokens") or 0, prompt + output
    block, found = len(blocks[0]), sum(map(len, blocks))
    if found - block == output - 1 and block <= prompt - cached:
        return prompt - block
    causes = []
    if meta.get("num_retractions"):
        causes.append(f"{meta['num_retractions']} retractions, after which rows are sent twice")
    if found == 1:
        causes.append('only the last row was asked for ("last")')
    elif "spec_verify_ct" in meta and found - block < output - 1:
        causes.append(DROPS_ROWS)
    because = f" ({'; '.join(causes)})" if causes else ""
    raise RecordError(
        f"{where}: {found} rows of states for {total} tokens, {cached} of them cached, expected "
        f"{total - cached - 1}{because}"
    )


def _block(item: Any, where: str) -> np.ndarray:
    try:
        block = np.asarray(item, np.float32)
    except (TypeError, ValueError):
        block = np.zeros(())
    if block.ndim not in (1, 2):
        raise RecordError(f"{where}: hidden_states holds no rows of numbers of one width")
    return block[None] if block.ndim == 1 else block


def _prompt_ids(answer: dict, request: dict, meta: dict, where: str) -> Any:
    for place, key in (
        (answer, "prompt_token_ids"),
        (answer, "input_ids"),
        (request, "input_ids"),
    ):
        if isinstance(place.get(key), list):
            return place[key]
    logged = meta.get("input_token_logprobs")
    if isinstance(logged, list) and logged and len(logged) == meta.get("prompt_tokens"):
        return [entry[1] for entry in logged]
    raise RecordError(
        f"{where}: the prompt's ids are not in the answer: give them with --ids, or ask with "
        "return_prompt_token_ids, or with return_logprob and logprob_start_len 0"
    )


def _top(
    meta: dict[str, Any], prompt: int, first: int, rows: int, where: str
) -> tuple[np.ndarray | None, np.ndarray | None]:
    """Best next tokens of each row: `input_top_logprobs[t + 1]` and then `output_top_logprobs`.

    Both are None unless every row has them, with the same number each.
    """
    after, output = meta.get("input_top_logprobs"), meta.get("output_top_logprobs")
    if not after or not output or len(after) != prompt:
        return None, None
    entries = (after[1:] + output)[first:][:rows]
    if len(entries) != rows or not all(entries) or len({len(e) for e in entries}) != 1:
        return None, None
    try:
        pairs = np.array([[pair[:2] for pair in entry] for entry in entries], np.float64)
    except (TypeError, ValueError, IndexError):
        raise RecordError(f"{where}: top logprobs are not [logprob, id, text] triples") from None
    return pairs[..., 1].astype(np.int32), pairs[..., 0].astype(np.float32)


def _answers(path: Path) -> Iterator[tuple[str, Any]]:
    number = 1
    try:
        with path.open(encoding="utf-8") as file:
            first = file.readline()
            if not _is_object(first):
                value = json.loads(first + file.read())
                answers = value if isinstance(value, list) else [value]
                yield from ((f"{path}, answer {i}", answer) for i, answer in enumerate(answers))
                return
            for number, line in enumerate(itertools.chain([first], file), 1):
                if line.strip():
                    yield f"{path}, line {number}", json.loads(line)
    except OSError as error:
        raise RecordError(f"{path}: cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise RecordError(f"{path}: not UTF-8 text") from None
    except RecursionError:
        raise RecordError(f"{path}: not JSON: nested too deep") from None
    except json.JSONDecodeError as error:
        line = number + error.lineno - 1
        raise RecordError(f"{path}, line {line}: not JSON: {error.msg}") from None


def _is_object(line: str) -> bool:
    try:
        return isinstance(json.loads(line), dict)
    except ValueError:
        return False

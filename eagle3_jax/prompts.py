"""Prompts as the commands take them: texts, conversations or ids, from arguments or files."""

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from eagle3_jax.config import TargetConfig
from eagle3_jax.findings import ConvertError
from eagle3_jax.tokenizer import Tokenizer

KEYS = ("prompt", "messages", "input_ids", "ids")


@dataclasses.dataclass(frozen=True)
class Prompt:
    """One prompt; exactly one of text, messages and ids is set.

    Attributes:
      where: opens every message about it: `--prompt 2`, `FILE, line 3`.
    """

    where: str
    text: str | None = None
    messages: list[dict[str, Any]] | None = None
    ids: list[int] | None = None

    @property
    def label(self) -> str:
        """A short line that tells the prompt from others."""
        text = self.text
        if self.messages is not None:
            text = str(self.messages[-1]["content"])
        if text is None:
            text = " ".join(map(str, self.ids or []))
        line = " ".join(text.split())
        return line if len(line) <= 60 else line[:57] + "..."


def from_texts(texts: Sequence[str]) -> list[Prompt]:
    """The values of `--prompt`."""
    prompts = [Prompt(f"--prompt {i}", text=text) for i, text in enumerate(texts, 1)]
    for prompt in prompts:
        if not prompt.text:
            raise _bad(prompt.where, "the text is empty")
    return prompts


def read_jsonl(path: Path) -> list[Prompt]:
    """A file with one prompt a line: a JSON string, or an object with one of `KEYS`.

    Blank lines are skipped; other keys of an object are ignored.

    Raises:
      ConvertError: code PROMPTS, naming file and line.
    """
    prompts = []
    for number, line in enumerate(_read(path).split("\n"), 1):
        if not line.strip():
            continue
        where = f"{path}, line {number}"
        try:
            value = json.loads(line)
        except ValueError as error:
            raise _bad(where, f"not JSON: {error}") from None
        prompts.append(_from_line(value, where))
    if not prompts:
        raise _bad(str(path), "no prompts, expected one a line")
    return prompts


def read_ids(path: Path) -> list[Prompt]:
    """A JSON list of id lists.

    Raises:
      ConvertError: code PROMPTS, naming the file and the entry.
    """
    try:
        value = json.loads(_read(path))
    except json.JSONDecodeError as error:
        raise _bad(f"{path}, line {error.lineno}", f"not JSON: {error.msg}") from None
    if not isinstance(value, list) or not all(isinstance(entry, list) for entry in value):
        raise _bad(str(path), "expected a JSON list of id lists, such as [[1, 2, 3], [4, 5]]")
    if not value:
        raise _bad(str(path), "the list is empty, expected at least one list of ids")
    return [
        Prompt(f"{path}, entry {i}", ids=_ids(entry, f"{path}, entry {i}"))
        for i, entry in enumerate(value)
    ]


def encode(prompts: Sequence[Prompt], tokenizer: Tokenizer | None, raw: bool) -> list[list[int]]:
    """Token ids. Texts and conversations go through the chat template unless `raw` or it has none.

    The template writes its own special tokens; a raw text gets what the tokenizer adds, and one bos
    only if it opens with bos already. Ids stay as they are.

    Raises:
      ConvertError: code PROMPTS: a conversation without a template or with `raw`, a template that
        refuses it, a text without any token.
    """
    return [_encode(prompt, tokenizer, raw) for prompt in prompts]


def check_sizes(
    prompts: Sequence[Prompt],
    ids: Sequence[Sequence[int]],
    target: TargetConfig,
    max_new_tokens: int,
):
    """Refuses what the target cannot read, before the first of many prompts is run.

    Raises:
      ConvertError: code PROMPTS: an id outside the vocabulary, a prompt that is too long.
    """
    limit = target.max_position_embeddings
    for prompt, row in zip(prompts, ids, strict=True):
        wrong = next((i for i, t in enumerate(row) if not 0 <= t < target.vocab_size), None)
        if wrong is not None:
            raise _bad(
                prompt.where,
                f"id {row[wrong]} at position {wrong} is outside the target's vocabulary "
                f"0..{target.vocab_size - 1}",
            )
        if len(row) + max_new_tokens > limit:
            raise _bad(
                prompt.where,
                f"{len(row)} tokens and --max-new-tokens {max_new_tokens} make "
                f"{len(row) + max_new_tokens} positions, the target has {limit}",
            )


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise _bad(str(path), f"not UTF-8 at byte {error.start}") from None
    except OSError as error:
        raise _bad(str(path), f"cannot be read: {error.strerror}") from None


def _from_line(value: Any, where: str) -> Prompt:
    if isinstance(value, str):
        value = {"prompt": value}
    if not isinstance(value, dict):
        raise _bad(where, f"a {type(value).__name__}, expected a string or an object")
    found = [key for key in KEYS if key in value]
    if len(found) != 1:
        has = ", ".join(map(repr, found or value)) or "no key"
        raise _bad(where, f"has {has}, expected one of {', '.join(KEYS)}")
    content = value[found[0]]
    if found[0] == "prompt":
        if not isinstance(content, str) or not content:
            raise _bad(where, f"prompt is {str(content)[:40]!r}, expected text")
        return Prompt(where, text=content)
    if found[0] == "messages":
        if not isinstance(content, list) or not content or not all(map(_is_message, content)):
            raise _bad(where, "messages is not a list of objects with role and content")
        return Prompt(where, messages=content)
    return Prompt(where, ids=_ids(content, where))


def _is_message(value: Any) -> bool:
    return isinstance(value, dict) and {"role", "content"} <= value.keys()


def _ids(value: Any, where: str) -> list[int]:
    if not isinstance(value, list) or not value:
        raise _bad(where, f"{str(value)[:40]!r}, expected a list of at least one token id")
    wrong = next((v for v in value if not isinstance(v, int) or isinstance(v, bool)), None)
    if wrong is not None:
        raise _bad(where, f"{wrong!r} is not a token id")
    return value


def _encode(prompt: Prompt, tokenizer: Tokenizer | None, raw: bool) -> list[int]:
    if prompt.ids is not None:
        return prompt.ids
    assert tokenizer is not None
    if prompt.messages is not None and (raw or tokenizer.chat_template is None):
        why = "--raw turns it off" if raw else "the target has none"
        raise _bad(prompt.where, f"messages need a chat template, and {why}")
    if raw or tokenizer.chat_template is None:
        ids = _with_one_bos(prompt.text or "", tokenizer)
    else:
        try:
            text = tokenizer.apply_chat_template(prompt.messages or prompt.text or "")
        except ValueError as error:
            raise _bad(prompt.where, str(error)) from None
        ids = tokenizer.encode(text)
    if not ids:
        raise _bad(prompt.where, "the text has no tokens")
    return ids


def _with_one_bos(text: str, tokenizer: Tokenizer) -> list[int]:
    ids = tokenizer.encode(text, add_special_tokens=True)
    bos = tokenizer.special_tokens.get("bos_token")
    if bos is None:
        return ids
    found = tokenizer.encode(bos)
    own = tokenizer.encode(text)
    doubled = own[:1] == found and ids[:2] == found * 2 and len(ids) > len(own)
    return ids[1:] if doubled else ids


def _bad(where: str, message: str) -> ConvertError:
    return ConvertError("PROMPTS", f"{where}: {message}")

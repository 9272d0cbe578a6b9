"""Text to ids and back for a target's folder, with its chat template; needs the tokenizer extra."""

import datetime
import functools
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from eagle3_jax.files.source import FileError, read_json

REPLACEMENT = "\ufffd"
SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token")


class Tokenizer:
    """A Hugging Face fast tokenizer: tokenizer.json, and the template of tokenizer_config.json.

    Attributes:
      special_tokens: `bos_token`, `eos_token`, ... as text, those the folder names.
      chat_template: the Jinja text, or None.
    """

    def __init__(
        self,
        backend: Any,
        special_tokens: Mapping[str, str],
        chat_template: str | None,
        folder: Path,
    ):
        self._backend = backend
        self._folder = folder
        self.special_tokens = dict(special_tokens)
        self.chat_template = chat_template

    @classmethod
    def from_folder(cls, path: str | os.PathLike) -> "Tokenizer":
        """Reads tokenizer.json, tokenizer_config.json and chat_template.jinja, which wins if there.

        Raises:
          FileError: the tokenizers package is not installed, tokenizer.json is missing or damaged,
            or the config has a chat template that is neither text nor has one named "default".
        """
        try:
            import tokenizers
        except ImportError:
            _missing("tokenizers")
        folder = Path(path)
        file = folder / "tokenizer.json"
        if not file.is_file():
            raise FileError(f"{file}: no such file")
        try:
            backend = tokenizers.Tokenizer.from_file(str(file))
        except Exception as error:  # the library raises bare Exception
            raise FileError(f"{file}: not a tokenizer: {error}") from None
        backend.no_truncation()
        backend.no_padding()
        config_file = folder / "tokenizer_config.json"
        config = read_json(config_file) if config_file.is_file() else {}
        return cls(backend, _special(config), _template(folder, config), folder)

    @property
    def vocab_size(self) -> int:
        """Number of ids, added tokens included."""
        return self._backend.get_vocab_size()

    def encode(self, text: str, add_special_tokens: bool = False) -> list[int]:
        """Ids of a text. Special tokens written out in it become their ids.

        `add_special_tokens` adds the bos or eos that the tokenizer's own post-processor adds; a
        rendered chat template has its own.
        """
        return self._backend.encode(text, add_special_tokens=add_special_tokens).ids

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        """Text of ids. Bytes that are no UTF-8 become U+FFFD.

        Raises:
          ValueError: an id outside the vocabulary.
        """
        for i in ids:
            if i < 0 or self._backend.id_to_token(i) is None:
                raise ValueError(
                    f"{self._folder}: id {i} is not in a vocabulary of {self.vocab_size}"
                )
        return self._backend.decode(list(ids), skip_special_tokens=skip_special_tokens)

    def pieces(self, ids: Sequence[int]) -> list[str]:
        """The text each id adds to the ids before it; together they are `decode(ids)`.

        A character whose bytes several ids share belongs to the last of them.
        """
        pieces, shown = [], ""
        for end in range(1, len(ids) + 1):
            text = self.decode(ids[:end])
            if end < len(ids):
                text = text.rstrip(REPLACEMENT)
            pieces.append(text[len(shown) :])
            shown = text if len(text) > len(shown) else shown
        return pieces

    def apply_chat_template(
        self, messages: str | Sequence[Mapping[str, Any]], add_generation_prompt: bool = True
    ) -> str:
        """The prompt text of a conversation; a string is one user message.

        Rendered as transformers does (`utils/chat_template_utils.py`): a sandbox, blocks trimmed,
        `raise_exception`, `strftime_now`, `tojson` without HTML escapes, loop controls.

        Raises:
          FileError: jinja2 is not installed.
          ValueError: the folder has no template, or the template refuses the messages.
        """
        if self.chat_template is None:
            raise ValueError(f"{self._folder}: has no chat template")
        if isinstance(messages, str):
            messages = [{"role": "user", "content": messages}]
        template = _compile(self.chat_template, self._folder)
        import jinja2

        try:
            return template.render(
                messages=messages,
                add_generation_prompt=add_generation_prompt,
                **self.special_tokens,
            )
        except (jinja2.TemplateError, TypeError, KeyError) as error:
            raise ValueError(f"{self._folder}: the chat template fails: {error}") from None


def _missing(package: str) -> NoReturn:
    raise FileError(
        f"text needs the {package} package: pip install 'eagle3-jax[tokenizer]'"
    ) from None


def _special(config: Mapping[str, Any]) -> dict[str, str]:
    found = {}
    for name in SPECIAL_TOKENS:
        value = config.get(name)
        if isinstance(value, dict):
            value = value.get("content")
        if isinstance(value, str):
            found[name] = value
    return found


def _template(folder: Path, config: Mapping[str, Any]) -> str | None:
    file = folder / "chat_template.jinja"
    if file.is_file():
        return file.read_text(encoding="utf-8")
    value = config.get("chat_template")
    if isinstance(value, list):
        named = {item["name"]: item["template"] for item in value if isinstance(item, dict)}
        value = named.get("default", value)
    if value is not None and not isinstance(value, str):
        raise FileError(
            f"{folder / 'tokenizer_config.json'}: chat_template is a {type(value).__name__}, "
            "expected text, or a list with one named 'default'"
        )
    return value


@functools.lru_cache(maxsize=8)
def _compile(text: str, folder: Path) -> Any:
    try:
        import jinja2
        import jinja2.sandbox
    except ImportError:
        _missing("jinja2")

    def raise_exception(message: str) -> NoReturn:
        raise jinja2.TemplateError(message)

    def to_json(
        value: Any,
        ensure_ascii: bool = False,
        indent: int | None = None,
        separators: tuple[str, str] | None = None,
        sort_keys: bool = False,
    ) -> str:
        return json.dumps(
            value,
            ensure_ascii=ensure_ascii,
            indent=indent,
            separators=separators,
            sort_keys=sort_keys,
        )

    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = to_json
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
    try:
        return environment.from_string(text)
    except jinja2.TemplateError as error:
        raise ValueError(f"{folder}: the chat template does not compile: {error}") from None

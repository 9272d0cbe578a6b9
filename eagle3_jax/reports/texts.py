"""Tokens as text that can't harm the page: pieces of the running text, labels of single tokens."""

import re
from collections.abc import Iterable, Sequence

from eagle3_jax.live import Pieces
from eagle3_jax.reports.reading import UNKNOWN
from eagle3_jax.tokenizer import REPLACEMENT, Tokenizer

HARMFUL = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\xad\u061c\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f\ufeff"
    "\ud800-\udfff\ufff9-\ufffb\U000e0000-\U000e007f]"
)
"""Control characters, those that turn the direction of text, and those nobody sees."""
WINDOW = 64
KEPT = 8


def readable(text: str) -> str:
    """The text with `HARMFUL` characters written out."""
    return HARMFUL.sub(lambda found: _escape(found[0]), text)


def label(text: str) -> str:
    """One token on one line: its spaces at the ends and its line breaks made visible."""
    body = text.strip(" ")
    start = len(text) - len(text.lstrip(" "))
    end = len(text) - start - len(body)
    body = body.replace("\\", "\\\\").replace("\n", "\\n").replace("\t", "\\t")
    return "␣" * start + readable(body) + "␣" * end


def pieces(tokenizer: Tokenizer | None, ids: Sequence[int]) -> list[str]:
    """`live.Pieces.of`, in time that grows with the number of ids and not with its square.

    Decoding begins anew every few tokens, some tokens back, where the text of those is whole; of a
    long run of bytes that ends broken, the characters before stay what they were.
    """
    if tokenizer is None or len(ids) <= WINDOW:
        return Pieces.of(tokenizer, ids)
    known = _Known(tokenizer)
    found: list[str] = []
    window: list[int] = []
    shown = ""
    for position, token in enumerate(ids):
        if not known.has(token):
            found.append(f"<{token}>")
            continue
        window.append(token)
        text = tokenizer.decode(window)
        whole = text.rstrip(REPLACEMENT)
        if position + 1 == len(ids):
            whole = text
        found.append(whole[len(shown) :])
        shown += found[-1]
        if len(window) >= WINDOW and whole == text:
            kept = tokenizer.decode(window[-KEPT:])
            if REPLACEMENT not in kept:
                window, shown = window[-KEPT:], kept
    if found and not known.has(ids[len(ids) - 1]) and window:
        found[len(found) - 1] += tokenizer.decode(window)[len(shown) :]
    return found


def labels(tokenizer: Tokenizer | None, ids: Iterable[int]) -> dict[int, str]:
    """A label for each distinct id; without a tokenizer there is none but the id.

    A token of bytes that are no text alone is named by its id.
    """
    if tokenizer is None:
        return {}
    known = _Known(tokenizer)
    texts = {i: known.decode(i) for i in sorted(set(ids)) if i != UNKNOWN}
    return {i: f"‹bytes {i}›" if REPLACEMENT in t else label(t) for i, t in texts.items()}


def last_words(tokenizer: Tokenizer | None, ids: Sequence[int], size: int = 44) -> str:
    """How a prompt ends, on one line, without special tokens; a chat template opens all alike."""
    if tokenizer is None:
        text = " ".join(map(str, ids))
    else:
        known = _Known(tokenizer)
        inside = [i for i in ids[-size:] if known.has(i)]
        text = " ".join(tokenizer.decode(inside, skip_special_tokens=True).split())
    return readable(text if len(text) <= size else "…" + text[-size:])


class _Known:
    """A tokenizer asked once about each id."""

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer = tokenizer
        self._texts: dict[int, str | None] = {}

    def has(self, token: int) -> bool:
        if token not in self._texts:
            try:
                self._texts[token] = self._tokenizer.decode([token])
            except ValueError:
                self._texts[token] = None
        return self._texts[token] is not None

    def decode(self, token: int) -> str:
        return (self._texts[token] or "") if self.has(token) else f"<{token}>"


def _escape(character: str) -> str:
    code = ord(character)
    return f"\\x{code:02x}" if code < 256 else f"\\u{code:04x}"

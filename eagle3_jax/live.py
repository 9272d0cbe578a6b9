"""Text by who wrote it, accepted draft tokens coloured by depth; shown while it is generated."""

import re
from collections.abc import Iterable, Sequence

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.text import Text

from eagle3_jax.stopwatch import Stopwatch
from eagle3_jax.tokenizer import REPLACEMENT, Tokenizer
from eagle3_jax.trace import Round

DEPTH_STYLES = ("bold green", "bold cyan", "bold magenta", "bold yellow", "bold blue", "bold red")
CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029]")


def depth_style(depth: int) -> str:
    """Of a token: none for the target's own (depth 0), six colours in turn for drafted ones."""
    return DEPTH_STYLES[(depth - 1) % len(DEPTH_STYLES)] if depth else ""


def token_depths(accept_lengths: Sequence[int], num_tokens: int) -> list[int]:
    """Per new token: its depth in the draft's tree, 0 for a token the target chose itself.

    The prefill's token comes first; a round of accept length a commits depths 1 to a - 1 and one
    token of the target's own. Without rounds every token is the target's.
    """
    found = [0]
    for length in accept_lengths:
        found += [*range(1, length), 0]
    return (found + [0] * num_tokens)[:num_tokens]


def has_color(console: Console) -> bool:
    """Whether colours will be seen (a terminal, and NO_COLOR is not set)."""
    return console.color_system is not None and not console.no_color


def printable(text: str) -> str:
    """The text with its control characters written out, so that it can't steer a terminal."""
    return CONTROL.sub(lambda found: f"\\x{ord(found[0]):02x}", text.replace("\t", "    "))


def by_depth(pieces: Iterable[str], depths: Iterable[int], *, color: bool) -> Text:
    """Pieces of text styled by depth, or written as `[depth:piece]` where colours are not seen."""
    text = Text()
    for piece, depth in zip(pieces, depths, strict=True):
        shown = printable(piece)
        if depth and not color:
            one_line = shown.replace("\n", "\\n")
            text.append(f"[{depth}:{one_line}]" + "\n" * shown.count("\n"))
        else:
            text.append(shown, style=depth_style(depth))
    return text


def legend(levels: int, *, color: bool) -> Text:
    """How to read `by_depth`."""
    text = Text("plain: the target's own tokens; accepted draft tokens by depth:")
    for depth in range(1, levels + 1):
        label = f" depth {depth}" if color else f" [{depth}:token]"
        text.append(label, style=depth_style(depth))
    return text


class Pieces:
    """What each id adds to the text so far: `Tokenizer.pieces` for ids that come one by one.

    Without a tokenizer the ids themselves, spaced. An id the tokenizer lacks (a padded vocabulary)
    is shown as `<id>`.
    """

    def __init__(self, tokenizer: Tokenizer | None):
        self._tokenizer = tokenizer
        self._ids: list[int] = []
        self._shown = ""

    def add(self, token: int) -> str:
        """The piece of one more token; empty while its character is incomplete."""
        if self._tokenizer is None:
            return f"{token} "
        try:
            text = self._tokenizer.decode([*self._ids, token])
        except ValueError:
            return f"<{token}>"
        self._ids.append(token)
        text = text.rstrip(REPLACEMENT)
        piece = text[len(self._shown) :]
        self._shown += piece
        return piece

    def rest(self) -> str:
        """What is left at the end: the characters that never became complete."""
        if self._tokenizer is None:
            return ""
        return self._tokenizer.decode(self._ids)[len(self._shown) :]

    @classmethod
    def of(cls, tokenizer: Tokenizer | None, ids: Sequence[int]) -> list[str]:
        """The pieces of all ids; together they are the text."""
        pieces = cls(tokenizer)
        found = [pieces.add(token) for token in ids]
        return [*found[:-1], found[-1] + pieces.rest()] if found else []


class LiveView:
    """Follows one generation on a terminal: its text, and a status line below.

    A line that can't change any more is printed for good; only the last one and the status are
    drawn again, so a text longer than the screen scrolls as usual.
    """

    def __init__(self, console: Console, tokenizer: Tokenizer | None, watch: Stopwatch):
        self._console = console
        self._pieces = Pieces(tokenizer)
        self._watch = watch
        self._line = Text()
        self._accept: list[int] = []
        self._tokens = 0
        self._live = Live(self, console=console, refresh_per_second=8, redirect_stderr=False)

    def __enter__(self) -> "LiveView":
        self._live.start(refresh=True)
        return self

    def __exit__(self, *_: object):
        self._append(self._pieces.rest(), 0)
        self._live.stop()

    def __rich__(self) -> RenderableType:
        status = Text(self.status(), style="dim", no_wrap=True, overflow="ellipsis")
        return Group(self._line, status)

    def add(self, item: Round):
        """Shows what a round emitted; with the first one also the prefill's token."""
        own = item.num_correct_drafts
        depths = [*range(1, own + 1), 0]
        if not self._tokens:
            self.add_token(item.tokens[0], 0)
        if len(item.tokens) > 1:
            self._accept.append(item.accept_length)
        for token, depth in zip(item.emitted, depths, strict=False):
            self.add_token(token, depth)

    def add_token(self, token: int, depth: int):
        """Shows one more token."""
        self._tokens += 1
        self._append(self._pieces.add(token), depth)

    def status(self) -> str:
        """Tokens, rounds, accept length, speed; before the first token, how long it takes."""
        if not self._tokens:
            return f"compiling ... {self._watch.total:.1f} s"
        return summary(self._tokens, self._accept, self._watch)

    def _append(self, piece: str, depth: int):
        line = self._line.copy()
        line.append_text(by_depth([piece], [depth], color=has_color(self._console)))
        *done, line = line.split("\n", allow_blank=True) or [Text()]
        for paragraph in done:
            self._print(paragraph)
        settled, self._line = settle(line, self._console)
        for part in settled:
            self._print(part)

    def _print(self, line: Text):
        held, self._line = self._line, Text()
        self._console.print(line)
        self._line = held


def summary(tokens: int, accept_lengths: Sequence[int], watch: Stopwatch) -> str:
    """One line of numbers; the accept length is the mean over rounds, compile time is apart."""
    parts = [f"{tokens} tokens"]
    if accept_lengths:
        mean = sum(accept_lengths) / len(accept_lengths)
        parts += [f"{len(accept_lengths)} rounds", f"accept length {mean:.2f}"]
    if watch.running > 0:
        parts.append(f"{tokens / watch.running:.1f} tokens/s")
    parts.append(f"compiling took {watch.compiling:.1f} s more")
    return " | ".join(parts)


def settle(line: Text, console: Console) -> tuple[list[Text], Text]:
    """The rows of a paragraph that more text can't change, and the rest of the paragraph."""
    *rows, _ = line.wrap(console, console.width) or [line]
    at = 0
    for row in rows:
        at += len(row.plain)
        while line.plain[at : at + 1].isspace():
            at += 1
    return list(rows), line[at:]

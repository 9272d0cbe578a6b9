"""What `eagle3 speculate` and `eagle3 generate` print once they are done, and their progress."""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.text import Text

from eagle3_jax.command import say
from eagle3_jax.comparison import Compared, beside
from eagle3_jax.driver import Outcome
from eagle3_jax.live import Pieces, by_depth, has_color, printable, summary, token_depths
from eagle3_jax.prompts import Prompt
from eagle3_jax.stopwatch import Stopwatch
from eagle3_jax.tokenizer import Tokenizer


@dataclasses.dataclass(frozen=True)
class Report:
    """Writes results to `out`; elsewhere than on a terminal texts alone, notes go to stderr.

    Attributes:
      tokenizer: None shows ids. watch: of the generation, ended.
    """

    out: Console
    prompts: Sequence[Prompt]
    tokenizer: Tokenizer | None
    watch: Stopwatch

    def json(self, outcome: Outcome, compared: Compared | None, loaded: float) -> dict[str, Any]:
        """The object of `--json`; only `seconds` differs between two equal runs."""
        seconds: dict[str, Any] = {
            "load": loaded,
            "compile": self.watch.compiling,
            "generate": self.watch.running,
        }
        tree = outcome.job.tree
        result: dict[str, Any] = {
            "prompts": outcome.prompts,
            "tokens": outcome.tokens,
            "accept_lengths": outcome.accept_lengths,
            "stats": outcome.stats,
            "tree": None if tree is None else dataclasses.asdict(tree),
            "rule": outcome.job.accept_rule.name,
        }
        if self.tokenizer is not None:
            result["texts"] = [self.text(tokens) for tokens in outcome.tokens]
        if compared is not None:
            result["compare"] = [found.json() for found in compared.results]
            seconds["compare"] = dict(zip(("plain", "speculate"), compared.seconds, strict=True))
        return result | {"seconds": seconds}

    def text(self, tokens: Sequence[int]) -> str:
        """Tokens as text, or the ids where there is no tokenizer."""
        if self.tokenizer is None:
            return " ".join(map(str, tokens))
        return "".join(Pieces.of(self.tokenizer, tokens))

    def show(self, outcome: Outcome):
        """Every prompt's text, then one line of numbers."""
        for i, tokens in enumerate(outcome.tokens):
            if len(self.prompts) > 1:
                self._header(i)
            if self.out.is_terminal:
                self.out.print(self._styled(tokens, outcome.accept_lengths[i]))
            else:
                say(printable(self.text(tokens)))
        accept = [a for row in outcome.accept_lengths for a in row]
        self.note(summary(sum(map(len, outcome.tokens)), accept, self.watch))

    def show_compared(self, compared: Compared):
        """Both texts of every prompt, the verdict on each, then speed and target passes."""
        for i, found in enumerate(compared.results):
            self._header(i)
            plain = self._styled(compared.plain[i], [])
            beside(
                self.out, plain, self._styled(compared.speculated[i], compared.accept_lengths[i])
            )
            self.out.print(found.verdict(lambda t: repr(self.text([t]))), soft_wrap=True)
            self.out.print()
        self.out.print(compared.numbers())

    def note(self, text: str):
        """One line beside the texts."""
        out = self.out if self.out.is_terminal else Console(stderr=True, highlight=False)
        out.print(Text(text, style="dim"), soft_wrap=True)

    def _styled(self, tokens: Sequence[int], accept: Sequence[int]) -> Text:
        pieces = Pieces.of(self.tokenizer, tokens)
        color = has_color(self.out) or not self.out.is_terminal
        return by_depth(pieces, token_depths(accept, len(tokens)), color=color)

    def _header(self, i: int):
        text = printable(f"[{i + 1}/{len(self.prompts)}] {self.prompts[i].label}")
        self.out.print(Text(text, style="bold"), soft_wrap=True)


@contextlib.contextmanager
def progress(name: str, total: int) -> Iterator[Callable[..., None]]:
    """A bar over prompts on stderr, on terminals only; yields `step(done, outcome=None)`."""
    console = Console(stderr=True)
    columns = (TextColumn(name), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    note = TextColumn("{task.fields[note]}")
    shown = console.is_terminal
    with Progress(*columns, note, console=console, transient=True, disable=not shown) as bar:
        task = bar.add_task(name, total=total, note="")

        def step(done: int, outcome: Outcome | None = None):
            lengths = [a for row in outcome.accept_lengths for a in row] if outcome else []
            mean = f"accept length {sum(lengths) / len(lengths):.2f}" if lengths else ""
            bar.update(task, completed=done, note=mean)

        yield step

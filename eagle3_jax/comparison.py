"""Speculation beside plain decoding: the same text or not, and how fast each is."""

import dataclasses
import time
from collections.abc import Callable, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from eagle3_jax.driver import Job
from eagle3_jax.run import Generation

NEAR_TIE = {"float64": 1e-9, "float32": 1e-3, "float16": 0.03, "bfloat16": 0.25}
"""Logits closer than this may change places between two programs that sum in another order, by the
target's dtype. In float32 the logits of both agree to about 1e-4; the half types are given two
spacings of a value near 20, which is where the last state's rounding shows."""


@dataclasses.dataclass(frozen=True)
class Comparison:
    """One prompt under both.

    Attributes:
      position: index of the first token that differs, None for the same text.
      tokens: the ids there, plain decoding's first; None past an end.
      margin: the target's best logit minus its second best there, in plain decoding.
      near_tie: margins below this are rounding's choice.
      passes: target passes after the prompt's, plain decoding's first.
    """

    position: int | None
    tokens: tuple[int | None, int | None]
    margin: float | None
    near_tie: float
    passes: tuple[int, int]

    @property
    def same(self) -> bool:
        """Whether both wrote the same tokens."""
        return self.position is None

    @property
    def excused(self) -> bool:
        """The same, or apart by a near tie."""
        return self.same or (self.margin is not None and self.margin < self.near_tie)

    def json(self) -> dict[str, Any]:
        """What `--json` prints."""
        found: dict[str, Any] = {
            "same": self.same,
            "near_tie": not self.same and self.excused,
            "target_passes": {"plain": self.passes[0], "speculate": self.passes[1]},
        }
        if not self.same:
            found["first_difference"] = {
                "position": self.position,
                "plain": self.tokens[0],
                "speculate": self.tokens[1],
                "margin": self.margin,
            }
        return found

    def verdict(self, show: Callable[[int], str]) -> Text:
        """One line; `show` writes a token."""
        if self.same:
            return Text("same text: yes", style="green")
        plain, other = ("the end" if t is None else show(t) for t in self.tokens)
        margin = "not recorded" if self.margin is None else f"{self.margin:.2e}"
        kind = "a near tie" if self.excused else "no near tie: this is a fault"
        return Text(
            f"same text: no, first at token {self.position}: {plain} plain, {other} with "
            f"speculation; margin {margin}, {kind} (below {self.near_tie:g})",
            style="yellow" if self.excused else "bold red",
        )


@dataclasses.dataclass
class Compared:
    """All prompts under both, batch by batch.

    Attributes:
      plain, speculated: tokens; accept_lengths: of the speculated ones.
      seconds: of the second calls, plain decoding's first.
    """

    plain: list[list[int]] = dataclasses.field(default_factory=list)
    speculated: list[list[int]] = dataclasses.field(default_factory=list)
    accept_lengths: list[list[int]] = dataclasses.field(default_factory=list)
    results: list[Comparison] = dataclasses.field(default_factory=list)
    seconds: tuple[float, float] = (0.0, 0.0)

    def add(self, job: Job, ids: Sequence[Sequence[int]]):
        """Runs one batch twice each way and compares the second calls."""
        plain, plain_seconds = _second_call(lambda: job.plain(ids))
        other, seconds = _second_call(lambda: job.call(ids))
        self.seconds = (self.seconds[0] + plain_seconds, self.seconds[1] + seconds)
        self.plain += plain.tokens
        self.speculated += other.tokens
        self.accept_lengths += other.accept_lengths
        self.results += _compare(job, ids, plain, other)

    @property
    def excused(self) -> bool:
        """Whether every text is the same, near ties apart."""
        return all(result.excused for result in self.results)

    def numbers(self) -> Table:
        """Tokens, target passes and speed of both."""
        table = Table(box=None, pad_edge=False, header_style="bold")
        table.add_column("")
        for name in ("tokens", "target passes", "second call", "tokens/s"):
            table.add_column(name, justify="right")
        rows = (("plain", self.plain), ("speculate", self.speculated))
        for i, (name, tokens) in enumerate(rows):
            count = sum(map(len, tokens))
            table.add_row(
                name,
                str(count),
                str(sum(result.passes[i] for result in self.results)),
                f"{self.seconds[i]:.2f} s",
                f"{count / self.seconds[i]:.1f}",
            )
        return table


def beside(console: Console, plain: Text, other: Text):
    """Two texts in columns where the terminal is wide, else one after the other."""
    if console.is_terminal and console.width >= 80:
        table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), expand=True)
        table.add_column("plain", ratio=1)
        table.add_column("speculate", ratio=1)
        table.add_row(plain, other)
        console.print(table)
        return
    for name, text in (("plain", plain), ("speculate", other)):
        console.print(Text(f"{name}:", style="bold"))
        console.print(text, soft_wrap=not console.is_terminal)


def _second_call(call: Callable[[], Generation]) -> tuple[Generation, float]:
    call()
    start = time.perf_counter()
    return call(), time.perf_counter() - start


def _compare(
    job: Job, ids: Sequence[Sequence[int]], plain: Generation, other: Generation
) -> list[Comparison]:
    """Pass i of plain decoding chose token i + 1, the prefill token 0."""
    traced = None
    found = []
    for i, (a, b) in enumerate(zip(plain.tokens, other.tokens, strict=True)):
        position, margin = first_difference(a, b), None
        if position is not None:
            traced = traced or job.plain(ids, trace=True)
            assert traced.trace is not None
            if position > 0 and traced.tokens[i][: position + 1] == a[: position + 1]:
                margin = traced.trace.of(i)[position - 1].margins[0]
        at = slice(position, None) if position is not None else slice(0)
        tokens = tuple(next(iter(t[at]), None) for t in (a, b))
        found.append(
            Comparison(
                position,
                (tokens[0], tokens[1]),
                margin,
                NEAR_TIE[str(job.target.dtype)],
                (len(a) - 1, len(other.accept_lengths[i])),
            )
        )
    return found


def first_difference(a: Sequence[int], b: Sequence[int]) -> int | None:
    """Index of the first token that differs or is missing; None for equal lists."""
    if list(a) == list(b):
        return None
    pairs = enumerate(zip(a, b, strict=False))
    return next((i for i, (x, y) in pairs if x != y), min(len(a), len(b)))

"""What the demo prints: text by who wrote it, numbers, and the first rounds as trees."""

import dataclasses

from rich.console import Console
from rich.table import Table
from rich.text import Text
from rich.tree import Tree

from eagle3_jax import Generation, Round, Trace
from eagle3_jax.comparison import NEAR_TIE, first_difference
from eagle3_jax.live import by_depth, has_color, token_depths
from eagle3_jax.tokenizer import Tokenizer


@dataclasses.dataclass(frozen=True)
class Run:
    """One way of generating, measured."""

    name: str
    generation: Generation
    first_seconds: float
    seconds: float

    @property
    def tokens(self) -> list[int]:
        return self.generation.tokens[0]

    @property
    def trace(self) -> Trace:
        assert self.generation.trace is not None
        return self.generation.trace

    @property
    def passes(self) -> int:
        """Target passes after the prompt's: plain rounds are passes of one token."""
        return len(self.trace.rounds)


@dataclasses.dataclass(frozen=True)
class Comparison:
    """Whether two runs wrote the same text; if not, where, and how near the second choice was."""

    position: int | None = None
    margin: float | None = None

    @property
    def same(self) -> bool:
        return self.position is None

    @property
    def near_tie(self) -> bool:
        return self.margin is not None and self.margin < NEAR_TIE["float32"]


def compare(plain: Run, other: Run) -> Comparison:
    """The first difference. Pass i of plain decoding chose token i + 1, the prefill token 0."""
    position = first_difference(plain.tokens, other.tokens)
    if position is None:
        return Comparison()
    if not 0 < position < len(plain.tokens):
        return Comparison(position)
    return Comparison(position, plain.trace.rounds[position - 1].margins[0])


def colored_text(run: Run, tokenizer: Tokenizer, *, color: bool) -> Text:
    """The text, accepted draft tokens colored by depth, or as `[depth:token]` without color."""
    depths = token_depths(run.generation.accept_lengths[0], len(run.tokens))
    return by_depth(tokenizer.pieces(run.tokens), depths, color=color)


def verdict(plain: Run, run: Run, tokenizer: Tokenizer) -> Text:
    """`same text: yes`, or the first difference with the margin the target had there."""
    found = compare(plain, run)
    if found.same:
        return Text(f"{run.name}: same text: yes ({len(run.tokens)} tokens)", style="green")
    here, there = (
        repr(tokenizer.decode(r.tokens[found.position : found.position + 1])) for r in (plain, run)
    )
    margin = "not recorded" if found.margin is None else f"{found.margin:.2e}"
    kind = "a near tie" if found.near_tie else "no near tie: this is a fault"
    return Text(
        f"{run.name}: same text: no, first at token {found.position}: {here} without and {there} "
        f"with speculation, margin {margin}, {kind}",
        style="yellow" if found.near_tie else "bold red",
    )


def numbers(runs: list[Run]) -> Table:
    """One line a run: passes, accept lengths, time."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("")
    for name in ("tokens", "target passes", "mean accept", "first call", "second", "tokens/s"):
        table.add_column(name, justify="right")
    for run in runs:
        accept = run.generation.accept_lengths[0]
        table.add_row(
            run.name,
            str(len(run.tokens)),
            str(run.passes),
            f"{sum(accept) / len(accept):.3f}" if accept else "-",
            f"{run.first_seconds:.2f} s",
            f"{run.seconds:.2f} s",
            f"{len(run.tokens) / run.seconds:.1f}",
        )
    return table


def totals(prompts: list[list[Run]]) -> Table:
    """All prompts together, one line a way of generating."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("all prompts")
    for name in ("tokens", "target passes", "tokens/pass", "tokens/s"):
        table.add_column(name, justify="right")
    for runs in zip(*prompts, strict=True):
        tokens, passes = sum(len(r.tokens) for r in runs), sum(r.passes for r in runs)
        seconds = sum(r.seconds for r in runs)
        each = f"{(tokens - len(runs)) / passes:.3f}" if passes else "-"
        table.add_row(runs[0].name, str(tokens), str(passes), each, f"{tokens / seconds:.1f}")
    return table


def statistics(run: Run) -> tuple[Text, Text]:
    """Accept lengths round by round, and SGLang's numbers under SGLang's names."""
    accept = " ".join(map(str, run.generation.accept_lengths[0]))
    stats = run.generation.stats[0]
    spec = [
        f"{key} {value:.4g}" if isinstance(value, float) else f"{key} {value}"
        for key, value in stats.items()
        if key.startswith("spec_")
    ]
    return (
        Text(f"{run.name}: accept lengths: {accept}"),
        Text(f"{run.name}: {', '.join(spec) or 'no rounds'}", style="dim"),
    )


def round_tree(item: Round, tokenizer: Tokenizer, *, chain: bool) -> Tree:
    """One round: every node with its token, its score and its fate."""
    accepted = set(item.accepted)
    scores = item.draft_probs if chain else item.scores

    def token(i: int) -> str:
        return repr(tokenizer.decode([i]))

    def label(node: int) -> Text:
        text = Text(f"{token(item.tokens[node])} {scores[node]:.3f} ")
        if node in accepted:
            return text.append("accepted", style="bold green")
        return text.append("rejected", style="dim")

    root = Text(f"round {item.index}, length {item.length}: {token(item.tokens[0])} is pending")
    branches = {0: Tree(root, guide_style="dim")}
    for node in range(1, len(item.tokens)):
        branches[node] = branches[item.parents[node]].add(label(node))
    last = item.accepted[item.num_correct_drafts]
    branches[last].add(Text(f"{token(item.bonus)} the target's own", style="bold"))
    return branches[0]


def show_prompt(
    console: Console, prompt: str, plain: Run, runs: list[Run], tokenizer: Tokenizer, rounds: int
):
    """Everything about one prompt."""
    color = has_color(console)
    wrap = {"soft_wrap": not console.is_terminal}
    console.rule(Text(prompt), align="left")
    for run in runs:
        console.print(Text(f"{run.name}:", style="bold"))
        console.print(colored_text(run, tokenizer, color=color), **wrap)
        console.print()
    for run in runs:
        console.print(verdict(plain, run, tokenizer), **wrap)
    console.print()
    console.print(numbers([plain, *runs]))
    console.print()
    for run in runs:
        for line in statistics(run):
            console.print(line, **wrap)
    for run in runs:
        shown = run.trace.rounds[:rounds]
        chain = run.trace.tree is not None and run.trace.tree["topk"] == 1
        if shown:
            score = "the draft's probability" if chain else "score along the path"
            console.print()
            console.print(Text(f"{run.name}: first rounds (token, {score}, fate)", style="bold"))
        for item in shown:
            console.print(round_tree(item, tokenizer, chain=chain))
    console.print()

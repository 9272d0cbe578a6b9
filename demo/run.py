"""EAGLE-3 on a real pair, end to end: `python demo/run.py` (or `make demo`).

Fetches SmolLM2-135M-Instruct, converts the PyTorch draft in demo/draft as a user would, and writes
each prompt's answer without and with speculation. Exit status: 0, 1 if a text with speculation
differs by more than a near tie, 2 if something could not be done.
"""

import argparse
import functools
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from model import cache_folder, ensure_model
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.text import Text
from show import Run, compare, show_prompt, totals

import eagle3_jax as e3
from eagle3_jax.live import has_color, legend
from eagle3_jax.tokenizer import Tokenizer

ROOT = Path(__file__).resolve().parent.parent
PROMPTS = (
    "What is the capital of France, and what is it famous for?",
    "Write a Python function that checks whether a year is a leap year.",
    "What is 17 plus 28? Explain your steps.",
)
CALLS = 3


class DemoError(Exception):
    """What the demo needs and did not get."""


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--prompt", action="append", metavar="TEXT", help="may be repeated")
    parser.add_argument("--max-new-tokens", type=int, default=64, metavar="N")
    parser.add_argument("--num-steps", type=int, metavar="N", help="drafted levels")
    parser.add_argument("--topk", type=int, metavar="N", help="1 for a chain")
    parser.add_argument("--num-draft-tokens", type=int, metavar="N", help="verified a round")
    parser.add_argument("--rounds", type=int, default=3, metavar="N", help="rounds drawn as trees")
    return parser.parse_args()


def chosen_trees(args: argparse.Namespace) -> list[e3.TreeConfig]:
    """A chain and a tree of three levels, or the one that the options describe."""
    if args.num_steps is None and args.topk is None and args.num_draft_tokens is None:
        return [e3.TreeConfig(num_steps=3), e3.TreeConfig(3, topk=4, num_draft_tokens=8)]
    steps = 3 if args.num_steps is None else args.num_steps
    topk = 1 if args.topk is None else args.topk
    return [e3.TreeConfig(steps, topk, args.num_draft_tokens)]


def convert_draft(console: Console, target: Path) -> Path:
    """Runs the converter's command on demo/draft and shows its report."""
    out = cache_folder() / "smollm2-draft"
    arguments = ["-m", "convert.from_torch", "demo/draft"]
    arguments += ["--target", str(target), "--out", str(out), "--force"]
    console.print(Text(f"$ python {shlex.join(arguments)}", style="bold"), soft_wrap=True)
    done = subprocess.run(
        [sys.executable, *arguments], cwd=ROOT, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise DemoError(f"the converter failed: {done.stderr.strip()}")
    console.print(Text(done.stdout), soft_wrap=True)
    return out


def measure(
    tree: e3.TreeConfig | None, call: Callable[[bool], e3.Generation], step: Callable[[], None]
) -> Run:
    """Three calls: the first compiles if need be, the second is timed, the third is traced."""
    times = [time.perf_counter()]
    for _ in range(2):
        call(False)
        times.append(time.perf_counter())
        step()
    traced = call(True)
    step()
    kind = "chain" if tree and tree.topk == 1 else "tree"
    return Run(
        f"{kind} {tree}" if tree else "plain", traced, times[1] - times[0], times[2] - times[1]
    )


def show_all(
    args: argparse.Namespace, trees: list[e3.TreeConfig], console: Console, folder: Path
) -> bool:
    """Shows every prompt; true when every text is the target's own, near ties apart."""
    tokenizer = Tokenizer.from_folder(folder)
    converted = convert_draft(console, folder)
    target = e3.load_target(folder)
    draft = e3.load_draft(converted, target=target)
    limit = args.max_new_tokens
    prompts = args.prompt or list(PROMPTS)
    shown, results = [], []
    console.print(legend(max(t.num_steps for t in trees), color=has_color(console)))
    console.print()
    for prompt in prompts:
        ids = tokenizer.encode(tokenizer.apply_chat_template(prompt))

        def call(tree: e3.TreeConfig | None, trace: bool, ids: list[int] = ids) -> e3.Generation:
            if tree is None:
                return e3.generate(target, [ids], max_new_tokens=limit, trace=trace)
            return e3.speculate(target, draft, [ids], max_new_tokens=limit, tree=tree, trace=trace)

        with progress(f"generating {limit} tokens", CALLS * (1 + len(trees))) as step:
            plain, *runs = (
                measure(tree, functools.partial(call, tree), step) for tree in (None, *trees)
            )
        show_prompt(console, prompt, plain, runs, tokenizer, args.rounds)
        shown.append([plain, *runs])
        results += [compare(plain, run) for run in runs]
    console.print(totals(shown))
    same = sum(result.same for result in results)
    console.print(Text(f"\nsame text: {same} of {len(results)}", style="bold"))
    return all(result.same or result.near_tie for result in results)


@contextmanager
def progress(name: str, total: int) -> Iterator[Callable[[], None]]:
    """A bar on stderr, on terminals only."""
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(
        *columns,
        TimeElapsedColumn(),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    ) as bar:
        task = bar.add_task(name, total=total)
        yield lambda: bar.advance(task)


def main() -> int:
    args = parse()
    console = Console(highlight=False)
    try:
        trees = chosen_trees(args)
        return 0 if show_all(args, trees, console, ensure_model()) else 1
    except (DemoError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())

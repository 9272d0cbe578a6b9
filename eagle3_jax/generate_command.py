"""`eagle3 speculate` and `eagle3 generate`: text from a target, with a draft or without."""

import argparse
import contextlib
import importlib.util
import io
import json
import shlex
import sys
import time
from pathlib import Path
from typing import Any

import jax
from rich.console import Console

from eagle3_jax import prompts as prompts_module
from eagle3_jax.checkpoint import MANIFEST, load_draft, read_manifest
from eagle3_jax.command import check_writable, note, say, stop_ids
from eagle3_jax.comparison import Compared
from eagle3_jax.config import DTYPES, TargetConfig, TreeConfig
from eagle3_jax.driver import Job, Outcome, drive
from eagle3_jax.engine_rules import ENGINES
from eagle3_jax.findings import ConvertError
from eagle3_jax.generate_report import Report, progress
from eagle3_jax.hub import model_folder
from eagle3_jax.live import LiveView, has_color, legend
from eagle3_jax.prompts import Prompt
from eagle3_jax.sampling import check_bias
from eagle3_jax.sampling_arguments import add_sampling_arguments, sampling_of
from eagle3_jax.stopwatch import Stopwatch
from eagle3_jax.targets import load_target
from eagle3_jax.tokenizer import Tokenizer
from eagle3_jax.tree import DRAFT_ATTENTIONS

SPECULATE = """Decoding with an EAGLE-3 draft, greedy or sampled. Exit status 0; 1 when --compare
finds a text that differs by more than a near tie; 2 with one error; 130 after Ctrl-C."""
GENERATE = """Decoding without a draft, greedy or sampled. Exit status 0, 2 with one error, 130
after Ctrl-C."""


def add_parser(subparsers: Any):
    """Adds `speculate` and `generate` to the commands of `eagle3`."""
    parser = subparsers.add_parser("speculate", help="text with a draft", description=SPECULATE)
    _add_speculate_arguments(parser)
    parser = subparsers.add_parser("generate", help="text without a draft", description=GENERATE)
    _add_generate_arguments(parser)


def _add_speculate_arguments(parser: argparse.ArgumentParser):
    add = parser.add_argument
    _add_models(parser, draft=True)
    add("--num-steps", type=int, default=3, metavar="N", help="drafted levels (3)")
    add("--topk", type=int, default=1, metavar="N", help="branches a level; 1 is a chain (1)")
    add("--num-draft-tokens", type=int, metavar="N", help="nodes verified a round, root included")
    add("--draft-attention", choices=DRAFT_ATTENTIONS, help="what a drafted row sees")
    add("--as-engine", metavar="NAME", help=f"as one would: {', '.join(ENGINES)}")
    _add_shared(parser)
    add_sampling_arguments(parser, rules=True)
    add("--compare", action="store_true", help="also decode without the draft, side by side")
    parser.set_defaults(run=run)


def _add_generate_arguments(parser: argparse.ArgumentParser):
    _add_models(parser, draft=False)
    _add_shared(parser)
    add_sampling_arguments(parser, rules=False)
    parser.set_defaults(run=run, draft=None, compare=False)


def _add_models(parser: argparse.ArgumentParser, *, draft: bool):
    add = parser.add_argument
    add("--target", required=True, metavar="T", help="a Hugging Face folder, or a Hub id")
    if draft:
        add("--draft", required=True, metavar="D", help="a converted draft's folder, or a Hub id")
    prompts = parser.add_mutually_exclusive_group(required=True)
    prompts.add_argument("--prompt", action="append", metavar="TEXT", help="may be repeated")
    prompts.add_argument(
        "--prompts",
        type=Path,
        metavar="FILE",
        help='JSON lines: {"prompt": TEXT}, {"messages": [...]} or {"input_ids": [...]}',
    )
    prompts.add_argument("--ids", type=Path, metavar="FILE", help="a JSON list of id lists")
    add("--raw", action="store_true", help="texts as they stand, without the chat template")


def _add_shared(parser: argparse.ArgumentParser):
    add = parser.add_argument
    add("--max-new-tokens", type=int, default=128, metavar="N", help="per prompt (128)")
    add("--stop", type=stop_ids, metavar="IDS|none", help="such as 2,7; else the target's eos")
    add("--dtype", choices=DTYPES, default="float32", help="of weights and activations")
    add("--batch-size", type=int, default=8, metavar="N", help="prompts per call (8)")
    add("--trace", type=Path, metavar="FILE", help="write every round as JSON lines")
    add("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> int:
    """Runs parsed arguments of either command; returns the exit status."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        with jax.enable_x64(True) if args.dtype == "float64" else contextlib.nullcontext():
            return _Command(args).run()
    except KeyboardInterrupt:
        return _interrupted(args)


class _Command:
    """One call: what was asked is checked before anything is loaded, loaded, run, printed."""

    def __init__(self, args: argparse.Namespace):
        self.args = args
        self.tree = None
        if args.draft is not None:
            self.tree = TreeConfig(args.num_steps, args.topk, args.num_draft_tokens)
        self.sampling, self.rule = sampling_of(args)
        if args.compare and args.temperature:
            raise ConvertError(
                "USAGE", "--compare needs temperature 0: two sampled texts are two draws"
            )
        _at_least_one("--max-new-tokens", args.max_new_tokens)
        _at_least_one("--batch-size", args.batch_size)
        if args.trace is not None:
            check_writable(args.trace)
        if args.prompt is not None:
            self.prompts = prompts_module.from_texts(args.prompt)
        elif args.prompts is not None:
            self.prompts = prompts_module.read_jsonl(args.prompts)
        else:
            self.prompts = prompts_module.read_ids(args.ids)
        self.out = Console(highlight=False)

    def run(self) -> int:
        start = time.perf_counter()
        self._load()
        loaded = time.perf_counter() - start
        args = self.args
        live = len(self.ids) == 1 and self.out.is_terminal and not self.out.is_dumb_terminal
        live = live and not args.json and not args.compare
        with Stopwatch() as self.watch:
            outcome = self._live() if live else self._quiet()
        trace = None
        if args.trace is not None:
            outcome.trace().save(args.trace)
            trace = f"trace written to {args.trace}"
        compared = None
        if args.compare and not outcome.interrupted:
            compared = self._compare()
        report = Report(self.out, self.prompts, self.tokenizer, self.watch)
        if args.json:
            if not outcome.interrupted:
                say(json.dumps(report.json(outcome, compared, loaded)))
        elif compared is not None:
            report.show_compared(compared)
        elif not live:
            report.show(outcome)
        if outcome.interrupted:
            done = sum(outcome.is_done(i) for i in range(len(self.ids)))
            after = f" after {done} of {len(self.ids)} prompts"
            return _interrupted(args, after + (f"; {trace}" if trace else ""))
        if trace is not None and not args.json:
            report.note(trace)
        return 0 if compared is None or compared.excused else 1

    def _load(self):
        args = self.args
        folder = model_folder(args.target)
        draft_folder = None
        if args.draft is not None:
            draft_folder = model_folder(args.draft)
            _check_converted(draft_folder, folder)
        self.tokenizer = _tokenizer(self.prompts, folder)
        self.ids = prompts_module.encode(self.prompts, self.tokenizer, args.raw)
        target = load_target(folder, dtype=args.dtype)
        note(target.folder.notes)
        config: TargetConfig = target.config
        prompts_module.check_sizes(self.prompts, self.ids, config, args.max_new_tokens)
        stop = config.eos_token_ids if args.stop is None else args.stop
        wrong = [i for i in args.stop or () if i >= config.vocab_size]
        if wrong:
            raise ConvertError(
                "USAGE", f"--stop {wrong[0]}: outside the vocabulary 0..{config.vocab_size - 1}"
            )
        draft, attention = None, None
        if draft_folder is not None:
            engine, attention = args.as_engine, args.draft_attention
            draft = load_draft(draft_folder, target=target, dtype=args.dtype, as_engine=engine)
        check_bias(self.sampling, config.vocab_size)
        self.job = Job(
            target,
            draft,
            self.tree,
            args.max_new_tokens,
            tuple(stop),
            attention,
            self.sampling,
            self.rule,
        )

    def _live(self) -> Outcome:
        if self.tree is not None:
            self.out.print(legend(self.tree.num_steps, color=has_color(self.out)))
        with LiveView(self.out, self.tokenizer, self.watch) as view:
            outcome = drive(self.job, self.ids, batch_size=1, by_round=True, on_round=view.add)
            if not outcome.rounds and outcome.tokens[0]:
                view.add_token(outcome.tokens[0][0], 0)
        return outcome

    def _quiet(self) -> Outcome:
        with progress("prompts", len(self.ids)) as step:
            return drive(
                self.job,
                self.ids,
                batch_size=self.args.batch_size,
                by_round=self.args.trace is not None,
                on_batch=lambda outcome, done: step(done, outcome),
            )

    def _compare(self) -> Compared:
        compared, size = Compared(), self.args.batch_size
        with progress("comparing", len(self.ids)) as step:
            for first in range(0, len(self.ids), size):
                compared.add(self.job, self.ids[first : first + size])
                step(min(first + size, len(self.ids)))
        return compared


def _interrupted(args: argparse.Namespace, after: str = "") -> int:
    message = f"interrupted{after}"
    if args.json:
        say(json.dumps({"error": {"code": "INTERRUPTED", "message": message}}))
    print(message, file=sys.stderr)
    return 130


def _tokenizer(prompts: list[Prompt], folder: Path) -> Tokenizer | None:
    """Texts need the target's; for ids it is used when it is there."""
    exists = (folder / "tokenizer.json").is_file()
    texts = [p for p in prompts if p.ids is None]
    if texts and not exists:
        raise ConvertError(
            "TOKENIZER",
            f"{texts[0].where}: a text, and {folder} has no tokenizer.json; --ids takes token ids",
        )
    if not texts and not (exists and importlib.util.find_spec("tokenizers")):
        return None
    return Tokenizer.from_folder(folder)


def _check_converted(draft: Path, target: Path):
    """Refuses a folder that is no converted draft, before a large target is loaded."""
    if not (draft / MANIFEST).exists() and (draft / "config.json").exists():
        out = shlex.quote(f"{draft.absolute().name}-converted")
        raise ConvertError(
            "CHECKPOINT",
            f"{draft}: a PyTorch checkpoint, not a converted draft; convert it once with "
            f"python -m convert.from_torch {shlex.quote(str(draft))} --target "
            f"{shlex.quote(str(target))} --out {out} and give --draft {out}",
        )
    read_manifest(draft)


def _at_least_one(name: str, value: int):
    if value < 1:
        raise ConvertError("USAGE", f"{name} is {value}, expected at least 1")

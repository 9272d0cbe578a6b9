"""`eagle3 crosscheck`: an engine's results beside this implementation, or beside another run."""

import argparse
import contextlib
import dataclasses
import json
from pathlib import Path
from typing import Any

import jax

from eagle3_jax.checkpoint import load_draft
from eagle3_jax.command import note, say, stop_ids
from eagle3_jax.config import DTYPES, TreeConfig
from eagle3_jax.crosscheck.compare import compare, compare_recorded
from eagle3_jax.crosscheck.live import saved_notes
from eagle3_jax.crosscheck.live_command import (
    add_live_arguments,
    check_live_arguments,
    driven,
    dump_ours,
)
from eagle3_jax.crosscheck.pair import compare_runs
from eagle3_jax.crosscheck.reading import read_run, with_dump
from eagle3_jax.crosscheck.result import Result
from eagle3_jax.crosscheck.types import EngineRun
from eagle3_jax.files.whole import finite
from eagle3_jax.findings import ConvertError
from eagle3_jax.hub import model_folder
from eagle3_jax.prompts import encode, read_jsonl
from eagle3_jax.replays.shared import read_shared
from eagle3_jax.targets import load_target
from eagle3_jax.tokenizer import Tokenizer
from eagle3_jax.tree import DRAFT_ATTENTIONS

DESCRIPTION = """Compares what an engine produced with this implementation and says in one sentence
where they part: RESULTS with --target and --draft, or two runs RESULTS OTHER without models. Exit
status 0: equal, equal up to ties, or not an acceptance problem; 1: the engine differs; 2: not
decidable, or one error."""
ENGINE = "sglang-0.5.23"


def add_parser(subparsers: Any):
    """Adds `crosscheck` to the commands of `eagle3`."""
    parser = subparsers.add_parser(
        "crosscheck", help="an engine's results beside ours", description=DESCRIPTION
    )
    add_arguments(parser)
    parser.set_defaults(run=run)


def add_arguments(parser: argparse.ArgumentParser):
    """The arguments of `eagle3 crosscheck`."""
    add = parser.add_argument
    add("results", type=Path, nargs="?", metavar="RESULTS", help="answers, dumps, or a trace")
    add("other", type=Path, nargs="?", metavar="OTHER", help="another run, instead of models")
    add("--dump", type=Path, metavar="DIR", help="SGLang's dumper files of the same requests")
    add("--target", metavar="T", help="a Hugging Face folder, or a Hub id")
    add("--draft", metavar="D", help="a converted draft's folder, or a Hub id")
    add("--num-steps", type=int, metavar="N", help="of the engine's tree, if it does not say")
    add("--topk", type=int, metavar="N", help="likewise (1)")
    add("--num-draft-tokens", type=int, metavar="N", help="likewise, root included")
    add(
        "--as-engine", default=ENGINE, metavar="NAME", help=f"its draft profile, or none ({ENGINE})"
    )
    add("--draft-attention", choices=DRAFT_ATTENTIONS, help="what a drafted row sees")
    add("--prompts", type=Path, metavar="FILE", help="JSON lines of prompts, in the answers' order")
    add("--raw", action="store_true", help="texts as they stand, without the chat template")
    add("--stop", type=stop_ids, metavar="IDS|none", help="such as 2,7; else the target's eos")
    add("--ignore-eos", action="store_true", help="the engine went on after eos")
    add("--dtype", choices=DTYPES, help="of our weights and activations; else the engine's")
    add_live_arguments(parser)
    add("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> int:
    """Runs parsed arguments; returns the exit status."""
    check_live_arguments(args)
    if (args.results is None) == (args.url is None):
        raise ConvertError("USAGE", "give RESULTS, or --url for a running server")
    if args.other is None and args.draft is None and args.target is None:
        raise ConvertError("USAGE", "give --target and --draft, or a second run to compare with")
    result = _pair(args) if args.other is not None else _models(args)
    show(result, as_json=args.json)
    return result.status


def show(result: Result, *, as_json: bool):
    """Prints a result: one page, or one JSON object."""
    say(json.dumps(finite(result.json()), allow_nan=False) if as_json else result.text())


def _pair(args: argparse.Namespace) -> Result:
    for name in ("target", "draft", "dump", "write_sglang_dump"):
        if getattr(args, name) is not None:
            option = f"--{name.replace('_', '-')}"
            raise ConvertError("USAGE", f"two runs are compared without models: {option} or OTHER")
    prompts = _prompts(args, None)
    runs = [read_run(path, prompts=prompts) for path in (args.results, args.other)]
    return compare_runs(runs[0], runs[1], dtype=args.dtype)


def _models(args: argparse.Namespace) -> Result:
    tree = _tree(args)
    folder = None if args.target is None else model_folder(args.target)
    prompts = _prompts(args, folder)
    if args.url is None:
        return _compared(args, args.results, prompts, tree, folder)
    assert prompts is not None
    with driven(args, prompts, folder) as answers:
        return _compared(args, answers, None, tree, folder)


def _compared(
    args: argparse.Namespace,
    results: Path,
    prompts: list[list[int]] | None,
    tree: TreeConfig | None,
    folder: Path | None,
) -> Result:
    """Loads the pair in the engine's dtype and compares; without a target, drafts alone."""
    engine_run = read_run(results, prompts=prompts)
    if args.dump is not None:
        engine_run = with_dump(engine_run, read_run(args.dump))
    notes = saved_notes(results) if results.is_dir() else ()
    engine_run = dataclasses.replace(engine_run, notes=(*engine_run.notes, *notes))
    said = engine_run.settings.dtype
    dtype = args.dtype or (said if said in DTYPES else None) or "float32"
    engine = None if args.as_engine == "none" else args.as_engine
    with jax.enable_x64(True) if dtype == "float64" else contextlib.nullcontext():
        if folder is None:
            return _recorded(args, engine_run, tree, dtype, engine)
        target = load_target(folder, dtype=dtype)
        note(target.folder.notes)
        draft = None
        if args.draft is not None:
            path = model_folder(args.draft)
            draft = load_draft(path, target=target, dtype=dtype, as_engine=engine)
        if args.write_sglang_dump is not None:
            dump_ours(args.write_sglang_dump, engine_run, target, draft, tree, args.draft_attention)
        half = dtype in ("bfloat16", "float16")
        return compare(
            engine_run,
            target,
            draft,
            tree=tree,
            draft_attention=args.draft_attention,
            stop_token_ids=args.stop,
            ignore_eos=True if args.ignore_eos else None,
            reference=load_target(folder, dtype="float32") if half else None,
        )


def _recorded(
    args: argparse.Namespace,
    engine_run: EngineRun,
    tree: TreeConfig | None,
    dtype: str,
    engine: str | None,
) -> Result:
    if args.write_sglang_dump is not None:
        raise ConvertError("USAGE", "--write-sglang-dump needs --target")
    draft = load_draft(model_folder(args.draft), dtype=dtype, as_engine=engine)
    shared = None
    if "target" in (draft.config.embed, draft.config.head):
        embedding = engine_run.settings.other.get("embedding")
        if embedding is None:
            raise ConvertError(
                "USAGE", "this draft uses the target's embedding or head: give --target"
            )
        shared = read_shared(embedding, draft.config, dtype=dtype)
    return compare_recorded(
        engine_run, draft, shared, tree=tree, draft_attention=args.draft_attention
    )


def _tree(args: argparse.Namespace) -> TreeConfig | None:
    if args.num_steps is None:
        if args.topk is not None or args.num_draft_tokens is not None:
            raise ConvertError("USAGE", "--topk and --num-draft-tokens need --num-steps")
        return None
    topk = 1 if args.topk is None else args.topk
    nodes = None if topk == 1 else args.num_draft_tokens
    return TreeConfig(args.num_steps, topk, nodes)


def _prompts(args: argparse.Namespace, folder: Path | None) -> list[list[int]] | None:
    if args.prompts is None:
        return None
    found = read_jsonl(args.prompts)
    tokenizer = None
    if any(p.ids is None for p in found):
        if folder is None:
            raise ConvertError("USAGE", "prompts that are texts need --target, for its tokenizer")
        tokenizer = Tokenizer.from_folder(folder)
    return encode(found, tokenizer, args.raw)

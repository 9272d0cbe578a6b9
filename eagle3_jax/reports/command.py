"""`eagle3 report`: a page to look at, from one trace or two."""

import argparse
import sys
from pathlib import Path
from typing import Any

from eagle3_jax.command import check_writable
from eagle3_jax.findings import ConvertError
from eagle3_jax.hub import model_folder
from eagle3_jax.report import render, save
from eagle3_jax.reports.reading import read
from eagle3_jax.tokenizer import Tokenizer

DESCRIPTION = """One HTML page on a trace: text coloured by depth, accept lengths, every round's
tree; two traces side by side with their first difference. Exit status 0, 2 with one error."""


def add_parser(subparsers: Any):
    """Adds `report` to the commands of `eagle3`."""
    parser = subparsers.add_parser(
        "report", help="one page to look at, from a trace or two", description=DESCRIPTION
    )
    add = parser.add_argument
    add("traces", type=Path, nargs="+", metavar="TRACE", help="one or two files of --trace")
    add("-o", "--out", required=True, metavar="FILE", help="the page to write; - for stdout")
    texts = parser.add_mutually_exclusive_group()
    texts.add_argument("--target", metavar="T", help="the target's folder, for its tokenizer")
    texts.add_argument("--tokenizer", type=Path, metavar="DIR", help="a folder with tokenizer.json")
    add("--name", action="append", metavar="NAME", help="a trace's name, in order (its file)")
    add("--force", action="store_true", help="replace the page if there is one")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Runs parsed arguments; returns the exit status."""
    paths: list[Path] = args.traces
    if len(paths) > 2:
        raise ConvertError("USAGE", f"{len(paths)} traces, expected one or two")
    names = args.name or [str(path) for path in paths]
    if len(names) != len(paths):
        raise ConvertError("USAGE", f"{len(names)} --name for {len(paths)} traces")
    out = None if args.out == "-" else Path(args.out)
    if out is not None:
        check_writable(out)
        if out.exists() and any(path.exists() and out.samefile(path) for path in paths):
            raise ConvertError("FILE", f"{out}: is the trace itself; give another path")
        if out.exists() and not args.force:
            raise ConvertError("FILE", f"{out}: exists; give another path, or --force")
    traces = [read(path) for path in paths]
    tokenizer, models = None, []
    if args.target is not None:
        folder = model_folder(args.target)
        tokenizer = Tokenizer.from_folder(folder)
        models.append(("target, as given", str(args.target)))
    elif args.tokenizer is not None:
        tokenizer = Tokenizer.from_folder(args.tokenizer)
        models.append(("tokenizer", str(args.tokenizer)))
    page = render(traces, names=names, tokenizer=tokenizer, models=models)
    if out is None:
        sys.stdout.flush()
        sys.stdout.buffer.write(page.encode("utf-8", "backslashreplace"))
    else:
        save(page, out, force=args.force)
        print(f"page written to {out}", file=sys.stderr)
    return 0

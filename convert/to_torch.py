"""`python -m convert.to_torch DIR --dialect sglang --out DRAFT`: a draft for another framework."""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from eagle3_jax.command import Parser, run_command, say
from eagle3_jax.export import check_destination, plan_export, write_export
from eagle3_jax.export_report import report, summary
from eagle3_jax.export_rules import FORMS
from eagle3_jax.hub import local_path

DESCRIPTION = """Writes a converted draft as config.json and model.safetensors in one framework's
words. Exit status 0, or 2 with one error (what the dialect cannot say) and nothing written."""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; returns its exit status."""
    parser = Parser(prog="python -m convert.to_torch", description=DESCRIPTION)
    add_arguments(parser)
    return run_command(parser, run, argv)


def add_arguments(parser: argparse.ArgumentParser):
    """The arguments of `convert.to_torch` and `eagle3 export`."""
    add = parser.add_argument
    add("draft", type=Path, metavar="DIR", help="a draft converted by convert.from_torch")
    add("--dialect", choices=list(FORMS), required=True, help="whose config keys and tensor names")
    add("--out", type=Path, required=True, metavar="DRAFT", help="folder to write")
    add(
        "--dtype",
        choices=["keep", "float32", "bfloat16", "float16"],
        default="keep",
        help="of floating-point tensors",
    )
    add("--target", type=Path, help="the target's folder, config.json or Hub id: layer ids by T")
    add("--verify", action="store_true", help="convert the written draft back and compare")
    add("--force", action="store_true", help="replace a draft that was written to DRAFT before")
    add("--json", action="store_true", help="print what was written, or the error, as JSON")


def add_parser(subparsers: Any):
    """Adds `export` to the commands of `eagle3`."""
    parser = subparsers.add_parser(
        "export", help="a draft for another framework or engine", description=DESCRIPTION
    )
    add_arguments(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace):
    """Exports as parsed arguments say and prints what was written."""
    check_destination(args.out, args.force)
    target = args.target and local_path(args.target, ("config.json",))
    export = plan_export(args.draft, args.dialect, dtype=args.dtype, target=target)
    write_export(args.draft, args.out, export, verify=args.verify, force=args.force)
    if args.json:
        say(json.dumps(summary(export, str(args.out), args.verify), indent=1))
    else:
        say(report(export, str(args.out), args.verify))


if __name__ == "__main__":
    sys.exit(main())

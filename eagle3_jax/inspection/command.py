"""`eagle3 inspect PATH`: one page on a draft, before anything runs it."""

import argparse
import json
from pathlib import Path
from typing import Any

from eagle3_jax.command import say
from eagle3_jax.files.whole import finite
from eagle3_jax.hub import DRAFT_PATTERNS, local_path
from eagle3_jax.inspect import inspect_draft
from eagle3_jax.inspection.page import page

DESCRIPTION = """What a draft checkpoint is: sizes, switches and their origins, target states,
vocabulary, RoPE, and what each engine drops, overwrites or ignores. Exit status 0 clean, 1 warnings
in the file (with --patch: or in that engine), 2 unusable."""

TARGET_PATTERNS = ("config.json", "tokenizer.json", "tokenizer_config.json")


def add_parser(subparsers: Any):
    """Adds `inspect` to the commands of `eagle3`."""
    parser = subparsers.add_parser(
        "inspect", help="one page on a draft checkpoint", description=DESCRIPTION
    )
    add_arguments(parser)
    parser.set_defaults(run=run)


def add_arguments(parser: argparse.ArgumentParser):
    """The arguments of `eagle3 inspect`."""
    add = parser.add_argument
    add(
        "path",
        type=Path,
        metavar="PATH",
        help="folder, weight file, converted draft or Hub id",
    )
    add("--target", type=Path, metavar="T", help="the target's folder, config.json or Hub id")
    add("--patch", choices=["sglang", "vllm"], help="the change of config.json for this engine")
    add("--json", action="store_true", help="print everything, or the error, as JSON")


def run(args: argparse.Namespace) -> int:
    """Inspects as parsed arguments say; returns the exit status."""
    target = args.target and local_path(args.target, TARGET_PATTERNS)
    path = local_path(args.path, DRAFT_PATTERNS)
    found = inspect_draft(path, target=target, patch=args.patch)
    say(json.dumps(finite(found), indent=1) if args.json else page(found).rstrip("\n"))
    return found["status"]

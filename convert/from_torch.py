"""`python -m convert.from_torch PATH --out DIR`: a PyTorch EAGLE-3 draft to this project's form."""

import argparse
import json
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from eagle3_jax.checkpoint import check_writable, save_draft
from eagle3_jax.command import Parser, run_command, say
from eagle3_jax.conversion import Options, convert_draft
from eagle3_jax.convert_report import conversion_report
from eagle3_jax.dialects import DIALECTS
from eagle3_jax.draft_switches import Flags
from eagle3_jax.findings import ALLOWABLE
from eagle3_jax.hub import DRAFT_PATTERNS, local_path

DESCRIPTION = """Converts an EAGLE-3 draft (.safetensors, shards or .bin) to an Orbax checkpoint and
draft.json. Exit status 0, or 2 with one error and nothing written."""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; returns its exit status."""
    parser = Parser(prog="python -m convert.from_torch", description=DESCRIPTION)
    add_arguments(parser)
    return run_command(parser, run, argv)


def add_parser(subparsers: Any):
    """Adds `convert` to the commands of `eagle3`."""
    parser = subparsers.add_parser(
        "convert", help="a PyTorch draft to this project's form", description=DESCRIPTION
    )
    add_arguments(parser)
    parser.set_defaults(run=run)


def add_arguments(parser: argparse.ArgumentParser):
    """The arguments of `convert.from_torch` and `eagle3 convert`."""
    add = parser.add_argument
    codes = "; ".join(f"{code}: {effect}" for code, effect in ALLOWABLE.items())
    add(
        "path",
        type=Path,
        metavar="PATH",
        help="folder, weight file with config.json beside it, or Hub id",
    )
    add("--out", type=Path, required=True, metavar="DIR", help="folder to write")
    add("--target", type=Path, help="the target's folder, config.json or Hub id")
    add("--dialect", choices=["auto", *DIALECTS], default="auto")
    add(
        "--dtype", choices=["keep", "float32", "bfloat16"], default="keep", help="of stored weights"
    )
    add(
        "--aux-convention",
        choices=["auto", "output", "index"],
        default="auto",
        help="layer id k is the output of block k (boundary k + 1), or boundary k",
    )
    for name, meaning in (
        ("--norm-before-residual", "the residual is the normed state (speculators)"),
        ("--double-norm", "the state passes two norms (trained by ModelOpt >= 0.41)"),
        ("--final-norm", "a final norm stands before the head"),
    ):
        add(name, type=_boolean, metavar="true|false", help=meaning)
    add("--feedback", choices=["pre_norm", "post_norm"], help="the state fed to the next step")
    add("--embed", choices=["auto", "draft", "target"], default="auto", help="whose embedding")
    add(
        "--next-layer-norm",
        choices=["input_layernorm", "hidden_norm"],
        help="the norm of layers after the first, where the file has both",
    )
    add("--dequantise", action="store_true", help="fp8 and int8 weights times their scales")
    add("--rope-theta", type=_positive, metavar="X", help="RoPE base, whatever the file says")
    add("--ignore-rope-scaling", action="store_true", help="plain RoPE, whatever the file says")
    add("--d2t-kind", choices=["auto", "offset", "absolute"], default="auto")
    add("--allow", nargs="+", action="extend", default=[], metavar="CODE", help=codes)
    add("--force", action="store_true", help="replace a draft that was written to DIR before")
    add("--json", action="store_true", help="print draft.json, or the error, as JSON")


def run(args: argparse.Namespace):
    """Converts as parsed arguments say and prints the report."""
    target = args.target and local_path(args.target, ("config.json",))
    options = Options(
        target=target,
        dialect=args.dialect,
        dtype=args.dtype,
        aux_convention=args.aux_convention,
        flags=Flags(
            args.norm_before_residual,
            args.feedback,
            args.final_norm,
            args.double_norm,
            args.embed,
            args.next_layer_norm,
        ),
        rope_theta=args.rope_theta,
        ignore_rope_scaling=args.ignore_rope_scaling,
        d2t_kind=args.d2t_kind,
        allow=tuple(args.allow),
        dequantise=args.dequantise,
    )
    check_writable(args.out, args.force)
    conversion = convert_draft(local_path(args.path, DRAFT_PATTERNS), options)
    save_draft(
        args.out,
        conversion.config,
        conversion.tensors,
        manifest=conversion.manifest,
        force=args.force,
    )
    if args.json:
        say(json.dumps({"out": str(args.out), **conversion.manifest}, indent=1))
    else:
        say(conversion_report(conversion.manifest, str(args.out)))


def _boolean(text: str) -> bool:
    if text not in ("true", "false"):
        raise argparse.ArgumentTypeError(f"expected true or false, found {text!r}")
    return text == "true"


def _positive(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not (math.isfinite(value) and value > 0):
        raise argparse.ArgumentTypeError(f"expected a number above 0, found {text!r}")
    return value


if __name__ == "__main__":
    sys.exit(main())

"""The arguments of `eagle3 record ...`."""

import argparse
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from eagle3_jax.command import Parser, stop_ids
from eagle3_jax.config import DTYPES, Boundary
from eagle3_jax.records.checks import ALLOWABLE
from eagle3_jax.records.recipe import BYTES
from eagle3_jax.records.types import KINDS

DESCRIPTION = """Records: a target's tokens and states, enough to replay a draft without the target.
Exit status 0, 2 with one error, 130 after Ctrl-C."""

Run = Callable[[argparse.Namespace], int]


def add_commands(subparsers: Any, files: Mapping[str, str], runs: Mapping[str, Run]):
    """Adds `record` and its commands.

    Args:
      files: names and help of the commands that read files. runs: what each command calls.
    """
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "record", help="tokens and states of a target, for replay", description=DESCRIPTION
    )
    commands = parser.add_subparsers(
        title="commands", metavar="COMMAND", required=True, parser_class=Parser
    )
    show = commands.add_parser("show", help="one page: what a record holds, what is wrong")
    show.add_argument("record", type=Path)
    show.add_argument("--draft", metavar="D", help="also check that this converted draft fits")
    show.add_argument("--json", action="store_true", help="print one JSON object")
    _add_make(commands.add_parser("make", help="from our own target: it writes, states are kept"))
    _add_sglang(commands.add_parser("from-sglang", help="from a server, or from saved answers"))
    for name, text in files.items():
        reader = commands.add_parser(name, help=text)
        reader.add_argument("paths", type=Path, nargs="+", metavar="PATH")
        _add_described(reader, kind=True)
        reader.set_defaults(reader=name)
    _add_recipe(commands.add_parser("recipe", help="how to capture one where the target runs"))
    for name, run in runs.items():
        commands.choices[name].set_defaults(run=run)


def _add_described(parser: argparse.ArgumentParser, *, kind: bool):
    add = parser.add_argument
    add(
        "--boundaries",
        required=True,
        type=_boundaries,
        metavar="LIST",
        help="what each captured slot is, such as 2,15,27 or 2,15,27,final_norm; k is the state "
        "after k blocks; default: (2, L//2, L-3)",
    )
    if kind:
        add("--kind", required=True, choices=KINDS, help="whose tokens they are")
    add("--target", metavar="T", help="its folder or Hub id: sizes, BOS, embedding for replay")
    add("--num-layers", type=int, metavar="L", help="of the target, without --target")
    add("--vocab-size", type=int, metavar="V", help="of the target, without --target")
    add("--prompt-length", type=int, default=0, metavar="N", help="where the files do not tell")
    add("--store", choices=tuple(BYTES), help="dtype on disk; must hold every value exactly")
    _add_written(parser)


def _add_written(parser: argparse.ArgumentParser):
    add = parser.add_argument
    add("--out", required=True, type=Path, metavar="FILE", help="folder, or NAME.safetensors")
    add("--tag", action="append", default=[], metavar="TEXT", help="a group, for tables")
    add("--partial-context", action="store_true", help="rows may begin after position 0")
    add(
        "--allow",
        action="append",
        default=[],
        choices=sorted(ALLOWABLE),
        metavar="CODE",
        help=f"note it instead of refusing; repeatable: {', '.join(sorted(ALLOWABLE))}",
    )
    add("--force", action="store_true", help="replace a record that is there")
    add("--json", action="store_true", help="print one JSON object")


def _add_prompts(parser: argparse.ArgumentParser, *, required: bool):
    group = parser.add_mutually_exclusive_group(required=required)
    group.add_argument("--prompt", action="append", metavar="TEXT", help="may be repeated")
    group.add_argument("--prompts", type=Path, metavar="FILE", help="JSON lines, as for generate")
    group.add_argument("--ids", type=Path, metavar="FILE", help="a JSON list of id lists")
    parser.add_argument("--raw", action="store_true", help="texts without the chat template")


def _add_make(parser: argparse.ArgumentParser):
    add = parser.add_argument
    add("--target", required=True, metavar="T", help="a Hugging Face folder, or a Hub id")
    _add_prompts(parser, required=True)
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--all-boundaries", action="store_true", help="0..L and final_norm")
    what.add_argument("--draft", metavar="D", help="the boundaries this converted draft reads")
    what.add_argument("--boundaries", type=_boundaries, metavar="LIST", help="such as 2,15,27")
    add(
        "--max-new-tokens",
        type=int,
        required=True,
        metavar="N",
        help="0 records the texts as they stand",
    )
    add("--stop", type=stop_ids, metavar="IDS|none", help="such as 2,7; else the target's eos")
    add("--dtype", choices=DTYPES, default="float32", help="of weights and activations")
    add("--batch-size", type=int, default=8, metavar="N", help="prompts per call (8)")
    add("--top-logprobs", type=int, default=0, metavar="N", help="best next tokens to keep (0)")
    _add_written(parser)
    parser.set_defaults(store=None)


def _add_sglang(parser: argparse.ArgumentParser):
    add = parser.add_argument
    add("answers", type=Path, nargs="*", metavar="FILE", help="saved answers: JSON, JSON lines")
    add("--url", metavar="URL", help="of a running server, such as http://127.0.0.1:30000")
    _add_prompts(parser, required=False)
    add("--max-new-tokens", type=int, default=512, metavar="N", help="per prompt (512)")
    add("--temperature", type=float, default=0.0, metavar="X", help="0 is greedy (0)")
    add("--ignore-eos", action="store_true", help="ask for max-new-tokens whatever comes")
    add("--top-logprobs", type=int, default=0, metavar="N", help="best next tokens to ask for (0)")
    add("--timeout", type=float, default=600.0, metavar="S", help="seconds without a byte (600)")
    add("--retries", type=int, default=3, metavar="N", help="after a lost connection (3)")
    add("--api-key-file", type=Path, metavar="FILE", help="holds the server's key")
    add("--kind", choices=KINDS, help="of saved answers; a server's follows from --temperature")
    _add_described(parser, kind=False)


def _add_recipe(parser: argparse.ArgumentParser):
    add = parser.add_argument
    add("engine", choices=("sglang", "vllm", "transformers"))
    add("--target", required=True, metavar="T", help="its folder, its config.json, or a Hub id")
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--boundaries", type=_boundaries, default="default", metavar="LIST")
    what.add_argument("--draft", metavar="D", help="the boundaries this converted draft reads")
    add("--tokens", type=int, default=2000, metavar="N", help="prompts and answers (2000)")
    add("--max-new-tokens", type=int, default=512, metavar="N", help="per prompt (512)")
    add("--dtype", choices=tuple(BYTES), default="bfloat16", help="of the target's states")


def _boundaries(text: str) -> tuple[Boundary, ...] | str:
    if text == "default":
        return text
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() or part == "final_norm" for part in parts):
        raise argparse.ArgumentTypeError(
            f"expected numbers of blocks such as 2,15,27, final_norm, or default; found {text!r}"
        )
    found: list[Boundary] = [int(part) if part.isdecimal() else "final_norm" for part in parts]
    return tuple(found)

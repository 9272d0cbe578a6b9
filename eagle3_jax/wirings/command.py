"""`eagle3 doctor`: why is the accept length low?"""

import argparse
import dataclasses
import json
import math
import sys
from pathlib import Path
from typing import Any

import numpy as np

from eagle3_jax.checkpoint import load_draft, read_manifest
from eagle3_jax.command import say, tree_triple
from eagle3_jax.config import ConfigError, DraftConfig
from eagle3_jax.doctor import diagnose, gap
from eagle3_jax.draft import Shared
from eagle3_jax.files.safetensors_file import SafetensorsFile
from eagle3_jax.files.shards import FileError
from eagle3_jax.files.source import TensorSource
from eagle3_jax.files.whole import finite
from eagle3_jax.findings import ConvertError
from eagle3_jax.hub import model_folder
from eagle3_jax.record import load
from eagle3_jax.replays.shared import read_shared
from eagle3_jax.wirings.maps import side_map
from eagle3_jax.wirings.material import checked_rotation
from eagle3_jax.wirings.report import as_json, lines

DESCRIPTION = """Tries the wirings of a draft on a record and says which one explains its accept
length. Exit status 0: as configured is best; 1: something else is, the draft does not match its
target, or the engine differs; 2: one error."""


def add_parser(subparsers: Any):
    """Adds `doctor` to the commands of `eagle3`."""
    parser = subparsers.add_parser(
        "doctor", help="why an accept length is low", description=DESCRIPTION
    )
    add = parser.add_argument
    add("record", type=Path, metavar="RECORD", help="a record's folder or file")
    add("--draft", required=True, metavar="D", help="a converted draft's folder, or a Hub id")
    add("--target", metavar="T", help="its embedding and head; else the record's own reference")
    add("--num-steps", type=int, metavar="N", help="drafts a round; else the engine's, else 3")
    add(
        "--tree",
        type=tree_triple,
        metavar="STEPS,TOPK,NODES",
        help="what the record's engine drafted; else what the record says, else a chain",
    )
    add("--max-tokens", type=int, default=4096, metavar="N", help="tokens to score on (4096)")
    add("--rotation", type=Path, metavar="FILE", help="Q of a rotated target, .npy or .safetensors")
    add("--map", type=Path, metavar="FILE", help="another d2t, .npy or .safetensors")
    add("--token-shift", type=int, choices=(0, 1), help="your engine pairs state p with p + N (1)")
    add("--train-accuracy", type=float, metavar="P", help="the trainer's accuracy per position")
    add("--engine-accept-length", type=float, metavar="L", help="what the engine reports")
    add("--quiet", action="store_true", help="no progress on stderr")
    add("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Runs parsed arguments; returns the exit status."""
    _check(args)
    record = load(args.record)
    folder = model_folder(args.draft)
    manifest = read_manifest(folder)
    draft = load_draft(folder, dtype="float32")
    config = draft.config
    rotation, other = None, None
    if args.rotation is not None:
        rotation = checked_rotation(config, _array(args.rotation), str(args.rotation))
    if args.map is not None:
        table = _array(args.map)
        other = side_map(table, config.draft_vocab_size, config.vocab_size, str(args.map))
    target = record.embedding if args.target is None else model_folder(args.target)
    shared = None
    if target is not None and (args.target is not None or target.is_dir() or _borrows(config)):
        shared = _shared(target, config)
    found = diagnose(
        record,
        draft,
        shared,
        changes={} if args.token_shift is None else {"token_shift": args.token_shift},
        side_map=other,
        rotation=rotation,
        num_steps=args.num_steps,
        tree=args.tree,
        max_tokens=args.max_tokens,
        say=lambda text: None if args.quiet else print(text, file=sys.stderr, flush=True),
    )
    ids = manifest.get("aux", {}).get("ids")
    ids = None if ids is None else tuple(ids)
    side = _three_numbers(args, found.configured.accept_length, found.tree.num_steps)
    if args.json:
        say(json.dumps(finite(as_json(found, ids) | {"gap": side})))
    else:
        text = lines(found, ids)
        if side is not None:
            text.append(f"By training accuracy, replay and engine alone: {side['verdict']}.")
        say("\n".join(text))
    return 0 if found.healthy else 1


def _check(args: argparse.Namespace):
    for name, least in (("num_steps", 1), ("max_tokens", 16)):
        value = getattr(args, name)
        if value is not None and value < least:
            raise ConvertError("USAGE", f"--{name.replace('_', '-')} is {value}, at least {least}")
    length = args.engine_accept_length
    if length is not None and not 1 <= length < math.inf:
        raise ConvertError("USAGE", f"--engine-accept-length is {length}, expected at least 1")
    if args.train_accuracy is not None and not 0 <= args.train_accuracy <= 1:
        raise ConvertError("USAGE", f"--train-accuracy is {args.train_accuracy}, expected 0..1")


def _three_numbers(args: argparse.Namespace, replay: float, steps: int) -> dict[str, Any] | None:
    if args.train_accuracy is None or args.engine_accept_length is None:
        return None
    return {
        "train_accuracy": args.train_accuracy,
        "replay_accept_length": replay,
        "engine_accept_length": args.engine_accept_length,
        "verdict": gap(args.train_accuracy, replay, args.engine_accept_length, steps),
    }


def _borrows(config: DraftConfig) -> bool:
    return "target" in (config.embed, config.head)


def _shared(folder: Path, config: DraftConfig) -> Shared | None:
    """The target's embedding and head, both if they fit: owners are candidates too."""
    if config.hidden_size != config.target_hidden_size:
        return None
    both = {"embed": "target", "head": "target", "draft_vocab_size": config.vocab_size}
    try:
        return read_shared(folder, dataclasses.replace(config, **both))
    except ConfigError:
        return read_shared(folder, config)


def _array(path: Path) -> np.ndarray:
    """The one array of a .npy or .safetensors file."""
    if path.suffix == ".npy":
        try:
            return np.load(path, allow_pickle=False)
        except (ValueError, EOFError) as error:
            raise FileError(f"{path}: not a .npy file: {error}") from None
    if path.suffix != ".safetensors":
        raise FileError(f"{path}: expected a .npy or .safetensors file")
    source: TensorSource = SafetensorsFile(path)
    names = list(source.names())
    if len(names) != 1:
        raise FileError(f"{path}: {len(names)} tensors, expected one")
    return source.read(names[0])

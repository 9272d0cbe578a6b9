"""`eagle3 replay`: what a draft would have accepted on a record."""

import argparse
import contextlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax

from eagle3_jax import record as record_module
from eagle3_jax.checkpoint import load_draft, manifest_config, read_manifest
from eagle3_jax.command import check_writable, say, tree_triple
from eagle3_jax.config import DTYPES, AcceptRule, TreeConfig
from eagle3_jax.engine_rules import ENGINES
from eagle3_jax.files.whole import finite
from eagle3_jax.findings import ConvertError
from eagle3_jax.hub import model_folder
from eagle3_jax.record import Record
from eagle3_jax.records.checks import check_for_draft
from eagle3_jax.replay import replay
from eagle3_jax.replays.cost import Cost, read_cost, sweep
from eagle3_jax.replays.report import as_json, lines
from eagle3_jax.replays.result import MODES, ReplayResult
from eagle3_jax.replays.shared import read_shared
from eagle3_jax.tree import DRAFT_ATTENTIONS

DESCRIPTION = """The accept length of a draft under any trees, from a record of tokens and aux
states; no target runs. Exit status 0, 2 with one error."""
DEFAULT_TREES = (TreeConfig(3), TreeConfig(3, 4, 16))


def add_parser(subparsers: Any):
    """Adds `replay` to the commands of `eagle3`."""
    parser = subparsers.add_parser(
        "replay", help="accept lengths from a record, without a target", description=DESCRIPTION
    )
    add = parser.add_argument
    add("record", type=Path, metavar="RECORD", help="what `eagle3 record` wrote")
    add("--draft", required=True, metavar="D", help="a converted draft's folder, or a Hub id")
    add("--target", type=Path, metavar="T", help="its embedding (and head), if not the record's")
    trees = parser.add_mutually_exclusive_group()
    trees.add_argument(
        "--tree",
        action="append",
        type=tree_triple,
        metavar="STEPS,TOPK,NODES",
        help="such as 3,1 or 5,8,32; may be repeated (3,1 and 3,4,16)",
    )
    trees.add_argument("--sweep", action="store_true", help="chains and trees of usual sizes")
    add("--mode", choices=MODES, default="free", help="own rounds, or the engine's starts (free)")
    add("--draft-attention", choices=DRAFT_ATTENTIONS, help="what a drafted row sees")
    add("--as-engine", metavar="NAME", help=f"as one would: {', '.join(ENGINES)}")
    add("--keep-draft-kv", action="store_true", help="never rebuild draft KV from target states")
    add(
        "--temperature",
        action="append",
        type=float,
        metavar="X",
        help="also the accept length expected when sampling at X; repeatable",
    )
    add("--threshold-single", type=float, default=1.0, metavar="X", help="SGLang's, with it (1)")
    add("--threshold-acc", type=float, default=1.0, metavar="X", help="SGLang's, with it (1)")
    add("--cost", metavar="FILE|VALUES", help="decode=10,draft=0.8,verify=4:11,verify=32:14")
    add("--dtype", choices=DTYPES, default="float32", help="of weights and activations")
    add("--also-dtype", choices=DTYPES, help="replay in this one too, such as the engine's")
    add("--trace", type=Path, metavar="FILE", help="write the first tree's rounds as JSON lines")
    add("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Runs parsed arguments; returns the exit status."""
    cost = None if args.cost is None else read_cost(args.cost)
    if args.trace is not None:
        check_writable(args.trace)
    folder = model_folder(args.draft)
    manifest = read_manifest(folder)
    config = manifest_config(manifest, folder)
    record = record_module.load(args.record)
    check_for_draft(record, config)
    trees = _trees(args, config.draft_vocab_size)
    if cost is not None:
        for tree in trees:
            cost.round(tree)
    window = manifest.get("source_config", {}).get("max_position_embeddings")
    window = window if isinstance(window, int) else None
    found = _replay(args, args.dtype, folder, record, trees, window)
    other = None
    if args.also_dtype is not None and args.also_dtype != args.dtype:
        other = _replay(args, args.also_dtype, folder, record, trees, window)
    if args.trace is not None:
        trace = found.trees[0].trace
        assert trace is not None
        trace.save(args.trace)
    _print(args, found, other, cost)
    return 0


def _replay(
    args: argparse.Namespace,
    dtype: str,
    folder: Path,
    record: Record,
    trees: Sequence[TreeConfig],
    window: int | None,
) -> ReplayResult:
    with jax.enable_x64(True) if dtype == "float64" else contextlib.nullcontext():
        draft = load_draft(folder, dtype=dtype, as_engine=args.as_engine)
        shared = None
        config = draft.config
        if "target" in (config.embed, config.head):
            target = args.target or record.embedding
            if target is None:
                raise ConvertError(
                    "USAGE", "this draft uses the target's embedding or head: give --target"
                )
            shared = read_shared(target, config, dtype=dtype)
        return replay(
            record,
            draft,
            trees,
            mode=args.mode,
            shared=shared,
            draft_attention=args.draft_attention,
            refresh=not args.keep_draft_kv,
            temperatures=tuple(args.temperature or ()),
            rule=AcceptRule(
                threshold_single=args.threshold_single, threshold_acc=args.threshold_acc
            ),
            window=window,
            trace=args.trace is not None,
        )


def _trees(args: argparse.Namespace, draft_vocab_size: int) -> list[TreeConfig]:
    if args.sweep:
        trees = sweep(draft_vocab_size)
        return [t for t in trees if t.topk == 1] if args.keep_draft_kv else trees
    if args.tree:
        return list(dict.fromkeys(args.tree))
    if args.keep_draft_kv:
        return [TreeConfig(3)]
    return [t for t in DEFAULT_TREES if t.topk <= draft_vocab_size]


def _print(
    args: argparse.Namespace, found: ReplayResult, other: ReplayResult | None, cost: Cost | None
):
    if args.json:
        result = as_json(found, cost)
        if other is not None:
            result["also"] = as_json(other)
        say(json.dumps(finite(result)))
        return
    say("\n".join(lines(found, cost, best=args.sweep)))
    if other is not None:
        for mine, its in zip(found.trees, other.trees, strict=True):
            if mine.accept_length is not None and its.accept_length is not None:
                say(
                    f"{mine.tree}: accept length {mine.accept_length:.2f} in {found.dtype}, "
                    f"{its.accept_length:.2f} in {other.dtype}"
                )
    if args.trace is not None:
        say(f"trace of {found.trees[0].tree} written to {args.trace}")

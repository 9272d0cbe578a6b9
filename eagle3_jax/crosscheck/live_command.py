"""The options of `eagle3 crosscheck` that drive a server, or write our side as a dump."""

import argparse
import json
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from eagle3_jax.config import TreeConfig
from eagle3_jax.crosscheck.dumping import write_sglang_dump
from eagle3_jax.crosscheck.live import Asking, drive
from eagle3_jax.crosscheck.types import CrosscheckError, EngineRun
from eagle3_jax.draft import Eagle3Draft
from eagle3_jax.findings import ConvertError
from eagle3_jax.generate_report import progress
from eagle3_jax.records.live import Server
from eagle3_jax.targets.base import Target
from eagle3_jax.tree import DraftAttention

SERVER_ONLY = {
    "save": None,
    "max_new_tokens": None,
    "top_logprobs": None,
    "batch_size": None,
    "flush_cache": False,
    "timeout": None,
    "retries": None,
    "api_key_file": None,
}

LONGEST = 86400
"""A day; far more is beyond what a socket takes."""


def add_live_arguments(parser: argparse.ArgumentParser):
    """`--url` and what goes with it; `--write-sglang-dump`."""
    add = parser.add_argument
    add("--url", metavar="URL", help="ask a running SGLang server, such as http://127.0.0.1:30000")
    add("--save", type=Path, metavar="DIR", help="with --url: keep the answers, to repeat without")
    add("--max-new-tokens", type=int, metavar="N", help="with --url: per prompt (64)")
    add("--top-logprobs", type=int, metavar="N", help="with --url: best tokens at each place (5)")
    add("--batch-size", type=int, metavar="N", help="with --url: prompts in one request (1)")
    add("--flush-cache", action="store_true", help="with --url: empty the prefix cache first")
    add("--timeout", type=float, metavar="S", help="with --url: seconds without a byte (600)")
    add("--retries", type=int, metavar="N", help="with --url: after a failure that may pass (3)")
    add("--api-key-file", type=Path, metavar="FILE", help="with --url: sent as a bearer token")
    add("--write-sglang-dump", type=Path, metavar="DIR", help="our passes as SGLang's dumper files")


def check_live_arguments(args: argparse.Namespace):
    """Refuses combinations before anything is read or asked.

    Raises:
      ConvertError: code USAGE, or PROMPTS.
    """
    if args.write_sglang_dump is not None and (args.target is None or args.draft is None):
        raise ConvertError("USAGE", "--write-sglang-dump needs --target and --draft")
    if args.url is None:
        for name, unset in SERVER_ONLY.items():
            if getattr(args, name) != unset:
                raise ConvertError("USAGE", f"--{name.replace('_', '-')} needs --url")
        return
    if args.prompts is None:
        raise ConvertError("USAGE", "--url needs --prompts, the texts to ask for")
    least = {"max_new_tokens": 1, "top_logprobs": 0, "batch_size": 1, "retries": 0}
    for name, bound in least.items():
        value = getattr(args, name)
        if value is not None and value < bound:
            option = f"--{name.replace('_', '-')}"
            raise ConvertError("USAGE", f"{option} is {value}, expected at least {bound}")
    if args.timeout is not None and not 0 < args.timeout <= LONGEST:
        raise ConvertError(
            "USAGE", f"--timeout is {args.timeout}, expected seconds above 0, at most {LONGEST}"
        )


def _key(file: Path) -> str:
    """The key as a header takes it; an error never holds it."""
    key = file.read_bytes().strip()
    if not key or any(not 32 < byte < 127 for byte in key):
        raise ConvertError("USAGE", f"--api-key-file {file}: expected one line of ASCII, a key")
    return key.decode("ascii")


@contextmanager
def driven(
    args: argparse.Namespace, prompts: Sequence[Sequence[int]], target: Path | None
) -> Iterator[Path]:
    """Asks the server of `--url`; yields the folder of answers, kept with `--save`.

    Args:
      target: the folder the answers will be compared with, None without one.

    Raises:
      CrosscheckError: as `live.drive` does.
    """
    given = {
        name: getattr(args, name)
        for name in ("max_new_tokens", "top_logprobs", "batch_size")
        if getattr(args, name) is not None
    }
    stop = () if args.stop is None else tuple(args.stop)
    asking = Asking(
        **given, ignore_eos=args.ignore_eos, stop_token_ids=stop, flush_cache=args.flush_cache
    )
    server = Server(
        args.url,
        timeout=600.0 if args.timeout is None else args.timeout,
        retries=3 if args.retries is None else args.retries,
        api_key=None if args.api_key_file is None else _key(args.api_key_file),
    )
    config = None
    if target is not None:
        config = json.loads((target / "config.json").read_text(encoding="utf-8"))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "answers" if args.save is None else args.save
        with progress("prompts", len(prompts)) as step:
            drive(server, prompts, folder, asking, target=config, on_done=step)
        yield folder


def dump_ours(
    folder: Path,
    run: EngineRun,
    target: Target,
    draft: Eagle3Draft | None,
    tree: TreeConfig | None,
    draft_attention: DraftAttention | None,
    batch_size: int = 1,
) -> int:
    """Our passes over the run's prompts, its text followed; the number of files.

    Every prompt gets as many tokens as the longest answer of the run has.

    Raises:
      CrosscheckError: no draft, no tree, or a request without prompt and output.
    """
    tree = tree or run.settings.tree
    if draft is None or tree is None:
        raise CrosscheckError("--write-sglang-dump needs --draft and the engine's tree")
    for request in run.requests:
        if not request.prompt or not request.output:
            raise CrosscheckError(f"{run.source}: {request.name} has no prompt or no output")
    return write_sglang_dump(
        folder,
        target,
        draft,
        [request.prompt for request in run.requests],
        max_new_tokens=max(len(request.output) for request in run.requests),
        tree=tree,
        batch_size=batch_size,
        draft_attention=draft_attention,
        stop_token_ids=(),
        follow=[request.output for request in run.requests],
    )

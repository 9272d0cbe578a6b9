"""The `eagle3` command: one subcommand for each thing a user does."""

import importlib
import sys
from collections.abc import Sequence

from eagle3_jax.command import Parser, keep_programs, run_command
from eagle3_jax.version import __version__

COMMANDS = {
    "convert": "convert.from_torch",
    "export": "convert.to_torch",
    "inspect": "eagle3_jax.inspection.command",
    "speculate": "eagle3_jax.generate_command",
    "generate": "eagle3_jax.generate_command",
    "record": "eagle3_jax.records.command",
    "replay": "eagle3_jax.replays.command",
    "doctor": "eagle3_jax.wirings.command",
    "crosscheck": "eagle3_jax.crosscheck.command",
    "report": "eagle3_jax.reports.command",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs `eagle3 SUBCOMMAND ...`; returns its exit status."""
    if argv is None:
        keep_programs()
        argv = sys.argv[1:]
    parser = Parser(prog="eagle3", description="EAGLE-3 drafts in JAX, checked against engines.")
    parser.add_argument("--version", action="version", version=f"eagle3_jax {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    # Only the module of the command that was typed is imported; for help and errors, all.
    typed = {argv[0]} & COMMANDS.keys() if argv else set()
    modules = dict.fromkeys(COMMANDS[name] for name in COMMANDS if not typed or name in typed)
    for name in modules:
        importlib.import_module(name).add_parser(commands)
    return run_command(parser, lambda args: args.run(args), argv)

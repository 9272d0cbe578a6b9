"""The `eagle3` command: one subcommand for each thing a user does."""

from collections.abc import Sequence

from convert import from_torch, to_torch
from eagle3_jax import generate_command
from eagle3_jax.command import Parser, keep_programs, run_command
from eagle3_jax.crosscheck import command as crosscheck_command
from eagle3_jax.inspection import command as inspect_command
from eagle3_jax.records import command as record_command
from eagle3_jax.replays import command as replay_command
from eagle3_jax.reports import command as report_command
from eagle3_jax.version import __version__
from eagle3_jax.wirings import command as doctor_command


def main(argv: Sequence[str] | None = None) -> int:
    """Runs `eagle3 SUBCOMMAND ...`; returns its exit status."""
    if argv is None:
        keep_programs()
    parser = Parser(prog="eagle3", description="EAGLE-3 drafts in JAX, checked against engines.")
    parser.add_argument("--version", action="version", version=f"eagle3_jax {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    convert = commands.add_parser(
        "convert",
        help="a PyTorch draft to this project's form",
        description=from_torch.DESCRIPTION,
    )
    from_torch.add_arguments(convert)
    convert.set_defaults(run=from_torch.run)
    to_torch.add_parser(commands)
    inspect_command.add_parser(commands)
    generate_command.add_speculate_arguments(
        commands.add_parser(
            "speculate", help="text with a draft", description=generate_command.SPECULATE
        )
    )
    generate_command.add_generate_arguments(
        commands.add_parser(
            "generate", help="text without a draft", description=generate_command.GENERATE
        )
    )
    record_command.add_parser(commands)
    replay_command.add_parser(commands)
    doctor_command.add_parser(commands)
    crosscheck_command.add_parser(commands)
    report_command.add_parser(commands)
    return run_command(parser, lambda args: args.run(args), argv)

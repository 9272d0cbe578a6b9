"""Runs `eagle3 record ...` in this process."""

from eagle3_jax.command import Parser, run_command
from eagle3_jax.records import command as record_command


def run(*argv: object) -> int:
    parser = Parser(prog="eagle3")
    record_command.add_parser(parser.add_subparsers(required=True))
    return run_command(parser, lambda args: args.run(args), ["record", *map(str, argv)])


def fails(capsys, *argv: object) -> str:
    """The one line of an error; the exit status must be 2 and stdout empty."""
    capsys.readouterr()
    assert run(*argv) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    return err

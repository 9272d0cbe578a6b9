"""Runs `eagle3 doctor ...` in this process, and writes what it reads."""

from pathlib import Path

from eagle3_jax.command import Parser, run_command
from eagle3_jax.record import RecordWriter
from eagle3_jax.replays import command as replay_command
from eagle3_jax.wirings import command as doctor_command


def run(*argv: object) -> int:
    parser = Parser(prog="eagle3")
    commands = parser.add_subparsers(required=True)
    doctor_command.add_parser(commands)
    replay_command.add_parser(commands)
    return run_command(parser, lambda args: args.run(args), [str(a) for a in argv])


def write_record(path: Path, record, embedding: Path | None = None) -> Path:
    with RecordWriter(
        path,
        boundaries=record.boundaries,
        kind=record.kind,
        vocab_size=record.vocab_size,
        num_layers=record.num_layers,
        embedding=embedding,
    ) as writer:
        for sequence in record.sequences:
            writer.append(sequence)
    return path

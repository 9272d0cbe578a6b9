"""What every command shares: statuses and streams."""

import os
import subprocess
import sys

import jax
import pytest

from eagle3_jax.command import Parser, run_command

RECIPE = ["record", "recipe", "transformers", "--target"]


def test_a_reader_that_leaves_early_ends_the_command_quietly(sglang_models):
    """`eagle3 ... | head`: no traceback, and the status a broken pipe has in a shell."""
    read, write = os.pipe()
    os.close(read)
    argv = [sys.executable, "-m", "eagle3_jax", *RECIPE, str(sglang_models / "target")]
    with os.fdopen(write, "w") as out:
        done = subprocess.run(argv, stdout=out, stderr=subprocess.PIPE, text=True, check=False)
    assert done.returncode == 141
    assert done.stderr == ""


@pytest.mark.parametrize("flags", [[], ["--json"]])
def test_what_does_not_fit_the_device_is_one_line(flags, capsys):
    """A tree of thousands of beams, say: XLA's error, not its traceback."""

    def run(args):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory: 68 bytes.\nat a b c")

    parser = Parser(prog="eagle3")
    parser.add_argument("--json", action="store_true")
    assert run_command(parser, run, flags) == 2
    said = capsys.readouterr()
    assert "the device has no room: RESOURCE_EXHAUSTED: Out of memory: 68 bytes." in (
        said.out + said.err
    )
    assert (said.out + said.err).count("\n") == 1

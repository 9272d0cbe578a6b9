"""What every command shares: statuses and streams."""

import os
import subprocess
import sys

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

"""What every command shares: one line for an error, exit status 2, `--json` for machines."""

import argparse
import json
import os
import re
import signal
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NoReturn

import jax

from eagle3_jax.checkpoint import CheckpointError
from eagle3_jax.config import ConfigError, TreeConfig
from eagle3_jax.files.shards import FileError
from eagle3_jax.findings import ConvertError
from eagle3_jax.record import RecordError

LONGEST = 400
"""Characters of a usage error."""
BROKEN_PIPE = 128 + signal.SIGPIPE if hasattr(signal, "SIGPIPE") else 1

CODES: dict[type[ValueError], str] = {
    RecordError: "RECORD",
    FileError: "FILE",
    CheckpointError: "CHECKPOINT",
    ConfigError: "CONFIG_INVALID",
}


class Parser(argparse.ArgumentParser):
    """argparse whose complaints are errors like any other."""

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **{"allow_abbrev": False, **kwargs})

    def error(self, message: str) -> NoReturn:
        """Raises instead of printing the usage; a value of thousands of characters is cut."""
        message = message if len(message) <= LONGEST else f"{message[:LONGEST]}..."
        raise ConvertError("USAGE", f"{message} ({self.prog} --help)")


def run_command(
    parser: argparse.ArgumentParser,
    run: Callable[[argparse.Namespace], int | None],
    argv: Sequence[str] | None,
) -> int:
    """Parses and runs; `run`'s status, or 2 after one line on stderr (an object with `--json`)."""
    argv = sys.argv[1:] if argv is None else list(argv)
    try:
        status = run(parser.parse_args(argv)) or 0
        sys.stdout.flush()
        return status
    except BrokenPipeError:  # `| head`: what is left unsaid was not wanted
        _drop()
        return BROKEN_PIPE
    except ConvertError as error:
        return _fail(error.code, str(error), "--json" in argv)
    except tuple(CODES) as error:
        code = next(code for kind, code in CODES.items() if isinstance(error, kind))
        return _fail(code, str(error), "--json" in argv)
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        return _fail(
            "MEMORY",
            f"the device has no room: {str(error).splitlines()[0][:LONGEST]}",
            "--json" in argv,
        )
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    except OSError as error:
        return _fail("FILE", f"{error.filename or _drop()}: {error.strerror}", "--json" in argv)


def stop_ids(text: str) -> tuple[int, ...]:
    """The value of `--stop`: ids between commas, or none.

    Raises:
      ArgumentTypeError: anything else.
    """
    if text == "none":
        return ()
    parts = text.split(",")
    if not all(part.strip().isdecimal() for part in parts):
        raise argparse.ArgumentTypeError(f"expected ids such as 2,7 or none, found {text!r}")
    return tuple(int(part) for part in parts)


def tree_triple(text: str) -> TreeConfig:
    """The value of `--tree`: `3,1` for a chain, `5,8,32` for a tree.

    Raises:
      ArgumentTypeError: anything else, or a tree that cannot be.
    """
    parts = text.split(",")
    if not 1 <= len(parts) <= 3 or not all(re.fullmatch(r"\s*[0-9]{1,9}\s*", p) for p in parts):
        raise argparse.ArgumentTypeError(
            f"expected STEPS,1 for a chain or STEPS,TOPK,NODES such as 5,8,32: {text[:40]!r}"
        )
    try:
        return TreeConfig(*map(int, parts))
    except ConfigError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def cache_folder() -> Path:
    """`$XDG_CACHE_HOME/eagle3_jax`, or `~/.cache/eagle3_jax`."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(base) if os.path.isabs(base) else Path.home() / ".cache") / "eagle3_jax"


def keep_programs():
    """What one command compiled is there for the next, unless jax was told otherwise.

    jax's own settings hold: `JAX_COMPILATION_CACHE_DIR` for another place,
    `JAX_ENABLE_COMPILATION_CACHE=0` for none.
    """
    if jax.config.values["jax_compilation_cache_dir"] is None:
        jax.config.update("jax_compilation_cache_dir", str(cache_folder() / "programs"))


def check_writable(path: Path):
    """Refuses a file that cannot be written before the work it is for, not after.

    Raises:
      ConvertError: a folder, or one to write in that is missing or not ours.
    """
    if path.is_dir():
        raise ConvertError("FILE", f"{path}: a folder, expected a file to write")
    if not path.absolute().parent.is_dir():
        raise ConvertError("FILE", f"{path}: no folder {path.parent} to write in")
    if not os.access(path.absolute().parent, os.W_OK):
        raise ConvertError("FILE", f"{path}: no permission to write in {path.absolute().parent}")


def note(lines: Iterable[str]):
    """Tells on stderr what the user should know though it worked."""
    for line in lines:
        print(f"note: {line}", file=sys.stderr)


def say(text: str):
    """Prints to stdout, whatever the names in `text` hold and stdout can encode."""
    encoding = sys.stdout.encoding or "utf-8"
    print(text.encode(encoding, "backslashreplace").decode(encoding))


def _drop() -> str:
    """Sends what stdout still holds nowhere, since it takes no more; names it."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return "stdout"


def _fail(code: str, message: str, as_json: bool) -> int:
    if as_json:
        print(json.dumps({"error": {"code": code, "message": message}}))
    else:
        line = re.sub(r"[\x00-\x1f\x7f-\x9f\u2028\u2029]+", " ", message)
        line = line.encode("utf-8", "backslashreplace").decode()
        print(f"error [{code}]: {line}", file=sys.stderr)
    return 2

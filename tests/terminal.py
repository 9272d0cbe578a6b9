"""A terminal to look at: what a person sees after all cursor movements, and programs run in one."""

import fcntl
import os
import pty
import re
import select
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SEQUENCE = re.compile(r"\x1b\[([?\d;]*)([A-Za-z])")


class Screen:
    """Rows of (character, style) after everything fed; unknown sequences are errors.

    The style is the text of the last SGR sequence, empty after a reset.
    """

    def __init__(self, width: int, height: int):
        self.width, self.height = width, height
        self.rows: list[dict[int, tuple[str, str]]] = [{}]
        self.row = self.column = 0
        self.style = ""

    def feed(self, data: str) -> "Screen":
        at = 0
        while at < len(data):
            found = SEQUENCE.match(data, at)
            if found:
                self._control(*found.groups())
                at = found.end()
                continue
            self._put(data[at])
            at += 1
        return self

    def _put(self, char: str):
        if char == "\r":
            self.column = 0
        elif char == "\n":
            self.column = 0
            self._down()
        else:
            assert char.isprintable(), f"control character {char!r}"
            if self.column == self.width:
                self._put("\n")
            self.rows[self.row][self.column] = (char, self.style)
            self.column += 1

    def _down(self):
        self.row += 1
        if self.row == len(self.rows):
            self.rows.append({})

    def _control(self, numbers: str, kind: str):
        if kind == "m":
            self.style = "" if numbers in ("", "0") else numbers
        elif kind == "A":
            self.row -= int(numbers or 1)
            assert self.row >= max(0, len(self.rows) - self.height), "above the screen"
        elif kind == "K":
            assert numbers == "2"
            self.rows[self.row] = {}
        else:
            assert (numbers, kind) in (("?25", "l"), ("?25", "h")), f"CSI {numbers}{kind}"

    @property
    def lines(self) -> list[str]:
        return [
            "".join(row.get(i, (" ", ""))[0] for i in range(max(row, default=-1) + 1)).rstrip()
            for row in self.rows
        ]

    def style_of(self, row: int, text: str) -> str:
        """The one style of `text` on a row."""
        start = self.lines[row].index(text)
        styles = {self.rows[row][i][1] for i in range(start, start + len(text))}
        assert len(styles) == 1, f"{text!r} has styles {styles}"
        return styles.pop()


def run_in_terminal(
    arguments: Sequence[str],
    *,
    width: int = 80,
    height: int = 24,
    watch: Callable[[str, subprocess.Popen], None] = lambda text, process: None,
    timeout: float = 120,
) -> tuple[int, str]:
    """Runs `python -m eagle3_jax ARGUMENTS` in a pseudo-terminal; its status and all it wrote.

    `watch` is called with everything written so far whenever there is more.
    """
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", height, width, 0, 0))
    unset = ("NO_COLOR", "FORCE_COLOR", "COLUMNS", "LINES", "COLORTERM", "TTY_COMPATIBLE")
    environment = {k: v for k, v in os.environ.items() if k not in unset}
    environment |= {"TERM": "xterm-256color", "PYTHONIOENCODING": "utf-8"}
    process = subprocess.Popen(
        [sys.executable, "-m", "eagle3_jax", *arguments],
        cwd=ROOT,
        env=environment,
        stdin=slave,
        stdout=slave,
        stderr=slave,
        start_new_session=True,
    )
    os.close(slave)
    written, end = b"", time.monotonic() + timeout
    try:
        while True:
            ready, _, _ = select.select([master], [], [], 1.0)
            assert time.monotonic() < end, f"still running: {written!r}"
            if not ready:
                continue
            try:
                data = os.read(master, 65536)
            except OSError:  # Linux's answer once the other side is closed
                data = b""
            if not data:
                break
            written += data
            watch(written.decode("utf-8", "ignore"), process)
        return process.wait(timeout=30), written.decode()
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()
        os.close(master)

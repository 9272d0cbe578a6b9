"""What ptxas and XLA say of each kernel: registers, spills, shared memory, launches."""

import dataclasses
import functools
import math
import re
import subprocess
import tempfile
from pathlib import Path

ARCH = "sm_90a"
SHARED_LIMIT = 232448
"""Bytes of shared memory one block of an H200 can ask for (227 KiB)."""


@dataclasses.dataclass(frozen=True)
class Kernel:
    """One entry function, as assembled.

    Attributes:
      tma: copies by TMA. within_tiles: those not known to start at the first row of a tile.
    """

    name: str
    registers: int
    spill_stores: int
    spill_loads: int
    shared: int
    tma: int = 0
    within_tiles: int = 0

    @property
    def spills(self) -> int:
        """Bytes stored to and loaded from local memory because registers ran out."""
        return self.spill_stores + self.spill_loads


def find_ptxas() -> Path:
    """In the nvidia-cuda-nvcc wheel of this environment.

    Raises:
      FileNotFoundError: the wheel is not installed.
    """
    import nvidia

    for folder in nvidia.__path__:
        for path in sorted(Path(folder).glob("*/bin/ptxas")):
            return path
    raise FileNotFoundError("no ptxas under the nvidia wheels: pip install nvidia-cuda-nvcc")


def assemble(path: Path) -> list[Kernel]:
    """Assembles a PTX file for the H200 and reads the report.

    Raises:
      RuntimeError: ptxas refused it; the message is its own.
    """
    command = [str(find_ptxas()), f"-arch={ARCH}", "-v", str(path), "-o", "/dev/null"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{path.name}: {done.stderr.strip()[:400]}")
    text = path.read_text()
    return [
        dataclasses.replace(kernel, **tma_copies(text, kernel.name))
        for kernel in parse(done.stderr)
    ]


def tma_copies(text: str, kernel: str) -> dict[str, int]:
    """`tma`, the copies by TMA of one kernel, and `within_tiles`: those whose row within a tile,
    the second coordinate, is not plain 0.

    The rest of such a tile would arrive as zeros.

    Raises:
      ValueError: no such kernel.
    """
    _, named, rest = text.partition(f".entry {kernel}(")
    if not named:
        raise ValueError(f"no kernel {kernel} in this PTX")
    body = rest.partition(".entry ")[0]
    copies = re.findall(r"cp\.async\.bulk\.tensor.*\{([^}]*)\}", body)
    found = 0
    for coordinates in copies:
        row = coordinates.split(",")[1].strip()
        values = re.findall(
            rf"^\s*(?:@\S+\s+)?(\S+)\s+{re.escape(row)},\s*(.*);", body, re.MULTILINE
        )
        found += row != "0" and set(values) != {("mov.b32", "0")}
    return {"tma": len(copies), "within_tiles": found}


@functools.cache
def assemble_text(text: str) -> tuple[Kernel, ...]:
    """The kernels of one PTX module; programs share many."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "module.ptx"
        path.write_text(text)
        return tuple(assemble(path))


def parse(report: str) -> list[Kernel]:
    """The kernels of a `ptxas -v` report.

    Raises:
      ValueError: a kernel without its line of registers.
    """
    kernels = []
    parts = re.split(r"Compiling entry function '([^']+)'", report)
    for name, text in zip(parts[1::2], parts[2::2], strict=True):
        used = re.search(r"Used (\d+) registers", text)
        if used is None:
            raise ValueError(f"no registers reported for {name}")
        stores = re.search(r"(\d+) bytes spill stores", text)
        loads = re.search(r"(\d+) bytes spill loads", text)
        shared = re.search(r"(\d+) bytes smem", text)
        numbers = (int(m.group(1)) if m else 0 for m in (stores, loads, shared))
        kernels.append(Kernel(name, int(used.group(1)), *numbers))
    return kernels


@dataclasses.dataclass(frozen=True)
class Launch:
    """One launch as XLA will make it.

    Attributes:
      blocks: of the grid. shared: bytes one block asks for. graphed: within a CUDA graph.
    """

    name: str
    blocks: int
    threads: int
    shared: int
    graphed: bool


def launches(thunks: str) -> tuple[list[Launch], int]:
    """The kernels in XLA's list of thunks, and how many CUDA graphs hold them."""
    found, graphs, graph_indent = [], 0, None
    for line in thunks.splitlines():
        indent = len(line) - len(line.lstrip())
        if graph_indent is not None and indent <= graph_indent:
            graph_indent = None
        if "kCommandBuffer" in line:
            graphs, graph_indent = graphs + 1, indent
        shape = re.search(
            r"(\S+) grid: \[([\d, ]+)\] threads: \[([\d, ]+)\]\s+shared_memory: (\d+)", line
        )
        if shape:
            name, grid, threads, shared = shape.groups()
            blocks, width = (math.prod(map(int, x.split(","))) for x in (grid, threads))
            found.append(Launch(name, blocks, width, int(shared), graph_indent is not None))
    return found, graphs

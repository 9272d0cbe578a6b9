"""What every benchmark shares: cores, alternating runs, a result that says where it came from."""

import argparse
import json
import math
import os
import platform
import statistics
import struct
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent


def parser(doc: str | None) -> argparse.ArgumentParser:
    """The options of every benchmark."""
    made = argparse.ArgumentParser(description=(doc or "").split("\n")[0])
    made.add_argument("--cores", type=int, metavar="N", help="use the first N cores only")
    made.add_argument("--repeats", type=int, default=5, metavar="N", help="alternating runs")
    made.add_argument("--out", type=Path, metavar="FILE", help="also write the result as JSON")
    return made


def use_cores(count: int | None):
    """Keeps this process on the first cores; call it before jax or torch start their threads."""
    if count is not None:
        cores = sorted(os.sched_getaffinity(0))
        if not 1 <= count <= len(cores):
            sys.exit(f"--cores is {count}, this process may use 1 to {len(cores)}")
        os.sched_setaffinity(0, cores[:count])


def alternate(runs: dict[str, Callable[[], object]], repeats: int) -> dict[str, list[float]]:
    """Seconds of each run, once each in turn `repeats` times, after one of each to warm up.

    A slow minute of the machine falls on all of them, so their ratios are worth more than their
    times.
    """
    for run in runs.values():
        run()
    times: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(repeats):
        for name, run in runs.items():
            start = time.perf_counter()
            run()
            times[name].append(time.perf_counter() - start)
    return times


def medians(times: dict[str, list[float]]) -> dict[str, float]:
    """The median of each."""
    return {name: statistics.median(values) for name, values in times.items()}


def ratio(times: dict[str, list[float]], above: str, below: str) -> float:
    """Median over the rounds of time(above) / time(below), both taken in the same round."""
    pairs = zip(times[above], times[below], strict=True)
    return statistics.median(a / b for a, b in pairs)


def provenance() -> dict[str, Any]:
    """Command, commit, packages, processor, cores and load."""
    packages = {}
    for name in ("jax", "jaxlib", "flax", "numpy", "torch", "transformers"):
        try:
            packages[name] = version(name)
        except PackageNotFoundError:
            continue
    commit = subprocess.run(
        ["git", "describe", "--always", "--dirty"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    ).stdout.strip()
    cpu = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.is_file():
        names = [x for x in info.read_text().splitlines() if x.startswith("model name")]
        cpu = names[0].split(":", 1)[1].strip() if names else cpu
    return {
        "command": " ".join(["python", *sys.argv]),
        "commit": commit,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "python": platform.python_version(),
        "packages": packages,
        "cpu": cpu,
        "cores": len(os.sched_getaffinity(0)),
        "load": os.getloadavg()[0],
    }


def write_weights(
    file: Path, shapes: dict[str, tuple[int, ...]], dtype: str, itemsize: int, block: bytes
) -> int:
    """A safetensors file of these tensors, filled with `block` over and over; returns its size."""
    header, total = {}, 0
    for name, shape in shapes.items():
        end = total + itemsize * math.prod(shape)
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [total, end]}
        total = end
    text = json.dumps(header).encode()
    with file.open("wb") as stream:
        stream.write(struct.pack("<Q", len(text)) + text)
        for start in range(0, total, len(block)):
            stream.write(block[: total - start])
    return total


def report(result: dict[str, Any], out: Path | None):
    """Prints the result as JSON and writes it where asked."""
    text = json.dumps({"provenance": provenance()} | result, indent=1)
    print(text)
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(text + "\n")

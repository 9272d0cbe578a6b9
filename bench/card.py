"""What GPU benchmarks share: the device, its copy bandwidth, timed calls, options."""

import argparse
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

import harness
import jax
import jax.numpy as jnp


def parser(doc: str | None) -> argparse.ArgumentParser:
    """The options of every GPU benchmark."""
    made = harness.parser(doc)
    made.add_argument(
        "--tiny", action="store_true", help="sizes for a CPU: only shows that it runs"
    )
    made.add_argument("--pair", default="llama-3.1-8b", help="of bench/models.py")
    return made


def bandwidth(tiny: bool, repeats: int = 10) -> float:
    """Bytes a second of a large copy, read and write counted both."""
    count = (2**22 if tiny else 2**31) // 4
    x = jnp.ones((count,), jnp.float32)
    copy = jax.jit(lambda x: x + 1)
    times = harness.alternate({"copy": lambda: copy(x).block_until_ready()}, repeats)
    return 2 * x.nbytes / min(times["copy"])


def chained(step: Callable[[Any], Any], carry: Any, calls: int) -> Callable[[], None]:
    """A run of `calls` steps, each fed the last one's result, waited for once.

    The steps are queued ahead of the device, so that a step longer than its dispatch is timed
    without it. The carry may be donated.
    """

    def run():
        nonlocal carry
        for _ in range(calls):
            carry = step(carry)
        jax.block_until_ready(carry)

    return run


def keep(result: dict[str, Any], out: Path | None):
    """Writes what there is so far, so that a run cut short leaves its first numbers."""
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        text = harness.json.dumps({"provenance": harness.provenance()} | result, indent=1)
        out.write_text(text + "\n")


def device() -> dict[str, Any]:
    """What the numbers were measured on."""
    found = jax.devices()[0]
    return {"platform": found.platform, "kind": found.device_kind, "count": len(jax.devices())}


def against_floor(seconds: float, floor_bytes: int, bytes_per_s: float) -> dict[str, float]:
    """A time beside the least the card could need for those bytes."""
    least = floor_bytes / bytes_per_s
    return {
        "us": round(1e6 * seconds, 2),
        "floor_us": round(1e6 * least, 2),
        "time / floor": round(seconds / least, 3),
    }

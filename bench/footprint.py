"""Start to first token, and peak memory: `python bench/footprint.py` after `make model`.

Each number comes from a fresh process. Start to first token runs `eagle3 generate` for one token,
first without a compilation cache, then twice with one: the last is the warm start. Memory is the
peak resident size of a process that loads the models and generates, less that of one that only
imports, over weights and caches.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import harness

parser = harness.parser(__doc__)
args = parser.parse_args()
harness.use_cores(args.cores)
from pair import folders  # noqa: E402

IMPORT = """
import json, resource
import jax, eagle3_jax as e3
jax.devices()
"""
GENERATE = """
target = e3.load_target({folder!r})
draft = e3.load_draft({draft!r}, target=target)
loaded = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
e3.speculate(target, draft, [[1] * 40], max_new_tokens=64, tree=e3.TreeConfig(3, 4, 8))
"""
PRINT = """
print(json.dumps({"peak": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024} | {
    "loaded": globals().get("loaded")}))
"""
CONVERT = """
from convert import from_torch
from_torch.main([{source!r}, "--target", {folder!r}, "--out", {out!r}])
"""


def python(code: str) -> dict:
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=harness.ROOT, capture_output=True, text=True, check=False
    )
    if done.returncode:
        sys.exit(done.stderr)
    return json.loads(done.stdout.splitlines()[-1])


def first_token(folder: Path, cache: Path | None) -> float:
    command = [sys.executable, "-m", "eagle3_jax", "generate", "--target", str(folder)]
    command += ["--prompt", "Hello", "--max-new-tokens", "1", "--json"]
    environment = dict(os.environ)
    environment.pop("JAX_COMPILATION_CACHE_DIR", None)
    if cache is not None:
        environment["JAX_COMPILATION_CACHE_DIR"] = str(cache)
    start = time.perf_counter()
    subprocess.run(command, cwd=harness.ROOT, env=environment, capture_output=True, check=True)
    return time.perf_counter() - start


folder, draft = folders()
with tempfile.TemporaryDirectory() as scratch:
    cold = first_token(folder, None)
    first_token(folder, Path(scratch) / "cache")
    warm = sorted(first_token(folder, Path(scratch) / "cache") for _ in range(3))
    base = python(IMPORT + PRINT)["peak"]
    ran = python(IMPORT + GENERATE.format(folder=str(folder), draft=str(draft)) + PRINT)
    source, out = str(harness.ROOT / "demo/draft"), str(Path(scratch) / "draft")
    converted = python(IMPORT + CONVERT.format(source=source, folder=str(folder), out=out) + PRINT)[
        "peak"
    ]
weights = json.loads(
    subprocess.run(
        [
            sys.executable,
            "-c",
            "import json, sys, jax, eagle3_jax as e3\n"
            "from eagle3_jax.modules import take_apart\n"
            f"t = e3.load_target({str(folder)!r}); d = e3.load_draft({str(draft)!r}, target=t)\n"
            "print(json.dumps(sum(x.nbytes for m in (t, d) for x in take_apart(m)[0])))",
        ],
        cwd=harness.ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout
)
size = sum(f.stat().st_size for f in (harness.ROOT / "demo/draft").iterdir())
MIB = 2**20
harness.report(
    {
        "first_token_s": {"no compilation cache": round(cold, 2), "warm": round(warm[1], 2)},
        "memory_MiB": {
            "import": base // MIB,
            "weights": weights // MIB,
            "peak after loading, above import": (ran["loaded"] - base) // MIB,
            "peak after speculate, above import": (ran["peak"] - base) // MIB,
            "peak / weights": round((ran["peak"] - base) / weights, 3),
            "draft on disk": size // MIB,
            "peak of the converter, above import": (converted - base) // MIB,
        },
    },
    args.out,
)

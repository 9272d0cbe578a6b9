"""The kernel and the step compiled for an H200, no GPU needed: `make check-gpu`.

    python bench/check_gpu.py                     every program, cut to 2 and 4 target layers
    python bench/check_gpu.py --only qwen         those whose name holds a word
    python bench/check_gpu.py --full              also one 8B round at its whole depth
    python bench/check_gpu.py --out FILE          also as JSON; the table beside it as .txt
    python bench/check_gpu.py --attention xla     what it says without the kernel: it must fail

Exit status 1 and one line a fault: registers spilled, shared memory over the limit, a cache or a
weight written as a whole in a round, temporaries over the budget, a mask of rows x slots, a host
call, state that is not overwritten in place, or a kernel that does not run as often as the layers
say: attention and the writing of new rows once per target layer and draft forward, the keeping of
a path once per so many caches. docs/gpu.md says how to read the table. Prefill is the kernel's
here: cuDNN's does not compile without a GPU.
"""

import argparse
import dataclasses
import functools
import sys
from collections.abc import Callable
from pathlib import Path

import harness
import jax
from gpu_cases import CASES, Case, compile_case
from gpu_kernels import KERNEL_CASES, compile_kernel
from gpu_report import Fault, Row, extrapolate, table
from models import PAIRS

from eagle3_jax.ops.attention import use_attention

LAYERS = (2, 4)
FULL = Case("llama-3.1-8b", "3/4/8", 2048)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--only", metavar="WORD", help="programs whose name holds it")
    parser.add_argument("--full", action="store_true", help="one 8B round at its whole depth too")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write JSON, and a .txt beside it")
    parser.add_argument(
        "--attention", choices=["xla"], help="XLA's own attention instead of the kernel: it fails"
    )
    args = parser.parse_args(argv)
    rows: list[Row] = []
    grown: dict[str, dict[str, float]] = {}

    def add(name: str, make: Callable[[], Row]) -> Row:
        rows.append(attempt(name, make))
        print(table(rows[-1:]).splitlines()[1], flush=True)
        return rows[-1]

    def wanted(case: object) -> bool:
        return args.only is None or args.only in str(case)

    for kernel in filter(wanted, KERNEL_CASES):
        add(str(kernel), functools.partial(compile_kernel, kernel))
    with use_attention(args.attention):
        for case in filter(wanted, CASES):
            found = [
                add(f"{case}, {n} layers", functools.partial(compile_case, case, n)) for n in LAYERS
            ]
            full = PAIRS[case.pair].target.num_layers
            grown[str(case)] = extrapolate(found[0], found[1], LAYERS, full)
        if args.full:
            add(f"{FULL}, whole", functools.partial(compile_case, FULL, None))
    return show(rows, grown, args.out)


def attempt(name: str, make: Callable[[], Row]) -> Row:
    """The row of a program; one that does not compile is a fault of its own."""
    try:
        return make()
    except Exception as error:  # whatever XLA, Triton or ptxas refuse
        text = " ".join(str(error).split())[:300]
        return Row(name, faults=[Fault("COMPILE", f"{type(error).__name__}: {text}")])


def show(rows: list[Row], grown: dict[str, dict[str, float]], out: Path | None) -> int:
    """Prints and writes the tables; 1 with a fault."""
    lines = [f"jax {jax.__version__}, compiled for an H200 (sm_90a); nothing was run", ""]
    lines += [table(rows), ""]
    lines += ["at full depth, straight through both depths:"] * bool(grown)
    for name, values in grown.items():
        numbers = ", ".join(f"{k} {v:.0f}" for k, v in values.items())
        lines.append(f"  {name}: {numbers}")
    faults = [(row.program, fault) for row in rows for fault in row.faults]
    lines += ["", *(f"FAULT {program}: {fault}" for program, fault in faults)]
    lines.append(f"{len(rows)} programs, {len(faults)} faults")
    print("\n".join(["", *lines]))
    if out is not None:
        result = {
            "provenance": harness.provenance(),
            "programs": [dataclasses.asdict(row) for row in rows],
            "full_depth": grown,
        }
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(harness.json.dumps(result, indent=1) + "\n")
        out.with_suffix(".txt").write_text("\n".join(lines) + "\n")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())

"""The kernel and the step compiled for an H200, no GPU needed: `make check-gpu`.

    python bench/check_gpu.py                     every program, cut to 2 and 4 target layers
    python bench/check_gpu.py --only qwen         those whose name holds a word
    python bench/check_gpu.py --full              also one 8B round at its whole depth
    python bench/check_gpu.py --out FILE          also as JSON; the table beside it as .txt

Exit status 1 and one line a fault: registers spilled, shared memory over the limit, a cache or a
weight written as a whole in a round, temporaries over the budget, a mask of rows x slots, a host
call, state that is not overwritten in place, or a kernel that does not run once per target layer
and draft forward. docs/gpu.md says how to read the table. Prefill is left out: on a GPU it is
cuDNN's, which does not compile without a GPU.
"""

import argparse
import dataclasses
import sys
from pathlib import Path

import h200
import harness
import hlo
import jax
import jax.numpy as jnp
import models
import ptx
from gpu_report import Expected, Row, examine, extrapolate, table
from models import PAIRS, TREES, Pair

from eagle3_jax import loop, sharding
from eagle3_jax.config import TreeConfig
from eagle3_jax.state import Program, Weights

CAPACITY = 64
LARGE = 2**20
"""Elements from which an array counts as a weight that must not be copied."""
LAYERS = (2, 4)
KERNEL = "tree_attention_kernel"


@dataclasses.dataclass(frozen=True)
class Case:
    """One program: `round` or `finish` (the loop), for a pair, a tree, a context and devices."""

    pair: str
    tree: str | None
    context: int
    what: str = "round"
    batch: int = 1
    devices: int = 1

    def __str__(self) -> str:
        size = f"{self.context // 1024}k"
        parts = [self.pair, self.what, self.tree or "decode", size]
        parts += [f"batch {self.batch}"] * (self.batch > 1)
        parts += [f"{self.devices} devices"] * (self.devices > 1)
        return " ".join(parts)


CASES = (
    *(Case("llama-3.1-8b", tree, size) for tree in TREES for size in (2048, 32768)),
    Case("llama-3.1-8b", None, 2048),
    *(Case("llama-3.1-8b", tree, 2048, "finish") for tree in TREES),
    Case("llama-3.1-8b", "5/8/32", 32768, "finish"),
    Case("llama-3.1-8b", "3/4/8", 2048, batch=8),
    Case("qwen3-8b", "3/1/4", 2048),
    Case("qwen3-8b", "3/4/8", 32768),
    Case("qwen3-8b", "5/8/32", 2048, "finish"),
    Case("llama-3.3-70b", "3/4/8", 2048, devices=8),
    Case("llama-3.3-70b", "5/8/32", 32768, "finish", devices=8),
)


def budget(pair: Pair, tree: TreeConfig | None, batch: int) -> int:
    """Bytes of temporaries a round may take: 64 MiB and three times the target's logits."""
    nodes = 1 if tree is None else tree.num_draft_tokens
    return 64 * 2**20 + 3 * 4 * batch * nodes * pair.target.vocab_size


def expected(case: Case, pair: Pair, weights: Weights, state, devices: int) -> Expected:
    """What the program must hold, from its shapes."""
    tree = TREES[case.tree] if case.tree else None
    forwards = 0 if tree is None else tree.num_steps  # num_steps - 1 levels and the extend
    whole = {leaf.size for leaf in jax.tree.leaves(weights) if leaf.size >= LARGE}
    caches = {x.size for x in (*state.target_cache.k, *state.target_cache.v)}
    if state.draft_cache is not None:
        caches |= {x.size for x in (*state.draft_cache.k, *state.draft_cache.v)}

    def with_shards(sizes: set[int]) -> frozenset[int]:
        return frozenset(sizes | {n // devices for n in sizes if n // devices >= LARGE // 8})

    return Expected(
        kernel=KERNEL,
        calls=pair.target.num_layers + forwards * pair.draft.num_layers,
        cache=with_shards(caches),
        weights=with_shards(whole),
        batch=case.batch,
        slots=state.target_cache.k[0].shape[1],
        budget=budget(pair, tree, case.batch),
        donated=len(jax.tree.leaves(state)),
    )


def build(case: Case, pair: Pair, mesh) -> tuple[Program, Weights, object, object]:
    """The program and its arguments as shapes."""
    tree = TREES[case.tree] if case.tree else None
    weights, target, draft = models.shapes_of(pair, jnp.bfloat16)
    program = models.programs(pair, target, draft, tree)
    specs = None
    if case.devices > 1:
        specs = Weights(
            sharding.weight_specs(target.build(weights.target), case.devices),
            sharding.weight_specs(draft.build(weights.draft), case.devices),
        )
    if tree is None:
        weights = Weights(weights.target, ())
    limits = jax.eval_shape(lambda: models.limits_of(CAPACITY))
    slots = models.slots_for(case.context, CAPACITY, tree)
    state = models.state_shapes(program, weights, limits, case.batch, slots, CAPACITY)
    spread = sharding.state_specs(state, case.devices) if case.devices > 1 else None
    return (
        program,
        h200.place(weights, mesh, specs),
        h200.place(state, mesh, spread),
        h200.place(limits, mesh),
    )


def compile_case(case: Case, layers: int | None) -> Row:
    """Compiles one program at one depth and looks at it."""
    pair = PAIRS[case.pair] if layers is None else PAIRS[case.pair].cut(layers)
    mesh = h200.mesh(model=case.devices)
    arguments = build(case, pair, mesh)
    function = {"round": loop.round_jit, "finish": loop.finish_jit}[case.what]
    made = h200.compile_for(function, *arguments, on=mesh)
    return examine(
        f"{case}, {pair.target.num_layers} layers",
        hlo.parse(made.hlo),
        [kernel for text in made.ptx for kernel in ptx.assemble_text(text)],
        made.thunks,
        made.temporaries,
        expected(case, pair, arguments[1], arguments[2], case.devices),
        made.seconds,
    )


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--only", metavar="WORD", help="programs whose name holds it")
    parser.add_argument("--full", action="store_true", help="one 8B round at its whole depth too")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write JSON, and a .txt beside it")
    args = parser.parse_args(argv)
    rows: list[Row] = []
    grown: dict[str, dict[str, float]] = {}
    runs: list[tuple[Case, tuple[int | None, ...]]] = [(case, LAYERS) for case in CASES]
    if args.full:
        runs.append((Case("llama-3.1-8b", "3/4/8", 2048), (None,)))
    for case, depths in runs:
        if args.only and args.only not in str(case):
            continue
        found = [compile_case(case, depth) for depth in depths]
        for row in found:
            print(table([row]).splitlines()[1], flush=True)
        rows += found
        if len(found) == 2:
            full = PAIRS[case.pair].target.num_layers
            grown[str(case)] = extrapolate(found[0], found[1], LAYERS, full)
    return show(rows, grown, args.out)


def show(rows: list[Row], grown: dict[str, dict[str, float]], out: Path | None) -> int:
    """Prints and writes the tables; 1 with a fault."""
    lines = [f"jax {jax.__version__}, compiled for an H200 (sm_90a); nothing was run", ""]
    lines += [table(rows), "", "at full depth, straight through both depths:"]
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

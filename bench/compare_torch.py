"""The same step here and in plain PyTorch (SDPA, a CUDA graph), in one run.

    python bench/compare_torch.py         on a GPU: Llama-3.1-8B's shapes, random weights
    python bench/compare_torch.py --tiny  on a CPU: shows that it runs

`decode` is one token of every sequence, `verify` a tree's rows in one pass; both sides read the
same number of bytes and give the argmax after each row. Neither side drafts: PyTorch has no draft
to compare with. PyTorch's step is bench/torch_step.py, replayed as a CUDA graph.
"""

import functools

import card
import harness

parser = card.parser(__doc__)
parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 32], metavar="T")
parser.add_argument("--batch", type=int, nargs="+", default=[1, 8], metavar="B")
parser.add_argument("--context", type=int, nargs="+", default=[2048, 32768], metavar="S")
parser.add_argument("--calls", type=int, default=20, metavar="N", help="queued in one timed run")
args = parser.parse_args()
harness.use_cores(args.cores)

import floors  # noqa: E402
import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import models  # noqa: E402
import torch  # noqa: E402
import torch_step  # noqa: E402

from eagle3_jax.layers import Rows  # noqa: E402


def ours(batch: int, rows: int, context: int, slots: int):
    """A run of `args.calls` target passes, cache donated."""
    length = jnp.full((batch,), context, jnp.int32)

    @functools.partial(jax.jit, donate_argnames="cache")
    def step(leaves, cache):
        model = target.build(leaves)
        tokens = jnp.zeros((batch, rows), jnp.int32)
        states, _, cache = model.states(tokens, Rows.chain(length, rows), cache)
        return cache, jnp.argmax(model.logits(states), axis=-1)

    cache = target.build(weights).new_cache(batch, slots)
    return card.chained(lambda cache: step(weights, cache)[0], cache, args.calls)


def theirs(batch: int, rows: int, context: int, slots: int):
    """The same in PyTorch."""
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    peer = torch_step.TorchTarget(pair.target, batch, slots, context, device, dtype)
    step = peer.graphed(batch, rows)

    def run():
        for _ in range(args.calls):
            step()
        torch_step.wait(device)

    return run


@torch.no_grad()
def measure(batch: int, rows: int, context: int, bytes_per_s: float) -> dict:
    """Both sides at one shape."""
    slots = -(-(context + rows) // 32) * 32
    runs = {
        "eagle3_jax": ours(batch, rows, context, slots),
        "torch": theirs(batch, rows, context, slots),
    }
    times = harness.alternate(runs, args.repeats)
    floor = floors.target_pass(pair.target, rows, batch, context).total
    found = {
        name: card.against_floor(t / args.calls, floor, bytes_per_s)
        for name, t in harness.medians(times).items()
    }
    return {
        "what": "decode" if rows == 1 else "verify",
        "batch": batch,
        "rows": rows,
        "context": context,
        "parts": found,
        "torch / eagle3_jax": round(harness.ratio(times, "torch", "eagle3_jax"), 3),
    }


if args.tiny:
    args.pair, args.rows, args.batch, args.context, args.calls = "tiny", [1, 4], [2], [64], 2
device = "cuda" if torch.cuda.is_available() and jax.default_backend() == "gpu" else "cpu"
pair = models.PAIRS[args.pair]
shapes, target, _ = models.shapes_of(pair, jnp.float32 if device == "cpu" else jnp.bfloat16)
weights = models.fill(shapes.target, 0)
result = {
    "device": card.device() | {"torch": device},
    "pair": pair.name,
    "copy_bytes_per_s": card.bandwidth(args.tiny),
    "passes": [],
}
for context in args.context:
    for batch in args.batch:
        for rows in args.rows:
            result["passes"].append(measure(batch, rows, context, result["copy_bytes_per_s"]))
            card.keep(result, args.out)
harness.report(result, args.out)

"""The tree kernel against XLA's masked attention and `jax.nn.dot_product_attention`.

    python bench/kernel.py                on a GPU: Llama-3.1-8B's heads, contexts to 32k
    python bench/kernel.py --tiny         on a CPU: shows that it runs, in interpret mode

One call attends T rows over a cache of S slots. Each run goes through as many layers' caches as do
not fit the L2 together, as decoding does; the time is of one call. `share` is the bytes of keys and
values over the time, as a part of the copy bandwidth measured in the same process.
"""

import functools

import card
import harness

parser = card.parser(__doc__)
parser.add_argument("--batch", type=int, nargs="+", default=[1, 8], metavar="B")
parser.add_argument("--rows", type=int, nargs="+", default=[1, 4, 8, 32], metavar="T")
parser.add_argument("--context", type=int, nargs="+", default=[2048, 8192, 32768], metavar="S")
args = parser.parse_args()
harness.use_cores(args.cores)

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import models  # noqa: E402

from eagle3_jax.ops.attention import attend  # noqa: E402
from eagle3_jax.ops.bits import chain_bits  # noqa: E402

L2_TIMES_FOUR = 4 * 62914560


def layers_of(batch: int, slots: int, heads: int, width: int) -> int:
    """Caches of one run: more than the L2 holds, at most 64, on a CPU one."""
    if args.tiny:
        return 1
    each = 2 * 2 * batch * slots * heads * width
    return min(64, max(2, -(-L2_TIMES_FOUR // each)))


def mask_of(lengths: jax.Array, rows: int, slots: int) -> jax.Array:
    """[B, 1, T, S] bool, what `attend` sees, as `jax.nn.dot_product_attention` takes it."""
    at = jnp.arange(slots, dtype=jnp.int32)[None, None, None]
    row = jnp.arange(rows, dtype=jnp.int32)[None, None, :, None]
    return at <= lengths[:, None, None, None] + row


def calls(rows: int, slots: int, scale: float) -> dict:
    """Name -> function of (q, k, v, lengths, ancestors)."""

    def plain(q, k, v, lengths, ancestors, implementation=None):
        mask = mask_of(lengths, rows, slots)
        return jax.nn.dot_product_attention(
            q, k, v, mask=mask, scale=scale, implementation=implementation
        )

    ours = "pallas" if jax.default_backend() == "gpu" else "interpret"
    found = {
        "kernel": functools.partial(attend, scale=scale, implementation=ours),
        "xla": functools.partial(attend, scale=scale, implementation="xla"),
        "dot_product_attention": plain,
    }
    if jax.default_backend() == "gpu":
        found["dot_product_attention cudnn"] = functools.partial(plain, implementation="cudnn")
    return found


def measure(batch: int, rows: int, context: int, bytes_per_s: float) -> dict:
    """Times of all implementations for one shape, and their largest difference from XLA's."""
    pair = models.PAIRS["tiny" if args.tiny else args.pair].target
    N, K, H = pair.num_heads, pair.num_kv_heads, pair.head_dim
    slots = -(-(context + rows) // 32) * 32
    layers = layers_of(batch, slots, K, H)
    dtype = jnp.bfloat16
    shapes = [jax.ShapeDtypeStruct((batch, slots, K, H), dtype)] * (2 * layers)
    caches = models.fill(tuple(shapes), 1)
    q = models.fill(jax.ShapeDtypeStruct((batch, rows, N, H), dtype), 2)
    lengths = jnp.full((batch,), context, jnp.int32)
    bits = jnp.broadcast_to(jnp.asarray(chain_bits(rows)), (batch, rows, -(-rows // 32)))
    runs, first, failed = {}, {}, {}
    for name, function in calls(rows, slots, H**-0.5).items():

        @jax.jit
        def through(q, caches, function=function):
            for layer in range(layers):
                q = function(q, caches[2 * layer], caches[2 * layer + 1], lengths, bits)
            return q

        try:
            first[name] = jax.jit(function)(q, caches[0], caches[1], lengths, bits)
            step = functools.partial(lambda q, run: run(q, caches), run=through)
            runs[name] = card.chained(step, q, 1 if args.tiny else 10)
            runs[name]()
        except Exception as error:  # cuDNN refuses some shapes: said in the result
            runs.pop(name, None)
            failed[name] = f"{type(error).__name__}: {str(error)[:120]}"
    times = harness.medians(harness.alternate(runs, args.repeats))
    per_call = {name: t / layers / (1 if args.tiny else 10) for name, t in times.items()}
    moved = 2 * batch * (context + rows) * K * H * dtype.dtype.itemsize
    exact = first["xla"].astype(jnp.float32)
    return {
        "batch": batch,
        "rows": rows,
        "context": context,
        "layers": layers,
        "us": {k: round(1e6 * t, 2) for k, t in per_call.items()},
        "share": {k: round(moved / t / bytes_per_s, 3) for k, t in per_call.items()},
        "largest_difference": {
            k: float(jnp.max(jnp.abs(x.astype(jnp.float32) - exact))) for k, x in first.items()
        },
        "failed": failed,
    }


if args.tiny:
    args.batch, args.rows, args.context = [1, 2], [4], [64]
result = {
    "device": card.device(),
    "copy_bytes_per_s": card.bandwidth(args.tiny),
    "shapes": [],
}
for context in args.context:
    for batch in args.batch:
        for rows in args.rows:
            result["shapes"].append(measure(batch, rows, context, result["copy_bytes_per_s"]))
            card.keep(result, args.out)
harness.report(result, args.out)

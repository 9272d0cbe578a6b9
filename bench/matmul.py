"""A few rows against the weights of one model pass, by the layout the weights are stored in.

    python bench/matmul.py

The weights of 30 layers do not fit any cache, so every product reads them from memory, as decoding
does. `layers.Linear` stores a weight as `[out, in]` when it widens its input, else as `[in, out]`.
"""

import sys

import harness

parser = harness.parser(__doc__)
parser.add_argument("--rows", type=int, nargs="+", default=[1, 2, 4, 8, 16], metavar="T")
args = parser.parse_args()
harness.use_cores(args.cores)

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402

sys.path.insert(0, str(harness.ROOT))
from eagle3_jax.precision import matmul  # noqa: E402

LAYERS = 30
SIZES = {"widens": (3072, 576), "square": (576, 576), "narrows": (576, 1536)}


def products(transposed: bool):
    """All layers' products one after the other, each waiting for the last."""

    def run(x, weights):
        total = jnp.zeros((), x.dtype)
        for weight in weights:
            y = matmul(x, weight, transposed=transposed)
            total = total + jnp.sum(y)
            x = x + y[:1, :1] * 1e-9
        return total

    return jax.jit(run)


rng = np.random.default_rng(0)
result = {}
for name, (out, into) in SIZES.items():
    weights = [rng.standard_normal((out, into), np.float32) for _ in range(LAYERS)]
    stored = {
        "[out, in]": (products(False), [jnp.asarray(w) for w in weights]),
        "[in, out]": (products(True), [jnp.asarray(w.T.copy()) for w in weights]),
    }
    for rows in args.rows:
        x = jnp.ones((rows, into), jnp.float32)
        runs = {
            layout: lambda f=f, w=w, x=x: f(x, w).block_until_ready()
            for layout, (f, w) in stored.items()
        }
        times = harness.alternate(runs, args.repeats)
        result[f"{name} {[out, into]}, {rows} rows"] = {
            "ms": {k: round(1e3 * v / LAYERS, 4) for k, v in harness.medians(times).items()},
            "[in, out] / [out, in]": round(harness.ratio(times, "[in, out]", "[out, in]"), 3),
        }
harness.report({"products": result}, args.out)

"""Attention on four devices, run by test_attention_programs.py in a process that has them."""

import jax
import numpy as np
from attention_cases import draw
from jax.sharding import AxisType

from eagle3_jax.ops.attention import attend


def check(shape: tuple, axes: tuple[int, int], local: tuple[int, int] | None):
    """The result over a mesh of `data` and `model`; `local`: sequences and KV heads of a device."""
    case = draw(np.random.default_rng(0), "float32", shape)
    case.sinks = np.arange(case.q.shape[2], dtype=np.float32)
    mesh = jax.make_mesh(axes, ("data", "model"), axis_types=(AxisType.Auto,) * 2)

    def sharded(*arrays, **options):
        run = jax.jit(lambda *args: attend(*args, implementation="interpret", **options))
        text = run.lower(*arrays).as_text()
        assert ("manual_computation" in text) == (local is not None)
        if local:
            _, S, _, H = case.k.shape
            assert f"tensor<{local[0]}x{S}x{local[1]}x{H}xf32>" in text
        return run(*arrays)

    with jax.set_mesh(mesh):
        case.check(case.run(sharded))


if __name__ == "__main__":
    assert jax.device_count() == 4
    # (B, T, S, K, G, H, words)
    check((2, 3, 20, 2, 2, 16, 1), (2, 2), (1, 1))
    check((2, 3, 20, 4, 1, 16, 1), (1, 4), (2, 1))
    check((2, 3, 20, 1, 2, 16, 1), (2, 2), (1, 1))
    check((1, 3, 20, 1, 2, 16, 1), (2, 2), None)
    print("ok")

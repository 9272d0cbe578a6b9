"""Kernels on four devices, run by test_attention_programs.py in a process that has them."""

import jax
import jax.numpy as jnp
import numpy as np
from attention_cases import draw
from jax.sharding import AxisType

from eagle3_jax.cache import KVCache
from eagle3_jax.ops.append import append_rows
from eagle3_jax.ops.attention import attend, attend_causal, use_attention


def check(
    shape: tuple, axes: tuple[int, int], local: tuple[int, int] | None, *, run: bool = True
) -> None:
    """The program over a mesh of `data` and `model`, and what comes out where it is to `run`.

    `local`: sequences and KV heads of a device.
    """
    case = draw(np.random.default_rng(0), "float32", shape)
    case.sinks = np.arange(case.q.shape[2], dtype=np.float32)
    mesh = jax.make_mesh(axes, ("data", "model"), axis_types=(AxisType.Auto,) * 2)

    def sharded(*arrays, **options):
        sharded = jax.jit(lambda *args: attend(*args, implementation="interpret", **options))
        program = sharded.lower(*arrays)
        text = program.as_text()
        assert ("manual_computation" in text) == (local is not None)
        if local:
            _, S, _, H = case.k.shape
            assert f"tensor<{local[0]}x{S}x{local[1]}x{H}xf32>" in text
        return program.compile()(*arrays) if run else None

    with jax.set_mesh(mesh):
        found = case.run(sharded)
    if run:
        case.check(found)


def check_the_others():
    """Rows appended, a path kept and a prefill, each split over heads as on one device."""
    B, T, S, K, G, H = 2, 4, 20, 4, 2, 16
    rng = np.random.default_rng(1)

    def normal(*shape):
        return jnp.asarray(rng.normal(size=shape), jnp.float32)

    grouped, cos, sin = normal(B, T, K, G + 2, H), *normal(2, B, T, 1, H // 2)
    k, v = normal(2, B, S, K, H)
    norms = tuple(normal(2, H))
    start = jnp.asarray([3, 9], jnp.int32)
    path = jnp.asarray([[0, 2, 3], [0, 1, 3]], jnp.int32)

    def run(grouped, rotation, norms, k, v, start, path):
        q, k, v = append_rows(grouped, rotation, norms, k, v, start, 1e-5)
        cache = KVCache((k,), (v,)).keep(path, start)
        return q, cache, attend_causal(q, k[:, :T], v[:, :T], scale=0.5)

    def found(implementation):
        def chosen(*args):
            with use_attention(implementation):
                return run(*args)

        args = (grouped, (cos, sin), norms, k, v, start, path)
        program = jax.jit(chosen).lower(*args)
        return program.compile()(*args), program.as_text().count("manual_computation")

    expected, parts = found("xla")
    assert parts == 0
    with jax.set_mesh(jax.make_mesh((2, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)):
        mine, parts = found("interpret")
    assert parts >= 3
    for a, b in zip(jax.tree.leaves(mine), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5)


if __name__ == "__main__":
    assert jax.device_count() == 4
    jax.config.update("jax_disable_most_optimizations", True)
    # (B, T, S, K, G, H, words)
    check((2, 3, 20, 2, 2, 16, 1), (2, 2), (1, 1))
    check((2, 3, 20, 4, 1, 16, 1), (1, 4), (2, 1), run=False)
    check((2, 3, 20, 1, 2, 16, 1), (2, 2), (1, 1))
    check((1, 3, 20, 1, 2, 16, 1), (2, 2), None, run=False)
    check_the_others()
    print("ok")

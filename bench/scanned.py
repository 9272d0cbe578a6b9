"""Target layers unrolled or scanned, compiled for an H200: what the compiler makes of each.

    .venv-gpu/bin/python bench/scanned.py --layers 8

One verification pass of Llama-3.1-8B's shapes, cut. `unrolled` is the target as it is, `scanned`
the same blocks in a `lax.scan` over stacked weights and caches, written back in place. Both are
judged as `make check-gpu` judges.
"""

import argparse
import dataclasses
import functools
import sys

import gpu_cases
import gpu_kernels
import h200
import jax
import jax.numpy as jnp
import models
from flax import nnx
from gpu_report import Expected, Row, table
from jax import lax

from eagle3_jax.cache import KVCache
from eagle3_jax.layers import Rows
from eagle3_jax.modules import take_apart
from eagle3_jax.rope import rotations
from eagle3_jax.targets.llama import LlamaBlock

NODES, SLOTS = 8, 2144


def unrolled(pair: models.Pair):
    """(function of weights, caches, tokens, length; their shapes)."""
    shapes, target, _ = models.shapes_of(pair, jnp.bfloat16)
    cache = jax.eval_shape(lambda x: target.build(x).new_cache(1, SLOTS), shapes.target)

    def run(weights, cache, tokens, length):
        model = target.build(weights)
        states, _, cache = model.states(tokens, Rows.chain(length, NODES), cache)
        return jnp.argmax(model.logits(states), axis=-1), cache

    return run, shapes.target, cache


def scanned(pair: models.Pair):
    """The same over stacked layers."""
    shapes, target, _ = models.shapes_of(pair.cut(2), jnp.bfloat16)  # its embedding and head
    config, count = pair.target, pair.target.num_layers
    block, structure = take_apart(nnx.eval_shape(lambda: LlamaBlock(config, 0, rngs=nnx.Rngs(0))))
    stacked = tuple(jax.ShapeDtypeStruct((count, *x.shape), jnp.bfloat16) for x in block)
    buffer = jax.ShapeDtypeStruct(
        (count, 1, SLOTS, config.num_kv_heads, config.head_dim), jnp.bfloat16
    )

    def run(weights, cache, tokens, length):
        once, layers = weights
        model = target.build(once)
        rows = Rows.chain(length, NODES)
        x = jnp.take(model.embed.weight[...], tokens, axis=0, mode="clip")
        rotation = rotations(config.rope, config.head_dim, rows.positions, x.dtype)

        def layer(carry, here):
            x, k, v = carry
            index, leaves = here
            one = KVCache((k[index],), (v[index],))
            x, one = structure.build(leaves)(x, rotation, rows, one, 0)
            k = lax.dynamic_update_index_in_dim(k, one.k[0], index, 0)
            v = lax.dynamic_update_index_in_dim(v, one.v[0], index, 0)
            return (x, k, v), None

        index = jnp.arange(count, dtype=jnp.int32)
        (x, k, v), _ = lax.scan(layer, (x, *cache), (index, layers))
        return jnp.argmax(model.logits(model.norm(x)), axis=-1), (k, v)

    return run, (shapes.target, stacked), (buffer, buffer)


def look(name: str, made, layers: int) -> Row:
    """Compiles one form and judges it."""
    run, weights, cache = made
    mesh = h200.mesh()
    tokens = jax.ShapeDtypeStruct((1, NODES), jnp.int32)
    length = jax.ShapeDtypeStruct((1,), jnp.int32)
    arguments = h200.place((weights, cache, tokens, length), mesh)
    compiled = h200.compile_for(jax.jit(run, donate_argnums=1), *arguments, on=mesh)
    one_cache = SLOTS * 8 * 128
    sizes = {x.size for x in jax.tree.leaves(weights) if x.size >= gpu_cases.LARGE}
    wanted = Expected(
        kernel=gpu_kernels.KERNEL,
        calls=layers,
        cache=frozenset({one_cache, one_cache * layers}),
        weights=frozenset(sizes | {n // layers for n in sizes}),
        batch=1,
        slots=SLOTS,
        budget=gpu_kernels.KERNEL_BUDGET,
        donated=len(jax.tree.leaves(cache)),
    )
    return gpu_kernels.look(name, compiled, wanted)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--layers", type=int, default=8)
    args = parser.parse_args()
    pair = models.PAIRS["llama-3.1-8b"].cut(args.layers)
    pair = dataclasses.replace(pair, name=f"{args.layers} layers")
    make = functools.partial(look, layers=args.layers)
    rows = [make("unrolled", unrolled(pair)), make("scanned", scanned(pair))]
    print(table(rows))
    for row in rows:
        print("\n".join(f"{row.program}: {fault}" for fault in row.faults))
    return 0


if __name__ == "__main__":
    sys.exit(main())

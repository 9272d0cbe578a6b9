"""Every name of Pallas's Triton backend that this project uses.

jax deprecated that backend in 0.11 (a warning when a kernel is lowered; 0.12.0.1 still has it). The
kernels import from here alone. `mosaic_attention` is the tree kernel's port to Mosaic GPU; it
compiles with both jax versions this project supports and waits for a card to be timed on. It has no
twin for the small kernels yet (`merge`, `append`, `keep`), which move little.
"""

from collections.abc import Callable, Mapping, Sequence

import jax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton

load = pltriton.load
store = pltriton.store
barrier = pltriton.debug_barrier
"""All warps of a program wait for each other. Compiled programs only: interpreted ones have one."""


def call(
    kernel: Callable,
    *,
    grid: tuple[int, ...],
    in_specs: Sequence[pl.BlockSpec],
    out_specs: Sequence[pl.BlockSpec],
    out_shape: Sequence[jax.ShapeDtypeStruct],
    warps: int,
    stages: int,
    interpret: bool,
    aliases: Mapping[int, int] | None = None,
) -> Callable:
    """`pl.pallas_call` on the Triton backend: without compiler parameters jax picks one itself.

    Large caches are safe: for an array of more than 2**32 bytes Pallas counts offsets in 64 bits,
    below that those of 16- and 32-bit elements fit 32 (jax 0.10.2 and 0.12.0.1). Of 8 bits they
    would not. What a kernel counts itself is int32.

    `aliases`: input -> the output that overwrites it.
    """
    return pl.pallas_call(
        kernel,
        grid=grid,
        in_specs=in_specs,
        out_specs=out_specs,
        out_shape=out_shape,
        compiler_params=pltriton.CompilerParams(num_warps=warps, num_stages=stages),
        interpret=interpret,
        input_output_aliases=dict(aliases or {}),
    )

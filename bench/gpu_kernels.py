"""The attention calls `make check-gpu` compiles alone, and how a compiled program is looked at."""

import dataclasses
import functools

import h200
import hlo
import jax
import jax.numpy as jnp
import ptx
from gpu_report import Expected, Row, examine

from eagle3_jax.ops.attention import attend, attend_causal
from eagle3_jax.ops.tree_attention import tree_attention

KERNEL = "tree_attention_kernel"
MOSAIC = "mosaic_attention_kernel"
KERNEL_BUDGET = 64 * 2**20
"""Bytes of partial results of one call's splits."""


@dataclasses.dataclass(frozen=True)
class KernelCase:
    """One attention call: T rows, G query heads a KV head, widths, and what it does besides."""

    rows: int
    width: int
    group: int = 4
    kv_heads: int = 8
    batch: int = 1
    slots: int = 32768
    words: int = 0  # 0: as many as the rows need
    dtype: str = "bfloat16"
    window: int | None = None
    softcap: float | None = None
    sinks: bool = False
    latent: int | None = None  # width of the values within the keys
    prefill: bool = False  # of `slots` rows
    mosaic: bool = False

    def __str__(self) -> str:
        rows = "prefill" if self.prefill else f"T {self.rows}"
        what = "mosaic" if self.mosaic else "kernel"
        parts = [f"{what} {self.dtype} H {self.width} {rows} G {self.group}"]
        parts += [f"K {self.kv_heads}"] * (self.kv_heads != 8)
        parts += [f"batch {self.batch}"] * (self.batch > 1)
        parts += [f"{self.slots // 1024}k"]
        parts += [f"{self.words} words"] * (self.words > 0)
        parts += [f"window {self.window}"] * (self.window is not None)
        parts += ["softcap"] * (self.softcap is not None) + ["sinks"] * self.sinks
        parts += [f"values {self.latent} of the keys"] * (self.latent is not None)
        return " ".join(parts)


KERNEL_CASES = (
    *(KernelCase(rows, width) for width in (64, 80, 96, 128, 192, 256) for rows in (1, 8, 32, 64)),
    *(KernelCase(rows, 128, slots=2048) for rows in (1, 4, 8, 32)),
    *(KernelCase(8, 128, batch=batch) for batch in (8, 64)),
    KernelCase(8, 128, group=1, kv_heads=32),
    KernelCase(8, 128, group=5),
    KernelCase(8, 128, group=7, kv_heads=4),
    KernelCase(32, 128, group=8, kv_heads=1),
    KernelCase(10, 128, words=3),
    KernelCase(8, 128, window=4096),
    KernelCase(8, 256, softcap=50.0),
    KernelCase(8, 64, group=8, sinks=True, window=128),
    *(KernelCase(rows, 576, 64, 1, latent=512) for rows in (1, 8)),
    *(KernelCase(8, width, dtype="float16") for width in (128, 256)),
    *(KernelCase(8, width, dtype="float32") for width in (64, 128, 256)),
    *(KernelCase(0, 128, dtype=of, prefill=True) for of in ("bfloat16", "float32")),
    KernelCase(0, 256, softcap=50.0, window=4096, prefill=True),
    KernelCase(0, 64, group=8, sinks=True, window=128, prefill=True),
    KernelCase(0, 576, 64, 1, latent=512, prefill=True),
    *(KernelCase(rows, 128, mosaic=True) for rows in (1, 8, 32, 64)),
    *(KernelCase(8, width, mosaic=True) for width in (64, 256)),
    KernelCase(8, 128, batch=8, mosaic=True),
    KernelCase(10, 128, words=3, softcap=50.0, mosaic=True),
    KernelCase(8, 128, dtype="float16", mosaic=True),
)


def compile_kernel(case: KernelCase) -> Row:
    """Compiles one attention call alone and looks at it."""
    mesh = h200.mesh()
    shape, dtype = jax.ShapeDtypeStruct, jnp.dtype(case.dtype)
    B, K, S = case.batch, case.kv_heads, case.slots
    T = S if case.prefill else case.rows
    cache = shape((B, S, K, case.width), dtype)
    words = case.words or -(-T // 32)
    arrays = (
        shape((B, T, K * case.group, case.width), dtype),
        cache,
        None if case.latent else cache,
        shape((B,), jnp.int32),
        shape((B, T, words), jnp.uint32),
        (shape((B, T), jnp.int32), shape((B, S), jnp.int32)) if case.window else None,
        shape((K * case.group,), dtype) if case.sinks else None,
    )
    options = {
        "scale": case.width**-0.5,
        "softcap": case.softcap,
        "window": case.window,
        "width": case.latent,
    }
    run = functools.partial(tree_attention, **options)
    if case.mosaic:
        arrays = arrays[:5]
        run = functools.partial(
            attend, implementation="mosaic", scale=case.width**-0.5, softcap=case.softcap
        )
    if case.prefill:
        q, k, v, *_, sinks = arrays
        arrays = (q, k, v, sinks)

        def run(q, k, v, sinks):
            return attend_causal(q, k, v, sinks=sinks, **options)

    made = h200.compile_for(jax.jit(run), *h200.place(arrays, mesh), on=mesh)
    wanted = Expected(
        kernel=MOSAIC if case.mosaic else KERNEL,
        calls=1,
        cache=frozenset({cache.size}),
        weights=frozenset(),
        batch=B,
        slots=S,
        budget=KERNEL_BUDGET,
        donated=0,
        prompt=S if case.prefill else None,
        tma=case.mosaic,
    )
    return look(str(case), made, wanted)


def look(name: str, made: h200.Compiled, wanted: Expected) -> Row:
    """The row of a compiled program."""
    return examine(
        name,
        hlo.parse(made.hlo),
        [kernel for text in made.ptx for kernel in ptx.assemble_text(text)],
        made.thunks,
        made.temporaries,
        wanted,
        made.seconds,
    )

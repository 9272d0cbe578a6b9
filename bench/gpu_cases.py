"""The programs `make check-gpu` compiles, and what each must hold."""

import dataclasses
import functools

import h200
import hlo
import jax
import jax.numpy as jnp
import models
import numpy as np
import ptx
from gpu_report import Expected, Row, examine
from models import PAIRS, TREES, Pair

from eagle3_jax import loop, sharding
from eagle3_jax.config import SamplingConfig, TreeConfig
from eagle3_jax.ops.attention import attend, attend_causal
from eagle3_jax.ops.tree_attention import tree_attention
from eagle3_jax.sampling import SamplingPlan, SamplingValues
from eagle3_jax.sampling_config import AcceptRule
from eagle3_jax.state import Program, Weights

CAPACITY = 64
LARGE = 2**20
"""Elements from which an array counts as a weight that must not be copied."""
KERNEL = "tree_attention_kernel"
MOSAIC = "mosaic_attention_kernel"
KERNEL_BUDGET = 64 * 2**20
"""Bytes of partial results of one call's splits."""


@dataclasses.dataclass(frozen=True)
class Sampled:
    """How a case samples: a name, the request and the rule."""

    name: str
    config: SamplingConfig
    rule: AcceptRule

    def __str__(self) -> str:
        return self.name


PLAIN = Sampled("target_only", SamplingConfig(1.0), AcceptRule("target_only"))
CUT = Sampled(
    "target_only, top-k and top-p",
    SamplingConfig(0.7, top_k=50, top_p=0.9),
    AcceptRule("target_only"),
)
PENALISED = Sampled(
    "rejection, top-p and penalties",
    SamplingConfig(0.7, top_p=0.9, repetition_penalty=1.1),
    AcceptRule("rejection"),
)
DRAWN = Sampled(
    "rejection, drafts drawn", SamplingConfig(1.0), AcceptRule("rejection", sampled_drafts=True)
)
BLOCK = Sampled(
    "rejection by block, drafts drawn, top-p",
    SamplingConfig(0.7, top_p=0.9),
    AcceptRule("rejection", sampled_drafts=True, block=True),
)


@dataclasses.dataclass(frozen=True)
class Case:
    """One program: `round`, `finish` (the loop) or `start` (the prefill of `context` tokens).

    `sampled`: None is greedy.
    """

    pair: str
    tree: str | None
    context: int
    what: str = "round"
    batch: int = 1
    devices: int = 1
    sampled: Sampled | None = None
    dtype: str = "bfloat16"

    def __str__(self) -> str:
        size = f"{self.context // 1024}k"
        parts = [self.pair, self.what, self.tree or "decode", size]
        parts += [self.dtype] * (self.dtype != "bfloat16")
        parts += [str(self.sampled)] * (self.sampled is not None)
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
    *(Case("llama-3.1-8b", "3/4/8", 2048, sampled=how) for how in (PLAIN, CUT, PENALISED)),
    *(Case("llama-3.1-8b", "3/1/4", 2048, sampled=how) for how in (DRAWN, BLOCK)),
    Case("llama-3.1-8b", "5/8/32", 2048, "finish", sampled=CUT),
    Case("llama-3.1-8b", None, 2048, sampled=CUT),
    Case("qwen3-8b", "3/4/8", 32768, sampled=CUT),
    Case("qwen3-8b", "3/1/4", 2048, sampled=DRAWN),
    Case("llama-3.1-8b", "3/4/8", 32768, "start"),
    Case("llama-3.3-70b", "3/4/8", 2048, devices=8),
    Case("llama-3.3-70b", "5/8/32", 32768, "finish", devices=8),
)


def budget(case: Case, pair: Pair, tree: TreeConfig | None) -> int:
    """Bytes of temporaries a round may take: 64 MiB and three times the target's logits.

    A sampled one, which sorts and adds up distributions, eight times. A prefill: its rows four
    times as wide as the widest, an MLP's gate and up.
    """
    if case.what == "start":
        wide = case.batch * case.context * 2 * pair.target.intermediate_size
        return 64 * 2**20 + 4 * wide * jnp.dtype(case.dtype).itemsize
    nodes = 1 if tree is None else tree.num_draft_tokens
    times = 3 if case.sampled is None else 8
    return 64 * 2**20 + times * 4 * case.batch * nodes * pair.target.vocab_size


def expected(case: Case, pair: Pair, weights: Weights, state, devices: int) -> Expected:
    """What the program must hold, from its shapes."""
    tree = TREES[case.tree] if case.tree else None
    forwards = 0 if tree is None else tree.num_steps  # num_steps - 1 levels and the extend
    prefill = case.what == "start"
    whole = {leaf.size for leaf in jax.tree.leaves(weights) if leaf.size >= LARGE}
    caches = {x.size for x in (*state.target_cache.k, *state.target_cache.v)}
    if state.draft_cache is not None:
        caches |= {x.size for x in (*state.draft_cache.k, *state.draft_cache.v)}

    def with_shards(sizes: set[int]) -> frozenset[int]:
        return frozenset(sizes | {n // devices for n in sizes if n // devices >= LARGE // 8})

    return Expected(
        kernel=KERNEL,
        calls=pair.target.num_layers + (1 if prefill else forwards) * pair.draft.num_layers,
        # A prefill makes the caches; activations of a long prompt are as large as a weight.
        cache=frozenset() if prefill else with_shards(caches),
        weights=frozenset() if prefill else with_shards(whole),
        batch=case.batch,
        slots=state.target_cache.k[0].shape[1],
        budget=budget(case, pair, tree),
        donated=0 if prefill else len(jax.tree.leaves(state)),
        prompt=case.context if prefill else None,
    )


def build(case: Case, pair: Pair, mesh) -> tuple[Program, Weights, object, object]:
    """The program, and weights, state and limits as shapes."""
    tree = TREES[case.tree] if case.tree else None
    weights, target, draft = models.shapes_of(pair, jnp.dtype(case.dtype))
    program = models.programs(pair, target, draft, tree)
    values = None
    if case.sampled is not None:
        config, vocabulary = case.sampled.config, pair.target.vocab_size
        plan = SamplingPlan.of(config, case.sampled.rule)
        program = dataclasses.replace(program, sampling=plan)
        values = jax.eval_shape(
            lambda: SamplingValues.of(config, case.batch, vocabulary, np.dtype(np.float32))
        )
    specs = None
    if case.devices > 1:
        specs = Weights(
            sharding.weight_specs(target.build(weights.target), case.devices),
            sharding.weight_specs(draft.build(weights.draft), case.devices),
        )
    if tree is None:
        weights = Weights(weights.target, ())
    limits = jax.eval_shape(lambda: models.limits_of(CAPACITY))
    limits = dataclasses.replace(limits, sampling=values)
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
    made = h200.compile_for(*jitted(case, *arguments), on=mesh)
    wanted = expected(case, pair, arguments[1], arguments[2], case.devices)
    return look(f"{case}, {pair.target.num_layers} layers", made, wanted)


def jitted(case: Case, program: Program, weights, state, limits) -> tuple:
    """The function to compile and its arguments."""
    if case.what == "start":
        slots, where = state.target_cache.k[0].shape[1], state.length.sharding
        prompts, lengths = (
            jax.ShapeDtypeStruct(shape, jnp.int32, sharding=where)
            for shape in ((case.batch, case.context), (case.batch,))
        )

        def start(weights, prompts, lengths, limits):
            return loop.start(
                program, weights, prompts, lengths, limits, slots=slots, capacity=CAPACITY
            )

        return jax.jit(start), weights, prompts, lengths, limits
    function = {"round": loop.round_jit, "finish": loop.finish_jit}[case.what]
    return function, program, weights, state, limits


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

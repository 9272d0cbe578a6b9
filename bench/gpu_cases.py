"""The programs `make check-gpu` compiles, and what each must hold."""

import dataclasses

import h200
import jax
import jax.numpy as jnp
import models
import numpy as np
from gpu_kernels import KERNEL, look
from gpu_report import Expected, Row
from models import PAIRS, TREES, Pair

from eagle3_jax import loop, sharding
from eagle3_jax.config import SamplingConfig, TreeConfig
from eagle3_jax.ops import keep
from eagle3_jax.sampling import SamplingPlan, SamplingValues
from eagle3_jax.sampling_config import AcceptRule
from eagle3_jax.state import Program, Weights

CAPACITY = 64
APPEND, KEEP = "append_rows_kernel", "keep_rows_kernel"
LARGE = 2**20
"""Elements from which an array counts as a weight that must not be copied."""


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
    layers = pair.target.num_layers + (1 if prefill else forwards) * pair.draft.num_layers
    keeps = 0
    if tree is not None and tree.topk > 1 and not prefill:  # a chain's path is where it belongs
        rows, width = tree.num_steps + 1, pair.target.head_dim
        at_once = keep.buffers_at_once(rows, width, jnp.dtype(case.dtype).itemsize)
        keeps = -(-2 * pair.target.num_layers // at_once)
    whole = {leaf.size for leaf in jax.tree.leaves(weights) if leaf.size >= LARGE}
    caches = {x.size for x in (*state.target_cache.k, *state.target_cache.v)}
    if state.draft_cache is not None:
        caches |= {x.size for x in (*state.draft_cache.k, *state.draft_cache.v)}

    def with_shards(sizes: set[int]) -> frozenset[int]:
        return frozenset(sizes | {n // devices for n in sizes if n // devices >= LARGE // 8})

    return Expected(
        kernel=KERNEL,
        calls=layers,
        others={APPEND: 0 if prefill else layers, KEEP: keeps},
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

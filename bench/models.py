"""Pairs by their published sizes, as shapes only or with random weights made on the device."""

import dataclasses
import functools
import math
import sys

import harness
import jax
import jax.numpy as jnp
from flax import nnx

sys.path.insert(0, str(harness.ROOT))
from eagle3_jax import loop
from eagle3_jax.config import DraftConfig, RopeConfig, TargetConfig, TreeConfig
from eagle3_jax.draft import Eagle3Draft
from eagle3_jax.modules import Structure, take_apart
from eagle3_jax.state import Limits, LoopState, Program, Weights
from eagle3_jax.targets.llama import LlamaTarget

LLAMA3_ROPE = RopeConfig(
    theta=500000.0,
    kind="llama3",
    factor=8.0,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    original_max_position_embeddings=8192,
)
TREES = {
    "3/1/4": TreeConfig(3, 1, 4),
    "3/4/8": TreeConfig(3, 4, 8),
    "5/8/32": TreeConfig(5, 8, 32),
}


@dataclasses.dataclass(frozen=True)
class Pair:
    """A target and the draft that goes with it."""

    name: str
    target: TargetConfig
    draft: DraftConfig

    def cut(self, layers: int) -> "Pair":
        """The same with fewer target layers; aux states from the ones that are left."""
        target = dataclasses.replace(self.target, num_layers=layers)
        draft = dataclasses.replace(self.draft, aux_boundaries=boundaries(layers))
        return Pair(self.name, target, draft)


def boundaries(layers: int) -> tuple[int, int, int]:
    """SafeAILab's choice where the depth allows, else the first, a middle one and the last."""
    if layers >= 7:
        return (2, layers // 2, layers - 3)
    return (0, layers // 2, layers)


def _pair(name: str, target: TargetConfig, draft_vocab: int) -> Pair:
    draft = DraftConfig(
        hidden_size=target.hidden_size,
        target_hidden_size=target.hidden_size,
        num_aux=3,
        intermediate_size=target.intermediate_size,
        num_heads=target.num_heads,
        num_kv_heads=target.num_kv_heads,
        head_dim=target.head_dim,
        vocab_size=target.vocab_size,
        draft_vocab_size=draft_vocab,
        rms_norm_eps=target.rms_norm_eps,
        aux_boundaries=boundaries(target.num_layers),
    )
    return Pair(name, target, draft)


LLAMA_8B = TargetConfig(
    architecture="LlamaForCausalLM",
    hidden_size=4096,
    intermediate_size=14336,
    num_layers=32,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    vocab_size=128256,
    rms_norm_eps=1e-5,
    rope=LLAMA3_ROPE,
    max_position_embeddings=131072,
)
LLAMA_70B = dataclasses.replace(
    LLAMA_8B, hidden_size=8192, intermediate_size=28672, num_layers=80, num_heads=64
)
QWEN3_8B = dataclasses.replace(
    LLAMA_8B,
    architecture="Qwen3ForCausalLM",
    intermediate_size=12288,
    num_layers=36,
    vocab_size=151936,
    rms_norm_eps=1e-6,
    rope=RopeConfig(theta=1e6),
    max_position_embeddings=40960,
    qk_norm=True,
)
TINY = dataclasses.replace(
    LLAMA_8B,
    hidden_size=64,
    intermediate_size=96,
    num_layers=6,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    vocab_size=256,
)
PAIRS = {
    "llama-3.1-8b": _pair("llama-3.1-8b", LLAMA_8B, 32000),
    "qwen3-8b": _pair("qwen3-8b", QWEN3_8B, 32000),
    "llama-3.3-70b": _pair("llama-3.3-70b", LLAMA_70B, 32000),
    "tiny": _pair("tiny", TINY, 128),
}
"""The drafts of the 8B pairs have the published sizes; the 70B one is as wide as its target."""


def shapes_of(pair: Pair, dtype) -> tuple[Weights, Structure, Structure]:
    """Weights as shapes, and the two structures."""

    def abstract(make):
        leaves, structure = take_apart(nnx.eval_shape(make))
        cast = [
            jax.ShapeDtypeStruct(
                leaf.shape, dtype if jnp.issubdtype(leaf.dtype, jnp.floating) else leaf.dtype
            )
            for leaf in leaves
        ]
        return tuple(cast), structure

    target, target_structure = abstract(lambda: LlamaTarget(pair.target, rngs=nnx.Rngs(0)))
    draft, draft_structure = abstract(lambda: Eagle3Draft(pair.draft, rngs=nnx.Rngs(0)))
    return Weights(target, draft), target_structure, draft_structure


def programs(pair: Pair, target: Structure, draft: Structure, tree: TreeConfig | None) -> Program:
    """Speculation with that tree, or plain decoding without one."""
    if tree is None:
        return Program(target, None, None, (), "ancestors")
    return Program(target, draft, tree, boundaries(pair.target.num_layers), "ancestors")


def slots_for(context: int, capacity: int, tree: TreeConfig | None) -> int:
    """Cache slots of a generation of `capacity` tokens after `context`, as `generation` counts."""
    window = 1 if tree is None else tree.window
    return -(-(context + capacity + window) // 32) * 32


def limits_of(max_new_tokens: int, forced: jax.Array | None = None) -> Limits:
    """No stop ids."""
    stop = jnp.full((8,), -1, jnp.int32)
    return Limits(jnp.asarray(max_new_tokens, jnp.int32), stop, forced)


def state_shapes(
    program: Program, weights: Weights, limits: Limits, batch: int, slots: int, capacity: int
) -> LoopState:
    """The state before the first round, as shapes; they do not depend on the prompt's length."""
    prompts = jax.ShapeDtypeStruct((batch, 16), jnp.int32)
    lengths = jax.ShapeDtypeStruct((batch,), jnp.int32)
    run = functools.partial(loop.start, program, slots=slots, capacity=capacity)
    state, _ = jax.eval_shape(run, weights, prompts, lengths, limits)
    return state


@functools.partial(jax.jit, static_argnames=("shape", "dtype"))
def _normal(key, scale, shape, dtype):
    return (jax.random.normal(key, shape, jnp.float32) * scale).astype(dtype)


def fill(shapes, seed: int):
    """Arrays of these shapes on the device: matrices and states normal, vectors 1, integers 0."""
    leaves, treedef = jax.tree.flatten(shapes)
    keys = jax.random.split(jax.random.key(seed), max(len(leaves), 1))
    filled = []
    for key, leaf in zip(keys, leaves, strict=True):
        if not jnp.issubdtype(leaf.dtype, jnp.floating):
            filled.append(jnp.zeros(leaf.shape, leaf.dtype))
        elif leaf.ndim == 1:
            filled.append(jnp.ones(leaf.shape, leaf.dtype))
        else:
            scale = 1.0 / math.sqrt(min(leaf.shape[-2:])) if leaf.ndim == 2 else 1.0
            filled.append(_normal(key, scale, leaf.shape, leaf.dtype))
    return jax.tree.unflatten(treedef, filled)


def state_at(shapes: LoopState, context: int, seed: int) -> LoopState:
    """A state of these shapes with `context` random slots behind it, instead of a prefill."""
    state = fill(shapes, seed)
    state = dataclasses.replace(state, correct=jnp.full_like(state.correct, -1))
    return restarted(state, context)


def restarted(state: LoopState, context: int) -> LoopState:
    """Before the first round, `context` slots behind it."""
    return dataclasses.replace(
        state,
        length=jnp.full_like(state.length, context),
        num_new=jnp.ones_like(state.num_new),
        done=jnp.zeros_like(state.done),
        rounds=jnp.zeros_like(state.rounds),
    )

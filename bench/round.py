"""Each forward of a round and the whole round, beside the bytes it must move.

    python bench/round.py                 on a GPU: Llama-3.1-8B's shapes, random weights
    python bench/round.py --tiny          on a CPU: shows that it runs

Every forward is compiled alone with its cache donated, after `context` random slots. `floor` is its
bytes (bench/floors.py) over the copy bandwidth measured in the same process. `decode` is one token
of plain decoding, `loop` a round within the compiled `while_loop`.
"""

import dataclasses
import functools

import card
import harness

parser = card.parser(__doc__)
parser.add_argument("--tree", nargs="+", default=["3/1/4", "3/4/8", "5/8/32"], metavar="TRIPLE")
parser.add_argument("--batch", type=int, nargs="+", default=[1], metavar="B")
parser.add_argument("--context", type=int, nargs="+", default=[2048, 32768], metavar="S")
parser.add_argument("--calls", type=int, default=20, metavar="N", help="queued in one timed run")
args = parser.parse_args()
harness.use_cores(args.cores)

import floors  # noqa: E402
import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import models  # noqa: E402

from eagle3_jax import loop  # noqa: E402
from eagle3_jax.layers import Rows, chain_bits  # noqa: E402
from eagle3_jax.tree import top_probabilities  # noqa: E402

ENDLESS = 10**9


def forwards(program, weights, batch: int, slots: int, context: int) -> dict:
    """Name -> a run of `args.calls` of that forward, compiled alone."""
    tree = program.tree
    target = program.target.build(weights.target)
    draft = program.draft.build(weights.draft)
    length = jnp.full((batch,), context, jnp.int32)
    width, dtype = draft.config.hidden_size, draft.dtype
    aux_shape = (batch, tree.num_steps + 1, draft.config.num_aux, draft.config.target_hidden_size)

    def rows(count: int) -> Rows:
        bits = jnp.broadcast_to(jnp.asarray(chain_bits(count)), (batch, count, -(-count // 32)))
        at = length[:, None] + jnp.arange(count, dtype=jnp.int32)[None]
        return Rows(at, length, length, bits)

    @functools.partial(jax.jit, donate_argnames="cache")
    def verify(weights, cache):
        model = program.target.build(weights.target)
        tokens = jnp.ones((batch, tree.num_draft_tokens), jnp.int32)
        states, aux, cache = model.states(
            tokens, rows(tree.num_draft_tokens), cache, program.boundaries
        )
        return cache, jnp.argmax(model.logits(states), axis=-1), aux

    @functools.partial(jax.jit, donate_argnames="cache")
    def level(weights, cache):
        model = program.draft.build(weights.draft)
        shared = program.target.build(weights.target).shared()
        tokens = jnp.ones((batch, tree.topk), jnp.int32)
        hidden = jnp.ones((batch, tree.topk, width), dtype)
        out, cache = model.step(tokens, hidden, rows(tree.topk), cache, shared=shared)
        return cache, top_probabilities(model.logits(out, shared=shared), tree.topk)

    @functools.partial(jax.jit, donate_argnames="cache")
    def extend(weights, cache, aux):
        model = program.draft.build(weights.draft)
        shared = program.target.build(weights.target).shared()
        tokens = jnp.ones((batch, tree.num_steps + 1), jnp.int32)
        out, cache = model.step(
            tokens, model.fuse(aux), rows(tree.num_steps + 1), cache, shared=shared
        )
        return cache, top_probabilities(model.logits(out[:, -1], shared=shared), tree.topk)

    aux = models.fill(jax.ShapeDtypeStruct(aux_shape, dtype), 3)
    steps = {
        "verify": (verify, target.new_cache(batch, slots), ()),
        "draft level": (level, draft.new_cache(batch, slots), ()),
        "extend": (extend, draft.new_cache(batch, slots), (aux,)),
    }
    return {
        name: card.chained(lambda c, f=f, a=a: f(weights, c, *a)[0], cache, args.calls)
        for name, (f, cache, a) in steps.items()
    }


def rounds(program, weights, batch: int, context: int, capacity: int):
    """A run of `args.calls` rounds from a state with `context` slots, one dispatch a round."""
    limits = models.limits_of(ENDLESS)
    slots = models.slots_for(context, capacity, program.tree)
    shapes = models.state_shapes(program, weights, limits, batch, slots, capacity)
    state = models.state_at(shapes, context, 5)
    return card.chained(
        lambda s: loop.round_jit(program, weights, s, limits)[0], state, args.calls
    )


def in_loop(program, weights, batch: int, context: int, capacity: int):
    """A run of exactly `args.calls` rounds in one program: as many new tokens, one a round."""
    limits = models.limits_of(args.calls + 1)
    slots = models.slots_for(context, capacity, program.tree)
    forced = jnp.full((batch, slots), 1, jnp.int32)  # the draft never proposes this token
    limits = dataclasses.replace(limits, forced=forced)
    shapes = models.state_shapes(program, weights, limits, batch, slots, capacity)
    states = [models.state_at(shapes, context, 5)]

    def run():
        fresh = dataclasses.replace(
            states.pop(),
            length=jnp.full((batch,), context, jnp.int32),
            num_new=jnp.ones((batch,), jnp.int32),
            done=jnp.zeros((batch,), bool),
            rounds=jnp.zeros((), jnp.int32),
        )
        state = loop.finish_jit(program, weights, fresh, limits)
        if int(state.rounds) != args.calls:
            raise RuntimeError(f"{int(state.rounds)} rounds, expected {args.calls}")
        states.append(state)

    return run


def measure(name: str, batch: int, context: int, bytes_per_s: float) -> dict:
    """All forwards of one tree at one context."""
    tree = models.TREES[name]
    capacity = args.calls * (args.repeats + 3) * (tree.num_steps + 1)
    slots = models.slots_for(context, capacity, tree)
    program = models.programs(pair, target, draft, tree)
    plain = models.programs(pair, target, draft, None)
    runs = forwards(program, weights, batch, slots, context)
    runs["round"] = rounds(program, weights, batch, context, capacity)
    runs["loop"] = in_loop(program, weights, batch, context, capacity)
    alone = dataclasses.replace(weights, draft=())
    runs["decode"] = rounds(plain, alone, batch, context, capacity)
    times = harness.medians(harness.alternate(runs, args.repeats))
    parts = floors.round_parts(pair, tree, batch, context)
    parts |= {"loop": parts["round"]} | floors.round_parts(pair, None, batch, context)
    found = {
        part: card.against_floor(times[part] / args.calls, floor.total, bytes_per_s)
        for part, floor in parts.items()
    }
    return {"tree": name, "batch": batch, "context": context, "parts": found}


if args.tiny:
    args.pair, args.tree, args.context, args.calls = "tiny", ["3/4/8"], [64], 2
pair = models.PAIRS[args.pair]
shapes, target, draft = models.shapes_of(pair, jnp.bfloat16)
weights = models.fill(shapes, 0)
copied = card.bandwidth(args.tiny)
result = {
    "device": card.device(),
    "pair": pair.name,
    "copy_bytes_per_s": copied,
    "rounds": [
        measure(tree, batch, context, copied)
        for context in args.context
        for batch in args.batch
        for tree in args.tree
    ],
}
harness.report(result, args.out)

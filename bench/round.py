"""Each forward of a round and the whole round, beside the bytes it must move.

    python bench/round.py                 on a GPU: Llama-3.1-8B's shapes, random weights
    python bench/round.py --tiny          on a CPU: shows that it runs

Every forward is compiled alone with its cache donated, after `context` random slots. `floor` is its
bytes (bench/floors.py) over the copy bandwidth measured in the same process. `decode` is one token
of plain decoding, `loop` a round within the compiled `while_loop`.
"""

import dataclasses
import functools
from collections.abc import Iterator

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
from eagle3_jax.layers import Rows  # noqa: E402
from eagle3_jax.state import LoopState  # noqa: E402
from eagle3_jax.tree import top_probabilities  # noqa: E402

ENDLESS = 10**9


def forwards(program, batch: int, slots: int) -> dict:
    """Name -> (compiled alone, its cache, what else it takes); the length is an argument."""
    tree = program.tree
    draft = program.draft.build(weights.draft)
    width, dtype = draft.config.hidden_size, draft.dtype

    @functools.partial(jax.jit, donate_argnames="cache")
    def verify(weights, cache, length):
        model = program.target.build(weights.target)
        tokens = jnp.ones((batch, tree.num_draft_tokens), jnp.int32)
        at = Rows.chain(length, tree.num_draft_tokens)
        states, aux, cache = model.states(tokens, at, cache, program.boundaries)
        return cache, jnp.argmax(model.logits(states), axis=-1), aux

    @functools.partial(jax.jit, donate_argnames="cache")
    def level(weights, cache, length):
        model = program.draft.build(weights.draft)
        shared = program.target.build(weights.target).shared()
        tokens = jnp.ones((batch, tree.topk), jnp.int32)
        hidden = jnp.ones((batch, tree.topk, width), dtype)
        at = Rows.chain(length, tree.topk)
        out, cache = model.step(tokens, hidden, at, cache, shared=shared)
        return cache, top_probabilities(model.logits(out, shared=shared), tree.topk)

    @functools.partial(jax.jit, donate_argnames="cache")
    def extend(weights, cache, length, aux):
        model = program.draft.build(weights.draft)
        shared = program.target.build(weights.target).shared()
        count = tree.num_steps + 1
        tokens = jnp.ones((batch, count), jnp.int32)
        at = Rows.chain(length, count)
        out, cache = model.step(tokens, model.fuse(aux), at, cache, shared=shared)
        return cache, top_probabilities(model.logits(out[:, -1], shared=shared), tree.topk)

    config = draft.config
    aux_shape = (batch, tree.num_steps + 1, config.num_aux, config.target_hidden_size)
    aux = models.fill(jax.ShapeDtypeStruct(aux_shape, dtype), 3)
    cache = program.target.build(weights.target).new_cache(batch, slots)
    return {
        "verify": (verify, cache, ()),
        "draft level": (level, draft.new_cache(batch, slots), ()),
        "extend": (extend, draft.new_cache(batch, slots), (aux,)),
    }


def state_of(program, weights, batch: int, slots: int, capacity: int, limits) -> LoopState:
    """A state of random slots; `models.restarted` puts it at its start."""
    shapes = models.state_shapes(program, weights, limits, batch, slots, capacity)
    return models.state_at(shapes, 0, 5)


def dispatched(program, weights, held: dict, context: int, limits):
    """A run of `args.calls` rounds, one dispatch each. `held["state"]` passes from run to run."""

    def run():
        state = models.restarted(held["state"], context)
        for _ in range(args.calls):
            state = loop.round_jit(program, weights, state, limits)[0]
        held["state"] = jax.block_until_ready(state)

    return run


def in_loop(program, weights, held: dict, context: int, limits):
    """A run of exactly `args.calls` rounds in one program: as many new tokens, one a round."""

    def run():
        state = models.restarted(held["state"], context)
        state = loop.finish_jit(program, weights, state, limits)
        if int(state.rounds) != args.calls:
            raise RuntimeError(f"{int(state.rounds)} rounds, expected {args.calls}")
        held["state"] = state

    return run


def measure(name: str, batch: int, bytes_per_s: float) -> Iterator[dict]:
    """All forwards of one tree. Every context runs the same programs, on caches for the longest."""
    tree = models.TREES[name]
    capacity = args.calls * (tree.num_steps + 1)
    slots = models.slots_for(max(args.context), capacity, tree)
    program = models.programs(pair, target, draft, tree)
    plain = models.programs(pair, target, draft, None)
    alone = dataclasses.replace(weights, draft=())
    parts = forwards(program, batch, slots)
    endless = models.limits_of(ENDLESS)
    # Token 1 is never drafted (bench/models.py fills the id table with 0): nothing is accepted.
    forced = jnp.full((batch, slots), 1, jnp.int32)
    counted = models.limits_of(args.calls + 1, forced)
    held = {"state": state_of(program, weights, batch, slots, capacity, endless)}
    bare = {"state": state_of(plain, alone, batch, slots, capacity, endless)}
    caches = {part: cache for part, (_, cache, _) in parts.items()}

    def forward(part: str, length: jax.Array):
        function, _, others = parts[part]
        for _ in range(args.calls):
            caches[part] = function(weights, caches[part], length, *others)[0]
        jax.block_until_ready(caches[part])

    for context in args.context:
        length = jnp.full((batch,), context, jnp.int32)
        runs = {part: functools.partial(forward, part, length) for part in parts}
        runs["round"] = dispatched(program, weights, held, context, endless)
        runs["loop"] = in_loop(program, weights, held, context, counted)
        runs["decode"] = dispatched(plain, alone, bare, context, endless)
        times = harness.medians(harness.alternate(runs, args.repeats))
        least = floors.round_parts(pair, tree, batch, context)
        least |= {"loop": least["round"]} | floors.round_parts(pair, None, batch, context)
        yield {
            "tree": name,
            "batch": batch,
            "context": context,
            "parts": {
                part: card.against_floor(times[part] / args.calls, floor.total, bytes_per_s)
                for part, floor in least.items()
            },
        }


if args.tiny:
    args.pair, args.tree, args.context, args.calls = "tiny", ["3/4/8"], [64, 128], 2
pair = models.PAIRS[args.pair]
shapes, target, draft = models.shapes_of(pair, jnp.bfloat16)
weights = models.fill(shapes, 0)
result = {
    "device": card.device(),
    "pair": pair.name,
    "copy_bytes_per_s": card.bandwidth(args.tiny),
    "rounds": [],
}
for batch in args.batch:
    for tree in args.tree:
        for one in measure(tree, batch, result["copy_bytes_per_s"]):
            result["rounds"].append(one)
            card.keep(result, args.out)
harness.report(result, args.out)

"""Tokens a second with and without a draft, at accept lengths forced to 1..6.

    python bench/generate.py              on a GPU: Llama-3.1-8B's shapes, random weights
    python bench/generate.py --tiny       on a CPU: shows that it runs

Random weights would accept nothing, so the outcome is arranged while the program stays whole: the
draft's id table sends every draft id to token 0, its last norm is scaled until one candidate a
level has nearly all the probability (a tree then holds a path of full depth), and the text the
target has to follow (`Limits.forced`) is token 0 except at every a-th place. Each round then commits
exactly a tokens; the counts that come back are checked, and a round that differs is an error. What
is timed is `loop.finish_jit`, the compiled loop users run, from a state with `context` random slots.
"""

import dataclasses

import card
import harness

parser = card.parser(__doc__)
parser.add_argument("--tree", nargs="+", default=["5/1/6", "5/8/32"], metavar="TRIPLE")
parser.add_argument("--accept", type=int, nargs="+", default=[1, 2, 3, 4, 5, 6], metavar="A")
parser.add_argument("--batch", type=int, nargs="+", default=[1, 8, 64], metavar="B")
parser.add_argument("--context", type=int, nargs="+", default=[1024, 32768], metavar="S")
parser.add_argument("--rounds", type=int, default=24, metavar="R", help="in one timed run")
parser.add_argument("--memory", type=float, default=120.0, metavar="GB", help="skip what needs more")
args = parser.parse_args()
harness.use_cores(args.cores)

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import models  # noqa: E402
import numpy as np  # noqa: E402

from eagle3_jax import loop  # noqa: E402
from eagle3_jax.config import TreeConfig  # noqa: E402

SHARPNESS = 128.0
"""On the draft's last norm: gaps between its best logits, a few tenths as drawn, become tens."""


def text_to_follow(batch: int, slots: int, context: int, accept: int) -> np.ndarray:
    """[B, slots]: token 0, which is always drafted, and every `accept`-th token 1, which never is.

    The root of the first round stands at slot `context`.
    """
    at = np.arange(slots) - context
    row = np.where((at > 0) & (at % accept == 0), 1, 0).astype(np.int32)
    return np.broadcast_to(row, (batch, slots)).copy()


def run_of(program, weights, batch: int, context: int, accept: int, tokens: int):
    """A run that commits `tokens` tokens a sequence, and checks how."""
    tree = program.tree
    capacity = tokens + 1
    slots = models.slots_for(context, capacity, tree)
    forced = None if tree is None else jnp.asarray(text_to_follow(batch, slots, context, accept))
    limits = models.limits_of(tokens + 1, forced)
    shapes = models.state_shapes(program, weights, limits, batch, slots, capacity)
    states = [prime(program, weights, models.state_at(shapes, context, 7), limits)]
    expected = tokens if tree is None else tokens // accept

    def run():
        used = states.pop()
        fresh = dataclasses.replace(
            used,
            length=jnp.full((batch,), context, jnp.int32),
            num_new=jnp.ones((batch,), jnp.int32),
            done=jnp.zeros((batch,), bool),
            rounds=jnp.zeros((), jnp.int32),
        )
        state = loop.finish_jit(program, weights, fresh, limits)
        count = int(state.rounds)
        states.append(state)
        if count != expected:
            raise RuntimeError(f"{count} rounds for {tokens} tokens at {accept}, not {expected}")
        correct = np.asarray(state.correct[:count])
        if tree is not None and not (correct == accept - 1).all():
            raise RuntimeError(f"accepted {np.unique(correct)} drafts, {accept - 1} were arranged")

    return run


def prime(program, weights, state, limits):
    """A state whose seed is the draft's own: one round, then back to the start by `run`."""
    if program.tree is None:
        return state
    return loop.round_jit(program, weights, state, limits)[0]


def bytes_of(batch: int, context: int) -> float:
    """Weights and caches."""
    layers = pair.target.num_layers * pair.target.cache_width
    layers += 2 * pair.draft.num_kv_heads * pair.draft.head_dim
    held = sum(x.nbytes for x in jax.tree.leaves(weights))
    return held + 2.0 * layers * batch * context


def measure(batch: int, context: int) -> dict:
    """Tokens a second of all trees and accept lengths at one batch and context."""
    need = bytes_of(batch, context) / 1e9
    found = {"batch": batch, "context": context}
    if need > args.memory:
        return found | {"skipped": f"needs {need:.0f} GB"}
    plain = models.programs(pair, target, draft, None)
    alone = dataclasses.replace(weights, draft=())
    found["tokens_per_s"] = {}
    found["plain_tokens_per_s"] = {}
    for name in args.tree:
        tree = TreeConfig(*map(int, name.split("/")))
        program = models.programs(pair, target, draft, tree)
        for accept in args.accept:
            if accept > tree.num_steps + 1:
                continue
            tokens = accept * args.rounds
            runs = {
                "fast": run_of(program, weights, batch, context, accept, tokens),
                "plain": run_of(plain, alone, batch, context, 1, args.rounds),
            }
            times = harness.medians(harness.alternate(runs, args.repeats))
            key = f"{name} at {accept}"
            found["tokens_per_s"][key] = round(batch * tokens / times["fast"], 2)
            found["plain_tokens_per_s"][key] = round(batch * args.rounds / times["plain"], 2)
    return found


if args.tiny:
    args.pair, args.batch, args.context, args.rounds = "tiny", [1, 2], [64], 3
    args.tree, args.accept = ["3/1/4", "3/4/8"], [1, 3, 4]
pair = models.PAIRS[args.pair]
shapes, target, draft = models.shapes_of(pair, jnp.bfloat16)
weights = models.fill(shapes, 0)
model = draft.build(weights.draft)
model.norm_final.weight[...] = model.norm_final.weight[...] * SHARPNESS
weights = dataclasses.replace(weights, draft=models.take_apart(model)[0])
result = {
    "device": card.device(),
    "pair": pair.name,
    "rounds": args.rounds,
    "runs": [measure(batch, context) for context in args.context for batch in args.batch],
}
harness.report(result, args.out)

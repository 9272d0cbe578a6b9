"""Tokens a second with and without a draft, at accept lengths forced to 1..6.

    python bench/generate.py              on a GPU: Llama-3.1-8B's shapes, random weights
    python bench/generate.py --tiny       on a CPU: shows that it runs

Random weights would accept nothing, so the outcome is arranged while the program stays whole: the
draft's id table sends every draft id to token 0, its last norm is scaled until one candidate a
level has nearly all the probability (a tree then holds a path of full depth), and the text the
target has to follow (`Limits.forced`) is token 0 except at every a-th place. Each round then
commits exactly a tokens; the counts that come back are checked, and a round that differs is an
error. What is timed is `loop.finish_jit`, the compiled loop users run, from a state with `context`
random slots.
"""

import dataclasses
from collections.abc import Iterator

import card
import harness

parser = card.parser(__doc__)
parser.add_argument("--tree", nargs="+", default=["5/1/6", "5/8/32"], metavar="TRIPLE")
parser.add_argument("--accept", type=int, nargs="+", default=[1, 2, 3, 4, 5, 6], metavar="A")
parser.add_argument("--batch", type=int, nargs="+", default=[1, 8, 64], metavar="B")
parser.add_argument("--context", type=int, nargs="+", default=[1024, 32768], metavar="S")
parser.add_argument("--rounds", type=int, default=24, metavar="R", help="in one timed run")
parser.add_argument(
    "--memory", type=float, default=120.0, metavar="GB", help="skip what needs more"
)
args = parser.parse_args()
harness.use_cores(args.cores)

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import models  # noqa: E402
import numpy as np  # noqa: E402

from eagle3_jax import loop  # noqa: E402
from eagle3_jax.config import TreeConfig  # noqa: E402
from eagle3_jax.state import Limits  # noqa: E402

SHARPNESS = 128.0
"""On the draft's last norm: gaps between its best logits, a few tenths as drawn, become tens."""


def text_to_follow(batch: int, slots: int, context: int, accept: int) -> np.ndarray:
    """[B, slots]: token 0, which is always drafted, and every `accept`-th token 1, which never is.

    The root of the first round stands at slot `context`.
    """
    at = np.arange(slots) - context
    row = np.where((at > 0) & (at % accept == 0), 1, 0).astype(np.int32)
    return np.broadcast_to(row, (batch, slots)).copy()


class Loop:
    """One compiled loop at one batch, run at any context and accept length.

    Every run of it is checked: the rounds it took and the drafts each accepted.
    """

    def __init__(self, tree: TreeConfig | None, batch: int, longest: int):
        self.program = models.programs(pair, target, draft, tree)
        self.weights = weights if tree else dataclasses.replace(weights, draft=())
        self.batch = batch
        capacity = args.rounds * (1 if tree is None else tree.num_steps + 1)
        self.slots = models.slots_for(longest, capacity, tree)
        limits = self.limits(longest, 1, 1)
        shapes = models.state_shapes(
            self.program, self.weights, limits, batch, self.slots, capacity
        )
        self.state = models.state_at(shapes, longest, 7)
        if tree is not None:  # a seed of the draft's own
            self.state, *_ = loop.round_jit(self.program, self.weights, self.state, limits)

    def limits(self, context: int, accept: int, tokens: int) -> Limits:
        """As many tokens, and the text to follow."""
        forced = None
        if self.program.tree is not None:
            forced = jnp.asarray(text_to_follow(self.batch, self.slots, context, accept))
        return models.limits_of(tokens + 1, forced)

    def run(self, context: int, accept: int):
        """A call that commits `accept` tokens a sequence in each of `args.rounds` rounds."""
        limits = self.limits(context, accept, accept * args.rounds)

        def once():
            state = models.restarted(self.state, context)
            state = loop.finish_jit(self.program, self.weights, state, limits)
            count = int(state.rounds)
            self.state = state
            if count != args.rounds:
                raise RuntimeError(f"{count} rounds, {args.rounds} were arranged")
            if self.program.tree is not None:
                correct = np.unique(np.asarray(state.correct[:count]))
                if correct.tolist() != [accept - 1]:
                    raise RuntimeError(f"accepted {correct}, {accept - 1} were arranged")

        return once


def bytes_of(batch: int, context: int) -> float:
    """Weights, and the caches of the two loops that take turns."""
    width = pair.target.num_layers * pair.target.cache_width
    width += 2 * pair.draft.num_kv_heads * pair.draft.head_dim
    held = sum(x.nbytes for x in jax.tree.leaves(weights))
    return held + 2 * 2.0 * width * batch * context


def measure(batch: int, name: str) -> Iterator[dict]:
    """Tokens a second of one tree at all contexts that fit, and of plain decoding beside it."""
    fitting = [c for c in args.context if bytes_of(batch, c) / 1e9 <= args.memory]
    for context in args.context:
        if context not in fitting:
            yield {"tree": name, "batch": batch, "context": context, "skipped": "memory"}
    if not fitting:
        return
    tree = TreeConfig(*map(int, name.split("/")))
    fast, plain = Loop(tree, batch, max(fitting)), Loop(None, batch, max(fitting))
    accepts = [a for a in args.accept if a <= tree.num_steps + 1]
    for context in fitting:
        runs = {str(a): fast.run(context, a) for a in accepts} | {"plain": plain.run(context, 1)}
        times = harness.medians(harness.alternate(runs, args.repeats))
        rates = {a: batch * args.rounds * int(a) / times[a] for a in runs if a != "plain"}
        without = batch * args.rounds / times["plain"]
        yield {
            "tree": name,
            "batch": batch,
            "context": context,
            "tokens_per_s": {a: round(rate, 2) for a, rate in rates.items()},
            "without_a_draft": round(without, 2),
            "speedup": {a: round(rate / without, 3) for a, rate in rates.items()},
        }


if args.tiny:
    args.pair, args.batch, args.context, args.rounds = "tiny", [1, 2], [64], 3
    args.tree, args.accept = ["3/1/4", "3/4/8"], [1, 3, 4]
pair = models.PAIRS[args.pair]
shapes, target, draft = models.shapes_of(pair, jnp.bfloat16)
weights = models.fill(shapes, 0)
model = draft.build(weights.draft)
model.norm_final.weight[...] = model.norm_final.weight[...] * SHARPNESS
weights = dataclasses.replace(weights, draft=models.take_apart(model)[0])
result = {"device": card.device(), "pair": pair.name, "rounds_in_a_run": args.rounds, "runs": []}
for batch in args.batch:
    for tree in args.tree:
        for one in measure(batch, tree):
            result["runs"].append(one)
            card.keep(result, args.out)
harness.report(result, args.out)

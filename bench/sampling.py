"""Whether sampled texts follow the target: `python bench/sampling.py` after `make model`.

Each way of sampling SmolLM2 (plain, and every rule with the demo's draft) writes many short texts.
A plain pass over each whole text, which shares nothing with the rounds, gives every token's place
in the target's own distribution before it. Tests of each way, all by chi-square (follows.py): the
places are uniform; they are spread as those of plain sampling; texts begin as plain ones do; rounds
accept as many drafts as the rule expects in closed form; and certain drafts come as often as the
target itself would have written them. Of a hundred such benches one would reject a right way by
chance (Bonferroni over all tests). Three wrong rules show that the same tests reject what does not
follow the target; the last one is the sharpest where drafts are favoured.
"""

import contextlib
import dataclasses
import sys
import time
from collections import defaultdict

import harness

parser = harness.parser(__doc__)
parser.add_argument("--tokens", type=int, default=20_480, metavar="N", help="of each way")
parser.add_argument("--minutes", type=float, default=1e9, metavar="N", help="stop by then")
parser.add_argument("--batch-size", type=int, default=64, metavar="N")
parser.add_argument("--length", type=int, default=32, metavar="N", help="new tokens of a text")
parser.add_argument("--temperature", type=float, default=1.0)
parser.add_argument("--only", default="", metavar="WORD", help="ways with it in their name")
parser.add_argument("--chance", type=float, default=0.01, help="of any false alarm at all")
args = parser.parse_args()
harness.use_cores(args.cores)

import follows  # noqa: E402
import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
from pair import models  # noqa: E402

import eagle3_jax as e3  # noqa: E402
from eagle3_jax import choice  # noqa: E402
from eagle3_jax.layers import Rows  # noqa: E402
from eagle3_jax.modules import take_apart  # noqa: E402
from eagle3_jax.tokenizer import Tokenizer  # noqa: E402

PROMPTS = (
    "The capital of France is",
    "Once upon a time, there",
    "To make tea, first",
    "def is_leap_year(year",
)
"""Few and short: their pass costs little, and many texts begin at one place."""
BEGINNING = slice(1, 3)
"""The tokens by which texts are counted; the very first is the prompt pass's own, not a round's."""
ROWS = 32
"""Texts of one plain pass."""
SEEDS = 10**8
"""Apart from way to way."""
TREE, CHAIN = e3.TreeConfig(2, 2, 4), e3.TreeConfig(2)


class CertainDrafts(e3.AcceptRule):
    """A wrong rule: the draft's argmax verified with min(1, p/q), as if drawn from q."""


@dataclasses.dataclass(frozen=True)
class Way:
    """A way to sample; `wrong` ones must be rejected."""

    rule: e3.AcceptRule | None = None
    tree: e3.TreeConfig = TREE
    wrong: bool = False

    @property
    def certain(self) -> bool:
        """Whether drafts are no random draws."""
        drawn = self.rule is None or self.rule.sampled_drafts
        return not drawn or isinstance(self.rule, CertainDrafts)


DRAWN = {"sampled_drafts": True}
WAYS = {
    "plain": Way(),
    "target_only": Way(e3.AcceptRule()),
    "rejection": Way(e3.AcceptRule("rejection")),
    "rejection, drawn drafts": Way(e3.AcceptRule("rejection", **DRAWN), CHAIN),
    "rejection, drawn, block": Way(e3.AcceptRule("rejection", block=True, **DRAWN), CHAIN),
    "wrong: threshold_single 0.5": Way(e3.AcceptRule(threshold_single=0.5), TREE, True),
    "wrong: threshold_acc 0.8": Way(e3.AcceptRule(threshold_acc=0.8), TREE, True),
    "wrong: p/q on argmax drafts": Way(CertainDrafts("rejection", **DRAWN), CHAIN, True),
}
ALL = tuple(WAYS)
WAYS = {name: way for name, way in WAYS.items() if args.only in name}
PLAIN = "plain"


class Found:
    """What one way wrote so far."""

    def __init__(self):
        self.places: list[np.ndarray] = []
        self.beginnings: dict[str, list[tuple[int, ...]]] = defaultdict(list)
        self.accepted: list[int] = []
        self.expected: list[float] = []
        self.likely: list[float] = []
        self.seconds = 0.0

    @property
    def tokens(self) -> int:
        return sum(map(len, self.places))


def with_certain_drafts():
    """Rounds under `CertainDrafts` propose the draft's argmax; all others are as they are."""
    propose = choice.propose

    def wrong(program, limits, length, level, logits):
        found = propose(program, limits, length, level, logits)
        if program.sampling is None or not isinstance(program.sampling.rule, CertainDrafts):
            return found
        probs = found[2]
        best = jnp.argmax(probs, axis=-1).astype(jnp.int32)[:, None]
        chosen = jnp.take_along_axis(probs, best, axis=1)
        return chosen.reshape(found[0].shape), best.reshape(found[1].shape), probs

    choice.propose = wrong


def places_of(target, longest: int):
    """A function of texts [ROWS, longest + length], prompt lengths and shares: tokens' places."""
    leaves, structure = take_apart(target)
    slots = longest + args.length

    @jax.jit
    def run(leaves, ids, lengths, shares):
        model = structure.build(leaves)
        states, _, _ = model.states(ids, Rows.prefill(ROWS, slots), model.new_cache(ROWS, slots))
        new = lengths[:, None] + jnp.arange(args.length, dtype=jnp.int32)[None]  # [ROWS, length]

        def one(part):
            states, new, ids, shares = part
            p = jax.nn.softmax(model.logits(states[new - 1]) / args.temperature, axis=-1)
            following = ids[new][:, None]
            own = jnp.take_along_axis(p, following, axis=1)
            index = jnp.arange(p.shape[1], dtype=jnp.int32)[None]
            likelier = (p > own) | ((p == own) & (index < following))
            return jnp.sum(jnp.where(likelier, p, 0), axis=1) + shares * own[:, 0]

        return jax.lax.map(one, (states, new, ids, shares))

    def places(prompts, texts, rng) -> np.ndarray:
        found = []
        for first in range(0, len(texts), ROWS):
            part = slice(first, first + ROWS)
            ids = np.zeros((ROWS, slots), np.int32)
            for row, prompt, text in zip(ids, prompts[part], texts[part], strict=True):
                row[: len(prompt) + len(text)] = [*prompt, *text]
            lengths = np.asarray([len(p) for p in prompts[part]], np.int32)
            shares = rng.random((ROWS, args.length)).astype(np.float32)
            found.append(np.asarray(run(leaves, ids, lengths, shares)).ravel())
        return np.concatenate(found)

    return places


def write(target, draft, way: Way, prompts: list[list[int]], seeds: range) -> e3.Generation:
    """A batch of texts, each with its own seed."""
    given = {
        "max_new_tokens": args.length,
        "stop_token_ids": (),
        "sampling": e3.SamplingConfig(args.temperature, seed=seeds),
    }
    if way.rule is None:
        return e3.generate(target, prompts, **given)
    rule = {"tree": way.tree, "rule": way.rule, "trace": True}
    return e3.speculate(target, draft, prompts, **given, **rule)


def add(found: Found, texts: e3.Generation, prompts: list[str], where: np.ndarray):
    found.places.append(where)
    for prompt, tokens in zip(prompts, texts.tokens, strict=True):
        found.beginnings[prompt].append(tuple(tokens[BEGINNING]))
    for item in texts.trace.rounds if texts.trace else ():
        found.accepted.append(item.num_correct_drafts)
        found.expected.append(item.expected_drafts)
        reach = list(item.target_probs)  # of each node's whole path
        for node in range(1, len(reach)):
            reach[node] *= reach[item.parents[node]]
        found.likely.append(sum(reach[1:]))


def judged(found: dict[str, Found]) -> dict[str, dict]:
    """Every way's p-values, and whether one lies below its share of `--chance`."""
    ways, plain = {}, found.get(PLAIN)
    for name, one in found.items():
        places = np.concatenate(one.places)
        p = {"uniform": follows.uniform(places)}
        ways[name] = {"tokens": one.tokens, "seconds": round(one.seconds), "p": p}
        if name == PLAIN:
            continue
        accepted, expected, likely = (
            np.asarray(x, np.float64) for x in (one.accepted, one.expected, one.likely)
        )
        if not isinstance(WAYS[name].rule, CertainDrafts):
            p["accepted as expected"] = follows.accepted(accepted, expected)
        if WAYS[name].certain:
            p["drafts as likely"] = follows.accepted(accepted, likely)
        ways[name] |= {
            "rounds": len(accepted),
            "accept_length": 1 + accepted.mean(),
            "expected_accept_length": 1 + expected.mean(),
        }
        if WAYS[name].certain:
            ways[name]["accept_length_of_the_target"] = 1 + likely.mean()
        if plain is None:
            continue
        p["places as plain"] = follows.alike(places, np.concatenate(plain.places))
        p["tokens as plain"], freedom = follows.same_tokens(one.beginnings, plain.beginnings)
        ways[name]["token_degrees_of_freedom"] = freedom
    family = sum(len(way["p"]) for way in ways.values())
    for way in ways.values():
        way["rejected"] = min(way["p"].values()) < args.chance / family
    return {"ways": ways, "tests": family, "threshold": args.chance / family}


def report(found: dict[str, Found]) -> dict:
    settings = {n: getattr(args, n) for n in ("tokens", "temperature", "length", "chance")}
    settings |= {"cells": follows.CELLS, "prompts": PROMPTS}
    rules = {n: w.rule and dataclasses.asdict(w.rule) | w.tree.__dict__ for n, w in WAYS.items()}
    result = judged(found) | {"settings": settings, "rules": rules}
    harness.report(result, args.out)
    return result


def main():
    """A batch of each way in turn, so that an early end leaves all with as many."""
    folder, target, draft = models()
    with_certain_drafts()
    tokenizer, rng = Tokenizer.from_folder(folder), np.random.default_rng(0)
    ids = {text: tokenizer.encode(text) for text in PROMPTS}
    places = places_of(target, max(map(len, ids.values())))
    prompts = [PROMPTS[i % len(PROMPTS)] for i in range(args.batch_size)]
    found = {name: Found() for name in WAYS}
    end, turn = time.monotonic() + 60 * args.minutes, 0
    while any(one.tokens < args.tokens for name, one in found.items()):
        for name, one in found.items():
            if one.tokens >= args.tokens:
                continue
            if turn and time.monotonic() > end:
                break
            began = time.monotonic()
            first = (
                SEEDS * ALL.index(name) + turn * args.batch_size
            )  # ways are independent of each other
            seeds = range(first, first + args.batch_size)
            given = [ids[text] for text in prompts]
            texts = write(target, draft, WAYS[name], given, seeds)
            add(one, texts, prompts, places(given, texts.tokens, rng))
            one.seconds += time.monotonic() - began
            told = f"{name}: {one.tokens} tokens in {one.seconds:.0f} s"
            print(told, file=sys.stderr, flush=True)
        turn += 1
        if time.monotonic() > end:
            break
        if args.out is not None:
            with contextlib.redirect_stdout(sys.stderr):
                report(found)
    result = report(found)
    wrong = {name for name, way in result["ways"].items() if way["rejected"]}
    return wrong == {name for name, way in WAYS.items() if way.wrong}


if __name__ == "__main__":
    if args.batch_size % ROWS:
        sys.exit(f"--batch-size is {args.batch_size}, expected a multiple of {ROWS}")
    sys.exit(0 if main() else "a way is not what it says: see rejected")

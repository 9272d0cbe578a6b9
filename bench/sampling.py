"""Whether sampled texts follow the target: `python bench/sampling.py` after `make model`.

Each way of sampling SmolLM2 (plain, and every rule with the demo's draft) writes many texts. Each
token then has a place in the target's own distribution before it, worked out by a plain pass over
the whole text: the mass of likelier tokens, plus an even share of its own. For texts drawn from the
target these places are uniform, which a chi-square test over 100 cells checks; thresholds below 1
stand at the end to show what a rule that is not lossless looks like. Beside it the measured accept
length and the one expected from the rule in closed form, and how many standard errors lie between.
"""

import dataclasses
import functools

import harness

parser = harness.parser(__doc__)
parser.add_argument("--tokens", type=int, default=20_000, metavar="N", help="of each way")
parser.add_argument("--batch-size", type=int, default=50, metavar="N")
parser.add_argument("--length", type=int, default=40, metavar="N", help="new tokens of a text")
parser.add_argument("--temperature", type=float, default=1.0)
args = parser.parse_args()
harness.use_cores(args.cores)

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
from pair import models  # noqa: E402
from run import PROMPTS  # noqa: E402
from scipy import stats  # noqa: E402

import eagle3_jax as e3  # noqa: E402
from eagle3_jax.layers import Rows  # noqa: E402
from eagle3_jax.modules import take_apart  # noqa: E402
from eagle3_jax.tokenizer import Tokenizer  # noqa: E402

TREE, CHAIN = e3.TreeConfig(3, 4, 8), e3.TreeConfig(3)
WAYS = {
    "plain": None,
    "target_only": (e3.AcceptRule(), TREE),
    "rejection": (e3.AcceptRule("rejection"), TREE),
    "rejection, drawn": (e3.AcceptRule("rejection", sampled_drafts=True), CHAIN),
    "rejection, drawn, block": (e3.AcceptRule("rejection", sampled_drafts=True, block=True), CHAIN),
    "target_only, threshold_acc 0.5": (e3.AcceptRule(threshold_acc=0.5), TREE),
}
CELLS, ROWS = 100, 5


@functools.cache
def masses(structure, prompt_length: int):
    """A compiled function: texts of one prompt length and shares -> the places of new tokens."""
    length = prompt_length + args.length

    @jax.jit
    def run(leaves, ids, shares):
        model = structure.build(leaves)
        rows = Rows.prefill(ROWS, length - 1)
        states, _, _ = model.states(ids[:, :-1], rows, model.new_cache(ROWS, length - 1), ())
        logits = model.logits(states[:, prompt_length - 1 :]) / args.temperature
        p = jax.nn.softmax(logits, axis=-1)
        following = ids[:, prompt_length:, None]
        own = jnp.take_along_axis(p, following, axis=2)
        index = jnp.arange(p.shape[2], dtype=jnp.int32)[None, None]
        before = (p > own) | ((p == own) & (index < following))
        return jnp.sum(jnp.where(before, p, 0), axis=2) + shares * own[..., 0]

    return run


def places(target, prompt: list[int], texts: list[list[int]], rng) -> np.ndarray:
    """Of every token of texts that follow one prompt."""
    leaves, structure = take_apart(target)
    run, found = masses(structure, len(prompt)), []
    for first in range(0, len(texts), ROWS):
        ids = jnp.asarray([prompt + t for t in texts[first : first + ROWS]], jnp.int32)
        shares = jnp.asarray(rng.random((ROWS, args.length)), jnp.float32)
        found.append(np.asarray(run(leaves, ids, shares)).ravel())
    return np.concatenate(found)


def one(target, draft, prompt: list[int], way, seed: int):
    """A batch of texts after one prompt, each with its own seed."""
    sampling = e3.SamplingConfig(args.temperature, seed=range(seed, seed + args.batch_size))
    prompts = [prompt] * args.batch_size
    if way is None:
        return e3.generate(
            target,
            prompts,
            max_new_tokens=args.length,
            stop_token_ids=(),
            sampling=sampling,
        )
    rule, tree = way
    return e3.speculate(
        target,
        draft,
        prompts,
        max_new_tokens=args.length,
        tree=tree,
        stop_token_ids=(),
        sampling=sampling,
        rule=rule,
        trace=True,
    )


def check(target, draft, prompts: list[list[int]], way) -> dict:
    """Of one way of sampling."""
    rng, found, rounds, seed = np.random.default_rng(0), [], [], 0
    while sum(map(len, found)) < args.tokens:
        prompt = prompts[len(found) % len(prompts)]
        texts = one(target, draft, prompt, way, seed)
        seed += args.batch_size
        found.append(places(target, prompt, texts.tokens, rng))
        if texts.trace is not None:
            rounds += texts.trace.rounds
    numbers = np.concatenate(found)
    test = stats.chisquare(np.histogram(numbers, CELLS, (0, 1))[0])
    result = {"tokens": len(numbers), "chi_square": test.statistic, "p": float(test.pvalue)}
    if rounds:
        accepted = np.asarray([r.num_correct_drafts for r in rounds], np.float64)
        expected = np.asarray([r.expected_drafts for r in rounds])
        error = np.sqrt(((accepted - expected) ** 2).sum())
        result |= {
            "rounds": len(rounds),
            "accept_length": 1 + accepted.mean(),
            "expected_accept_length": 1 + expected.mean(),
            "standard_errors": (accepted - expected).sum() / error,
        }
    return result


def main():
    """Every way in turn."""
    folder, target, draft = models()
    tokenizer = Tokenizer.from_folder(folder)
    prompts = [
        tokenizer.encode(tokenizer.apply_chat_template([{"role": "user", "content": text}]))
        for text in PROMPTS
    ]
    result = {name: check(target, draft, prompts, way) for name, way in WAYS.items()}
    settings = {"temperature": args.temperature, "length": args.length, "cells": CELLS}
    rules = {n: None if w is None else dataclasses.asdict(w[0]) for n, w in WAYS.items()}
    harness.report({"settings": settings, "ways": result, "rules": rules}, args.out)


if __name__ == "__main__":
    main()

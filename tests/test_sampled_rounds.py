"""Whole sampled rounds done again in NumPy, from the logits they recorded and the same coins.

Exact and with no statistics: which node reads which coin, whose distribution a token comes from,
what the penalties have seen, how drawn drafts reach target ids.
"""

import inspect

import jax
import jax.numpy as jnp
import mutations
import numpy as np
import pytest
from selection import by_default
from test_sampling import CHAIN, EVERYTHING, PROMPTS, RULES, processed

import eagle3_jax as e3
from eagle3_jax import choice, loop

FINAL, NODES, DRAFTS = range(3)
LENGTH = 20


def uniform(seed: int, length: int, stream: int, count: int) -> np.ndarray:
    key = jax.random.fold_in(jax.random.fold_in(jax.random.key(seed), length), stream)
    return np.asarray(jax.random.uniform(key, (count,), jnp.float32), np.float64)


def draw(weights: np.ndarray, coin: float) -> int:
    total = np.cumsum(weights)
    return int(np.argmax(total > coin * total[-1]))


def softmax(z: np.ndarray) -> np.ndarray:
    p = np.exp(z - z.max())
    return p / p.sum()


class Sequence:
    """One prompt's text so far, and its coins."""

    def __init__(self, seed: int, d2t: np.ndarray):
        self.seed, self.d2t, self.output = seed, d2t, []
        self.draft_logits: np.ndarray | None = None

    def begin(self, one):
        p = processed(one.tensors["prefill.target_logits"], [], EVERYTHING)
        coin = self._one(one.length - 1)
        self.output.append(draw(p, coin))
        self.draft_logits = one.tensors["prefill.extend_logits"]

    def _one(self, length: int) -> float:
        key = jax.random.fold_in(jax.random.fold_in(jax.random.key(self.seed), length), FINAL)
        return float(jax.random.uniform(key, (), jnp.float32))

    def round(self, one, rule: e3.AcceptRule) -> tuple[list[int], list[int]]:
        """Accepted nodes and emitted tokens."""
        assert one.tokens[0] == self.output[-1]
        n = len(one.tokens)
        coins, final = uniform(self.seed, one.length, NODES, n), self._one(one.length)
        paths: list[list[int]] = [[]]
        for node in range(1, n):
            paths.append([*paths[one.parents[node]], one.tokens[node]])
        logits = one.tensors["target_logits"]
        p = [processed(logits[i], self.output + paths[i], EVERYTHING) for i in range(n)]
        if rule.sampled_drafts:
            accepted, left = self._drawn(one, p, coins, rule.block)
        else:
            accepted, left = self._certain(one, p, coins, rule.name == "target_only")
        emitted = [*paths[accepted[-1]], draw(left, final)]
        self.output += emitted
        self.draft_logits = one.tensors["extend_logits"]
        return accepted, emitted

    def _certain(self, one, p, coins, one_coin: bool) -> tuple[list[int], np.ndarray]:
        path = [0]
        while True:
            node, gone = path[-1], 0.0
            left = p[node].copy()
            for child in (c for c in range(1, len(p)) if one.parents[c] == node):
                share = p[node][one.tokens[child]]
                if one_coin:
                    taken = coins[node] < gone + share
                else:
                    taken = gone < 1 and coins[child] < share / (1 - gone)
                if taken and share > 0:
                    path.append(child)
                    break
                gone += share
                left[one.tokens[child]] = 0
            else:
                return path, left

    def _drawn(self, one, p, coins, block: bool) -> tuple[list[int], np.ndarray]:
        steps = len(p) - 1
        logits = [
            self.draft_logits,
            *(one.tensors[f"draft_logits.{i}"][0] for i in range(steps - 1)),
        ]
        drafts, q = uniform(self.seed, one.length, DRAFTS, steps), []
        for level in range(steps):
            narrow = softmax(logits[level].astype(np.float64) / EVERYTHING.temperature)
            assert one.tokens[level + 1] == self.d2t[draw(narrow, drafts[level])]
            wide = np.zeros(len(p[0]))
            wide[self.d2t] = narrow
            q.append(wide)
        ratio = [p[i][one.tokens[i + 1]] / q[i][one.tokens[i + 1]] for i in range(steps)]
        scale, correct = [1.0], 0
        if not block:
            while correct < steps and coins[correct] < ratio[correct]:
                correct += 1
            scale = [1.0] * (steps + 1)
        else:
            for i in range(steps):
                scale.append(min(1.0, scale[-1] * ratio[i]))
                mass = 1.0
                if i + 1 < steps:
                    mass = np.maximum(scale[-1] * p[i + 1] - q[i + 1], 0).sum()
                whole = scale[-1] if i + 1 == steps else mass / (mass + 1 - scale[-1])
                if coins[i] < whole:
                    correct = i + 1
        left = p[correct]
        if correct < steps:
            left = np.maximum(scale[correct] * p[correct] - q[correct], 0)
        return list(range(correct + 1)), left


def check(name: str, target, draft):
    """Every round of a rule of `RULES`; fails at the first that differs."""
    rule, tree = RULES[name]
    prompts, seeds = PROMPTS * 2, [7, 8, 9, 10, 2**32 - 1, 12, 13, 14]
    d2t = np.asarray(draft.draft_to_target[...])
    assert tree is not CHAIN or (d2t != np.arange(len(d2t))).any()
    sequences = [Sequence(seed, d2t) for seed in seeds]
    accepted = 0
    for one in e3.rounds(
        target,
        draft,
        prompts,
        max_new_tokens=LENGTH,
        tree=tree,
        stop_token_ids=(),
        sampling=EVERYTHING.with_seed(seeds),
        rule=rule,
        tensors=True,
    ):
        own = sequences[one.sequence]
        if one.index == 0:
            own.begin(one)
        path, emitted = own.round(one, rule)
        assert one.accepted == path
        assert one.emitted == emitted[: len(one.emitted)]
        assert len(one.emitted) == len(emitted) or len(own.output) >= LENGTH
        accepted += len(path) - 1
    assert accepted > 8
    assert min(len(own.output) for own in sequences) >= LENGTH


@pytest.mark.parametrize("name", by_default(RULES, lambda _, name: name == "block"))
def test_rounds_are_what_numpy_makes_of_the_same_coins(name, tiny_target, tiny_draft):
    check(name, tiny_target, tiny_draft)


MISTAKES = {
    "d2t of q skipped": (
        loop,
        "_over_target",
        "draft.to_target(jnp.arange(narrow.shape[2], dtype=jnp.int32))",
        "jnp.arange(narrow.shape[2], dtype=jnp.int32)",
    ),
    "one coin for all levels": (choice, "propose", "coins[:, level]", "coins[:, 0]"),
    "drafts at temperature 1": (choice, "propose", " / values.temperature", ""),
    "the first round's coin before it": (choice, "first_token", "lengths - 1, ()", "lengths, ()"),
    "one purpose's coins for another": (choice, "verified", "sampling.FINAL", "sampling.DRAFTS"),
    "tokens never counted": (
        loop,
        "round_",
        "sampling.count(state.counts, tokens, kept)",
        "state.counts",
    ),
}


@pytest.mark.exhaustive
@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_of_the_loop_show(mistake, tiny_target, tiny_draft, monkeypatch):
    module, name, old, new = MISTAKES[mistake]
    source = inspect.getsource(getattr(module, name))
    assert source.count(old) == 1
    wrong = dict(vars(module))
    exec(compile(source.replace(old, new), module.__name__, "exec"), wrong)
    mutations.fresh_programs(monkeypatch)
    monkeypatch.setattr(module, name, wrong[name])
    with pytest.raises(AssertionError):
        check("block", tiny_target, tiny_draft)

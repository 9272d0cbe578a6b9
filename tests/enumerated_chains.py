"""Every chain that a draft can draw, and every coin: what the rules for drawn drafts emit."""

import dataclasses
import itertools

import enumeration
import jax.numpy as jnp
import numpy as np
from enumeration import STEPS, Drawn, outcomes, sides, tree_probs
from tiny_language import Language, V

from eagle3_jax.config import AcceptRule
from eagle3_jax.tree import Tree

TOKEN_WISE = AcceptRule("rejection", sampled_drafts=True)
BLOCK = AcceptRule("rejection", sampled_drafts=True, block=True)


def draft(seed: int, path: tuple[int, ...]) -> np.ndarray:
    """q(. | path), any distribution; now and then it never proposes a token."""
    rng = np.random.default_rng([seed, 77, len(path), *path])
    q = rng.dirichlet(np.full(V, 0.8))
    if rng.random() < 0.5:
        q[rng.integers(V)] = 0
    return q / q.sum()


@dataclasses.dataclass
class Chain:
    """One drafted chain with p and q along it."""

    drafts: tuple[int, ...]
    weight: float
    p: list[np.ndarray]
    q: list[np.ndarray]

    def residual(self, correct: int, scale: float) -> np.ndarray:
        if correct == STEPS:
            return self.p[STEPS]
        return np.maximum(scale * self.p[correct] - self.q[correct], 0)


def chains(language: Language, seed: int, drawn: bool = True):
    """Every chain a draft can propose; not `drawn`: the one of its most likely tokens, for sure."""
    for drafts in itertools.product(range(V), repeat=STEPS):
        q = [draft(seed, drafts[:i]) for i in range(STEPS)]
        weight = float(np.prod([q[i][t] for i, t in enumerate(drafts)]))
        if not drawn:
            weight = float(all(q[i].argmax() == t for i, t in enumerate(drafts)))
        if weight > 0:
            yield Chain(drafts, weight, [language(drafts[:i]) for i in range(STEPS + 1)], q)


def token_chances(chain: Chain) -> tuple[list[float], list[float]]:
    """Thresholds of each level's coin, and the scale of the residual after each count."""
    ratios = [chain.p[i][t] / chain.q[i][t] for i, t in enumerate(chain.drafts)]
    return [min(1.0, r) for r in ratios], [1.0] * (STEPS + 1)


def block_chances(chain: Chain) -> tuple[list[float], list[float]]:
    """Sun et al. 2024, algorithm 2, in plain Python."""
    weights = [1.0]
    for i, t in enumerate(chain.drafts):
        weights.append(min(1.0, weights[-1] * chain.p[i][t] / chain.q[i][t]))
    chances = []
    for i in range(1, STEPS):
        mass = np.maximum(weights[i] * chain.p[i] - chain.q[i], 0).sum()
        below = mass + 1 - weights[i]
        chances.append(1.0 if weights[i] == 1 else mass / below if below > 0 else 0.0)
    return [*chances, weights[STEPS]], weights


def chain_round(rule: AcceptRule, language: Language, seed: int, *, drawn_drafts: bool = True):
    """What one round emits, exactly; mean accepted drafts; and the same in closed form."""
    work_out = block_chances if rule.block else token_chances
    drawn = Drawn([0, *range(STEPS)], [0] * (STEPS + 1))
    emitted: dict[tuple[int, ...], float] = {}
    mean = 0.0
    coins, rows_of, finals = [], [], []
    everything = list(chains(language, seed, drawn_drafts))
    for chain in everything:
        chances, scales = work_out(chain)
        cells = [sides([c]) for c in chances]
        for choice in itertools.product(*(range(len(c)) for c in cells)):
            picked = [c[w] for c, w in zip(cells, choice, strict=True)]
            weight = float(np.prod([length for _, length in picked]))
            row = [points[0] for points, _ in picked]
            accepted = [coin < chance for coin, chance in zip(row, chances, strict=True)]
            if rule.block:
                correct = max((i + 1 for i, a in enumerate(accepted) if a), default=0)
            else:
                correct = next((i for i, a in enumerate(accepted) if not a), STEPS)
            left = chain.residual(correct, scales[correct])
            for points, length in sides(np.cumsum(left / left.sum())[:-1]):
                for side in (0, 1):
                    coins.append([points_[side] for points_, _ in picked] + [0.0])
                    finals.append(points[side])
                rows_of.append((chain, correct, weight * length))
    trees, probs, draft_probs = [], [], []
    whole = {}
    for chain in everything:
        drawn = Drawn([0, *range(STEPS)], [0, *chain.drafts])
        whole[chain.drafts] = np.asarray(tree_probs(language, drawn, 1)[0])
    for chain, _, _ in rows_of:
        trees += [[0, *chain.drafts]] * 2
        probs += [whole[chain.drafts]] * 2
        draft_probs += [np.stack(chain.q)] * 2
    tokens = jnp.asarray(trees, jnp.int32)

    def tree_of(size: int) -> Tree:
        base = drawn.arrays(size)
        return dataclasses.replace(base, tokens=tokens[np.arange(size) % len(coins)])

    probs, draft_probs = jnp.asarray(np.stack(probs)), jnp.asarray(np.stack(draft_probs))
    found = outcomes(rule, tree_of, probs, draft_probs, coins, finals)
    for i, (chain, correct, weight) in enumerate(rows_of):
        assert found[2 * i] == found[2 * i + 1], "an interval with two outcomes"
        path, tokens_ = found[2 * i]
        assert len(path) == correct + 1
        total = chain.weight * weight
        emitted[tokens_] = emitted.get(tokens_, 0.0) + total
        mean += total * correct
    drafted = jnp.asarray([[0, *chain.drafts] for chain in everything], jnp.int32)
    expected = enumeration.CODE.expected(
        rule,
        dataclasses.replace(drawn.arrays(len(everything)), tokens=drafted),
        jnp.asarray(np.stack([whole[chain.drafts] for chain in everything])),
        jnp.asarray(np.stack([chain.q for chain in everything])),
        STEPS,
    )
    given = sum(c.weight * float(e) for c, e in zip(everything, expected, strict=True))
    return emitted, mean, given

"""Every one of these mistakes in the rules, the processors or the coins must show."""

import dataclasses
import importlib
import types

import jax
import pytest
import sampling_checks
from sampling_checks import CHECKS, Modules
from selection import by_default

MODULES = ("sampling", "verify", "expected")
"""In the order in which they import each other."""
FUNCTIONS = {"draw", "block_chances", "block_weights", "drafted_probs", "node_probs"}
"""What they import."""


@dataclasses.dataclass(frozen=True)
class Mistake:
    """Pieces of source replaced (old, new, old, new, ...), and the check that must fail."""

    name: str
    check: str
    module: str
    pieces: tuple[str, ...]


def mistakes(module: str, **of_check: dict[str, tuple[str, ...]]) -> list[Mistake]:
    return [
        Mistake(name, check, module, pieces)
        for check, found in of_check.items()
        for name, pieces in found.items()
    ]


EARLY = "    if plan.top_k:\n"
TOP_P = """    if plan.top_p:
        best = _only(best, _running(best) - best < values.top_p, sums)
"""
MIN_P = """    if plan.min_p:
        best = _only(best, best >= values.min_p * best[..., :1], sums)
"""
MISTAKES = [
    *mistakes(
        "verify",
        on_trees={
            "coins the wrong way round": ("reached = coin < (before", "reached = coin > (before"),
            "a sibling's share left out": ("(before + child) / max", "child / max"),
            "a sibling counted twice": ("cumsum(mine, axis=1) - mine", "cumsum(mine, axis=1)"),
            "shares not renormalised": ("coins * (1 - before) < child", "coins < child"),
            "the last sibling first": (
                "jnp.argmax(taken, axis=1)",
                "(taken.shape[1] - 1 - jnp.argmax(taken[:, ::-1], axis=1))",
            ),
            "the root its own child": (
                "siblings = (tree.parents == node[:, None]) & ~is_root",
                "siblings = tree.parents == node[:, None]",
            ),
            "another node's coin": (
                "take_along_axis(coins, node[:, None]",
                "take_along_axis(coins, 0 * node[:, None]",
            ),
            "rejected siblings left in": ("jnp.where(rejected, 0, 1)", "jnp.where(rejected, 1, 1)"),
            "other nodes' tokens taken out": (
                "rejected = (tree.parents == node[:, None]) & ~is_root",
                "rejected = ~is_root",
            ),
            "the bonus from the root": ("left = probs[batch, node]", "left = probs[:, 0]"),
            "a token after its own node": (
                "probs[batch, tree.parents, tree.tokens]",
                "jnp.take_along_axis(probs, tree.tokens[..., None], axis=2)[..., 0]",
            ),
            "the coin at a depth one late": (
                "going = jnp.any(taken, axis=1)",
                "going = jnp.any(taken, axis=1) & (num_correct < 1)",
            ),
        },
        with_thresholds={
            "the threshold of a single token off": (
                "(child >= threshold_single)",
                "(child >= 1.1)",
            ),
            "the other threshold off": ("/ max(threshold_acc, 1e-9)", ""),
        },
        on_chains={
            "p and q exchanged": ("coins[:, :-1] * q < p", "coins[:, :-1] * p < q"),
            "accepted whatever q": (
                "accepted = valid & (coins[:, :-1] * q < p)",
                "accepted = valid & (coins[:, :-1] < p)",
            ),
            "going on after a rejection": (
                "going = jnp.cumprod(accepted.astype(jnp.int32), axis=1)",
                "going = accepted.astype(jnp.int32)",
            ),
            "the residual's negative part": (
                "scale[:, None], 1) * p - q, 0)",
                "scale[:, None], 1) * p - q, -1)",
            ),
            "q added": ("scale[:, None], 1) * p - q, 0)", "scale[:, None], 1) * p + q, 0)"),
            "q not taken off": ("scale[:, None], 1) * p - q, 0)", "scale[:, None], 1) * p, 0)"),
            "the residual of another level": (
                "q = jnp.take_along_axis(draft_probs, jnp.minimum(at, steps - 1), axis=1)",
                "q = jnp.take_along_axis(draft_probs, jnp.minimum(at + 1, steps - 1), axis=1)",
            ),
            "q taken off the bonus": ("& (num_correct < steps)[:, None], q, 0)", ", q, 0)"),
            "p unscaled": (
                "_chain_end(tree, probs, draft_probs, num_correct, scale,",
                "_chain_end(tree, probs, draft_probs, num_correct, scale * 0 + 1,",
            ),
            "weights above one": ("jnp.minimum(weight * ratio, 1)", "weight * ratio"),
            "weights of single tokens": ("jnp.minimum(weight * ratio, 1)", "jnp.minimum(ratio, 1)"),
            "the shortest prefix": (
                "jnp.max(jnp.where(accepted, steps, 0), axis=1)",
                "jnp.sum(jnp.cumprod(accepted.astype(jnp.int32), axis=1), axis=1, dtype=jnp.int32)",
            ),
            "the mass of the level before": (
                "probs[:, 1:-1] - draft_probs[:, 1:]",
                "probs[:, :-2] - draft_probs[:, :-1]",
            ),
            "the weight left out of the mass": (
                "inner[..., None] * probs[:, 1:-1]",
                "probs[:, 1:-1]",
            ),
            "the mass alone": ("whole = mass + 1 - inner", "whole = mass"),
        },
        on_a_grid={
            "a coin on a node's threshold": (
                "reached = coin < (before",
                "reached = coin <= (before",
            ),
            "a coin on a child's share": (
                "coins * (1 - before) < child",
                "coins * (1 - before) <= child",
            ),
            "a coin on p/q": ("coins[:, :-1] * q < p", "coins[:, :-1] * q <= p"),
            "a coin on a prefix": ("coins[:, :-1] < chances", "coins[:, :-1] <= chances"),
        },
        at_the_edges={
            "tokens of no probability": ("(child > 0) & (reached |", "(reached |"),
            "those of certain proposals": ("(child > 0) & (coins * (1", "(coins * (1"),
            "above the single threshold": ("child >= threshold_single", "child > threshold_single"),
            "no floor": ("max(threshold_acc, 1e-9)", "max(threshold_acc, 1e-30)"),
            "SGLang's last id of the vocabulary": (
                "draw(jnp.where(nothing, probs, left), final_coins)",
                "jnp.where(nothing[:, 0], probs.shape[-1] - 1, draw(left, final_coins))",
            ),
            "a draft that nothing drew": ("valid = (q > 0) & (q <= 1)", "valid = q <= 1"),
            "a q above one": ("valid = (q > 0) & (q <= 1)", "valid = q > 0"),
            "a prefix that nothing drew": (
                "valid = (q[:, level] > 0) & (q[:, level] <= 1)",
                "valid = q[:, level] <= 1",
            ),
            "a prefix with q above one": (
                "valid = (q[:, level] > 0) & (q[:, level] <= 1)",
                "valid = q[:, level] > 0",
            ),
            "weights above one taken off": (
                "(q >= 0) & (q <= 1) & (num_correct",
                "(q >= 0) & (num_correct",
            ),
        },
    ),
    *mistakes(
        "sampling",
        processors={
            "presence added": (
                "- jnp.where(seen, values.presence, 0)",
                "+ jnp.where(seen, values.presence, 0)",
            ),
            "frequency once": (
                "values.frequency * often",
                "values.frequency * seen.astype(logits.dtype)",
            ),
            "presence on every token": ("jnp.where(seen, values.presence, 0)", "values.presence"),
            "repetition above 0 only": (
                "jnp.where(logits < 0, logits * values.repetition,",
                "jnp.where(logits < 0, logits,",
            ),
            "repetition the wrong way round": (
                "jnp.where(logits < 0, logits * values",
                "jnp.where(logits > 0, logits * values",
            ),
            "repetition before the others": (
                "logits = logits - values.frequency * often - jnp.where(seen, values.presence, 0)",
                "off = values.frequency * often + jnp.where(seen, values.presence, 0)",
                "scaled, logits)",
                "scaled - off, logits)",
            ),
            "repetition on every token": (
                "logits = jnp.where(seen, scaled, logits)",
                "logits = scaled",
            ),
            "the bias taken off": (
                "logits + values.bias[None, None]",
                "logits - values.bias[None, None]",
            ),
            "the bias before the penalties": (
                "logits = logits.astype(accum_dtype(logits.dtype))",
                "logits = logits + (0 if values.bias is None else values.bias[None, None])",
                "if plan.bias:",
                "if False:",
            ),
            "times the temperature": ("logits / values.temperature", "logits * values.temperature"),
            "the temperature after the cuts": (
                "jax.nn.softmax(logits / values.temperature, axis=-1)",
                "jax.nn.softmax(logits, axis=-1)",
                "    return probs\n\n\ndef _only",
                "    return jax.nn.softmax(jnp.log(probs) / values.temperature)\n\n\ndef _only",
            ),
            "one too many of top-k": ("rank < values.top_k", "rank <= values.top_k"),
            "not renormalised": ("probs = probs / total", "probs = probs"),
            "not renormalised in between": ("return best / sums[-1]", "return best"),
            "top-p before top-k": (EARLY, TOP_P + EARLY),
            "min-p before top-k": (EARLY, MIN_P + EARLY),
            "min-p of the whole": ("values.min_p * best[..., :1]", "values.min_p"),
            "one too few of top-p": (
                "_running(best) - best < values.top_p",
                "_running(best) < values.top_p",
            ),
            "sorted and left so": (
                "    for total in sums:",
                "    probs = best\n    for total in []:",
            ),
            "siblings' tokens penalised": (
                "on_path = unpack(tree.ancestors, N) &",
                "on_path = (unpack(tree.ancestors, N) | True) &",
            ),
            "the node's own token not": (
                "on_path = unpack(tree.ancestors, N) &",
                "on_path = unpack(tree.ancestors, N) & ~jnp.eye(N, dtype=bool)[None] &",
            ),
            "the root counted twice": (
                "> 0)[None, None]\n    batch",
                "> -1)[None, None]\n    batch",
            ),
            "nothing before the round": (
                "jnp.broadcast_to(counts[:, None], (B",
                "jnp.broadcast_to(0 * counts[:, None], (B",
            ),
            "penalties of the round's start": (
                ".add(on_path.astype(counts.dtype))",
                ".add(0 * on_path.astype(counts.dtype))",
            ),
        },
        cuts={
            "the higher id of equal ones": (
                "earlier = _running(equal.astype(jnp.int32))",
                "earlier = _running(equal[..., ::-1].astype(jnp.int32))[..., ::-1]",
            ),
            "all of equal ones": ("equal & (earlier <= room)", "equal"),
            "none of equal ones": ("equal & (earlier <= room)", "equal & (earlier < room)"),
            "a token past top-p": ("- best < values.top_p", "- best <= values.top_p"),
            "min-p above, not at": ("best >= values.min_p", "best > values.min_p"),
        },
        on_trees={
            "the last coin not scaled": ("weights, coin * total[..., -1])", "weights, coin)"),
        },
        on_a_grid={
            "a coin on the running sum": ("(total > goal", "(total >= goal"),
        },
        at_the_edges={
            "a token without weight at the end": ("jnp.where(weights > 0, index, 0)", "index"),
            "one at the beginning": (
                "(total > goal[..., None]) & (weights > 0)",
                "(total >= goal[..., None])",
            ),
            "the most likely at the end": (
                "jnp.argmax(exceeds, axis=-1).astype(jnp.int32), last",
                "jnp.argmax(exceeds, axis=-1).astype(jnp.int32), 0 * last",
            ),
        },
        many_ids={
            "the blocks before left out": ("before + jnp.cumsum(part", "jnp.cumsum(part"),
            "a block's first id": ("block[..., 0] * BLOCK + within", "block[..., 0] * BLOCK"),
            "the id within a block": ("block[..., 0] * BLOCK + within", "within"),
            "the block's own sum before it": ("jnp.maximum(block - 1, 0)", "block"),
            "the coin not scaled": ("goal = coin * total[..., -1]", "goal = coin"),
        },
        coins_are_apart={
            "the same in every round": (
                "jax.random.fold_in(jax.random.fold_in(key, length), stream)",
                "jax.random.fold_in(key, stream)",
            ),
            "the same for all purposes": (
                "jax.random.fold_in(jax.random.fold_in(key, length), stream)",
                "jax.random.fold_in(key, length)",
            ),
            "the same for every seed": (
                "jax.random.fold_in(jax.random.fold_in(key, length), stream)",
                "jax.random.fold_in(jax.random.fold_in(jax.random.key(0), length), stream)",
            ),
            "length and purpose mixed up": (
                "jax.random.fold_in(jax.random.fold_in(key, length), stream)",
                "jax.random.fold_in(key, length + stream)",
            ),
            "one for all nodes": (
                "return jax.random.uniform(key, shape, dtype)",
                "return jnp.broadcast_to(jax.random.uniform(key, (), dtype), shape)",
            ),
        },
    ),
    *mistakes(
        "expected",
        on_trees={
            "a depth left out": ("range(2, num_steps + 1)", "range(2, num_steps)"),
            "the parent's chance left out": (
                "jnp.take_along_axis(reached, tree.parents, axis=1) * chance",
                "chance",
            ),
        },
        on_chains={
            "not the least of 1 and p/q": (
                "jnp.minimum(p / jnp.where(valid, q, 1), 1)",
                "p / jnp.where(valid, q, 1)",
            ),
            "chances not multiplied": ("jnp.cumprod(chance, axis=1)", "chance"),
            "prefixes the wrong way round": (
                "(1 - chances)[:, ::-1], axis=1)[:, ::-1]",
                "(1 - chances), axis=1)",
            ),
        },
        with_thresholds={
            "no threshold of the sum": ("/ max(rule.threshold_acc, 1e-9)", ""),
            "no single threshold": (
                "jnp.where(child >= rule.threshold_single, 1,",
                "jnp.where(child > 2, 1,",
            ),
            "earlier siblings forgotten": ("return most - before", "return most"),
        },
    ),
]


def modules(mistake: Mistake | None) -> Modules:
    """The modules with the mistake in one of them; those after it import it."""
    made: Modules = {}
    for name in MODULES:
        original = importlib.import_module(f"eagle3_jax.{name}")
        source = original.__loader__.get_source(original.__name__)
        if mistake is not None and mistake.module == name:
            for old, new in zip(mistake.pieces[::2], mistake.pieces[1::2], strict=True):
                assert source.count(old) == 1, old
                source = source.replace(old, new)
        made[name] = types.ModuleType(original.__name__)
        exec(compile(source, original.__name__, "exec"), made[name].__dict__)
        for before in MODULES[: MODULES.index(name)]:
            for known in vars(made[before]).keys() & vars(made[name]).keys() & FUNCTIONS:
                setattr(made[name], known, getattr(made[before], known))
    return made


@pytest.fixture(autouse=True)
def _float64():
    with jax.enable_x64(True):
        yield


IN_FULL = ("on_trees", "on_chains", "with_thresholds")
"""Of the code as it is, test_verify.py and test_verify_chain.py have them."""


@pytest.mark.parametrize("check", by_default(CHECKS, lambda _, name: name not in IN_FULL))
def test_the_code_as_it_is(check):
    CHECKS[check](modules(None))


@pytest.mark.parametrize(
    "mistake", by_default(MISTAKES, lambda i, _: i % 6 == 0), ids=lambda x: x.name.replace(" ", "-")
)
def test_mistakes_show(mistake, monkeypatch):
    code = modules(mistake)
    sampling_checks.enumerate_with(code, monkeypatch)
    with pytest.raises(AssertionError):
        CHECKS[mistake.check](code)

"""Ways to be wrong: changes of a draft's weights or config, and of one function of the loop."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eagle3_jax import choice, loop, tree, verify
from eagle3_jax.cache import KVCache
from eagle3_jax.draft import Eagle3Draft
from eagle3_jax.modules import tensors_of
from eagle3_jax.targets.llama import LlamaTarget

Tensors = dict[str, np.ndarray]


def rebuilt(draft: Eagle3Draft, tensors: Tensors | None = None, **fields: Any) -> Eagle3Draft:
    """A draft with some config fields and tensors replaced."""
    config = dataclasses.replace(draft.config, **fields)
    own = tensors_of(draft) | (tensors or {})
    return Eagle3Draft.from_tensors(config, own, "float32", draft_attention=draft.draft_attention)


def flip(*biased: str, **fields: Any) -> Callable[[Eagle3Draft], Eagle3Draft]:
    """Changes config fields; new norms weigh 1, the tensors in `biased` get a bias of 0.05."""

    def change(draft: Eagle3Draft) -> Eagle3Draft:
        c = draft.config
        new: Tensors = {
            "input_norm.weight": np.ones(c.num_aux * c.target_hidden_size, np.float32),
            "fc_norm.weight": np.ones((c.num_aux, c.target_hidden_size), np.float32),
        }
        for name in biased:
            rows = len(tensors_of(draft)[f"{name}.weight"])
            new[f"{name}.bias"] = np.full(rows, 0.05, np.float32)
        return rebuilt(draft, new, **fields)

    return change


def without_hidden_norm(draft: Eagle3Draft) -> Eagle3Draft:
    return rebuilt(draft, hidden_norm=False)


def with_qk_norm(draft: Eagle3Draft) -> Eagle3Draft:
    """Norms whose weights are one."""
    ones = np.ones(draft.config.head_dim, np.float32)
    new = {f"layers.0.attn.{n}_norm.weight": ones for n in "qk"}
    return rebuilt(draft, new, qk_norm=True)


def own_embedding(draft: Eagle3Draft) -> Eagle3Draft:
    c = draft.config
    table = np.random.default_rng(0).standard_normal((c.vocab_size, c.hidden_size))
    return rebuilt(draft, {"embed.weight": table.astype(np.float32)}, embed="draft")


def exchanged(first: str, second: str) -> Callable[[Eagle3Draft], Eagle3Draft]:
    def change(draft: Eagle3Draft) -> Eagle3Draft:
        own = tensors_of(draft)
        return rebuilt(draft, {first: own[second], second: own[first]})

    return change


def altered(
    *names: str, by: Callable[[np.ndarray], np.ndarray]
) -> Callable[[Eagle3Draft], Eagle3Draft]:
    def change(draft: Eagle3Draft) -> Eagle3Draft:
        own = tensors_of(draft)
        return rebuilt(draft, {name: by(own[name]) for name in names})

    return change


def swap_input_halves(weight: np.ndarray) -> np.ndarray:
    """Columns for [hidden; embedding] where the model feeds [embedding; hidden]."""
    return np.roll(weight, weight.shape[1] // 2, axis=1)


def interleave_rotary_rows(weight: np.ndarray) -> np.ndarray:
    """llama.cpp's row order within each head of 8."""
    heads = weight.reshape(-1, 2, 4, weight.shape[1])
    return heads.swapaxes(1, 2).reshape(weight.shape)


def map_as_offsets(draft: Eagle3Draft) -> Eagle3Draft:
    """d2t taken as target ids; set past `from_tensors`, which refuses repeated ids."""
    changed = rebuilt(draft)
    ids = draft.draft_to_target[...]
    changed.draft_to_target[...] = ids - jnp.arange(len(ids), dtype=ids.dtype)
    return changed


def fresh_programs(patch: pytest.MonkeyPatch):
    """Programs that are traced again, so that a patched function is seen."""

    def start(program, weights, prompts, lengths, limits, *, slots, capacity):
        return loop.start(
            program, weights, prompts, lengths, limits, slots=slots, capacity=capacity
        )

    def round_(program, weights, state, limits):
        return loop.round_(program, weights, state, limits)

    static = ("program", "slots", "capacity")
    patch.setattr(loop, "start_jit", jax.jit(start, static_argnames=static))
    patch.setattr(loop, "round_jit", jax.jit(round_, static_argnames="program"))


def step_with(change: Callable) -> Callable[[pytest.MonkeyPatch], None]:
    """Patches `Eagle3Draft.step`: (tokens, hidden, rows) -> (tokens, hidden, rows)."""

    def apply(patch: pytest.MonkeyPatch):
        original = Eagle3Draft.step

        def step(self, tokens, hidden, rows, cache, *, shared=None):
            return original(self, *change(tokens, hidden, rows), cache, shared=shared)

        patch.setattr(Eagle3Draft, "step", step)

    return apply


def unshifted(tokens, hidden, rows):
    if rows.ancestors is None:
        tokens = jnp.concatenate((tokens[:, :1], tokens[:, :-1]), axis=1)
    return tokens, hidden, rows


def drafted_positions_plus_one(tokens, hidden, rows):
    if rows.ancestors is not None and tokens.shape[1] == 1:
        rows = dataclasses.replace(rows, positions=rows.positions + 1)
    return tokens, hidden, rows


def selected_with(change: Callable[[jax.Array], jax.Array]) -> Callable[[pytest.MonkeyPatch], None]:
    """Patches the ancestor bits [B, N, words] of the verified tree."""

    def apply(patch: pytest.MonkeyPatch):
        def select(candidates, root, config):
            chosen, selected = tree.select(candidates, root, config)
            return dataclasses.replace(chosen, ancestors=change(chosen.ancestors)), selected

        patch.setattr(loop, "select", select)

    return apply


def greedy_with(change: Callable) -> Callable[[pytest.MonkeyPatch], None]:
    """Patches acceptance: (path, num_correct, num_steps) -> (path, num_correct)."""

    def apply(patch: pytest.MonkeyPatch):
        original = verify.greedy

        def greedy(drafted, predicted, num_steps):
            found = original(drafted, predicted, num_steps)
            path, num_correct = change(found.path, found.num_correct, num_steps)
            tokens = jnp.take_along_axis(predicted, path, axis=1)
            return verify.Accepted(path, num_correct, tokens)

        patch.setattr(verify, "greedy", greedy)

    return apply


def extend_with(change: Callable) -> Callable[[pytest.MonkeyPatch], None]:
    """Patches what the extend after verification reads: (path, num_correct, rows) -> the same."""

    def apply(patch: pytest.MonkeyPatch):
        original = loop._extend

        def extend(program, draft, target, limits, length, accepted, *rest):
            path, num_correct = change(accepted.path, accepted.num_correct)
            changed = dataclasses.replace(accepted, path=path, num_correct=num_correct)
            return original(program, draft, target, limits, length, changed, *rest)

        patch.setattr(loop, "_extend", extend)

    return apply


def extend_writes_nothing(patch: pytest.MonkeyPatch):
    original = loop._extend

    def extend(*args):
        seed, _, tensors = original(*args)
        return seed, args[-1], tensors  # the cache it was given

    patch.setattr(loop, "_extend", extend)


def no_compaction(patch: pytest.MonkeyPatch):
    patch.setattr(KVCache, "keep", lambda self, path, start: self)


def other_beams_slot(patch: pytest.MonkeyPatch):
    original = tree._own_bits

    def bits(level, topk, words):
        return np.roll(original(level, topk, words), 1, axis=0)

    patch.setattr(tree, "_own_bits", bits)


def softmax_over_the_best(patch: pytest.MonkeyPatch):
    original = tree.top_probabilities

    def probabilities(logits, topk):
        probs, ids = original(logits, topk)
        return probs / probs.sum(axis=-1, keepdims=True), ids

    patch.setattr(tree, "top_probabilities", probabilities)
    patch.setattr(choice, "top_probabilities", probabilities)


def positions_by_node(patch: pytest.MonkeyPatch):
    original = LlamaTarget.states

    def states(self, tokens, rows, cache, boundaries=()):
        if rows.ancestors is not None:
            order = jnp.arange(tokens.shape[1], dtype=jnp.int32)[None]
            rows = dataclasses.replace(rows, positions=rows.lengths[:, None] + order)
        return original(self, tokens, rows, cache, boundaries)

    patch.setattr(LlamaTarget, "states", states)

"""The real pair's states and logits on recorded prompts: transformers' and speculators' numbers."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from smollm2_goldens import arrays, greedy

from eagle3_jax.layers import Rows
from eagle3_jax.modules import take_apart

pytestmark = pytest.mark.smollm2

RELATIVE = 1e-4
"""Of the largest value of the compared array: float32 sums of up to 1728 terms in another order."""

STEPS = 6


def close(found, expected: np.ndarray):
    found = np.asarray(found)
    assert found.shape == expected.shape
    np.testing.assert_allclose(found, expected, rtol=0, atol=RELATIVE * np.abs(expected).max())


def check_logits(found, recorded: dict[str, np.ndarray], name: str):
    """A sample of the logits, and the best ones with their ids."""
    logits = np.asarray(found)
    strided = recorded[f"{name}.strided"]
    close(logits[..., :: logits.shape[-1] // strided.shape[-1]], strided)
    top = np.take_along_axis(logits, recorded[f"{name}.top_ids"], axis=-1)
    close(top, recorded[f"{name}.top"])
    np.testing.assert_array_equal(logits.argmax(-1), recorded[f"{name}.top_ids"][..., 0])


def padded_prompts() -> tuple[np.ndarray, list[int]]:
    """Prompts 0..3, right padded."""
    prompts = [greedy()[i]["prompt_ids"] for i in range(4)]
    lengths = [len(prompt) for prompt in prompts]
    padded = np.zeros((4, max(lengths)), np.int32)
    for row, prompt in zip(padded, prompts, strict=True):
        row[: len(prompt)] = prompt
    return padded, lengths


@pytest.fixture(scope="module")
def prompt_states(smollm2_target):
    """Our states of prompts 0..3 at boundaries 0, 2, 15, 27, 30, after the norm; last logits."""
    padded, lengths = padded_prompts()
    leaves, structure = take_apart(smollm2_target)

    @jax.jit
    def run(leaves, tokens, last):
        model = structure.build(leaves)
        B, T = tokens.shape
        rows, cache = Rows.prefill(B, T), model.new_cache(B, T)
        normed, states, _ = model.states(tokens, rows, cache, (0, 2, 15, 27, 30, "final_norm"))
        return states, model.logits(jnp.take_along_axis(normed, last, axis=1)[:, 0])

    states, logits = run(leaves, padded, np.asarray(lengths)[:, None, None] - 1)
    return np.asarray(states), np.asarray(logits)


@pytest.mark.parametrize("number", range(4))
def test_target_states(number, prompt_states):
    states, logits = prompt_states
    recorded = arrays(f"target_aux_{number:02d}")
    rows = recorded["rows"]
    names = ("embed_0", "aux_2", "aux_15", "aux_27", "last_prenorm", "last_postnorm")
    for slot, name in enumerate(names):
        close(states[number, rows, slot], recorded[name])
    check_logits(logits[number], recorded, "logits_last")


@pytest.fixture(scope="module")
def prompt_drafts(smollm2_drafts, prompt_states):
    """The draft over prompts 0..3 and six steps on: what `draft_chain_NN` recorded.

    Over the prompt: `fc` output, states before the final norm, best draft ids. Then a chain, each
    step fed with its own argmax and its own state: its logits, states and target ids.
    """
    padded, lengths = padded_prompts()
    first = np.asarray([greedy()[i]["gen_ids"][0] for i in range(4)])
    shifted = np.concatenate((padded[:, 1:], padded[:, :1]), axis=1)
    shifted[np.arange(4), np.asarray(lengths) - 1] = first
    leaves, structure = take_apart(smollm2_drafts["draft"])

    @jax.jit
    def run(leaves, aux, tokens, lengths):
        draft = structure.build(leaves)
        B, T = tokens.shape
        fused = draft.fuse(aux)
        cache = draft.new_cache(B, T + STEPS)
        out, cache = draft.step(tokens, fused, Rows.prefill(B, T), cache)
        hidden = jnp.take_along_axis(out, (lengths - 1)[:, None, None], axis=1)
        logits, states, ids = [], [], []
        for step in range(STEPS):
            logits.append(draft.logits(hidden)[:, 0])
            states.append(hidden[:, 0])
            ids.append(draft.to_target(logits[-1].argmax(-1).astype(jnp.int32)))
            rows = Rows.chain(lengths + step, 1)
            hidden, cache = draft.step(ids[-1][:, None], hidden, rows, cache)
        chain = (jnp.stack(values, axis=1) for values in (logits, states, ids))
        return fused, out, draft.logits(out).argmax(-1), *chain

    aux = prompt_states[0][:, :, 1:4]
    found = run(leaves, aux, shifted, np.asarray(lengths, np.int32))
    names = ("fused", "hidden", "best", "chain_logits", "chain_hidden", "chain_ids")
    return dict(zip(names, map(np.asarray, found), strict=True))


@pytest.mark.parametrize("number", range(4))
def test_draft_states(number, prompt_drafts):
    recorded = arrays(f"draft_chain_{number:02d}")
    rows = recorded["rows"]
    close(prompt_drafts["fused"][number, rows], recorded["fc_out"])
    close(prompt_drafts["hidden"][number, rows], recorded["prefill_hidden"])
    best = recorded["prefill_argmax_draft"]
    np.testing.assert_array_equal(prompt_drafts["best"][number, : len(best)], best)


@pytest.mark.parametrize("number", range(4))
def test_draft_chain(number, prompt_drafts):
    recorded = arrays(f"draft_chain_{number:02d}")
    check_logits(prompt_drafts["chain_logits"][number], recorded, "chain_logits")
    close(prompt_drafts["chain_hidden"][number], recorded["chain_hidden"])
    np.testing.assert_array_equal(prompt_drafts["chain_ids"][number], recorded["chain_target_ids"])

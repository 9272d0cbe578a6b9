"""Drafts with several layers, latent attention and windows through the loop and the replay."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from random_models import draft_config, random_draft, random_target, target_config
from replay_records import of_target
from selection import by_default

import eagle3_jax as e3
from eagle3_jax.attention_config import LatentSizes, RopeConfig
from eagle3_jax.layers import Rows
from eagle3_jax.modules import take_apart
from eagle3_jax.replay import replay
from eagle3_jax.wirings.material import Material
from eagle3_jax.wirings.pack import pack
from eagle3_jax.wirings.search import Search
from eagle3_jax.wirings.wiring import configured

NEW, PADDED = 20, 40
CHAIN, TREE = e3.TreeConfig(3), e3.TreeConfig(3, 4, 12)
PROMPTS = [[1, 2, 3, 4, 5], [7, 8, 9]]
KINDS = {
    "latent": {
        "num_heads": 2,
        "num_kv_heads": 2,
        "head_dim": 5,
        "latent": LatentSizes(6, 3, 2, 4, q_lora_rank=5),
        "rope": RopeConfig(kind="yarn", factor=4.0, original_max_position_embeddings=16),
        "windows": (9,),
    },
    "two_layers": {
        "num_layers": 2,
        "next_layers": "hidden_norm",
        "qk_norm": True,
        "rope": RopeConfig(kind="dynamic", factor=2.0, original_max_position_embeddings=12),
    },
    "one_layer": {
        "qk_norm": True,
        "hidden_norm": False,
        "rope": RopeConfig(
            kind="yarn", factor=4.0, original_max_position_embeddings=16, attention_factor=1.4
        ),
        "windows": (7,),
    },
    "three_wide": {"num_layers": 3, "next_layers": "wide", "windows": (None, 6, 7)},
}


@functools.cache
def pair(name: str):
    target = random_target(target_config(), seed=1, dtype=np.float32)
    config = draft_config(target.config, **KINDS[name])
    return target, random_draft(config, seed=2, dtype=np.float32)


def kinds(*usual: str):
    """All kinds, those not usual on request only."""
    return pytest.mark.parametrize("kind", by_default(KINDS, lambda _, name: name in usual))


@functools.partial(jax.jit, static_argnames="structure")
def from_the_start(structure, leaves, shared, aux, tokens, drafted, count):
    """Logits of row `count` and its state; rows past the first are the draft's own [P, D]."""
    draft = structure.build(leaves)
    fused = draft.fuse(aux)
    own = jnp.arange(PADDED, dtype=jnp.int32)[None, :, None] >= drafted[1]
    hidden = jnp.where(own, drafted[0], fused)
    cache = draft.new_cache(1, PADDED)
    out, _ = draft.step(tokens, hidden, Rows.prefill(1, PADDED), cache, shared=shared)
    row = out[:, count]
    return draft.logits(row, shared=shared)[0], draft.feedback(row[:, None])[0, 0]


@kinds("latent", "two_layers")
def test_every_proposal_is_that_of_a_draft_without_a_cache(kind):
    """Chains of three: the whole sequence is run again for every drafted token."""
    target, draft = pair(kind)
    leaves, structure = take_apart(draft)
    shared, prompt = target.shared(), PROMPTS[0]
    boundaries = draft.config.aux_boundaries
    rounds = list(
        e3.rounds(target, draft, [prompt], max_new_tokens=NEW, tree=CHAIN, stop_token_ids=())
    )
    text = [*prompt, rounds[0].tokens[0], *(t for r in rounds for t in r.emitted)]
    record = of_target(target, [prompt], [text[len(prompt) :]], boundaries)
    aux = np.zeros((1, PADDED, *record.sequences[0].aux.shape[1:]), np.float32)
    aux[0, : len(text)] = record.sequences[0].aux
    differ = 0
    for r in rounds:
        tokens = np.zeros((1, PADDED), np.int32)
        tokens[0, : r.length] = text[1 : r.length + 1]
        own = np.zeros((1, PADDED, draft.config.hidden_size), np.float32)
        for depth in range(CHAIN.num_steps):
            at = r.length - 1 + depth
            logits, state = from_the_start(
                structure, leaves, shared, aux, tokens, (own, np.int32(r.length)), np.int32(at)
            )
            best = draft.to_target(jnp.argmax(logits))
            assert r.tokens[1 + depth] == int(best), (r.length, depth)
            differ += int(best) != tokens[0, at]
            tokens[0, at + 1], own[0, at + 1] = best, state
    assert len(rounds) > 5
    assert differ > 10


@kinds("latent")
def test_replay_equals_speculation(kind):
    target, draft = pair(kind)
    served = e3.speculate(target, draft, PROMPTS, tree=TREE, max_new_tokens=NEW, stop_token_ids=())
    record = of_target(target, PROMPTS, served.tokens, draft.config.aux_boundaries)
    found = replay(record, draft, [CHAIN, TREE], shared=target.shared())
    accepted = 0
    for ours, theirs in zip(found.of(TREE).accept_lengths, served.accept_lengths, strict=True):
        assert ours == theirs[: len(ours)]
        assert len(theirs) - len(ours) <= 1
        accepted += sum(theirs) - len(theirs)
    assert accepted > 2


@kinds("latent", "two_layers")
def test_the_doctor_scores_what_the_draft_says(kind):
    """Chains along the record's tokens, each drafted token from the whole sequence again."""
    target, draft = pair(kind)
    leaves, structure = take_apart(draft)
    options = {"max_new_tokens": NEW, "stop_token_ids": ()}
    outputs = e3.generate(target, PROMPTS[:1], **options).tokens
    record = of_target(target, PROMPTS[:1], outputs, draft.config.aux_boundaries)
    packed = pack(record, steps=3, max_tokens=64)
    shared = target.shared()
    material = Material(packed, record.boundaries, draft, shared, {}, None, None)
    wiring = configured(draft.config, record.boundaries)
    search = Search(material, lambda one: [one], lambda text: None)
    found = search.rows(wiring, search.many)
    text = record.sequences[0].tokens
    aux = np.zeros((1, PADDED, *record.sequences[0].aux.shape[1:]), np.float32)
    aux[0, : len(text)] = record.sequences[0].aux
    tokens = np.zeros((1, PADDED), np.int32)
    tokens[0, : len(text) - 1] = text[1:]
    chains = [packed.chains[i].slot for i in search.many.chains]
    assert len(chains) > 8
    for column, slot in enumerate(chains):
        own = np.zeros((1, PADDED, draft.config.hidden_size), np.float32)
        for depth in range(min(3, len(text) - 1 - slot)):
            start = (own, np.int32(slot + 1))
            logits, state = from_the_start(
                structure, leaves, shared, aux, tokens, start, np.int32(slot + depth)
            )
            assert found[depth, column] == int(jnp.argmax(logits)), (slot, depth)
            own[0, slot + depth + 1] = state

"""The doctor on drafts of two layers and with latent attention, under trees, over images."""

import dataclasses
import json

import numpy as np
import pytest
from scripted_checkpoint import canonical_tensors
from scripted_draft import Truth
from scripted_records import Request, make
from selection import by_default

from eagle3_jax.config import ConfigError, TreeConfig
from eagle3_jax.doctor import diagnose
from eagle3_jax.draft import Eagle3Draft
from eagle3_jax.replay import replay
from eagle3_jax.wirings.material import Material
from eagle3_jax.wirings.pack import pack
from eagle3_jax.wirings.report import as_json, lines, sentence
from eagle3_jax.wirings.search import Search
from eagle3_jax.wirings.trees import accepted
from eagle3_jax.wirings.wiring import configured

pytestmark = pytest.mark.full_compile

PLAIN, DEEP = Truth(), Truth(layers=2)
LATENT = Truth(latent=True, rope_pairs="interleaved")
IMAGE = (8, 3, 4)


def changed(truth, **fields):
    return dataclasses.replace(truth, **fields)


def scripted(truth, tokens=200, count=1, image=None, **options):
    return make([Request(tokens=tokens, image=image)] * count, truth=truth, **options)


def without_rounds(record):
    bare = [dataclasses.replace(s, rounds=None) for s in record.sequences]
    return dataclasses.replace(record, sequences=bare)


def check_up(s, claim=None, record=None, **options):
    return diagnose(record or s.record, s.draft(claim), s.shared(), **options)


def test_the_last_layer_s_state_is_fed_back():
    """E3-028: fed back from the first layer, first proposals stay and the others break."""
    s = scripted(changed(DEEP, fed_from="first"))
    rounds = replay(s.record, s.draft(DEEP), s.tree, shared=s.shared(), mode="pinned").trees[0]
    assert rounds.accepted.tolist() != s.accepted[0]
    one = replay(s.record, s.draft(DEEP), TreeConfig(1), shared=s.shared(), mode="pinned").trees[0]
    assert one.accepted.tolist() == [min(a, 1) for a in s.accepted[0]]
    s = scripted(DEEP)
    right = replay(s.record, s.draft(), s.tree, shared=s.shared(), mode="pinned").trees[0]
    assert right.accepted.tolist() == s.accepted[0]


FAULTS = {
    "norm and boundaries": (
        changed(DEEP, next_norm="hidden_norm", boundaries=(3, 5, 6)),
        DEEP,
        {"next_norm", "boundaries"},
    ),
    "latent pairs and base": (
        changed(LATENT, rope_pairs="half", theta=1e5),
        LATENT,
        {"pairs", "rope"},
    ),
    "norm": (changed(DEEP, next_norm="hidden_norm"), DEEP, {"next_norm"}),
    "other norm": (DEEP, changed(DEEP, next_norm="hidden_norm"), {"next_norm"}),
    "fed from": (changed(DEEP, fed_from="first"), DEEP, {"fed_from"}),
    "one layer served": (changed(DEEP, runs=1), DEEP, {"layers"}),
    "deep residual": (changed(DEEP, norm_before_residual=True), DEEP, {"norm_before_residual"}),
    "latent order": (changed(LATENT, boundaries=(5, 4, 2)), LATENT, {"boundaries"}),
    "latent window": (changed(LATENT, window=32), LATENT, {"window"}),
    "latent owner": (changed(LATENT, embed="draft"), LATENT, {"embed"}),
}


@pytest.mark.parametrize("name", by_default(FAULTS, lambda i, _: i < 2))
def test_faults_of_deep_and_latent_drafts(name):
    truth, claim, fields = FAULTS[name]
    s = scripted(truth)
    extra = {"embed.weight": s.weights["embed_tokens.weight"]}
    d = check_up(s, claim, extra=extra)
    assert d.verdict == "wiring_differs"
    assert set(d.configured.wiring.changes(d.best.wiring)) == fields
    assert d.best.accept_length == pytest.approx(s.accept_length, abs=0.05)
    assert d.configured.accept_length < 2.2
    assert d.agreements[0].name == "refresh"
    assert d.agreements[0].different == 0
    json.dumps(as_json(d))


@pytest.mark.parametrize("truth", by_default([DEEP, LATENT], lambda i, _: i == 0))
def test_right_ones_are_not_cured(truth):
    d = check_up(scripted(truth))
    assert d.verdict == "not_acceptance"
    assert d.agreements[0].different == 0


POLICIES = [(DEEP, "keep"), (DEEP, "hole"), (LATENT, "keep"), (LATENT, "hole")]


@pytest.mark.parametrize("case", by_default(POLICIES, lambda i, _: i == 1))
def test_cache_policies_of_deep_and_latent_drafts(case):
    """Rows of a later layer depend on what the first one's cache holds."""
    truth, policy = case
    s = scripted(changed(truth, kv=policy))
    d = check_up(s, truth)
    assert (d.verdict, d.explained) == ("engine_differs", policy)
    assert d.agreements[0].different == 0


def test_what_cannot_be_tried_is_said():
    s = scripted(DEEP, tokens=80)
    spare = s.draft(DEEP)
    assert check_up(s, record=without_rounds(s.record)).not_tried == []
    lone = dataclasses.replace(spare.config, next_spare_norm=False)
    tensors = canonical_tensors(DEEP, s.weights)
    del tensors["layers.1.norm_hidden.weight"]
    draft = Eagle3Draft.from_tensors(lone, tensors, "float32")
    d = diagnose(without_rounds(s.record), draft, s.shared())
    assert d.not_tried[0].startswith("later layers under hidden_norm: the file has only")
    assert "Not tried:" in lines(d)


def material(s, draft, steps):
    packed = pack(s.record, steps=steps, max_tokens=4096)
    return Material(packed, s.record.boundaries, draft, s.shared(), {}, None, None)


KINDS = {
    "plain": (PLAIN, {}, None),
    "deep": (DEEP, {}, None),
    "latent, window": (changed(LATENT, window=20), {"windows": (20,)}, None),
    "image": (Truth(sections=(4, 2, 2), interleaved=True), {}, IMAGE),
}


@pytest.mark.parametrize("name", KINDS)
def test_trees_of_a_wiring_are_the_replay_s(name):
    """From every place of the text, where both ways to attend while drafting differ."""
    truth, fields, image = KINDS[name]
    tree = TreeConfig(4, 3, 10)
    s = scripted(truth, tokens=90, image=image, tree=tree, count=2)
    draft = s.draft(**fields)
    search = Search(material(s, draft, 4), lambda wiring: [])
    wiring = configured(draft.config, truth.boundaries)
    found = {a: accepted(search, wiring, tree, a) for a in ("ancestors", "beam_slots")}
    chains = search.material.pack.chains
    for attention, counts in found.items():
        options = {"mode": "pinned", "shared": s.shared(), "draft_attention": attention}
        rounds = replay(s.record, draft, tree, **options).trees[0].rounds
        expected = {(r.sequence, r.start): r.accepted for r in rounds}
        starts = [(c.sequence, c.engine.start) for c in chains]
        assert counts.tolist() == [expected[at] for at in starts]
    assert found["ancestors"].mean() > 0.5


@pytest.mark.parametrize("rounds", by_default([True, False], lambda i, _: i == 0))
def test_a_winner_is_confirmed_under_the_tree(rounds):
    """Also where only the tree's rounds show enough."""
    tree = TreeConfig(3, 2, 6)
    truth = Truth(boundaries=(3, 5, 6)) if rounds else Truth(norm_before_residual=True)
    s = scripted(truth, tokens=100, count=2, tree=tree, draft_attention="beam_slots")
    d = check_up(s, PLAIN, s.record if rounds else without_rounds(s.record), tree=tree)
    assert d.verdict == "wiring_differs"
    field = "boundaries" if rounds else "norm_before_residual"
    assert set(d.configured.wiring.changes(d.best.wiring)) == {field}
    assert d.under_tree.gain.low > 0
    assert f"under the tree 3/2/6 {d.under_tree.configured:.2f} -> " in sentence(d)
    assert as_json(d)["under_tree"]["tree"]["topk"] == 2
    if rounds:
        assert d.under_tree.best == pytest.approx(s.accept_length, abs=0.05)
        assert d.agreements[0].different == 0


def test_a_right_wiring_is_judged_by_its_tree():
    """Its chains accept little, its trees enough: no "not matched"."""
    tree = TreeConfig(3, 2, 6)
    s = scripted(PLAIN, tokens=100, count=2, tree=tree)
    d = check_up(s, record=without_rounds(s.record), tree=tree)
    assert d.configured.accept_length < 1.4 < d.under_tree.best
    assert d.verdict == "as_configured"
    assert "under the tree 3/2/6" in sentence(d)


def test_a_tree_that_cannot_be_is_refused():
    s = scripted(PLAIN, tokens=60)
    with pytest.raises(ConfigError, match="num_steps is 2, the tree's is 3: give one"):
        check_up(s, tree=TreeConfig(3, 2, 4), num_steps=2)
    with pytest.raises(ConfigError, match="topk=65 exceeds the draft vocabulary of 64"):
        check_up(s, tree=TreeConfig(3, 65, 66))


@pytest.mark.parametrize(
    ("truth", "claim", "words"),
    [
        (
            Truth(sections=(4, 2, 2), interleaved=True),
            Truth(sections=(4, 2, 2)),
            "rope with sections [4, 2, 2] interleaved",
        ),
        pytest.param(
            PLAIN, Truth(sections=(4, 2, 2)), "rope of one axis", marks=pytest.mark.exhaustive
        ),
    ],
)
def test_axes_are_tried_where_the_record_has_them(truth, claim, words):
    s = scripted(truth, image=(2, 4, 5), count=3)
    d = check_up(s, claim)
    assert d.verdict == "wiring_differs"
    assert d.best.words == words
    assert d.best.accept_length == pytest.approx(s.accept_length, abs=0.05)


def test_axes_without_positions_are_not_tried():
    s = scripted(Truth(sections=(4, 2, 2)), tokens=80)
    d = check_up(s)
    assert "axes of the rope: the record has no positions on three axes" in d.not_tried
    assert np.isfinite(d.best.nll)

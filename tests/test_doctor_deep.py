"""The doctor on drafts of two layers and with latent attention, under trees, over images."""

import dataclasses
import json

import pytest
from scripted_checkpoint import canonical_tensors
from scripted_draft import Truth
from scripted_records import Request, make
from selection import by_default

from eagle3_jax.config import TreeConfig
from eagle3_jax.doctor import diagnose
from eagle3_jax.draft import Eagle3Draft
from eagle3_jax.replay import replay
from eagle3_jax.wirings.material import Material
from eagle3_jax.wirings.not_tried import not_tried
from eagle3_jax.wirings.pack import pack
from eagle3_jax.wirings.report import as_json, lines
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


def material(s, draft, steps):
    packed = pack(s.record, steps=steps, max_tokens=4096)
    return Material(packed, s.record.boundaries, draft, s.shared(), {}, None, None)


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


@pytest.mark.parametrize("name", by_default(FAULTS, lambda i, _: i == 0))
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
    assert "Not tried:" not in lines(d)
    assert lines(dataclasses.replace(d, not_tried=["why"])).count("  why") == 1


@pytest.mark.parametrize("truth", by_default([DEEP, LATENT], lambda i, _: False))
def test_right_ones_are_not_cured(truth):
    d = check_up(scripted(truth))
    assert d.verdict == "not_acceptance"
    assert d.agreements[0].different == 0


POLICIES = [(DEEP, "keep"), (DEEP, "hole"), (LATENT, "keep"), (LATENT, "hole")]


@pytest.mark.parametrize("case", by_default(POLICIES, lambda i, _: False))
def test_cache_policies_of_deep_and_latent_drafts(case):
    """Rows of a later layer depend on what the first one's cache holds."""
    truth, policy = case
    s = scripted(changed(truth, kv=policy))
    d = check_up(s, truth)
    assert (d.verdict, d.explained) == ("engine_differs", policy)
    assert d.agreements[0].different == 0


def test_what_cannot_be_tried_is_said():
    s = scripted(DEEP, tokens=60)
    assert reasons(s, s.draft()) == []
    lone = dataclasses.replace(s.draft().config, next_spare_norm=False)
    tensors = canonical_tensors(DEEP, s.weights)
    del tensors["layers.1.norm_hidden.weight"]
    (said,) = reasons(s, Eagle3Draft.from_tensors(lone, tensors, "float32"))
    assert said.startswith("later layers under hidden_norm: the file has only input_layernorm")
    (said,) = reasons(s, s.draft(windows=(20, None)))
    assert said.startswith("windows layer by layer")
    s = scripted(Truth(sections=(4, 2, 2)), tokens=60)
    assert reasons(s, s.draft()) == ["axes of the rope: the record has no positions on three axes"]


def reasons(s, draft):
    return not_tried(material(s, draft, 3), configured(draft.config, (2, 4, 5)))


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
    s = scripted(truth, image=(2, 4, 5))
    d = check_up(s, claim)
    assert d.verdict == "wiring_differs"
    assert d.best.words == words
    assert d.best.accept_length == pytest.approx(s.accept_length, abs=0.05)

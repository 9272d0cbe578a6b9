"""Wirings under trees: as the replay grows them, and winners confirmed by them."""

import pytest
from scripted_draft import Truth
from selection import by_default
from test_doctor_deep import (
    DEEP,
    IMAGE,
    LATENT,
    PLAIN,
    changed,
    check_up,
    material,
    scripted,
    without_rounds,
)

from eagle3_jax.config import ConfigError, TreeConfig
from eagle3_jax.replay import replay
from eagle3_jax.wirings.report import as_json, sentence
from eagle3_jax.wirings.search import Search
from eagle3_jax.wirings.trees import accepted
from eagle3_jax.wirings.wiring import configured

KINDS = {
    "plain": (PLAIN, {}, None),
    "deep": (DEEP, {}, None),
    "latent, window": (changed(LATENT, window=20), {"windows": (20,)}, None),
    "image": (Truth(sections=(4, 2, 2), interleaved=True), {}, IMAGE),
}


@pytest.mark.parametrize("name", by_default(KINDS, lambda i, _: i == 2))
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
@pytest.mark.full_compile
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


@pytest.mark.exhaustive
@pytest.mark.full_compile
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

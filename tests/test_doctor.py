"""The doctor on scripted records: one fault at a time, two at once, and none."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest
from scripted_draft import Truth
from scripted_records import Request, make
from selection import by_default

from eagle3_jax.aux_ids import AUX_KEY
from eagle3_jax.config import ConfigError, RopeConfig, TreeConfig
from eagle3_jax.doctor import diagnose, gap
from eagle3_jax.record import RecordError
from eagle3_jax.wirings.material import checked_rotation
from eagle3_jax.wirings.patch import overriding, patches
from eagle3_jax.wirings.report import as_json, lines, sentence
from eagle3_jax.wirings.stats import Paired
from eagle3_jax.wirings.trees import UnderTree
from eagle3_jax.wirings.wiring import configured

pytestmark = pytest.mark.full_compile

TRUE = Truth()


def scripted(truth=TRUE, seed=0, tokens=160, count=1, **options):
    return make([Request(tokens=tokens)] * count, truth=truth, seed=seed, **options)


def without_rounds(record):
    bare = [dataclasses.replace(s, rounds=None) for s in record.sequences]
    return dataclasses.replace(record, sequences=bare)


def check_up(s, claim=None, record=None, **options):
    return diagnose(record or s.record, s.draft(claim), s.shared(), **options)


def test_right_wiring_and_equal_rounds_are_not_an_acceptance_problem():
    s = scripted()
    d = check_up(s)
    assert d.verdict == "not_acceptance"
    assert d.healthy
    assert d.best.wiring == d.configured.wiring
    assert d.agreements[0].different == 0
    assert d.configured.accept_length == pytest.approx(s.accept_length, abs=0.05)
    assert "Not an acceptance problem" in sentence(d)


CHANGED = {
    "boundaries": (Truth(boundaries=(1, 4, 7)), 1.3),
    "shift": (Truth(boundaries=(3, 5, 6)), 1.2),
    "order": (Truth(boundaries=(5, 4, 2)), 1.2),
    "norm_before_residual": (Truth(norm_before_residual=True), 1.6),
    "window": (Truth(window=32), 1.5),
    "pairs": (Truth(rope_pairs="interleaved"), 1.3),
    "feedback": (Truth(feedback="post_norm"), 2.0),
    "residual": (Truth(residual="embedding"), 1.5),
    "double_norm": (Truth(double_norm=True), 2.0),
    "final_norm": (Truth(final_norm=False), 2.1),
    "chunk": (Truth(chunk=8), 2.3),
}


@pytest.mark.parametrize(
    "name",  # E3-036
    by_default(CHANGED, lambda i, name: i % 2 == 0 or name == "norm_before_residual"),
)
def test_one_fault(name):
    """The config claims TINY's wiring, the record was made by another."""
    truth, most = CHANGED[name]
    s = scripted(truth)
    claim = dataclasses.replace(TRUE, final_norm=truth.final_norm)
    options = {"wiring": None}
    if name == "final_norm":  # the weight is in the file
        options = {"extra": {"norm_final.weight": s.weights["norm.weight"]}}
        options["changes"] = {"final_norm": True}
    d = check_up(s, claim, **options)
    assert d.verdict == "wiring_differs"
    assert d.configured.accept_length < most
    assert d.best.accept_length == pytest.approx(s.accept_length, abs=0.05)
    assert d.agreements[0].name == "refresh"
    assert d.agreements[0].different == 0
    field = "boundaries" if name in ("shift", "order") else name
    assert set(d.configured.wiring.changes(d.best.wiring)) == {field}


def test_what_a_mistake_leads_to_is_named_before_what_luck_prefers():
    """Boundary 7 holds the states of 6, and 6 a little noise: (3, 5, 7) is a hair better."""
    s = scripted(Truth(boundaries=(3, 5, 6)))
    aux = np.array(s.record.sequences[0].aux)
    aux[:, 7] = aux[:, 6]
    aux[:, 6] += 0.03 * np.random.default_rng(0).standard_normal(aux[:, 6].shape)
    sequence = dataclasses.replace(s.record.sequences[0], aux=aux)
    d = check_up(s, TRUE, record=dataclasses.replace(s.record, sequences=[sequence]))
    assert d.best.words == "boundaries (3, 5, 6) for (2, 4, 5) (shift +1)"


def test_default_formula_was_a_guess():
    """E3-001: no ids in the config, so the guess is (2, 4, 5); trained on (1, 4, 7)."""
    s = scripted(Truth(boundaries=(1, 4, 7)))
    draft = s.draft(TRUE, aux_boundaries="default(2, L//2, L-3)")
    d = diagnose(s.record, draft, s.shared())
    assert d.configured.wiring.boundaries == (2, 4, 5)
    assert d.configured.accept_length < 1.3
    assert d.best.wiring.boundaries == (1, 4, 7)
    assert d.agreements[0].different == 0
    patch = patches(d.configured.wiring, d.best.wiring)
    key = "eagle_aux_hidden_state_layer_ids"
    assert patch["sglang"]["config"] == {"eagle_config": {key: [0, 3, 6]}}
    assert patch["vllm"]["config"] == {key: [1, 4, 7]}


@pytest.mark.parametrize("ids", by_default([(1, 4, 6), (2, 4, 5), (3, 5, 6)], lambda i, _: i == 0))
@pytest.mark.parametrize("step", [0, 1])
def test_ids_are_boundaries_or_block_outputs(ids, step):
    """E3-002: the same answer whatever the first id is."""
    s = scripted(Truth(boundaries=tuple(i + step for i in ids)))
    d = check_up(s, Truth(boundaries=ids))
    words = "boundaries (vLLM's reading)" if step == 0 else "block outputs"
    assert words in sentence(d, ids)
    assert d.healthy == (step == 0)


@pytest.mark.exhaustive
def test_uniform_shift_is_named():
    """E3-003."""
    s = scripted(Truth(boundaries=(3, 5, 6)))
    d = check_up(s, TRUE)
    assert "shift +1" in d.best.words
    assert d.configured.accept_length < 1.2
    assert d.best.accept_length == pytest.approx(2.5, abs=0.05)


@pytest.mark.parametrize("configured", by_default(["checkpoint", "side file"], lambda i, _: i == 1))
def test_side_file_of_a_stale_vocabulary(configured):
    """E3-011: the table in the checkpoint is right, another one differs in 60 of 64 rows."""
    s = scripted()
    draft = s.draft()
    ids = np.asarray(draft.draft_to_target[...]).copy()
    rng = np.random.default_rng(1)
    unused = np.flatnonzero(~np.isin(ids, s.record.sequences[0].tokens))[:4]
    stale = np.setdiff1d(np.arange(64), unused)
    ids[stale] = rng.permutation(np.setdiff1d(np.arange(256), ids[unused]))[:60]
    assert len(stale) == 60
    d = diagnose(s.record, draft, s.shared(), side_map=ids, changes={"vocab": configured})
    assert d.best.wiring.vocab == "checkpoint"
    assert d.best.accept_length == pytest.approx(2.5, abs=0.05)
    if configured == "side file":
        assert d.configured.accept_length < 1.05
    else:
        assert d.verdict == "not_acceptance"


@pytest.mark.parametrize("table", by_default(["ids", "none"], lambda i, _: i == 1))
def test_misread_vocabulary_table(table):
    s = scripted(Truth(table=table))
    d = check_up(s, TRUE)
    assert d.configured.accept_length < 1.1
    assert d.best.accept_length == pytest.approx(2.5, abs=0.05)
    assert set(d.configured.wiring.changes(d.best.wiring)) == {"vocab"}


@pytest.mark.parametrize("configured", ["draft", "target"])
def test_owner_of_the_embedding(configured):
    """E3-020: the draft trained its own embedding."""
    s = scripted(Truth(embed="draft"))
    d = check_up(s, changes={"embed": configured})
    assert d.best.wiring.embed == "draft"
    assert d.best.accept_length == pytest.approx(2.5, abs=0.05)
    assert any("SGLang 0.5.23 puts the target's embedding" in t for t in overriding(d.best.wiring))
    assert d.healthy == (configured == "draft")
    assert d.healthy or "own embedding" in d.best.words


def test_lost_input_norm():
    """E3-033: input_norm.weight is in the file, the flag is not."""
    s = scripted(Truth(norm_before_fc=True))
    d = check_up(s, TRUE, extra={"input_norm.weight": s.weights["input_norm.weight"]})
    assert d.best.words == "norm over concat before fc"
    assert d.best.accept_length == pytest.approx(2.5, abs=0.05)


def test_lost_norm_per_state():
    s = scripted(Truth(fc_norm=True))
    weights = np.stack([s.weights[f"fc_norm.{i}.weight"] for i in range(3)])
    d = check_up(s, TRUE, extra={"fc_norm.weight": weights})
    assert d.best.words == "a norm per state before fc"


def test_theta_in_the_config_is_untrue():
    """E3-039."""
    s = scripted()
    d = check_up(s, Truth(theta=1e6))
    assert d.best.words == "rope theta 10000 for 1e+06"
    assert d.configured.accept_length < 1.4
    patch = patches(d.configured.wiring, d.best.wiring)
    assert patch["sglang"]["config"] == {"rope_theta": 10000.0}


def test_the_target_s_dynamic_rope_is_tried():
    """The base grows past 32 tokens; the draft's config says nothing of it."""
    s = scripted(Truth(grows=(8.0, 32)))
    rope = RopeConfig(10000.0, "dynamic", factor=8.0, original_max_position_embeddings=32)
    d = check_up(s, TRUE, target_rope=rope)
    assert d.verdict == "wiring_differs"
    assert d.best.wiring.rope == rope
    assert d.best.accept_length == pytest.approx(s.accept_length, abs=0.05)
    assert d.configured.accept_length < s.accept_length - 0.3
    assert d.agreements[0].different == 0


@pytest.mark.exhaustive
def test_window_shows_only_past_it():
    """E3-045: early rounds are equal for all windows."""
    s = scripted(Truth(window=32))
    d = check_up(s, TRUE)
    assert d.best.wiring.window == 32


@pytest.mark.parametrize("said", [0, 1])
def test_token_shift(said):
    """E3-049: embed(token p + 1) joins state p, the input says `said`."""
    s = scripted()
    d = check_up(s, changes={"token_shift": said})
    assert d.best.wiring.token_shift == 1
    assert d.best.accept_length == pytest.approx(2.5, abs=0.05)
    assert d.healthy == (said == 1)
    if said == 0:
        assert d.configured.accept_length < 1.2


@pytest.mark.parametrize("policy", ["keep", "hole"])
def test_cache_policy_of_the_engine(policy):
    """E3-051, E3-052: the wiring is right, the engine's cache is not."""
    s = scripted(Truth(kv=policy))
    d = check_up(s, TRUE)
    assert d.verdict == "engine_differs"
    assert d.explained == policy
    assert d.agreements[0].different == 0
    first = next(a for a in d.agreements if a.name == "refresh").first
    assert f"round {first[1]} of sequence {first[0]}" in sentence(d)
    if policy == "keep":
        assert d.configured.accept_length < 1.6


def rotation():
    return np.linalg.qr(np.random.default_rng(4).standard_normal((64, 64)))[0].astype(np.float32)


@pytest.mark.parametrize("given", [False, True])
def test_rotated_states(given):
    """E3-077: norms unchanged, no wiring fits until the rotation is given."""
    s = scripted()
    turn = rotation()
    turned = [dataclasses.replace(q, aux=q.aux @ turn) for q in s.record.sequences]
    record = dataclasses.replace(s.record, sequences=turned)
    d = check_up(s, record=record, rotation=turn if given else None)
    if given:
        assert d.best.words == "states rotated back"
        assert d.best.accept_length == pytest.approx(2.5, abs=0.05)
    else:
        assert d.verdict == "no_wiring_fits"
        plain = check_up(s)
        assert d.norms == pytest.approx(plain.norms, rel=1e-4)
        assert "--rotation" in sentence(d)


@pytest.mark.exhaustive
def test_draft_of_another_target_is_no_false_cure():
    """E3-079: the states moved away from what the draft was trained on."""
    s = scripted(count=4, tokens=200)
    rng = np.random.default_rng(2)
    moved = []
    for q in s.record.sequences:
        noise = rng.standard_normal(q.aux.shape) * q.aux.std()
        moved.append(dataclasses.replace(q, aux=(0.6 * q.aux + noise).astype(np.float32)))
    record = without_rounds(dataclasses.replace(s.record, sequences=moved))
    d = check_up(s, record=record)
    assert d.verdict == "not_matched"
    assert d.best.wiring == d.configured.wiring
    assert not d.healthy


@pytest.mark.parametrize("shards", by_default([2, 4], lambda i, _: i == 1))
def test_rows_left_as_shards(shards):
    """E3-085: row i stands at (i % 4) * 12 + i // 4."""
    s = scripted()
    stored = []
    for q in s.record.sequences:
        order = np.argsort(np.arange(len(q.aux)) % shards, kind="stable")
        stored.append(dataclasses.replace(q, aux=q.aux[order]))
    record = dataclasses.replace(s.record, sequences=stored)
    d = check_up(s, record=record)
    assert d.best.words == f"rows as {shards} shards"
    assert d.best.accept_length == pytest.approx(2.5, abs=0.05)


@pytest.mark.exhaustive
def test_rows_of_another_request():
    s = scripted(count=2)
    a, b = s.record.sequences
    rows = min(len(a.aux), len(b.aux))
    swapped = [
        dataclasses.replace(q, aux=other.aux[:rows], tokens=q.tokens[:rows])
        for q, other in ((a, b), (b, a))
    ]
    d = check_up(s, record=without_rounds(dataclasses.replace(s.record, sequences=swapped)))
    assert d.best.words == "rows of the next request"


def test_three_numbers():
    """E3-090."""
    assert gap(0.85, 2.9, 1.2) == "wiring or engine"
    assert gap(0.85, 1.4, 1.4) == "training"
    assert gap(0.85, 2.9, 2.85) == "healthy"


def test_the_engine_that_ran_another_wiring_is_named():
    """Target's text, draft trained on TINY, an engine that served it one boundary early."""
    s = scripted()
    early = dataclasses.replace(TRUE, boundaries=(1, 3, 4))
    rounds = served(s, early)
    record = dataclasses.replace(
        s.record, sequences=[dataclasses.replace(s.record.sequences[0], rounds=rounds)]
    )
    d = check_up(s, record=record)
    assert d.verdict == "engine_differs"
    assert d.explained == "boundaries (1, 3, 4) for (2, 4, 5) (shift -1)"


def served(s, truth):
    """Rounds of an engine that reads the text's states under `truth`."""
    from scripted_draft import ReferenceDraft

    from eagle3_jax.record import EngineRound

    q = s.record.sequences[0]
    tokens = q.tokens.tolist()
    aux = q.aux[:, list(truth.boundaries)]
    draft = ReferenceDraft(s.weights, truth, s.sizes, s.embedding, s.head)
    for t in range(q.prompt_length):
        draft.commit(t, tokens[t + 1], aux[t])
    rounds, length = [], q.prompt_length
    while length + 4 < len(tokens):
        found = draft.draft(length, s.tree).tokens
        true = tokens[length + 1 : length + 4]
        a = next((i for i in range(3) if found[i] != true[i]), 3)
        rounds.append(EngineRound(length, a, tuple(map(int, found)), tokens[length + a + 1]))
        for i in range(a + 1):
            draft.commit(length + i, tokens[length + i + 1], aux[length + i])
        length += a + 1
    return tuple(rounds)


def test_a_vocabulary_map_of_another_head_is_named():
    """Random ids for d2t: the rows still follow the text, under no reading of the table."""
    s = scripted(count=2)
    ids = np.sort(np.random.default_rng(3).permutation(s.sizes.vocab)[: s.sizes.draft_vocab])
    draft = s.draft()
    right = np.asarray(draft.draft_to_target[...])
    draft.draft_to_target[...] = jnp.asarray(np.random.default_rng(4).permutation(ids), jnp.int32)
    d = diagnose(s.record, draft, s.shared())
    assert d.verdict == "vocab_differs"
    assert sentence(d).startswith("The vocabulary map is not this head's")
    assert len(d.learned.rows) > 5
    agree = [right[row] == token for row, token in d.learned.rows.items()]
    assert np.mean(agree) > 0.8
    assert "Rows as the text shows them" in "\n".join(lines(d))


@pytest.mark.exhaustive
def test_a_draft_of_another_training_is_not_blamed_on_its_map():
    s, other = scripted(tokens=300), scripted(tokens=60, seed=5)
    d = diagnose(without_rounds(s.record), other.draft(), s.shared())
    assert d.verdict == "no_wiring_fits"
    assert not d.learned.clear


def test_a_record_without_the_configured_boundaries():
    """The engine captured (3, 5, 6) and the draft likes them; the config says (2, 4, 5)."""
    s = scripted(Truth(boundaries=(3, 5, 6)), capture=(3, 5, 6))
    d = check_up(s, TRUE)
    assert d.verdict == "wiring_differs"
    assert "lacks the configured boundaries (2, 4, 5); with (3, 5, 6)" in sentence(d)
    assert as_json(d)["patch"]["vllm"]["config"] == {AUX_KEY: [3, 5, 6]}
    d = check_up(s, TRUE, record=without_rounds(s.record))
    assert d.verdict == "undecided"
    assert "capture them all" in sentence(d)
    assert "To serve it so" not in "\n".join(lines(d))


@pytest.mark.parametrize(
    "served", [pytest.param("right", marks=pytest.mark.exhaustive), "other rows"]
)
def test_rounds_of_an_engines_trees(served):
    """Rounds with topk above 1 are compared as trees, not as chains that accept less."""
    tree = TreeConfig(3, 2, 6)
    s = scripted(tree=tree, draft_attention="beam_slots", count=2, tokens=100)
    record = s.record
    if served != "right":
        items = [r for q in record.sequences[:1] for r in q.rounds]
        wrong = [dataclasses.replace(r, accepted=0) if i > 3 else r for i, r in enumerate(items)]
        first = dataclasses.replace(record.sequences[0], rounds=tuple(wrong))
        record = dataclasses.replace(record, sequences=[first, record.sequences[1]])
    said = {"speculative_num_steps": 3, "speculative_eagle_topk": 2}
    said["speculative_num_draft_tokens"] = 6
    record = dataclasses.replace(record, provenance={"server": said})
    d = check_up(s, record=record)
    assert d.tree == tree
    if served == "right":
        assert d.verdict == "not_acceptance"
        assert d.agreements[0].rounds == sum(map(len, s.accepted))
    else:
        assert d.verdict == "engine_differs"
        first = next(i for i, r in enumerate(s.record.sequences[0].rounds) if i > 3 and r.accepted)
        assert d.agreements[0].first == (0, first)


def test_what_cannot_be_decided_is_said():
    s = scripted(capture=(2, 4, 5))
    d = check_up(s, record=without_rounds(s.captured((2, 4, 5))))
    text = "\n".join(lines(d))
    assert "boundaries: the record holds only those of one choice" in d.undecided
    assert "eagle3 record make" in text
    assert "eagle3 record from-sglang" in text
    assert "constant offset of all positions" in text


def test_a_likelier_wiring_that_accepts_no_more_is_no_cure_and_no_clean_bill(monkeypatch):
    """A real fault, were its gain in accept length within the noise."""
    s = scripted(Truth(boundaries=(3, 5, 6)))
    record = without_rounds(s.record)
    monkeypatch.setattr("eagle3_jax.doctor.threshold", lambda tried: 2.0)
    monkeypatch.setattr(
        "eagle3_jax.wirings.judge.paired", lambda a, b, size: Paired(0.0, 0.0, -0.1, 0.1)
    )
    monkeypatch.setattr("eagle3_jax.doctor.WEAK", 1.0)
    d = check_up(s, TRUE, record=record)
    assert d.verdict == "undecided"
    assert not d.healthy
    assert d.best.wiring == d.configured.wiring
    assert sentence(d).startswith("Not decided: no wiring of")
    assert "boundaries (3, 5, 6)" in sentence(d)


def test_a_winner_that_loses_under_the_tree_is_no_cure(monkeypatch):
    """Chains gain; the trees that are served do not."""
    s = scripted(CHANGED["feedback"][0])
    asked = []

    def lost(search, base, best, tree, draft):
        asked.append(best.feedback)
        gain = Paired(0.0, 0.0, 0.0, 0.0) if best == base else Paired(-0.4, -9.0, -0.5, -0.3)
        return UnderTree(tree, "ancestors", 1.5, 1.5 + gain.mean, gain), []

    monkeypatch.setattr("eagle3_jax.doctor.under_tree", lost)
    d = check_up(
        s, TRUE, tree=TreeConfig(3, 2, 6), wiring=configured(s.draft(TRUE).config, (2, 4, 5))
    )
    assert asked == ["post_norm", "pre_norm"]
    assert d.best.wiring == d.configured.wiring
    assert d.under_tree.gain.mean == 0
    assert d.verdict == "as_configured"
    assert "post_norm" in [c.wiring.feedback for c in d.table]


def test_report_and_json_agree():
    s = scripted(Truth(boundaries=(3, 5, 6)))
    d = check_up(s, TRUE)
    found = as_json(d, (2, 4, 5))
    assert found["verdict"] == "wiring_differs"
    assert found["best"]["wiring"]["boundaries"] == [3, 5, 6]
    assert lines(d, (2, 4, 5))[0] == found["sentence"]


def test_refusals():
    s = scripted(tokens=60)
    with pytest.raises(ConfigError, match=r"capture them all"):
        check_up(s, Truth(boundaries=(2, 4, 7)), record=s.captured((1, 3, 8)))
    with pytest.raises(ConfigError, match=r"the draft reads 3: \[2, 4, 5\]"):
        check_up(s, record=s.captured((2, 4)))
    with pytest.raises(ConfigError, match=r"target's embed, which is not here"):
        diagnose(s.record, s.draft(), None)
    short = dataclasses.replace(s.record.sequences[0], tokens=s.record.sequences[0].tokens[:5])
    record = dataclasses.replace(s.record, sequences=[short])
    with pytest.raises(RecordError, match="no place to start"):
        check_up(s, record=without_rounds(record))
    with pytest.raises(ConfigError, match="not orthogonal"):
        checked_rotation(s.draft().config, np.ones((64, 64)), "Q.npy")
    with pytest.raises(ConfigError, match="dtype complex128, expected real numbers"):
        checked_rotation(s.draft().config, np.eye(64) * (1 + 0j), "Q.npy")


@pytest.mark.exhaustive
def test_more_slots_than_the_alignment_looks_at():
    s = scripted(tokens=300, count=8)
    d = check_up(s)
    assert d.verdict == "not_acceptance"


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_states_that_are_not_finite_are_refused(value):
    s = scripted(tokens=60)
    aux = np.array(s.record.sequences[0].aux)
    aux[20, 0, 3] = value
    broken = dataclasses.replace(s.record.sequences[0], aux=aux)
    with pytest.raises(RecordError, match="states of token 20 are not finite"):
        check_up(s, record=dataclasses.replace(s.record, sequences=[broken]))


def test_records_of_another_target_are_refused():
    s = scripted(tokens=60)
    whole = s.record.sequences[0]
    wide = dataclasses.replace(whole, aux=np.concatenate((whole.aux, whole.aux), axis=2))
    strange = dataclasses.replace(whole, tokens=np.where(whole.tokens > 90, 700, whole.tokens))
    for second, message in ((wide, "sequence 1: states are 128 wide"), (strange, "id 700")):
        record = dataclasses.replace(s.record, sequences=[whole, second], vocab_size=None)
        with pytest.raises(RecordError, match=message):
            check_up(s, record=record)


@pytest.mark.exhaustive
def test_too_little_text_is_said():
    """Few rounds of a rightly wired draft: no verdict against the draft."""
    s = scripted(tokens=60)
    d = check_up(s, record=without_rounds(s.record))
    assert d.verdict in ("undecided", "as_configured")

"""Replay against scripted records: accept lengths that were decided before any replay."""

import dataclasses

import numpy as np
import pytest
from scripted_draft import ReferenceDraft, Sizes, Truth
from scripted_records import Request, Scripted, make
from selection import every_other

from eagle3_jax.config import ConfigError, TreeConfig
from eagle3_jax.record import RecordError
from eagle3_jax.replay import replay

CHAIN = TreeConfig(3)
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
WIRINGS = {
    "plain": Truth(),
    "boundaries": Truth(boundaries=(7, 1, 4)),
    "final_norm_state": Truth(boundaries=(0, 8, "final_norm")),
    "five_states": Truth(boundaries=(1, 2, 3, 5, 8)),
    "norm_before_residual": Truth(norm_before_residual=True),
    "norm_before_fc": Truth(norm_before_fc=True),
    "fc_norm": Truth(fc_norm=True, feedback="post_norm"),
    "no_final_norm": Truth(final_norm=False),
    "double_norm": Truth(double_norm=True),
    "biases": Truth(fc_bias=True, qkv_bias=True, output_bias=True, mlp_bias=True),
    "llama3": Truth(scaling=LLAMA3),
    "theta": Truth(theta=5e5),
    "own_embedding": Truth(embed="draft"),
    "target_head": Truth(head="target"),
}


def accepted(result, index: int = 0) -> list[list[int]]:
    return [[a - 1 for a in row] for row in result.trees[index].accept_lengths]


def run(made: Scripted, trees=CHAIN, claim: Truth | None = None, **options):
    record = options.pop("record", made.record)
    return replay(record, made.draft(claim), trees, shared=made.shared(), **options)


@pytest.fixture(scope="module")
def plain() -> Scripted:
    return make([Request(), Request(tokens=230, script=(2, 0, 3, 3, 1), prompt_length=70)])


@pytest.mark.parametrize("name", every_other(WIRINGS))
def test_every_wiring_gives_its_script(name):
    made = make(truth=WIRINGS[name], capture=(*range(9), "final_norm"), seed=3)
    found = run(made)
    assert accepted(found) == made.accepted
    assert found.trees[0].censored == 0
    pinned = run(made, mode="pinned").trees[0]
    assert pinned.engine_equal == (len(made.accepted[0]),) * 2


@pytest.mark.parametrize("kv_heads", [1, 4])
def test_attention_sizes_are_the_draft_s_own(kv_heads):
    """E3-032: no key of the target's attention is read."""
    made = make(sizes=Sizes(kv_heads=kv_heads))
    assert accepted(run(made)) == made.accepted


def test_another_width_than_the_target():
    made = make(truth=Truth(embed="draft"), sizes=Sizes(target_hidden=48))
    assert accepted(replay(made.record, made.draft(), CHAIN)) == made.accepted


FAULTS = {
    "one early": (Truth(boundaries=(1, 3, 4)), 1.2),
    "swapped": (Truth(boundaries=(5, 4, 2)), 1.2),
    "no table": (Truth(table="none"), 1.1),
    "table as ids": (Truth(table="ids"), 1.1),
    "before residual": (Truth(norm_before_residual=True), 1.4),
    "post norm": (Truth(feedback="post_norm"), 1.9),
    "theta": (Truth(theta=1e6), 1.3),
    "scaled": (Truth(scaling=LLAMA3), 2.2),
}


@pytest.mark.parametrize("name", every_other(FAULTS))
def test_a_wrong_wiring_does_not(name, plain):
    claim, bound = FAULTS[name]
    draft = plain.draft(claim)
    if claim.table == "ids":
        ids = plain.weights["d2t"] % plain.sizes.vocab
        draft.draft_to_target[...] = draft.draft_to_target[...] * 0 + ids.astype(np.int32)
    found = replay(plain.record, draft, CHAIN, shared=plain.shared()).trees[0]
    assert found.accept_length is not None
    assert found.accept_length < bound < plain.accept_length


TREES = [TreeConfig(5, 4, 16), TreeConfig(3, 8, 24), TreeConfig(4, 3, 30), TreeConfig(1, 8, 9)]


@pytest.mark.parametrize(
    ("tree", "attention"),
    [
        pytest.param(
            tree,
            attention,
            id=f"{tree}-{attention}",
            marks=[] if (i + j) % 2 else [pytest.mark.exhaustive],
        )
        for i, tree in enumerate(TREES)
        for j, attention in enumerate(("ancestors", "beam_slots"))
    ],
)
def test_trees_give_their_script(tree, attention):
    made = make(
        [Request(script=(4, 1, 0, 3, 5, 2)), Request(tokens=200)],
        tree=tree,
        draft_attention=attention,
        seed=2,
    )
    for mode in ("free", "pinned"):
        found = run(made, tree, mode=mode, draft_attention=attention)
        assert accepted(found) == made.accepted, mode
    assert max(map(max, made.accepted)) == tree.num_steps or tree.num_steps > 3


def test_one_growth_serves_smaller_trees():
    """Trees of one call equal each tree of a call of its own."""
    made = make(Request(tokens=200, script=(3, 1, 2)), tree=TreeConfig(4, 4, 20))
    trees = [
        TreeConfig(s, 4, n) for s in (1, 2, 4) for n in (3, 5, 17) if n - 1 <= 4 + (s - 1) * 16
    ]
    together = run(made, [*trees, TreeConfig(2), TreeConfig(4)])
    for tree in trees:
        assert run(made, tree).trees[0].rounds == together.of(tree).rounds, tree
    for tree in (TreeConfig(2), TreeConfig(4)):
        assert run(made, tree).trees[0].rounds == together.of(tree).rounds


def brute_force(made: Scripted, sequence: int, start: int, steps: int) -> list[int]:
    """The reference's chain from one start, committed anew."""
    draft = ReferenceDraft(made.weights, made.truth, made.sizes, made.embedding, made.head)
    tokens = made.record.sequences[sequence].tokens
    aux = made.captured(made.truth.boundaries).sequences[sequence].aux
    for t in range(start):
        draft.commit(t, int(tokens[t + 1]), aux[t])
    return draft.draft(start, TreeConfig(steps)).tokens


def test_any_start_not_only_the_script_s(plain):
    """A longer chain wanders off the script's rounds; each is checked against the reference."""
    found = run(plain, TreeConfig(5)).trees[0]
    tokens = [s.tokens for s in plain.record.sequences]
    off_script = 0
    for r in found.rounds[::7]:
        proposed = brute_force(plain, r.sequence, r.start, 5)
        true = tokens[r.sequence][r.start + 1 : r.start + 6].tolist()
        hits = [a == b for a, b in zip(proposed, true, strict=False)]
        assert r.accepted == (hits.index(False) if False in hits else 5)
        scripted = {x.start for x in plain.record.sequences[r.sequence].rounds or ()}
        off_script += r.start not in scripted
    assert len(found.rounds) > 50
    assert off_script < len(found.rounds)


@pytest.mark.parametrize(
    ("chunk", "capacity"),
    [pytest.param(*p, marks=pytest.mark.exhaustive) for p in [(32, 128), (256, 4096)]],
)
def test_how_rows_are_packed_changes_nothing(chunk, capacity):
    """One long sequence and short ones, alone or side by side, in calls of any size."""
    requests = [Request(tokens=n, prompt_length=n // 2) for n in (40, 31, 90, 500, 33)]
    made = make(requests)
    trees = [TreeConfig(3), TreeConfig(3, 4, 12)]
    whole = run(made, trees)
    assert accepted(whole) == made.accepted
    other = run(made, trees, chunk=chunk, capacity=capacity)
    assert [t.rounds for t in other.trees] == [t.rounds for t in whole.trees]
    assert np.allclose(other.norms.ratio, whole.norms.ratio, atol=1e-4)


def cut(made: Scripted, length: int):
    sequence = made.record.sequences[0]
    short = dataclasses.replace(
        sequence, tokens=sequence.tokens[:length], aux=sequence.aux[:length], rounds=None
    )
    return dataclasses.replace(made.record, sequences=[short])


def test_the_record_s_end_cuts_rounds_and_never_bends_them():
    """At every length the whole rounds are the script's; the cut one is not counted."""
    made = make(Request(tokens=60))
    rounds = made.record.sequences[0].rounds
    for length in range(26, len(made.record.sequences[0].tokens) + 1):
        found = run(made, record=cut(made, length)).trees[0]
        known = [
            r
            for r in rounds
            if r.start + 1 + r.accepted < length or (r.accepted == 3 and r.start + 3 < length)
        ]
        assert [r.accepted for r in found.rounds] == [r.accepted for r in known], length
        started = [r for r in rounds if r.start + 1 < length]
        assert found.censored == len(started) - len(known), length
        assert found.censored <= 1


def test_states_of_the_last_token_are_not_needed(plain):
    shorter = [dataclasses.replace(s, aux=s.aux[:-1]) for s in plain.record.sequences]
    record = dataclasses.replace(plain.record, sequences=shorter)
    assert accepted(run(plain, record=record)) == plain.accepted


def test_a_loss_mask_marks_the_outputs():
    """Two outputs in one sequence: rounds start at each, tokens between are context only."""
    made = make(Request(tokens=200))
    sequence = made.record.sequences[0]
    rounds = sequence.rounds
    first, second = rounds[5], rounds[20]
    ends = (rounds[12].start + 1, len(sequence.tokens))
    mask = np.zeros(len(sequence.tokens), bool)
    mask[first.start : ends[0]] = mask[second.start : ends[1]] = True
    masked = dataclasses.replace(sequence, loss_mask=mask)
    found = run(made, record=dataclasses.replace(made.record, sequences=[masked])).trees[0]
    assert [r.start for r in found.rounds if r.run == 0] == [r.start for r in rounds[5:12]]
    assert [r.start for r in found.rounds if r.run == 1] == [r.start for r in rounds[20:]]
    expected = [r.accepted for r in (*rounds[5:12], *rounds[20:])]
    assert [r.accepted for r in found.rounds] == expected
    assert [r.index for r in found.rounds][:7] == list(range(7))


def test_partial_context():
    """E3-053: states from 16 on, as a cached prefix leaves them; refused unless declared."""
    made = make([Request(first=16), Request()])
    found = run(made)
    assert accepted(found) == made.accepted
    assert found.findings[0].code == "KV_PREFIX_NOT_FILLED"
    assert "0..15" in found.findings[0].message
    undeclared = dataclasses.replace(made.record, partial_context=False)
    with pytest.raises(RecordError, match=r"draft context incomplete.*0\.\.15"):
        run(made, record=undeclared)


def test_output_that_begins_where_the_states_do():
    """The first round needs the row before its bonus token."""
    made = make(Request(first=24, prompt_length=24, rounds=0))
    sequence = make(Request(first=10)).record.sequences[0]
    early = dataclasses.replace(sequence, prompt_length=4, rounds=None)
    base = make(Request(first=10))
    record = dataclasses.replace(base.record, sequences=[early])
    found = run(base, record=record)
    assert min(r.start for r in found.trees[0].rounds) == 11
    assert len(made.record.sequences[0].tokens) == 25


def test_draft_kv_that_is_kept():
    """The fault of an engine that never rebuilds draft KV, and what it costs."""
    made = make([Request(tokens=240), Request()], truth=Truth(kv="keep"))
    assert accepted(run(made, refresh=False)) == made.accepted
    assert run(made).trees[0].accept_length < 1.6
    with pytest.raises(ConfigError, match="chains in free mode"):
        run(made, TreeConfig(3, 2, 4), refresh=False)


def test_kept_rows_of_longer_chains():
    made = make(
        Request(tokens=240, script=(5, 2, 4, 1)), truth=Truth(kv="keep"), tree=TreeConfig(5)
    )
    assert accepted(run(made, TreeConfig(5), refresh=False)) == made.accepted


def test_two_prefixes_share_rows_up_to_the_last(plain):
    """E3-055: row t holds token t + 1, so a common prefix of 16 shares 15 rows of draft KV."""
    from eagle3_jax.replays.bin import BinReplay, Runner
    from eagle3_jax.replays.rows import pack

    sequence = plain.record.sequences[0]
    other = dataclasses.replace(sequence, tokens=sequence.tokens.copy())
    other.tokens[16] = (other.tokens[16] + 1) % 256
    draft = plain.draft()
    runner = Runner(draft, plain.shared(), (2, 4, 5), (2, 4, 5), "ancestors", 32)
    keys = []
    for s in (sequence, other):
        rows = next(pack([s], np.zeros(256, np.int32), steps=3, capacity=256, multiple=32))
        keys.append(np.asarray(BinReplay(runner, rows, topk=1).bin.cache.k[0][0]))
    equal = (keys[0] == keys[1]).all(axis=(1, 2))
    assert equal[:15].all()
    assert not equal[15]
    record = dataclasses.replace(plain.record, sequences=[sequence, other])
    alone = [
        run(plain, record=dataclasses.replace(plain.record, sequences=[s]))
        for s in (sequence, other)
    ]
    assert accepted(run(plain, record=record)) == [accepted(a)[0] for a in alone]


def test_too_few_states(plain):
    """E3-098."""
    record = plain.captured((2,))
    with pytest.raises(RecordError, match=r"needs 3 states, got 1"):
        run(plain, record=record)


def test_a_boundary_that_was_not_captured(plain):
    with pytest.raises(RecordError, match="no 5"):
        run(plain, record=plain.captured((2, 4, 6)))


@pytest.mark.parametrize(("value", "what"), [(np.nan, "NaN"), (np.inf, "Inf")])
def test_states_that_are_not_finite(plain, value, what):
    """E3-071: boundary 4, row 30."""
    made = make(Request())
    made.record.sequences[0].aux[30, 4, 7] = value
    with pytest.raises(RecordError, match=rf"boundary 4, row 30 has {what}"):
        run(made)


def test_states_a_half_float_cannot_hold():
    """E3-072: runs in float32 with a warning, refused once stored in float16."""

    def huge(states):
        states = states.copy()
        states[:, 5] *= 9e4 / np.abs(states[:, 5]).max()
        return states

    made = make(Request(tokens=80), states=huge)
    found = run(made)
    assert accepted(found) == made.accepted
    assert any(f.code == "NUMERIC_FP16_RANGE" for f in found.findings)
    with np.errstate(over="ignore"):
        halves = [
            dataclasses.replace(s, aux=s.aux.astype(np.float16)) for s in made.record.sequences
        ]
    with pytest.raises(RecordError, match=r"boundary 5, row \d+ has Inf"):
        run(made, record=dataclasses.replace(made.record, sequences=halves))


WRONG = {
    "no tree": ({"trees": []}, "expected one TreeConfig"),
    "mode": ({"mode": "pined"}, "mode is 'pined'"),
    "chunk": ({"chunk": 20}, "multiple of 32"),
    "topk": ({"trees": TreeConfig(2, 65, 100)}, "topk=65 exceeds the draft vocabulary of 64"),
    "temperature": ({"temperatures": (0.0,)}, "above 0"),
    "logprobs": ({"temperatures": (1.0,)}, "no logprobs"),
    "attention": ({"draft_attention": "both"}, "draft_attention"),
}


@pytest.mark.parametrize("name", WRONG)
def test_calls_that_cannot_be(name, plain):
    options, message = WRONG[name]
    trees = options.get("trees", CHAIN)
    rest = {k: v for k, v in options.items() if k != "trees"}
    with pytest.raises(ConfigError, match=message):
        replay(plain.record, plain.draft(), trees, shared=plain.shared(), **rest)


def test_what_a_draft_lacks_is_asked_for(plain):
    with pytest.raises(ConfigError, match="uses the target's embed"):
        replay(plain.record, plain.draft(), CHAIN)
    nothing = dataclasses.replace(plain.record.sequences[0], rounds=None)
    record = dataclasses.replace(plain.record, sequences=[nothing])
    with pytest.raises(ConfigError, match="no rounds of an engine to pin to"):
        run(plain, record=record, mode="pinned")

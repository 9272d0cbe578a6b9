"""Checks at the door: each fault is named with sequence, rows, found and expected."""

import dataclasses

import ml_dtypes
import numpy as np
import pytest
from random_models import draft_config, target_config

from eagle3_jax.config import DEFAULT_BOUNDARIES
from eagle3_jax.record import (
    EngineRound,
    Record,
    RecordError,
    RecordSequence,
    RecordWriter,
    check_for_draft,
    check_record,
    check_sequence,
    load,
)
from eagle3_jax.records.capture import first_of, fold, stored_as
from eagle3_jax.records.checks import spans
from eagle3_jax.records.last_state import FinalNorm

T = 12


def good(**changes) -> RecordSequence:
    rng = np.random.default_rng(3)
    given = RecordSequence(
        tokens=np.arange(5, 5 + T, dtype=np.int32),
        aux=rng.normal(size=(T - 1, 3, 8)).astype(np.float32),
        prompt_length=4,
        name="a",
    )
    return dataclasses.replace(given, **changes)


def of(*sequences: RecordSequence, **changes) -> Record:
    given = Record((2, 4, 5), "text", sequences, vocab_size=64, num_layers=8)
    return dataclasses.replace(given, **changes)


def aux(rows: int, slots: int = 3) -> np.ndarray:
    return np.random.default_rng(4).normal(size=(rows, slots, 8)).astype(np.float32)


STRUCTURE = {
    "too few rows": (good(aux=aux(9)), "9 rows of states from position 0 for 12 tokens, expected"),
    "too many rows": (good(aux=aux(13)), "13 rows of states from position 0 for 12 tokens"),
    "slots": (good(aux=aux(11, 2)), "rows hold 2 states, expected 3 (boundaries 2, 4, 5)"),
    "flat states": (good(aux=aux(11).reshape(11, 24)), "states are float32 [11, 24]"),
    "integer states": (good(aux=np.ones((11, 3, 8), np.int32)), "states are int32"),
    "no states": (good(aux=aux(0)), "states are float32 [0, 3, 8]"),
    "float tokens": (good(tokens=np.ones(T)), "tokens are float64"),
    "an id": (good(tokens=np.arange(60, 60 + T)), "id 64 at position 4 is outside the vocabulary"),
    "a negative id": (good(tokens=np.arange(-1, T - 1)), "id -1 at position 0"),
    "prompt": (good(prompt_length=13), "prompt_length is 13, expected 0..12"),
    "mask": (good(loss_mask=np.ones(T - 1, bool)), "loss_mask is bool [11], expected bool [12]"),
    "mask type": (good(loss_mask=np.ones(T)), "loss_mask is float64 [12], expected bool"),
    "top rows": (
        good(top_ids=np.ones((12, 2), int), top_logprobs=np.zeros((12, 2))),
        "top_ids are int64 [12, 2], expected integer ids [11, n]",
    ),
    "top half": (good(top_ids=np.ones((11, 2), int)), "has no top_logprobs"),
    "top id": (
        good(top_ids=np.full((11, 2), 64), top_logprobs=np.zeros((11, 2))),
        "top_ids: id 64 at position 0",
    ),
    "rounds order": (
        good(rounds=(EngineRound(5, 1), EngineRound(5, 1))),
        "round 1 starts at 5 and accepts 1, expected a start in 6..11",
    ),
    "rounds count": (good(rounds=(EngineRound(5, 3, (1, 2)),)), "round 0 accepts 3 of 2 drafts"),
    "rounds id": (good(rounds=(EngineRound(5, 1, (64,)),)), "round 0: id 64"),
    "cached prefix": (
        good(first=3, aux=aux(8)),
        "draft context incomplete: no states for positions 0..2 (a cached prefix, or",
    ),
}


@pytest.mark.parametrize("name", STRUCTURE)
def test_a_sequence_that_does_not_fit(name):
    sequence, message = STRUCTURE[name]
    with pytest.raises(RecordError) as error:
        check_sequence(sequence, of(), "sequence 7 'a'")
    assert str(error.value).startswith("sequence 7 'a'")
    assert message in str(error.value)


def test_what_fits():
    check_sequence(good(), of(), "s")
    check_sequence(good(aux=aux(12)), of(), "s")
    check_sequence(good(first=3, aux=aux(8)), of(partial_context=True), "s")
    check_sequence(good(tokens=np.arange(90, 90 + T)), of(vocab_size=None), "s")


def test_partial_context_is_declared_on_the_way_in(tmp_path):
    def write(**options):
        with RecordWriter(tmp_path / "r", boundaries=(2, 4, 5), kind="text", **options) as writer:
            writer.append(good(first=3, aux=aux(8)))

    with pytest.raises(RecordError, match="--partial-context"):
        write()
    write(partial_context=True)
    found = load(tmp_path / "r")
    assert found.partial_context
    assert found.sequences[0].first == 3


def test_rows_that_are_not_finite_are_counted_and_named():
    states = aux(11)
    states[2, 0, 1] = np.nan
    states[3, 2, 5] = np.inf
    states[8, 1, 1] = -np.inf
    with pytest.raises(RecordError) as error:
        check_record(of(good(), good(aux=states, name="b")))
    assert "sequence 1 'b': 3 rows with NaN or infinity, at positions 2..3, 8" in str(error.value)
    findings = check_record(of(good(aux=states)), allow=["STATE_NOT_FINITE"])
    assert findings[0].startswith("STATE_NOT_FINITE: 3 rows")
    with pytest.raises(RecordError, match="cannot be allowed"):
        check_record(of(good()), allow=["ANYTHING"])


def test_positions_of_a_partial_context_are_those_of_the_tokens():
    states = aux(8)
    states[1] = np.nan
    record = of(good(first=3, aux=states), partial_context=True)
    with pytest.raises(RecordError, match="at positions 4"):
        check_record(record)


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16, np.float64])
def test_rows_without_a_state_of_their_own(dtype):
    states = aux(11).astype(dtype)
    states[3] = 0
    states[6:8] = states[5]
    findings = check_record(of(good(aux=states)))
    assert [line.split(":")[0] for line in findings] == ["STATE_ALL_ZERO", "STATE_REPEATED"]
    assert "positions 3" in findings[0]
    assert "2 rows" in findings[1]
    assert "positions 6..7" in findings[1]


def test_repeated_rows_are_seen_across_pieces(monkeypatch):
    from eagle3_jax.records import checks

    monkeypatch.setattr(checks, "CHUNK_BYTES", 3 * 3 * 8 * 4)
    states = aux(11)
    states[3] = states[2]
    states[9] = states[8]
    assert "positions 3, 9" in check_record(of(good(aux=states)))[0]


def test_a_doubled_bos_is_noted():
    doubled = np.array([1, 1, *range(5, 5 + T - 2)], np.int32)
    record = of(good(), good(tokens=doubled, name="b"))
    (known,) = check_record(record, bos_token_id=1)
    assert known.startswith("TOKEN_DOUBLED_BOS: 1 of 2 sequences begin with BOS (id 1) twice")
    assert "'b'" in known
    (unknown,) = check_record(record)
    assert "a BOS perhaps" in unknown
    assert check_record(record, bos_token_id=2) == ()


def test_empty_loss_masks():
    empty, full = np.zeros(T, bool), np.ones(T, bool)
    with pytest.raises(RecordError, match=r"2 of 2 loss masks \(100%\) count no token"):
        check_record(of(good(loss_mask=empty), good(loss_mask=empty)))
    masks = [empty] * 3 + [full] * 7
    (line,) = check_record(of(*(good(loss_mask=m) for m in masks)))
    assert line.startswith("DATA_MASK_EMPTY: 3 of 10 loss masks (30%)")
    (line,) = check_record(of(good(loss_mask=empty)), allow=["DATA_MASK_EMPTY"])
    assert line.startswith("DATA_MASK_EMPTY: 1 of 1")


def test_greedy_output_is_the_best_of_its_own_logprobs():
    best = np.stack([np.arange(6, 6 + 11), np.full(11, 1)], 1)
    logprobs = np.zeros((11, 2), np.float32)
    fits = good(top_ids=best, top_logprobs=logprobs)
    assert check_record(of(fits, kind="greedy")) == ()
    wrong = best.copy()
    wrong[[1, 5, 9], 0] = 2
    sampled = good(top_ids=wrong, top_logprobs=logprobs)
    (line,) = check_record(of(sampled, kind="greedy"))
    assert line.startswith("KIND_NOT_GREEDY: 2 output tokens")  # row 1 is the prompt's
    assert "positions 6, 10" in line
    assert check_record(of(sampled, kind="sampled")) == ()


@pytest.mark.parametrize("offset", [0.0, 1.0], ids=["w", "1 + w"])
@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
def test_the_last_state_before_or_after_the_norm(dtype, offset):
    rng = np.random.default_rng(8)
    weight = rng.uniform(0.3, 2.0, 64)
    before = rng.normal(size=(20, 64)) * rng.uniform(0.5, 30, (20, 1))
    after = before / np.sqrt(np.mean(before**2, -1, keepdims=True) + 1e-5) * weight
    norm = FinalNorm(weight - offset, "model.norm.weight")
    assert norm.kind(before.astype(dtype)) == "before"
    assert norm.kind(after.astype(dtype)) == "after"

    def record(states, boundary):
        item = good(
            tokens=np.arange(21, dtype=np.int32), aux=states[:, None].astype(dtype), prompt_length=1
        )
        return of(item, boundaries=(boundary,))

    assert check_record(record(before, 8), final_norm=norm) == ()
    assert check_record(record(after, "final_norm"), final_norm=norm) == ()
    with pytest.raises(RecordError, match=r"the one after the final norm.*name it final_norm"):
        check_record(record(after, 8), final_norm=norm)
    with pytest.raises(RecordError, match=r"the one before the final norm.*name it 8"):
        check_record(record(before, "final_norm"), final_norm=norm)
    (line,) = check_record(record(after, 8), final_norm=norm, allow=["STATE_LAST_NORM"])
    assert line.startswith("STATE_LAST_NORM")
    assert check_record(record(after, 7), final_norm=norm) == ()


def draft(**changes):
    target = target_config(num_layers=8, hidden_size=8, vocab_size=64)
    return draft_config(target, **{"aux_boundaries": (2, 4, 5), **changes})


def test_a_draft_finds_its_slots():
    record = of(good(), boundaries=(5, 2, 4))
    assert check_for_draft(record, draft()) == (1, 2, 0)
    assert check_for_draft(of(good()), draft(aux_boundaries=DEFAULT_BOUNDARIES)) == (0, 1, 2)


UNFIT = {
    "one state": (
        of(good(aux=aux(11, 1)), boundaries=(2,)),
        {},
        "needs 3 states, got 1",
    ),
    "width": (
        of(good()),
        {"target_hidden_size": 16, "embed": "draft"},
        "states are 8 wide, the draft takes 16",
    ),
    "vocabulary": (of(good(), vocab_size=65), {}, "go up to 64, the draft's vocabulary to 63"),
    "boundary": (of(good()), {"aux_boundaries": (2, 4, 6)}, "no 6"),
    "depth": (
        of(good(), num_layers=None),
        {"aux_boundaries": DEFAULT_BOUNDARIES},
        "does not know the target's depth",
    ),
}


@pytest.mark.parametrize("name", UNFIT)
def test_a_draft_that_cannot_read_it(name):
    record, changes, message = UNFIT[name]
    with pytest.raises(RecordError) as error:
        check_for_draft(record, draft(**changes))
    assert message in str(error.value)


def test_gaps_in_positions():  # E3-056
    assert first_of([16, 17, 18], "r") == 16
    with pytest.raises(RecordError, match=r"r: gap 16\.\.39: rows jump from position 15 to 40"):
        first_of([*range(16), *range(40, 64)], "r")
    with pytest.raises(RecordError, match="position 3 follows 3"):
        first_of([2, 3, 3, 4], "r")
    with pytest.raises(RecordError, match="position 0 follows 5"):
        first_of([4, 5, 0, 1], "r")


def test_folding_states():
    states = aux(5)
    assert np.array_equal(fold(states.reshape(5, 24), 3, "r"), states)
    assert np.array_equal(fold(states[None], 3, "r"), states)
    bits = states.astype(ml_dtypes.bfloat16)
    assert np.array_equal(fold(bits.view(np.uint16), 3, "r"), bits)
    with pytest.raises(RecordError, match=r"expected \[rows, 5 \* width\]"):
        fold(states.reshape(5, 24), 5, "r")
    with pytest.raises(RecordError, match="24 numbers a row are 3 states of the target's width 8"):
        fold(states.reshape(5, 24), 2, "r", width=8)


def test_another_dtype_must_hold_every_value():
    exact = aux(4).astype(ml_dtypes.bfloat16).astype(np.float32)
    assert np.array_equal(stored_as(exact, "bfloat16", "r").astype(np.float32), exact)
    with pytest.raises(RecordError, match="is no bfloat16"):
        stored_as(aux(4), "bfloat16", "r")
    with pytest.raises(RecordError, match="is no float16"):
        stored_as(np.full((1, 1, 1), 1e9, np.float32), "float16", "r")


def test_spans():
    assert spans([1]) == "1"
    assert spans([1, 2, 3, 7, 9, 10]) == "1..3, 7, 9..10"
    assert spans([0, 2, 4, 6, 8, 10]) == "0, 2, 4, 6 and 2 more"

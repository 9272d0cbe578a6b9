"""The draft vocabulary: both readings of d2t against their definition, spelled out in Python."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eagle3_jax.findings import ConvertError, Findings
from eagle3_jax.vocab import resolve_map, to_mask, to_offsets


def resolve(table, V, *, W=None, mask=None, kind="auto", allow=()):
    findings = Findings(allow)
    array = None if table is None else np.asarray(table)
    found = resolve_map(
        array,
        draft_vocab_size=len(table) if W is None else W,
        vocab_size=V,
        findings=findings,
        mask=None if mask is None else np.asarray(mask),
        kind=kind,
    )
    return found, findings.items


def refused(code, match, *args, **kwargs):
    with pytest.raises(ConvertError, match=match) as caught:
        resolve(*args, **kwargs)
    assert caught.value.code == code


def expected(table: list[int], V: int, mask: list[bool] | None, kind: str):
    """What the rules say, by brute force: a list of target ids, or the code of the error."""
    readings = {"offset": [i + d for i, d in enumerate(table)], "absolute": list(table)}
    valid = {
        name
        for name, ids in readings.items()
        if all(0 <= t < V for t in ids) and len(set(ids)) == len(ids)
    }
    named = None if mask is None else [i for i, true in enumerate(mask) if true]
    if kind == "auto":
        if len(valid) == 2 and readings["offset"] != readings["absolute"]:
            if named is None:
                return "VOCAB_MAP_AMBIGUOUS"
            kind = next((k for k in valid if sorted(readings[k]) == named), "offset")
        elif valid == {"absolute"}:
            return "VOCAB_MAP_ABSOLUTE"
        else:
            kind = "offset"
    if kind not in valid:
        return "VOCAB_MAP_INVALID"
    if len(table) < V and not any(table):
        return "VOCAB_MAP_ALL_ZERO"
    if named is not None and named != sorted(readings[kind]):
        return "VOCAB_T2D_DISAGREES"
    return readings[kind]


@st.composite
def cases(draw):
    """Tables that are offsets, target ids, or nearly so, with and without a mask."""
    V = draw(st.integers(1, 12))
    W = draw(st.integers(1, V))
    ids = draw(st.permutations(range(V)))[:W]
    style = draw(st.sampled_from(["offset", "absolute", "sorted", "noise", "zero"]))
    ids = sorted(ids) if style == "sorted" else ids
    if style == "noise":
        table = draw(st.lists(st.integers(-V - 2, V + 2), min_size=W, max_size=W))
    elif style == "zero":
        table = [0] * W
    else:
        table = ids if style == "absolute" else [t - i for i, t in enumerate(ids)]
    if draw(st.booleans()) and style != "zero":
        table[draw(st.integers(0, W - 1))] += draw(st.integers(-1, 1))
    mask = draw(
        st.one_of(
            st.none(),
            st.just([i in ids for i in range(V)]),
            st.lists(st.booleans(), min_size=V, max_size=V),
        )
    )
    return table, V, mask, draw(st.sampled_from(["auto", "auto", "offset", "absolute"]))


@settings(max_examples=1500, deadline=None)
@given(cases())
def test_every_table_is_read_by_definition_or_refused(case):
    table, V, mask, kind = case
    want = expected(table, V, mask, kind)
    try:
        outcome = resolve(table, V, mask=mask, kind=kind)[0].targets.tolist()
    except ConvertError as error:
        outcome = error.code
    assert outcome == want


@settings(max_examples=200, deadline=None)
@given(st.integers(1, 30).flatmap(lambda V: st.tuples(st.just(V), st.permutations(range(V)))))
def test_a_map_survives_its_own_table_and_mask(case):
    V, ids = case
    targets = np.array(ids[: len(ids) // 2 + 1])
    table, mask = to_offsets(targets), to_mask(targets, V)
    found, _ = resolve(table, V, mask=mask, kind="offset", allow=["VOCAB_MAP_ALL_ZERO"])
    assert found.targets.tolist() == targets.tolist()
    assert found.targets.dtype == np.int64
    assert found.ascending == (targets.tolist() == sorted(targets.tolist()))
    assert mask.tolist() == [i in targets.tolist() for i in range(V)]


@pytest.mark.parametrize("dtype", [np.int64, np.int32, np.int16, np.int8, np.uint8])
def test_every_integer_type_is_widened(dtype):
    found, _ = resolve(np.array([1, 1, 2], dtype), 6)
    assert found.targets.tolist() == [1, 2, 4]
    assert found.targets.dtype == np.int64
    assert found.kind == "offset"


@pytest.mark.parametrize("dtype", [np.bool_, np.uint8, np.int64])
def test_the_mask_may_be_bool_or_zeros_and_ones(dtype):
    mask = np.array([0, 1, 1, 0, 1, 0], dtype)
    assert resolve([1, 1, 2], 6, mask=mask)[0].targets.tolist() == [1, 2, 4]


def test_repeated_values_mean_offsets():
    found, items = resolve([5, 5, 5, 5], 12)
    assert (found.kind, found.targets.tolist(), items) == ("offset", [5, 6, 7, 8], [])


def test_an_unsorted_map_keeps_its_order():
    found, _ = resolve([9, 1, -1, -3], 12)
    assert found.targets.tolist() == [9, 2, 1, 0]
    assert not found.ascending


def test_the_mask_decides_between_two_valid_readings():
    table, V = [2, 0, 1], 6  # offsets: 2, 1, 3; target ids: 2, 0, 1
    refused("VOCAB_MAP_AMBIGUOUS", r"--d2t-kind offset\|absolute", table, V)
    assert resolve(table, V, mask=[0, 1, 1, 1, 0, 0])[0].kind == "offset"
    assert resolve(table, V, mask=[1, 1, 1, 0, 0, 0])[0].targets.tolist() == table
    assert resolve(table, V, kind="offset")[0].targets.tolist() == [2, 1, 3]
    assert resolve(table, V, kind="absolute")[0].targets.tolist() == table
    refused("VOCAB_T2D_DISAGREES", "draft id 1 -> target id 1", table, V, mask=[1, 0, 1, 1, 0, 0])


def test_an_absolute_table_names_the_flag():
    refused("VOCAB_MAP_ABSOLUTE", "--d2t-kind absolute", [0, 5, 7, 9], 10)
    found, _ = resolve([0, 5, 7, 9], 10, kind="absolute")
    assert (found.kind, found.targets.tolist()) == ("absolute", [0, 5, 7, 9])


def test_a_full_vocabulary_of_zeros_is_the_identity():
    found, items = resolve([0] * 5, 5)
    assert (found.kind, found.targets.tolist(), items) == ("offset", [0, 1, 2, 3, 4], [])


def test_zeros_for_a_reduced_vocabulary_are_refused_unless_allowed():
    refused("VOCAB_MAP_ALL_ZERO", "--allow VOCAB_MAP_ALL_ZERO", [0] * 3, 5)
    found, items = resolve([0] * 3, 5, allow=["VOCAB_MAP_ALL_ZERO"])
    assert found.targets.tolist() == [0, 1, 2]
    assert [item.code for item in items] == ["VOCAB_MAP_ALL_ZERO"]


def test_a_missing_table():
    found, items = resolve(None, 5, W=5)
    assert (found.kind, found.targets.tolist(), items) == ("identity", [0, 1, 2, 3, 4], [])
    refused("VOCAB_MAP_MISSING", "3 ids of the target's 5", None, 5, W=3)
    found, items = resolve(None, 5, W=3, allow=["VOCAB_MAP_MISSING"])
    assert (found.targets.tolist(), items[0].severity) == ([0, 1, 2], "warning")
    refused(
        "VOCAB_T2D_DISAGREES",
        "draft id 1 -> target id 1, which t2d has false",
        None,
        5,
        W=3,
        mask=[1, 0, 1, 1, 0],
        allow=["VOCAB_MAP_MISSING"],
    )


def test_the_first_wrong_row_is_named():
    far = [0, 1, 2, 300]
    refused(
        "VOCAB_MAP_INVALID", r"draft id 3 \+ offset 300 -> target id 303, outside 0..9", far, 10
    )
    twice = [3, 3, 3, 2, 3]
    refused("VOCAB_MAP_INVALID", "draft id 3 .*-> target id 5, which draft id 2", twice, 10)
    refused("VOCAB_MAP_INVALID", "draft id 0 .*-> target id -1, outside", [-1, 0, 0], 10)
    refused("VOCAB_MAP_INVALID", "draft id 2 -> target id 12", [1, 2, 12], 10, kind="absolute")


def test_wrong_lengths_and_types_are_refused():
    refused("VOCAB_MAP_LENGTH", r"shape \[3\], expected \[4\]", [1, 1, 2], 6, W=4)
    refused("VOCAB_MAP_LENGTH", r"shape \[3, 1\]", np.ones((3, 1), np.int64), 6, W=3)
    refused("VOCAB_MAP_DTYPE", "float32", np.ones(3, np.float32), 6)
    huge = np.array([1, 2**63 + 5], np.uint64)
    refused("VOCAB_MAP_INVALID", str(2**63 + 5), huge, 6)
    refused("VOCAB_MAP_INVALID", "outside", np.array([2**63 - 1, 2**63 - 1]), 6)
    refused("VOCAB_T2D_DISAGREES", r"shape \[2\], expected \[6\]", [1, 1], 6, mask=[True, True])
    refused("VOCAB_T2D_DISAGREES", "float64", [1, 1], 6, mask=np.ones(6))
    refused("VOCAB_T2D_DISAGREES", "other than 0 and 1", [1, 1], 6, mask=[0, 1, 2, 0, 0, 0])
    refused("VOCAB_T2D_DISAGREES", "d2t never names it", [1, 1], 6, mask=[0, 1, 1, 1, 0, 0])

"""Layer ids become boundaries under the convention of whoever wrote them."""

import pytest

from eagle3_jax.aux_ids import AUX_KEY, read_aux
from eagle3_jax.config import DEFAULT_BOUNDARIES
from eagle3_jax.findings import ConvertError, Findings
from eagle3_jax.source_config import SourceConfig


def read(raw, *, dialect="official", num_aux=3, layers=None, convention="auto"):
    findings = Findings()
    found = read_aux(
        SourceConfig(raw, "config.json"),
        findings,
        dialect=dialect,
        num_aux=num_aux,
        target_layers=layers,
        convention=convention,
    )
    return found, [item.code for item in findings.items], findings.items


def refused(code, match, raw, **options):
    with pytest.raises(ConvertError, match=match) as caught:
        read(raw, **options)
    assert caught.value.code == code


def nested(*ids):
    return {"eagle_config": {AUX_KEY: list(ids)}}


@pytest.mark.parametrize(
    ("raw", "options", "boundaries", "convention"),
    [
        (nested(1, 3, 4), {}, (2, 4, 5), "output"),
        (nested(1, 3, 4), {"convention": "index"}, (1, 3, 4), "index"),
        (nested(24, 30, 36), {"layers": 36}, (24, 30, 36), "index"),
        (nested(24, 30, 35), {"layers": 36}, (25, 31, 36), "output"),
        (nested(24, 30, 36), {}, (25, 31, 37), "output"),
        ({AUX_KEY: [2, 18, 33]}, {"dialect": "speculators"}, (2, 18, 33), "index"),
        ({AUX_KEY: [1, 3, 6]}, {}, (1, 3, 6), "index"),
        ({AUX_KEY: [1, 3, 6]}, {"convention": "output"}, (2, 4, 7), "output"),
        ({"aux_hidden_states_layer_ids": [1, 17, 32]}, {}, (2, 18, 33), "output"),
        (nested(1, 9, 17, 25, 33), {"num_aux": 5}, (2, 10, 18, 26, 34), "output"),
        (nested(7) | {AUX_KEY: [8]}, {"num_aux": 1}, (8,), "output"),
    ],
)
def test_each_place_has_its_convention(raw, options, boundaries, convention):
    found, *_ = read(raw, **options)
    assert found.boundaries == boundaries
    assert found.convention == convention
    assert found.ids is not None
    assert len(found.ids) == len(boundaries)


def test_a_lone_top_level_list_is_ambiguous_and_both_readings_are_printed():
    _, codes, items = read({AUX_KEY: [1, 3, 6]})
    assert codes == ["AUX_CONVENTION_AMBIGUOUS"]
    assert (
        "read as index: boundaries [1, 3, 6]; the other reading gives [2, 4, 7]" in items[0].message
    )
    assert read({AUX_KEY: [1, 3, 6]}, convention="index")[1] == []
    assert read({AUX_KEY: [1, 3, 6]}, dialect="speculators")[1] == []


def test_two_lists_that_mean_the_same_agree_silently():
    found, codes, _ = read(nested(1, 3, 4) | {AUX_KEY: [2, 4, 5]})
    assert (found.boundaries, codes) == ((2, 4, 5), [])


def test_the_same_list_in_two_places_is_warned_about():
    raw = nested(1, 3, 4) | {AUX_KEY: [1, 3, 4]}
    found, codes, _ = read(raw)
    assert (found.boundaries, codes) == ((2, 4, 5), ["AUX_CONVENTION_AMBIGUOUS"])
    found, codes, _ = read(raw, dialect="speculators")
    assert (found.boundaries, codes) == ((1, 3, 4), ["AUX_CONVENTION_AMBIGUOUS"])


def test_two_lists_that_disagree_need_the_flag():
    raw = nested(1, 3, 4) | {AUX_KEY: [1, 3, 5]}
    refused("AUX_CONVENTION_AMBIGUOUS", "--aux-convention output takes", raw)
    assert read(raw, convention="output")[0].boundaries == (2, 4, 5)
    assert read(raw, convention="index")[0].boundaries == (1, 3, 5)
    both = raw | {"aux_hidden_states_layer_ids": [0, 1, 2]}
    refused("AUX_CONVENTION_AMBIGUOUS", "the lists disagree", both, convention="output")


def test_unsorted_ids_keep_their_order_with_a_warning():
    found, codes, items = read(nested(6, 1, 3))
    assert (found.boundaries, codes) == ((7, 2, 4), ["AUX_IDS_UNSORTED"])
    assert "SGLang and vLLM capture in ascending order" in items[0].message


@pytest.mark.parametrize(
    ("raw", "options", "match"),
    [
        (
            nested(1, 1, 4),
            {},
            r"\[1, 1, 4\] read as output gives boundaries \[2, 2, 5\]: an id given",
        ),
        (nested(-1, 3, 4), {}, "a negative id"),
        (nested(1, 3, 8), {"layers": 8, "convention": "output"}, "past the target's 8 blocks"),
        ({AUX_KEY: [2, 4, 9]}, {"layers": 8}, "past the target's 8 blocks"),
        (nested(1, 3), {}, "2 ids, but fc takes 3 states"),
        (nested(1, 2, 3, 4), {}, "4 ids, but fc takes 3"),
        ({"eagle_config": {AUX_KEY: "1,3,4"}}, {}, "expected a list of layer numbers"),
        ({AUX_KEY: [1, True, 3]}, {}, "expected a list of layer numbers"),
        ({AUX_KEY: [1.0, 2, 3]}, {}, "expected a list of layer numbers"),
        ({AUX_KEY: []}, {}, "expected a list of layer numbers"),
        ({}, {"num_aux": 4}, "fc takes 4 states, the file names no layers"),
        ({}, {"layers": 4}, r"would be \(2, 2, 1\)"),
        ({}, {"layers": 1}, r"would be \(2, 0, -2\)"),
    ],
)
def test_impossible_ids_are_refused_with_the_list(raw, options, match):
    refused("AUX_IDS_INVALID", match, raw, **options)


def test_no_ids_fall_back_to_the_default_and_say_so():
    found, codes, _ = read({})
    assert (found.boundaries, found.ids, codes) == (
        DEFAULT_BOUNDARIES,
        None,
        ["AUX_FALLBACK_USED"],
    )
    assert read({}, layers=32)[0].boundaries == (2, 16, 29)


def test_the_printed_default_given_explicitly_is_the_same_draft():
    default = read({}, layers=8)[0].boundaries
    explicit = read({AUX_KEY: list(default)}, dialect="speculators", layers=8)[0].boundaries
    assert explicit == default == (2, 4, 5)

"""RoPE from its three spellings; what is not understood is refused, never dropped."""

import pytest

from eagle3_jax.config import RopeConfig
from eagle3_jax.findings import ConvertError, Findings
from eagle3_jax.rope_config import read_rope
from eagle3_jax.source_config import SourceConfig

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
SCALED = RopeConfig(500000.0, "llama3", 8.0, 1.0, 4.0, 32)


def read(raw, **options):
    return read_rope(SourceConfig(raw, "config.json"), **options)


@pytest.mark.parametrize(
    ("raw", "expected"),
    [
        ({}, RopeConfig(10000.0)),
        ({"rope_theta": None, "rope_scaling": None, "rope_parameters": None}, RopeConfig(10000.0)),
        ({"rope_theta": 500000}, RopeConfig(500000.0)),
        ({"rope_parameters": {"rope_theta": 500000, "rope_type": "default"}}, RopeConfig(500000.0)),
        ({"rope_scaling": {"type": "default"}, "rope_theta": 1e6}, RopeConfig(1e6)),
        (
            {"rope_theta": 1e6, "rope_parameters": {"rope_theta": 1000000, "rope_type": "default"}},
            RopeConfig(1e6),
        ),
        ({"rope_theta": 5e5, "rope_scaling": LLAMA3}, SCALED),
        ({"rope_parameters": {**LLAMA3, "rope_theta": 5e5}}, SCALED),
        ({"rope_theta": 5e5, "rope_scaling": LLAMA3 | {"type": "llama3"}}, SCALED),
        ({"rope_scaling": LLAMA3, "rope_parameters": {**LLAMA3, "rope_theta": 5e5}}, SCALED),
        ({"transformer_layer_config": {"rope_parameters": {**LLAMA3, "rope_theta": 5e5}}}, SCALED),
        ({"rope_theta": 5e5, "partial_rotary_factor": 1.0}, RopeConfig(5e5)),
    ],
)
def test_every_spelling_is_read(raw, expected):
    assert read(raw).effective == expected


def test_origins_and_the_file_s_own_words_are_kept():
    found = read({"rope_theta": 5e5, "rope_scaling": LLAMA3})
    assert found.theta_origin == "config:rope_theta"
    assert found.kind_origin == "config:rope_scaling"
    assert found.configured == {"rope_theta": 5e5, "rope_scaling": LLAMA3}
    assert read({}).theta_origin.startswith("default")
    assert read({}).configured == {}


YARN = {"type": "yarn", "factor": 32.0}
MROPE = {"type": "mrope", "mrope_section": [16, 24, 24], "mrope_interleaved": True}


@pytest.mark.parametrize(
    ("raw", "expected"),
    [
        ({"type": "linear", "factor": 2}, RopeConfig(5e5, "linear", 2.0)),
        (
            {"type": "dynamic", "factor": 2.0},
            RopeConfig(5e5, "dynamic", 2.0, original_max_position_embeddings=99),
        ),
        (
            YARN | {"original_max_position_embeddings": 2048, "finetuned": True},
            RopeConfig(5e5, "yarn", 32.0, original_max_position_embeddings=2048),
        ),
        (YARN, RopeConfig(5e5, "yarn", 32.0, original_max_position_embeddings=99)),
        (
            YARN | {"mscale": 1.0, "mscale_all_dim": 0.5, "beta_fast": 64, "truncate": False},
            RopeConfig(
                5e5,
                "yarn",
                32.0,
                original_max_position_embeddings=99,
                mscale=1.0,
                mscale_all_dim=0.5,
                beta_fast=64.0,
                truncate=False,
            ),
        ),
        (MROPE, RopeConfig(5e5, mrope_section=(16, 24, 24), mrope_interleaved=True)),
        (
            {"rope_type": "default", "mrope_section": [4, 2, 2]},
            RopeConfig(5e5, mrope_section=(4, 2, 2)),
        ),
        (
            {"mrope_section": [8, 12, 12], "mrope_interleaved_glm": True},
            RopeConfig(5e5, mrope_section=(8, 12, 12), mrope_interleaved_glm=True),
        ),
        (
            YARN | {"mrope_section": [4, 2, 2]},
            RopeConfig(
                5e5, "yarn", 32.0, original_max_position_embeddings=99, mrope_section=(4, 2, 2)
            ),
        ),
        (
            {"mrope_section": [24, 20, 20], "interleaved": True, "mrope_interleaved": True},
            RopeConfig(5e5, mrope_section=(24, 20, 20), mrope_interleaved=True),
        ),
    ],
)
def test_every_kind_of_scaling(raw, expected):
    config = {"rope_theta": 5e5, "rope_scaling": raw, "max_position_embeddings": 99}
    findings = Findings()
    found = read_rope(SourceConfig(config, "config.json"), findings)
    assert found.effective == expected
    mrope = "mrope_section" in raw
    assert [f.code for f in findings.items] == ["FEATURE_MROPE"] * mrope
    assert all("plain rope for text" in f.message for f in findings.items)


@pytest.mark.parametrize(
    "sections", [None, [], "16,24,24", [16, -1], [True], [4, 4], [4, 2, -1], [4, 2.0, 2], [0, 0, 0]]
)
def test_mrope_without_sections_is_refused(sections):
    raw = {"rope_scaling": {"type": "mrope", "mrope_section": sections}}
    with pytest.raises(ConvertError, match="mrope_section is") as caught:
        read(raw)
    assert caught.value.code == "FEATURE_MROPE"


@pytest.mark.parametrize(
    ("changes", "code", "match"),
    [
        ({"mrope_section": [16, 24, 23]}, "FEATURE_MROPE", "63 pairs, expected 64: half of"),
        ({"mrope_interleaved": False, "interleaved": True}, "FEATURE_MROPE", "expected both alike"),
        ({"mrope_interleaved": "yes"}, "CONFIG_INVALID", "mrope_interleaved"),
        ({"mrope_sections": [1]}, "POS_SCALING_UNSUPPORTED", "unknown key 'mrope_sections'"),
    ],
)
def test_axes_that_do_not_fit_are_refused(changes, code, match):
    with pytest.raises(ConvertError, match=match) as caught:
        read({"rope_scaling": MROPE | changes}, rotary_dim=128)
    assert caught.value.code == code


@pytest.mark.parametrize("kind", ["longrope", "su", 3, ["x"]])
def test_other_kinds_are_refused_by_name_with_the_way_out(kind):
    raw = {"rope_theta": 5e5, "rope_scaling": {"rope_type": kind, "factor": 2.0}}
    with pytest.raises(ConvertError, match="--ignore-rope-scaling") as caught:
        read(raw)
    assert caught.value.code == "POS_SCALING_UNSUPPORTED"
    assert repr(kind) in str(caught.value)
    found = read(raw, ignore_scaling=True)
    assert found.effective == RopeConfig(5e5)
    assert found.kind_origin == "flag --ignore-rope-scaling"
    assert found.configured["rope_scaling"] == raw["rope_scaling"]


@pytest.mark.parametrize(
    ("raw", "match"),
    [
        ({"rope_scaling": LLAMA3 | {"mscale": 1.0}}, "unknown key 'mscale'"),
        ({"rope_scaling": {"rope_type": "default", "factor": 2.0}}, "unknown key 'factor'"),
        ({"rope_scaling": {"type": "linear"}}, "has no 'factor'"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0, "alpha": 1.0}}, "unknown key 'alpha'"),
        ({"rope_scaling": {"type": "yarn", "factor": 2.0}}, "there is no max_position_embeddings"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "has no 'low_freq_factor'"),
        ({"rope_scaling": LLAMA3 | {"type": "yarn"}}, "rope_type 'llama3' and type 'yarn'"),
        (
            {"rope_scaling": LLAMA3, "rope_parameters": {"rope_type": "default"}},
            "rope_parameters and rope_scaling disagree",
        ),
        (
            {"rope_scaling": LLAMA3, "rope_parameters": LLAMA3 | {"factor": 4.0}},
            "rope_parameters and rope_scaling disagree",
        ),
        (
            {"rope_scaling": {"rope_type": "default"}, "rope_parameters": MROPE},
            "rope_parameters and rope_scaling disagree",
        ),
        (
            {"rope_parameters": {"full_attention": {"rope_type": "default"}}},
            "one rope per layer type",
        ),
        ({"partial_rotary_factor": 0.5}, "partial rotary"),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial rotary"),
    ],
)
def test_what_is_not_understood_is_refused(raw, match):
    with pytest.raises(ConvertError, match=match) as caught:
        read(raw)
    assert caught.value.code == "POS_SCALING_UNSUPPORTED"


@pytest.mark.parametrize(
    "raw",
    [
        {"rope_theta": 10000, "rope_parameters": {"rope_theta": 500000}},
        {"rope_theta": 10000, "rope_scaling": {"rope_theta": 500000}},
        {"rope_theta": 10000, "transformer_layer_config": {"rope_theta": 500000}},
    ],
)
def test_two_bases_are_refused_and_the_flag_decides(raw):
    with pytest.raises(ConvertError, match="--rope-theta") as caught:
        read(raw)
    assert caught.value.code == "POS_THETA_NESTED"
    assert "10000" in str(caught.value)
    assert "500000" in str(caught.value)
    found = read(raw, theta=20000.0)
    assert found.effective.theta == 20000.0
    assert found.theta_origin == "flag --rope-theta"


@pytest.mark.parametrize(
    "raw",
    [
        {"rope_theta": "10000"},
        {"rope_theta": True},
        {"rope_theta": 0},
        {"rope_theta": -1.0},
        {"rope_theta": float("nan")},
        {"rope_theta": 10**400},
        {"rope_scaling": "llama3"},
        {"rope_scaling": LLAMA3 | {"factor": "8"}},
        {"rope_scaling": LLAMA3 | {"original_max_position_embeddings": 8192.0}},
        {"rope_scaling": LLAMA3 | {"high_freq_factor": 1.0}},
    ],
)
def test_values_of_another_type_are_named(raw):
    with pytest.raises(ConvertError, match=r"^config\.json: rope_") as caught:
        read(raw)
    assert caught.value.code == "CONFIG_INVALID"

"""The doctor's parts that need no search: patches, candidates, positions, what trees reject."""

import dataclasses

import numpy as np
import pytest
from scripted_draft import Truth
from test_doctor_deep import material, reasons, scripted

from eagle3_jax.config import ConfigError, RopeConfig
from eagle3_jax.doctor import diagnose
from eagle3_jax.records.positions import placed
from eagle3_jax.wirings.candidates import singles
from eagle3_jax.wirings.patch import patches
from eagle3_jax.wirings.wiring import Wiring, configured

BLOCKS = RopeConfig(mrope_section=(4, 2, 2))
TURNS = dataclasses.replace(BLOCKS, mrope_interleaved=True)
YARN = RopeConfig(kind="yarn", factor=4.0, original_max_position_embeddings=64)
SAID = {"rope_type": "default", "mrope_section": [4, 2, 2]}
ROPES = {
    "blocks to turns": (BLOCKS, TURNS, SAID | {"mrope_interleaved": True}),
    "one axis to blocks": (RopeConfig(), BLOCKS, SAID),
    "blocks to one axis": (BLOCKS, RopeConfig(), None),
    "linear": (dataclasses.replace(BLOCKS, kind="linear", factor=2.0), BLOCKS, SAID),
    "mscale": (
        dataclasses.replace(YARN, mscale=1.0, mscale_all_dim=1.0),
        YARN,
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
    ),
}


@pytest.mark.parametrize("name", ROPES)
def test_patches_of_ropes(name):
    old, new, table = ROPES[name]
    found = patches(Wiring((2, 4, 5), rope=old), Wiring((2, 4, 5), rope=new))
    for engine in ("sglang", "vllm"):
        assert found[engine]["config"] == {"rope_theta": 10000.0, "rope_scaling": table}


def test_what_no_engine_key_says_is_said():
    old = Wiring((2, 4, 5))
    rope = dataclasses.replace(BLOCKS, kind="linear", factor=2.0)
    (note,) = patches(old, dataclasses.replace(old, rope=rope))["sglang"]["notes"]
    assert note == "SGLang cannot run rope linear: it runs multi-axis rope without scaling"
    found = patches(old, dataclasses.replace(old, window=20), 3)["vllm"]["config"]
    assert found["layer_types"] == ["sliding_attention"] * 3


def test_ropes_that_are_tried():
    s = scripted(Truth(sections=(2, 3, 3)), tokens=60, image=(2, 3, 4))
    glm = RopeConfig(mrope_section=(2, 3, 3), mrope_interleaved_glm=True)
    assert glm in ropes(s)
    s = scripted(Truth(), tokens=60, image=(2, 3, 4))
    (said,) = reasons(s, s.draft())
    assert said.startswith("sections of a multi-axis rope, GLM's alternation:")
    s = scripted(Truth(), tokens=60)
    target = dataclasses.replace(YARN, mrope_section=(4, 2, 2))
    assert YARN in ropes(s, target_rope=target)
    assert target not in ropes(s, target_rope=target)


def ropes(s, **options):
    draft = s.draft()
    base = configured(draft.config, (2, 4, 5))
    return [w.rope for w in singles(material(s, draft, 3), base, **options)]


def test_a_target_rope_must_fit():
    s = scripted(Truth(), tokens=60)
    with pytest.raises(ConfigError, match="9 pairs, expected 8"):
        diagnose(s.record, s.draft(), s.shared(), target_rope=RopeConfig(mrope_section=(4, 3, 2)))


def test_the_farthest_position_counts_tokens_before_the_states():
    s = scripted(Truth(sections=(4, 2, 2)), tokens=60, image=(2, 8, 1))
    q = s.record.sequences[0]
    at, farthest = placed(q, 11, 20)
    np.testing.assert_array_equal(at, q.positions[:, 11:31])
    expected = [int(q.positions[:, : i + 1].max()) for i in range(11, 31)]
    assert farthest.tolist() == expected

"""Multi-axis rope (E3-082): layouts, records with an image's positions, what is refused."""

import dataclasses
import json

import jax.numpy as jnp
import numpy as np
import pytest
from doctor_commands import run, write_record
from scripted_draft import Truth
from scripted_records import Request, make

from convert import from_torch
from eagle3_jax import record as records
from eagle3_jax.checkpoint import manifest_config, read_manifest
from eagle3_jax.config import ConfigError, RopeConfig, TreeConfig
from eagle3_jax.record import RecordError
from eagle3_jax.records.arrays import read_npz
from eagle3_jax.records.capture import Described
from eagle3_jax.replay import replay
from eagle3_jax.rope import axes, rotations

IMAGE = (8, 3, 4)  # tokens 8..19
BLOCKS = Truth(sections=(4, 2, 2))
TURNS = Truth(sections=(4, 2, 2), interleaved=True)
LAYOUTS = {
    "blocks": (RopeConfig(mrope_section=(16, 24, 24)), "0" * 16 + "1" * 24 + "2" * 24),
    "in turn": (
        RopeConfig(mrope_section=(24, 20, 20), mrope_interleaved=True),
        "012" * 20 + "0" * 4,
    ),
    "in turn, small": (RopeConfig(mrope_section=(4, 2, 2), mrope_interleaved=True), "01201200"),
    "in turn, cut": (RopeConfig(mrope_section=(2, 1, 1), mrope_interleaved=True), "0120"),
    "GLM": (RopeConfig(mrope_section=(2, 3, 3), mrope_interleaved_glm=True), "01201212"),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_layouts(name):
    rope, expected = LAYOUTS[name]
    assert "".join(map(str, axes(rope, 2 * len(expected)))) == expected


def positions_of(rng, batch=2, rows=7):
    return rng.integers(0, 300, (batch, 3, rows)).astype(np.int32)


@pytest.mark.parametrize("name", LAYOUTS)
def test_every_pair_turns_by_its_axis(name):
    """And on equal axes bit for bit as plain rope does."""
    rope, expected = LAYOUTS[name]
    width = 2 * len(expected)
    at = positions_of(np.random.default_rng(1))
    cos, sin = rotations(rope, width, jnp.asarray(at), jnp.float32)
    frequency = 10000.0 ** (-np.arange(0, width, 2) / width)
    angle = np.stack([at[:, int(a)] * f for a, f in zip(expected, frequency, strict=True)], -1)
    np.testing.assert_allclose(cos[:, :, 0], np.cos(angle), atol=3e-5)
    np.testing.assert_allclose(sin[:, :, 0], np.sin(angle), atol=3e-5)
    text = at[:, :1]
    same = rotations(rope, width, jnp.asarray(np.repeat(text, 3, axis=1)), jnp.float32)
    plain = rotations(rope.one_axis, width, jnp.asarray(text[:, 0]), jnp.float32)
    for a, b in zip(same, plain, strict=True):
        np.testing.assert_array_equal(a, b)


def test_a_dynamic_base_follows_the_farthest_axis():
    rope = RopeConfig(kind="dynamic", factor=2.0, original_max_position_embeddings=16)
    rope = dataclasses.replace(rope, mrope_section=(2, 1, 1))
    at = jnp.asarray([[[20], [40], [30]]], jnp.int32)
    cos, _ = rotations(rope, 8, at, jnp.float32)
    raised = 10000.0 * (2 * 41 / 16 - 1) ** (8 / 6)
    frequency = raised ** (-np.arange(0, 8, 2) / 8)
    np.testing.assert_allclose(cos[0, 0, 0], np.cos([20, 20, 40, 30] * frequency), atol=3e-5)


@pytest.mark.parametrize(
    ("family", "sections"), [("qwen2_vl", (16, 24, 24)), ("qwen3_vl", (24, 20, 20))]
)
def test_layouts_are_transformers_own(family, sections):
    torch = pytest.importorskip("torch")
    pytest.importorskip("transformers")
    turns = family == "qwen3_vl"
    rope = RopeConfig(5e5, mrope_section=sections, mrope_interleaved=turns)
    at = positions_of(np.random.default_rng(2))
    cos, sin = peer(family, rope, 128)(
        torch.zeros(1), torch.asarray(at.transpose(1, 0, 2).astype(np.int64))
    )
    found = rotations(rope, 128, jnp.asarray(at), jnp.float32)
    for ours, its in zip(found, (cos, sin), strict=True):
        np.testing.assert_allclose(np.asarray(ours)[:, :, 0], its[..., :64].numpy(), atol=3e-4)


def peer(family, rope, head_dim):
    """The rotary module of the text part of transformers' model."""
    if family == "qwen2_vl":
        from transformers.models.qwen2_vl.configuration_qwen2_vl import Qwen2VLTextConfig as Config
        from transformers.models.qwen2_vl.modeling_qwen2_vl import Qwen2VLRotaryEmbedding as Module
    else:
        from transformers.models.qwen3_vl.configuration_qwen3_vl import Qwen3VLTextConfig as Config
        from transformers.models.qwen3_vl.modeling_qwen3_vl import (
            Qwen3VLTextRotaryEmbedding as Module,
        )
    said = {"rope_type": "default", "rope_theta": rope.theta}
    said["mrope_section"] = list(rope.mrope_section)
    config = Config(hidden_size=2 * head_dim, num_attention_heads=2, num_key_value_heads=2)
    config.head_dim, config.rope_parameters = head_dim, said
    return Module(config)


def scripted(truth, image=IMAGE, tokens=64, **options):
    return make(Request(tokens=tokens, image=image), truth=truth, **options)


def accepts(s, draft, record=None, trees=None, **options):
    found = replay(record or s.record, draft, trees or s.tree, shared=s.shared(), **options)
    return found, [r.accepted for r in found.trees[0].rounds]


def codes(found):
    return [f.code for f in found.findings]


def changed(s, **fields):
    sequence = dataclasses.replace(s.record.sequences[0], **fields)
    return dataclasses.replace(s.record, sequences=[sequence])


@pytest.mark.parametrize("truth", [BLOCKS, TURNS], ids=["blocks", "in turn"])
def test_an_image_s_positions_give_the_script(truth):
    """And neither the other layout nor plain rope nor a record without them does."""
    s = scripted(truth)
    assert s.record.sequences[0].positions[:, 20].tolist() == [12, 12, 12]
    found, accepted = accepts(s, s.draft())
    assert accepted == s.accepted[0]
    assert "FEATURE_MROPE" not in codes(found)
    other = TURNS if truth is BLOCKS else BLOCKS
    assert accepts(s, s.draft(other))[1] != s.accepted[0]
    found, accepted = accepts(s, s.draft(Truth()))
    assert accepted != s.accepted[0]
    assert "FEATURE_MROPE" in codes(found)
    assert accepts(s, s.draft(), changed(s, positions=None))[1] != s.accepted[0]


def test_text_alone_is_plain_rope():
    plain = scripted(Truth(), image=None)
    q = plain.record.sequences[0]
    at = np.repeat(np.arange(len(q.tokens), dtype=np.int32)[None], 3, axis=0)
    placed = dataclasses.replace(plain.record, sequences=[dataclasses.replace(q, positions=at)])
    for record in (plain.record, placed):
        assert accepts(plain, plain.draft(TURNS), record)[1] == plain.accepted[0]


def test_trees_and_several_sequences_side_by_side():
    """One with an image, one without, one with another: in one bin, under a tree."""
    tree = TreeConfig(3, 2, 6)
    requests = [Request(tokens=56, image=image) for image in (IMAGE, None, (2, 5, 2))]
    s = make(requests, truth=TURNS, tree=tree, draft_attention="beam_slots")
    found, _ = accepts(s, s.draft(), draft_attention="beam_slots", trace=True)
    rounds = found.trees[0].rounds
    for i, script in enumerate(s.accepted):
        assert [r.accepted for r in rounds if r.sequence == i] == script
    first = found.trees[0].trace.rounds[0]
    assert (first.length, first.positions[0]) == (24, 16)  # 12 patches took 4 positions


def test_kept_draft_rows_stand_where_they_were_drafted():
    s = scripted(dataclasses.replace(BLOCKS, kv="keep"), tokens=80)
    assert accepts(s, s.draft(BLOCKS), refresh=False)[1] == s.accepted[0]


def test_a_window_counts_tokens_not_positions():
    s = scripted(dataclasses.replace(TURNS, window=10))
    assert accepts(s, s.draft(TURNS, windows=(10,)))[1] == s.accepted[0]


def test_from_files_to_the_page(tmp_path, capsys):
    """`convert`, `record show` and `replay` as a user runs them."""
    s = scripted(TURNS)
    target = s.write_target(tmp_path / "target")
    source = s.write_draft(tmp_path / "source")
    assert (
        from_torch.main([str(source), "--target", str(target), "--out", str(tmp_path / "D")]) == 0
    )
    assert "sections [4, 2, 2] interleaved" in capsys.readouterr().out
    config = manifest_config(read_manifest(tmp_path / "D"), tmp_path / "D")
    assert config.rope == RopeConfig(mrope_section=(4, 2, 2), mrope_interleaved=True)
    path = write_record(tmp_path / "R.safetensors", s.record, target)
    kept = records.load(path).sequences[0].positions
    np.testing.assert_array_equal(kept, s.record.sequences[0].positions)
    argv = ["replay", path, "--draft", tmp_path / "D", "--tree", "3,1", "--json"]
    assert run(*argv) == 0
    found = json.loads(capsys.readouterr().out)["trees"][0]
    assert found["accept_length"] == pytest.approx(s.accept_length, abs=1e-6)


@pytest.mark.parametrize(
    ("edit", "words"),
    [
        (lambda at: at[0], "int32 [64], expected integers [3, 64], one row an axis"),
        (lambda at: at[:2], "int32 [2, 64]"),
        (lambda at: at[:, :-1], "int32 [3, 63]"),
        (lambda at: at.T, "int32 [64, 3]"),
        (lambda at: at.astype(np.float32), "float32 [3, 64]"),
        (lambda at: at - 1, "positions span -1.."),
        (lambda at: at.astype(np.int64) + (1 << 31), "expected 0.."),
        (
            lambda at: np.where(np.arange(64) == 30, 0, at),
            "output token 30 is at positions [0, 0, 0], expected 22 on each axis",
        ),
        (
            lambda at: np.where(np.arange(64) < 24, at, np.arange(64)),  # the tokens' own numbers
            "output token 24 is at positions [24, 24, 24], expected 16 on each axis",
        ),
    ],
)
def test_positions_that_cannot_be_are_refused(edit, words):
    s = scripted(BLOCKS)
    at = s.record.sequences[0].positions
    record = changed(
        s,
        tokens=s.record.sequences[0].tokens[:64],
        aux=s.record.sequences[0].aux[:64],
        positions=edit(at[:, :64]),
        rounds=None,
    )
    with pytest.raises(RecordError) as caught:
        replay(record, s.draft(), s.tree, shared=s.shared())
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("masked", [True, False])
def test_only_output_has_to_go_on_after_the_largest(masked):
    """The loss mask says what is output: a later turn may bring another image."""
    s = scripted(BLOCKS)
    at = np.array(s.record.sequences[0].positions)
    at[:, 40:] += 5
    mask = np.arange(at.shape[1]) >= 24
    mask[40] = not masked
    record = changed(s, positions=at, loss_mask=mask, rounds=None)
    if masked:
        assert len(accepts(s, s.draft(), record)[1]) > 5
    else:
        with pytest.raises(RecordError, match=r"output token 40 is at positions \[37, 37, 37\]"):
            accepts(s, s.draft(), record)


@pytest.mark.parametrize("first", [13, 22])
def test_states_that_begin_inside_or_after_the_image(first):
    """A cached prefix: rows stand where the whole text puts them."""
    s = make([Request(tokens=64, first=first, image=IMAGE), Request(tokens=64)], truth=BLOCKS)
    rounds = accepts(s, s.draft())[0].trees[0].rounds
    for i, script in enumerate(s.accepted):
        assert [r.accepted for r in rounds if r.sequence == i] == script


def test_npz(tmp_path):
    q = scripted(TURNS).record.sequences[0]
    T = len(q.tokens)
    described = Described(tuple(range(9)), "greedy", prompt_length=24, num_layers=8)
    arrays = {"tokens": q.tokens, "aux": q.aux, "positions": np.arange(T)}

    def read(**more):
        np.savez(tmp_path / "a.npz", **(arrays | more))
        return next(iter(read_npz([tmp_path / "a.npz"], described)))

    assert read().positions is None
    for shape in ((3, T), (3, 1, T)):
        found = read(mrope_positions=q.positions.reshape(shape)).positions
        np.testing.assert_array_equal(found, q.positions)
    with pytest.raises(RecordError, match="on three axes are named mrope_positions"):
        read(positions=q.positions)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"mrope_section": (4, 4)}, "expected three sizes"),
        ({"mrope_section": (0, 0, 0)}, "expected three sizes"),
        ({"mrope_section": [4, 2, 2]}, "expected three sizes"),
        ({"mrope_interleaved": True}, "needs mrope_section"),
    ],
)
def test_impossible_axes_are_refused(fields, words):
    with pytest.raises(ConfigError, match=words):
        RopeConfig(**fields)


def test_axes_and_positions_must_fit():
    s = scripted(BLOCKS)
    with pytest.raises(ConfigError, match="8 pairs, expected 16"):
        RopeConfig(mrope_section=(4, 2, 2)).check_sections(32)
    with pytest.raises(ConfigError, match="9 pairs, expected 8"):
        s.draft(BLOCKS, rope=RopeConfig(mrope_section=(4, 3, 2)))
    with pytest.raises(ConfigError, match="the rope has one"):
        rotations(RopeConfig(), 16, jnp.zeros((1, 3, 2), jnp.int32), jnp.float32)

"""Drafts on disk: what is written is what is read, and damage is named."""

import dataclasses
import json
import os
import stat
from pathlib import Path
from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
import toy_drafts as toy
from convert_command import Command, stored

from eagle3_jax.checkpoint import (
    CheckpointError,
    load_draft,
    manifest_config,
    read_manifest,
    save_draft,
)
from eagle3_jax.config import ConfigError, DraftConfig, RopeConfig, TargetConfig
from eagle3_jax.modules import tensors_of

SIZES = {
    "hidden_size": 8,
    "target_hidden_size": 8,
    "num_aux": 3,
    "intermediate_size": 12,
    "num_heads": 2,
    "num_kv_heads": 1,
    "head_dim": 4,
    "vocab_size": 20,
    "draft_vocab_size": 10,
}
CONFIG = DraftConfig(**SIZES, aux_boundaries=(2, 4, 5))


def tensors(config: DraftConfig) -> dict[str, np.ndarray]:
    made = {name: toy.normal(*shape) for name, shape in config.tensor_shapes().items()}
    return made | {"draft_to_target": np.arange(config.draft_vocab_size, dtype=np.int32) * 2}


def target(**changes) -> SimpleNamespace:
    sizes = {"hidden_size": 8, "intermediate_size": 16, "num_layers": 8, "vocab_size": 20}
    sizes |= {"num_heads": 2, "num_kv_heads": 1, "head_dim": 4, "max_position_embeddings": 64}
    config = TargetConfig("LlamaForCausalLM", rms_norm_eps=1e-5, rope=RopeConfig(), **sizes)
    return SimpleNamespace(config=dataclasses.replace(config, **changes))


@pytest.fixture
def draft(tmp_path) -> Path:
    return save_draft(tmp_path / "draft", CONFIG, tensors(CONFIG))


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"aux_boundaries": (7, 2, "final_norm")},
        {"aux_boundaries": DraftConfig.aux_boundaries},
        {"rope": RopeConfig(5e5, "llama3", 8.0, 1.0, 4.0, 32), "rms_norm_eps": 1e-5},
        {"embed": "draft", "head": "draft", "qkv_bias": True, "output_bias": True},
        {"fc_norm": True, "feedback": "post_norm", "fc_bias": True, "mlp_bias": True},
        {"norm_before_fc": True, "norm_before_residual": True, "double_norm": True},
        {"draft_vocab_size": 20, "head": "target", "final_norm": False},
    ],
)
def test_every_config_and_tensor_comes_back(tmp_path, changes):
    config = dataclasses.replace(CONFIG, **changes)
    made = tensors(config) | {"draft_to_target": np.arange(config.draft_vocab_size, dtype=np.int32)}
    folder = save_draft(tmp_path / "draft", config, made)
    assert manifest_config(read_manifest(folder), folder) == config
    read = stored(folder)
    assert set(read) == set(made)
    for name, tensor in made.items():
        assert (read[name].dtype, read[name].tobytes()) == (tensor.dtype, tensor.tobytes())
    loaded = load_draft(folder)
    assert loaded.config == config
    assert loaded.engine is None
    assert loaded.draft_attention == "ancestors"


def test_weights_are_a_plain_orbax_tree(draft):
    """Read without this package: a nested dict by the dots of the canonical names."""
    tree = ocp.StandardCheckpointer().restore((draft / "weights").absolute())
    made = tensors(CONFIG)
    assert np.array_equal(tree["fc"]["weight"], made["fc.weight"])
    leaf = tree["layers"]["0"]["attn"]["q"]["weight"]
    assert np.array_equal(leaf, made["layers.0.attn.q.weight"])
    assert np.array_equal(tree["draft_to_target"], made["draft_to_target"])


def test_a_converted_draft_is_loaded_in_the_dtype_asked_for(tmp_path, capsys):
    command = Command(tmp_path, capsys)
    command.converted(toy.write(tmp_path / "source"))
    for dtype in ("float32", "bfloat16", "float16"):
        loaded = load_draft(command.out, dtype=dtype)
        expected = toy.tensors()["midlayer.self_attn.q_proj.weight"].astype(jnp.dtype(dtype))
        weight = tensors_of(loaded)["layers.0.attn.q.weight"]
        assert weight.tobytes() == expected.tobytes()
        assert np.asarray(loaded.draft_to_target[...]).tolist() == toy.target_ids().tolist()


def test_a_target_settles_the_default_boundaries(tmp_path):
    config = dataclasses.replace(CONFIG, aux_boundaries=DraftConfig.aux_boundaries)
    folder = save_draft(tmp_path / "draft", config, tensors(config))
    assert load_draft(folder).config.aux_boundaries == DraftConfig.aux_boundaries
    assert load_draft(folder, target=target()).config.aux_boundaries == (2, 4, 5)
    assert load_draft(folder, target=target(num_layers=32)).config.aux_boundaries == (2, 16, 29)
    with pytest.raises(ConfigError, match="name the three boundaries"):
        load_draft(folder, target=target(num_layers=4))


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        (
            {"hidden_size": 16},
            r"expects target width 8 \(3 states\), the target has hidden_size 16",
        ),
        ({"vocab_size": 24}, "vocabulary of 20, the target has 24"),
        ({"num_layers": 4}, r"boundary 5 lies outside the target's 0\.\.4"),
    ],
)
def test_another_target_is_refused(draft, changes, match):
    with pytest.raises(ConfigError, match=match):
        load_draft(draft, target=target(**changes))


def test_what_is_not_a_draft_says_how_to_make_one(tmp_path):
    with pytest.raises(CheckpointError, match="absent: no such folder"):
        load_draft(tmp_path / "absent")
    folder = toy.write(tmp_path / "torch")
    with pytest.raises(CheckpointError, match=rf"from_torch {folder} --out DIR"):
        load_draft(folder)


def edit(folder: Path, change) -> Path:
    manifest = json.loads((folder / "draft.json").read_text())
    change(manifest)
    (folder / "draft.json").write_text(json.dumps(manifest))
    return folder


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (lambda m: m.update(format=3), "format 3, this version reads up to 2: upgrade"),
        (lambda m: m.update(format="1"), "format is '1', expected 2"),
        (lambda m: m.pop("format"), "format is None"),
        (lambda m: m.pop("config"), "config is not an object"),
        (lambda m: m.update(tensors=[]), "tensors is not an object"),
        (lambda m: m["tensors"].update({"fc.weight": 3}), "not an object of records"),
        (lambda m: m.update(d2t=3), "d2t is not an object"),
        (lambda m: m["config"].pop("rope"), "config is damaged: 'rope'"),
        (lambda m: m["config"].update(rope=3), "config is damaged"),
        (lambda m: m["config"].update(colour="red"), "config is damaged: .*colour"),
        (lambda m: m["config"].update(hidden_size="8"), "config is damaged: .*hidden_size"),
        (lambda m: m["config"].update(fc_norm=1), "fc_norm is 1, expected true or false"),
        (lambda m: m["config"].update(aux_boundaries="all"), "config is damaged: .*'all'"),
        (lambda m: m["config"].update(windows=3), "config is damaged"),
        (lambda m: m["config"].update(windows=["4"]), "config is damaged: .*window"),
        (lambda m: m["config"].update(latent=3), "config is damaged"),
        (lambda m: m["config"].update(latent={"kv_lora_rank": 4}), "config is damaged"),
        (lambda m: m["config"].update(next_layers="last"), "config is damaged: next_layers"),
        (lambda m: m["config"].update(num_layers=0), "config is damaged: .*num_layers"),
        (lambda m: m["config"].update(fc_bias=True), "has no tensor 'fc.bias'"),
        (
            lambda m: m["tensors"]["fc.weight"].update(sha256="00"),
            "'fc.weight' has sha256 .*: damaged",
        ),
        (lambda m: m["config"].update(intermediate_size=13), "expected"),
    ],
)
def test_a_damaged_manifest_is_named(draft, change, match):
    with pytest.raises((CheckpointError, ConfigError), match=match):
        load_draft(edit(draft, change))


def test_a_manifest_that_is_not_json_is_named(draft):
    (draft / "draft.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"draft\.json: not JSON"):
        load_draft(draft)


def test_lost_weights_are_named(draft):
    (draft / "weights").rename(draft / "elsewhere")
    with pytest.raises(CheckpointError, match="weights: no such folder"):
        load_draft(draft)
    (draft / "weights").mkdir()
    with pytest.raises(CheckpointError, match="cannot be restored"):
        load_draft(draft)


def test_a_flipped_byte_anywhere_in_the_data_is_found(draft):
    files = [path for path in (draft / "weights").rglob("*") if path.is_file()]
    data = max(files, key=lambda path: path.stat().st_size)
    whole = data.read_bytes()
    outcomes = []
    for place in range(0, len(whole), max(1, len(whole) // 40)):
        broken = bytearray(whole)
        broken[place] ^= 0x10
        data.write_bytes(bytes(broken))
        try:
            outcomes.append({name: tensor.tobytes() for name, tensor in stored(draft).items()})
        except CheckpointError as error:
            outcomes.append("named" if str(draft) in str(error) else str(error))
    whole_draft = {name: tensor.tobytes() for name, tensor in tensors(CONFIG).items()}
    assert [o for o in outcomes if o not in ("named", whole_draft)] == []
    assert outcomes.count("named") > 20
    data.write_bytes(whole[:-10])
    with pytest.raises(CheckpointError):
        stored(draft)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (lambda t: t.pop("fc.weight"), "'fc.weight' has shape None, expected"),
        (lambda t: t.update(extra=np.zeros(1)), r"'extra' has shape \(1,\), expected None"),
        (lambda t: t.update({"fc.weight": np.zeros((8, 8))}), r"\(8, 8\), expected \(8, 24\)"),
    ],
)
def test_only_the_config_s_tensors_are_saved(tmp_path, change, match):
    made = tensors(CONFIG)
    change(made)
    with pytest.raises(CheckpointError, match=match):
        save_draft(tmp_path / "draft", CONFIG, made)
    assert list(tmp_path.iterdir()) == []


def test_force_replaces_a_draft_and_nothing_else(draft):
    with pytest.raises(CheckpointError, match="--force"):
        save_draft(draft, CONFIG, tensors(CONFIG))
    changed = {name: tensor + 1 for name, tensor in tensors(CONFIG).items()}
    changed = {n: t.astype(np.int32) if n == "draft_to_target" else t for n, t in changed.items()}
    save_draft(draft, CONFIG, changed, force=True)
    assert stored(draft)["fc.weight"].tobytes() == changed["fc.weight"].tobytes()
    assert [path.name for path in draft.parent.iterdir()] == ["draft"]
    (draft / "draft.json").unlink()
    with pytest.raises(CheckpointError, match="not a draft written here"):
        save_draft(draft, CONFIG, changed, force=True)


def test_the_folder_has_the_usual_permissions(tmp_path):
    old = os.umask(0o027)
    try:
        folder = save_draft(tmp_path / "new/draft", CONFIG, tensors(CONFIG))
    finally:
        os.umask(old)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o750


def test_a_draft_of_format_1_is_read(draft):
    """It has no fields about layers, windows and latent attention."""
    later = ("num_layers", "hidden_norm", "next_layers", "next_spare_norm", "qk_norm", "windows")

    def older(manifest):
        manifest["format"] = 1
        for name in later[1:]:
            del manifest["config"][name]

    before = load_draft(draft).config
    assert load_draft(edit(draft, older)).config == before

"""Sizes, shapes and values: tensors decide, the config is a witness, damage is named."""

import numpy as np
import pytest
import toy_drafts as toy
from convert_command import Command, codes


@pytest.fixture
def command(tmp_path, capsys) -> Command:
    return Command(tmp_path, capsys)


def official(tmp_path, extra=(), drop=(), **keys):
    """The base draft with config keys, extra tensors (name, shape) and without some."""

    def change(config, tensors):
        config |= keys
        tensors |= {name: toy.normal(*shape) for name, shape in extra}
        return {name: tensor for name, tensor in tensors.items() if name not in drop}

    return toy.write(tmp_path / "draft", change)


def test_values_that_are_not_finite_are_counted(command, tmp_path):
    def broken(config, tensors):
        tensors["midlayer.mlp.up_proj.weight"][3, :2] = (np.nan, np.inf)

    folder = toy.write(tmp_path / "draft", broken)
    command.refused("WEIGHT_NOT_FINITE", "'midlayer.mlp.up_proj.weight' has 2 values", folder)
    manifest = command.converted(folder, "--allow", "WEIGHT_NOT_FINITE")
    assert codes(manifest) == ["WEIGHT_NOT_FINITE"]


def test_a_cast_that_overflows_is_refused(command, tmp_path):
    def huge(config, tensors):
        tensors["norm.weight"] = tensors["norm.weight"].astype(np.float64)
        tensors["norm.weight"][5] = 1e300

    folder = toy.write(tmp_path / "draft", huge)
    command.refused("WEIGHT_NOT_FINITE", "'norm.weight' has 1 values", folder, "--dtype", "float32")
    command.converted(folder)


@pytest.mark.parametrize(
    ("keys", "code", "text"),
    [
        ({"hidden_size": 32}, "CONFIG_SIZE_DISAGREES", "hidden_size is 32, but tensor fc.weight"),
        ({"intermediate_size": 95}, "CONFIG_SIZE_DISAGREES", "intermediate_size is 95"),
        ({"num_attention_heads": None}, "CONFIG_MISSING", "num_attention_heads"),
        ({"num_attention_heads": 8}, "CONFIG_HEAD_DIM", "64 rows, but"),
        ({"num_key_value_heads": 4}, "CONFIG_HEAD_DIM", "k_proj.weight' has 32 rows"),
        ({"num_attention_heads": 3, "head_dim": None}, "CONFIG_HEAD_DIM", "64 rows, but"),
        ({"num_attention_heads": 0}, "CONFIG_INVALID", "num_attention_heads is 0"),
        ({"head_dim": 16.0}, "CONFIG_INVALID", "head_dim is 16.0"),
        ({"rms_norm_eps": 0}, "CONFIG_INVALID", "rms_norm_eps is 0"),
        ({"num_aux_hidden_states": 4}, "AUX_IDS_INVALID", "is 4, but eagle_config"),
        ({"target_hidden_size": 96}, "CONFIG_WRONG_PAIR", "192"),
    ],
)
def test_configs_that_do_not_fit_the_tensors(command, tmp_path, keys, code, text):
    command.refused(code, text, official(tmp_path, **keys))


def test_a_llama_4_config_has_another_key_for_the_mlp(command, tmp_path):
    sizes = {"model_type": "llama4_text", "intermediate_size": 48, "intermediate_size_mlp": 96}
    manifest = command.converted(official(tmp_path, **sizes))
    assert (manifest["config"]["intermediate_size"], codes(manifest)) == (96, [])


def test_the_tensors_win_when_allowed(command, tmp_path):
    folder = official(tmp_path, hidden_size=32, intermediate_size=95)
    manifest = command.converted(folder, "--allow", "CONFIG_SIZE_DISAGREES")
    assert manifest["config"]["hidden_size"] == 64
    assert manifest["config"]["intermediate_size"] == 96
    assert codes(manifest) == ["CONFIG_SIZE_DISAGREES"] * 2


@pytest.mark.parametrize(
    ("keys", "code"),
    [
        ({"vocab_size": 250}, "VOCAB_SIZE_DISAGREES"),
        ({"draft_vocab_size": 32000}, "VOCAB_SIZE_DISAGREES"),
        ({"num_hidden_layers": 40}, "CONFIG_LAYER_COUNT"),
    ],
)
def test_keys_known_to_be_copied_are_warnings(command, tmp_path, keys, code):
    manifest = command.converted(official(tmp_path, **keys))
    assert codes(manifest) == [code]
    assert manifest["config"]["vocab_size"] == 256
    assert manifest["config"]["draft_vocab_size"] == 64


def test_padding_rows_of_an_embedding_are_left_out(command, tmp_path):
    manifest = command.converted(official(tmp_path, [("embed_tokens.weight", (300, 64))]))
    assert codes(manifest) == ["VOCAB_SIZE_DISAGREES"]
    expected = toy.normal(300, 64)[:256]
    assert command.stored()["embed.weight"].tobytes() == expected.tobytes()
    command.out = tmp_path / "other"
    folder = official(tmp_path, [("embed_tokens.weight", (200, 64))])
    command.refused("VOCAB_SIZE_DISAGREES", "has 200 rows", folder)


@pytest.mark.parametrize(
    ("name", "shape", "text"),
    [
        ("midlayer.self_attn.o_proj.weight", (64, 63), "shape [64, 63], expected [64, 64]"),
        ("midlayer.self_attn.q_proj.weight", (64, 64), "shape [64, 64], expected [64, 128]"),
        ("midlayer.hidden_norm.weight", (64, 1), "expected 1 dimensions"),
        ("fc.weight", (64,), "expected 2 dimensions"),
        ("lm_head.weight", (64, 32), "shape [64, 32], expected [64, 64]"),
        ("lm_head.weight", (0, 64), "none of them 0"),
        ("norm.weight", (63,), "shape [63], expected [64]"),
    ],
)
def test_a_tensor_of_another_shape_is_named(command, tmp_path, name, shape, text):
    err = command.refused("WEIGHT_SHAPE", text, official(tmp_path, [(name, shape)]))
    assert f"'{name}'" in err


def test_a_head_larger_than_the_vocabulary_is_refused(command, tmp_path):
    folder = official(tmp_path, [("lm_head.weight", (300, 64))], drop=["d2t"])
    command.refused("VOCAB_SIZE_DISAGREES", "larger than the target's 256", folder)


def test_a_map_of_another_length_than_the_head_is_refused(command, tmp_path):
    folder = official(tmp_path, [("lm_head.weight", (63, 64))])
    command.refused("VOCAB_MAP_LENGTH", "shape [64], expected [63]", folder)


def test_a_draft_without_any_vocabulary_size_asks_for_the_target(command, tmp_path):
    folder = official(tmp_path, vocab_size=None, drop=["t2d"])
    command.refused("CONFIG_MISSING", "--target", folder)
    target = toy.write_target(tmp_path / "target")
    manifest = command.converted(folder, "--target", target)
    assert manifest["origins"]["vocab_size"].startswith("target:vocab_size")

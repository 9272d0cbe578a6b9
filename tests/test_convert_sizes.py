"""Reported faults in sizes, norms and RoPE, each as a small draft."""

import numpy as np
import pytest
import toy_drafts as toy
from convert_command import Command, codes, digests

from eagle3_jax.config import RopeConfig


@pytest.fixture
def command(tmp_path, capsys) -> Command:
    return Command(tmp_path, capsys)


# Sizes: EAGLE#315, vllm#17740, vllm#37966


@pytest.mark.parametrize("stated", [16, None, "absent"])
def test_head_dim_need_not_be_hidden_over_heads(command, tmp_path, stated):
    def change(config, tensors):
        config |= {"hidden_size": 40, "head_dim": stated, "target_hidden_size": 64}
        if stated == "absent":
            del config["head_dim"]
        made = {n: t for n, t in tensors.items() if n in ("d2t", "t2d")}
        shapes = {"q": (64, 80), "k": (32, 80), "v": (32, 80), "o": (40, 64)}
        made |= {f"midlayer.self_attn.{n}_proj.weight": toy.normal(*s) for n, s in shapes.items()}
        mlp = {"gate": (96, 40), "up": (96, 40), "down": (40, 96)}
        made |= {f"midlayer.mlp.{n}_proj.weight": toy.normal(*s) for n, s in mlp.items()}
        norms = ("input_layernorm", "hidden_norm", "post_attention_layernorm")
        made |= {f"midlayer.{n}.weight": toy.normal(40) for n in norms}
        made |= {"fc.weight": toy.normal(40, 192), "norm.weight": toy.normal(40)}
        made |= {"lm_head.weight": toy.normal(64, 40), "embed_tokens.weight": toy.normal(256, 40)}
        return made

    config = command.converted(toy.write(tmp_path / "draft", change))["config"]
    assert (config["head_dim"], config["hidden_size"]) == (16, 40)
    assert (config["target_hidden_size"], config["embed"]) == (64, "draft")


def narrow(config, tensors):
    """A draft 48 wide for a target 64 wide."""
    config["hidden_size"] = 48
    made = {name: tensor for name, tensor in tensors.items() if name in ("d2t", "t2d")}
    for name, shape in toy.LAYER_SHAPES.items():
        narrowed = tuple({128: 96, 64: 48}.get(n, n) for n in shape)
        if name == "self_attn.q_proj.weight":
            narrowed = (64, 96)
        if name == "self_attn.o_proj.weight":
            narrowed = (48, 64)
        made[f"midlayer.{name}"] = toy.normal(*narrowed)
    made |= {"fc.weight": toy.normal(48, 192), "norm.weight": toy.normal(48)}
    made |= {"lm_head.weight": toy.normal(64, 48), "embed_tokens.weight": toy.normal(256, 48)}
    return made


@pytest.mark.parametrize(
    ("key", "origin"),
    [(64, "config:target_hidden_size"), (None, "inferred: fc.in / 3")],
)
def test_a_draft_narrower_than_its_target(command, tmp_path, key, origin):
    def change(config, tensors):
        config["target_hidden_size"] = key
        return narrow(config, tensors)

    manifest = command.converted(toy.write(tmp_path / "draft", change))
    assert manifest["config"]["target_hidden_size"] == 64
    assert manifest["origins"]["target_hidden_size"] == origin


def test_a_narrow_draft_needs_its_own_embedding_and_head(command, tmp_path):
    def no_embedding(config, tensors):
        made = narrow(config, tensors)
        del made["embed_tokens.weight"]
        return made

    def no_head(config, tensors):
        made = narrow(config, tensors)
        config["draft_vocab_size"] = 256
        return {n: t for n, t in made.items() if n not in ("lm_head.weight", "d2t", "t2d")}

    folder = toy.write(tmp_path / "draft", no_embedding)
    command.refused("WEIGHT_OWNER", "the draft is 48 wide, the target 64", folder)
    folder = toy.write(tmp_path / "draft", no_head)
    command.refused("WEIGHT_MISSING_LM_HEAD", "a width of 48, not the target's 64", folder)


@pytest.mark.parametrize("width", [128, 96, 65])
def test_a_target_of_another_width_is_refused(command, tmp_path, width):
    def no_ids(config, tensors):
        del config["eagle_config"]

    target = toy.write_target(tmp_path / "target", hidden_size=width)
    folder = toy.write(tmp_path / "draft", no_ids)
    err = command.refused(
        "CONFIG_WRONG_PAIR", "target width 64 (3 states", folder, "--target", target
    )
    assert f"width {width}" in err
    folder = toy.write(tmp_path / "draft")
    command.refused("CONFIG_WRONG_PAIR", "expects target width 64", folder, "--target", target)


def test_a_target_of_another_vocabulary_is_refused(command, tmp_path):
    target = toy.write_target(tmp_path / "target", vocab_size=300)
    folder = toy.write(tmp_path / "draft")
    command.refused("CONFIG_WRONG_PAIR", "256 (tensor t2d), but", folder, "--target", target)


@pytest.mark.parametrize("nest", ["text_config", "language_config"])
def test_a_composite_target_keeps_its_sizes_in_a_nest(command, tmp_path, nest):
    sizes = {"hidden_size": 64, "vocab_size": 256, "num_hidden_layers": 8}
    vision = {"hidden_size": 1152, "num_hidden_layers": 27}
    target = tmp_path / "target"
    toy.write_target(target, **dict.fromkeys(sizes), vision_config=vision, **{nest: sizes})
    found = command.converted(toy.write(tmp_path / "draft"), "--target", target)["target"]
    assert found == sizes
    toy.write_target(target, **dict.fromkeys(sizes), vision_config=vision)
    folder = toy.write(tmp_path / "draft")
    command.out = tmp_path / "other"
    command.refused("CONFIG_MISSING", "no hidden_size", folder, "--target", target)


def test_a_quantised_target_says_nothing_about_the_draft(command, tmp_path):
    target = toy.write_target(tmp_path / "target", quantization_config={"quant_method": "fp8"})
    assert codes(command.converted(toy.write(tmp_path / "draft"), "--target", target)) == []


def test_null_and_missing_fields_are_tolerated(command, tmp_path):
    """Model-Optimizer#1417: placeholders left null by a template."""

    def nulls(config, tensors):
        config |= {"use_cache": None, "rope_scaling": None, "head_dim": None, "dtype": "float32"}
        config |= {"num_aux_hidden_states": None, "target_hidden_size": None, "bias": None}

    manifest = command.converted(toy.write(tmp_path / "draft", nulls))
    assert manifest["config"]["head_dim"] == 16
    assert None not in manifest["config"].values()
    assert digests(manifest) == digests(command.converted(toy.write(tmp_path / "plain")))


# Norms: sglang#32334


@pytest.mark.parametrize("name", ["input_norm.weight", "model.input_norm.weight", "fc_norm.weight"])
def test_a_norm_before_fc_under_any_name(command, tmp_path, name):
    def change(config, tensors):
        config["eagle_config"]["norm_before_fc"] = True
        tensors[name] = toy.normal(192)

    manifest = command.converted(toy.write(tmp_path / "draft", change))
    assert manifest["config"]["norm_before_fc"]
    assert not manifest["config"]["fc_norm"]
    assert manifest["tensors"]["input_norm.weight"]["from"] == [name]
    assert command.stored()["input_norm.weight"].tobytes() == toy.normal(192).tobytes()


@pytest.mark.parametrize(
    "names",
    [
        [f"fc_norm.{i}.weight" for i in range(3)],
        [f"aux_norm_{which}.weight" for which in ("low", "mid", "high")],
    ],
)
def test_a_norm_for_each_state_is_stacked_in_order(command, tmp_path, names):
    norms = [toy.normal(64, seed=i) for i in range(3)]

    def change(config, tensors):
        config["fc_norm"] = True
        tensors |= dict(zip(names, norms, strict=True))

    manifest = command.converted(toy.write(tmp_path / "draft", change))
    assert (manifest["config"]["fc_norm"], manifest["config"]["norm_before_fc"]) == (True, False)
    assert manifest["tensors"]["fc_norm.weight"]["from"] == names
    assert command.stored()["fc_norm.weight"].tobytes() == np.stack(norms).tobytes()


# RoPE: Automodel#2920, speculators#574


def test_a_nested_base_is_read_and_two_bases_are_refused(command, tmp_path):
    def nested(config, tensors):
        del config["rope_theta"]
        config["rope_parameters"] = {"rope_theta": 500000, "rope_type": "default"}

    def both(config, tensors):
        config["rope_parameters"] = {"rope_theta": 500000, "rope_type": "default"}

    manifest = command.converted(toy.write(tmp_path / "draft", nested))
    assert manifest["config"]["rope"]["theta"] == 500000.0
    assert codes(manifest) == ["POS_THETA_UNTRUE"]
    folder = toy.write(tmp_path / "both", both)
    command.out = tmp_path / "other"
    command.refused("POS_THETA_NESTED", "--rope-theta", folder)
    manifest = command.converted(folder, "--rope-theta", 10000)
    assert manifest["rope"]["effective"]["theta"] == 10000.0
    assert manifest["rope"]["configured"] == {
        "rope_parameters": {"rope_theta": 500000, "rope_type": "default"},
        "rope_theta": 10000,
    }
    assert codes(manifest) == []


def test_llama3_scaling_is_kept(command, tmp_path):
    scaling = {"rope_type": "llama3", "factor": 8, "low_freq_factor": 1, "high_freq_factor": 4}

    def scaled(config, tensors):
        config["rope_scaling"] = scaling | {"original_max_position_embeddings": 32}

    rope = command.converted(toy.write(tmp_path / "draft", scaled))["config"]["rope"]
    expected = RopeConfig(10000.0, "llama3", 8.0, 1.0, 4.0, 32)
    rope["mrope_section"] = tuple(rope["mrope_section"])  # what is None is left out
    assert RopeConfig(**rope) == expected

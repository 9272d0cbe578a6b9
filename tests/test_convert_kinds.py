"""Drafts of other frameworks: several layers, latent attention, one state, training states."""

import json

import ml_dtypes
import numpy as np
import pytest
import toy_drafts as toy
from convert_command import Command, codes, digests, stored
from safetensors.numpy import save_file

from eagle3_jax.checkpoint import load_draft, manifest_config
from eagle3_jax.config import LatentSizes

D, V, W, N, H = toy.D, toy.V, toy.W, toy.N, toy.H


@pytest.fixture
def command(tmp_path, capsys) -> Command:
    return Command(tmp_path, capsys)


def second_layer(made: toy.Tensors, *norms: str, width: int = D) -> toy.Tensors:
    """The draft under `layers.0.` with a layer 1 that reads `width` features."""
    layer = {name: toy.normal(*shape, seed=9) for name, shape in toy.LAYER_SHAPES.items()}
    for name in "qkv":
        rows = len(layer[f"self_attn.{name}_proj.weight"])
        layer[f"self_attn.{name}_proj.weight"] = toy.normal(rows, width, seed=9)
    kept = {n: t for n, t in layer.items() if "norm" not in n or "post" in n}
    kept |= {f"{norm}.weight": toy.normal(D, seed=3 + i) for i, norm in enumerate(norms)}
    return toy.layers0(made) | {f"layers.1.{name}": tensor for name, tensor in kept.items()}


@pytest.mark.parametrize("norm", ["input_layernorm", "hidden_norm"])
def test_the_only_norm_of_a_later_layer_is_the_one_it_uses(command, tmp_path, norm):
    folder = toy.write(tmp_path / "draft", lambda c, t: second_layer(t, norm))
    manifest = command.converted(folder)
    config = manifest["config"]
    assert (config["num_layers"], config["next_layers"]) == (2, norm)
    assert codes(manifest) == ["CONFIG_LAYER_COUNT"]
    assert manifest["origins"]["next_layers"] == f"tensor layers.1.{norm}.weight"
    ours = {"input_layernorm": "norm_embed", "hidden_norm": "norm_hidden"}[norm]
    tensors = command.stored()
    assert tensors[f"layers.1.{ours}.weight"].tobytes() == toy.normal(D, seed=3).tobytes()
    assert tensors["layers.1.attn.q.weight"].shape == (N * H, D)
    assert len(load_draft(command.out).layers) == 2


def test_two_norms_in_a_later_layer_are_asked_for(command, tmp_path):
    both = ("input_layernorm", "hidden_norm")
    folder = toy.write(tmp_path / "draft", lambda c, t: second_layer(t, *both))
    command.refused("CONFIG_MULTI_LAYER", "give --next-layer-norm", folder)
    manifest = command.converted(folder, "--next-layer-norm", "hidden_norm")
    assert manifest["config"]["next_spare_norm"]
    assert manifest["origins"]["next_layers"] == "flag --next-layer-norm"
    names = [f"layers.1.{n}.weight" for n in ("norm_embed", "norm_hidden")]
    assert all(name in manifest["tensors"] for name in names)
    only = toy.write(tmp_path / "only", lambda c, t: second_layer(t, "hidden_norm"))
    command.out = tmp_path / "other"
    flag = ("--next-layer-norm", "input_layernorm")
    command.refused("CONFIG_MULTI_LAYER", "the file has only hidden_norm", only, *flag)


@pytest.mark.parametrize(
    ("regular", "width", "refusal"),
    [(True, D, None), (False, 2 * D, None), (True, 2 * D, "128"), (False, D, "64")],
)
def test_next_layer_regular_must_fit_the_shapes(command, tmp_path, regular, width, refusal):
    def change(config, tensors):
        config["eagle_config"]["next_layer_regular"] = regular
        norms = ("input_layernorm",) if width == D else ("input_layernorm", "hidden_norm")
        return second_layer(tensors, *norms, width=width)

    folder = toy.write(tmp_path / "draft", change)
    if refusal:
        command.refused("CONFIG_MULTI_LAYER", f"layer 1 reads {refusal} features", folder)
    else:
        kind = "input_layernorm" if regular else "wide"
        assert command.converted(folder)["config"]["next_layers"] == kind


def test_modelopt_numbers_midlayer(command, tmp_path):
    def change(config, tensors):
        made = second_layer(tensors, "input_layernorm")
        return {n.replace("layers.", "midlayer."): t for n, t in made.items()}

    manifest = command.converted(toy.write(tmp_path / "draft", change))
    assert manifest["config"]["num_layers"] == 2
    assert manifest["tensors"]["layers.1.attn.o.weight"]["from"] == [
        "midlayer.1.self_attn.o_proj.weight"
    ]


def test_a_layer_that_is_missing_or_reads_something_else(command, tmp_path):
    def gap(config, tensors):
        made = second_layer(tensors, "input_layernorm")
        return {n.replace("layers.1.", "layers.2."): t for n, t in made.items()}

    command.refused("WEIGHT_MISSING", "layers.1.", toy.write(tmp_path / "gap", gap))
    odd = toy.write(tmp_path / "odd", lambda c, t: second_layer(t, "input_layernorm", width=48))
    command.refused("CONFIG_MULTI_LAYER", "read [48] features", odd)


def test_deepspec(command, tmp_path):
    def change(config, tensors):
        config |= {"architectures": ["Qwen3Eagle3Model"], "target_layer_ids": [1, 2, 3, 5, 6]}
        config |= {"model_type": "qwen3", "draft_vocab_size": V}
        del config["eagle_config"]
        made = second_layer(tensors, "input_layernorm", "hidden_norm", width=2 * D)
        made |= {
            f"layers.{i}.self_attn.{n}_norm.weight": toy.normal(H) for i in (0, 1) for n in "qk"
        }
        made |= {"fc.weight": toy.normal(D, 5 * D), "embed_tokens.weight": toy.normal(V, D)}
        return toy.full_vocabulary(made)

    manifest = command.converted(toy.write(tmp_path / "draft", change))
    config = manifest["config"]
    assert manifest["dialect"] == "deepspec"
    assert (config["num_aux"], config["aux_boundaries"]) == (5, [2, 3, 4, 6, 7])
    assert (config["qk_norm"], config["next_layers"]) == (True, "wide")
    assert manifest["aux"]["convention"] == "output"
    assert load_draft(command.out).layers[1].attn.q_norm is not None


def test_one_of_two_attention_norms_is_refused(command, tmp_path):
    def change(config, tensors):
        tensors["midlayer.self_attn.q_norm.weight"] = toy.normal(H)

    folder = toy.write(tmp_path / "draft", change)
    command.refused("WEIGHT_MISSING", "self_attn.k_norm.weight, though", folder)


def single(config, tensors):
    config["eagle_config"] = {"use_aux_hidden_state": False}
    return {
        n: t for n, t in tensors.items() if n not in ("fc.weight", "midlayer.hidden_norm.weight")
    }


def test_a_draft_of_one_state(command, tmp_path):
    manifest = command.converted(toy.write(tmp_path / "draft", single))
    config = manifest["config"]
    assert (config["num_aux"], config["aux_boundaries"]) == (1, ["final_norm"])
    assert (config["fuse"], config["hidden_norm"]) == ("none", False)
    assert "fc.weight" not in manifest["tensors"]
    draft = load_draft(command.out)
    assert draft.fc is None
    assert draft.layers[0].norm_hidden is None
    served = load_draft(command.out, as_engine="sglang-0.5.23")
    assert np.asarray(served.layers[0].norm_hidden.weight[...]).tolist() == [1.0] * D


def test_a_draft_of_one_state_keeps_no_fc_and_no_other_width(command, tmp_path):
    def with_fc(config, tensors):
        config["eagle_config"]["use_aux_hidden_state"] = False

    folder = toy.write(tmp_path / "draft", with_fc)
    command.refused("ARCH_SINGLE_STATE", "the file has fc.weight", folder)
    folder = toy.write(tmp_path / "other", single)
    target = toy.write_target(tmp_path / "target", hidden_size=128)
    command.refused("CONFIG_WRONG_PAIR", "of its own width 64", folder, "--target", target)


SIZES = LatentSizes(16, 10, 6, 8, q_lora_rank=24)


def latent(config, tensors):
    config |= {"architectures": ["Eagle3DeepseekV2ForCausalLM"], "kv_lora_rank": 16}
    config["rope_scaling"] = {"type": "yarn", "factor": 4.0, "mscale": 1.0, "mscale_all_dim": 1.0}
    made = {n: t for n, t in tensors.items() if "self_attn" not in n}
    shapes = {
        "q_a_proj": (24, 2 * D),
        "q_a_layernorm": (24,),
        "q_b_proj": (N * 16, 24),
        "kv_a_proj_with_mqa": (22, 2 * D),
        "kv_a_layernorm": (16,),
        "kv_b_proj": (N * 18, 16),
        "o_proj": (D, N * 8),
    }
    return made | {f"midlayer.self_attn.{n}.weight": toy.normal(*s) for n, s in shapes.items()}


def test_latent_attention(command, tmp_path):
    folder = toy.write(tmp_path / "draft", latent)
    manifest = command.converted(folder)
    config = manifest_config(manifest, command.out)
    assert config.latent == SIZES
    assert (config.num_kv_heads, config.head_dim) == (N, 16)
    assert config.rope.latent_sharpness == pytest.approx((0.1 * np.log(4) + 1) ** 2)
    tensors = command.stored()
    assert tensors["layers.0.attn.kv_b.weight"].tobytes() == toy.normal(N * 18, 16).tobytes()
    assert load_draft(command.out).new_cache(1, 5).k[0].shape == (1, 5, 1, 22)
    assert load_draft(command.out, as_engine="sglang-0.5.23").config == config


def test_a_size_of_latent_attention_that_disagrees(command, tmp_path):
    def change(config, tensors):
        made = latent(config, tensors)
        config["qk_nope_head_dim"] = 12
        return made

    folder = toy.write(tmp_path / "draft", change)
    command.refused("CONFIG_SIZE_DISAGREES", "qk_nope_head_dim is 12, the tensors say 10", folder)


def test_nemo_is_told_by_its_names(command, tmp_path):
    bare = ("lm_head.weight", "d2t", "t2d")

    def change(config, tensors):
        return {n if n in bare else f"model.{n}": t for n, t in toy.layers0(tensors).items()}

    manifest = command.converted(toy.write(tmp_path / "draft", change))
    assert manifest["dialect"] == "nemo"
    assert codes(manifest) == ["DIALECT_NEMO"]


def test_the_prefix_of_a_training_state_is_noted(command, tmp_path):
    def change(config, tensors):
        return {f"module.draft_model.{name}": tensor for name, tensor in tensors.items()}

    manifest = command.converted(toy.write(tmp_path / "draft", change))
    assert codes(manifest) == ["WEIGHT_PREFIX"]
    assert "module.draft_model." in manifest["findings"][0]["message"]


@pytest.mark.parametrize("several", [False, True])
def test_specforges_training_state(command, tmp_path, several):
    torch = pytest.importorskip("torch")
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(toy.config()))
    state = {f"draft_model.{n}": torch.from_numpy(t.copy()) for n, t in toy.tensors().items()}
    whole = {"draft_state_dict": state, "global_step": 7, "optimizer": {"state": {}}}
    if several:
        whole["ema"] = dict(state)
    torch.save(whole, folder / "training_state.pt")
    if several:
        command.refused("FILE", "'draft_state_dict', 'ema' all hold", folder / "training_state.pt")
        return
    manifest = command.converted(folder / "training_state.pt")
    assert codes(manifest) == ["FILE_CHOICE", "WEIGHT_PREFIX"]
    assert "entry 'draft_state_dict'" in manifest["findings"][0]["message"]
    same = command.stored()
    command.out = tmp_path / "plain"
    command.converted(toy.write(tmp_path / "draft"))
    assert {n: t.tobytes() for n, t in same.items()} == {
        n: t.tobytes() for n, t in command.stored().items()
    }


def test_a_window_is_kept(command, tmp_path):
    def change(config, tensors):
        config |= {"layer_types": ["sliding_attention"], "sliding_window": 32}

    manifest = command.converted(toy.write(tmp_path / "draft", change))
    assert manifest["config"]["windows"] == [32]
    assert manifest_config(manifest, command.out).windows == (32,)
    assert load_draft(command.out).new_cache(1, 4).positions is not None


def test_a_tensor_without_a_use_is_refused(command, tmp_path):
    def change(config, tensors):
        tensors["midlayer.self_attn.kv_b_proj.weight"] = toy.normal(8, 8)

    folder = toy.write(tmp_path / "draft", change)
    command.refused("WEIGHT_UNUSED", "'midlayer.self_attn.kv_b_proj.weight' has no use", folder)


FP8 = ml_dtypes.float8_e4m3fn
NAME = "midlayer.mlp.up_proj."


def per_tensor(weight):
    return (weight / 2).astype(FP8), {"weight_scale": np.full((), 2.0, np.float32)}, 2.0


def per_channel(weight):
    scale = np.linspace(0.5, 2, len(weight)).astype(np.float32)[:, None]
    return (weight / scale).astype(FP8), {"weight_scale": scale}, scale


def per_block(weight):
    scale = np.array([[0.5, 1.0], [2.0, 4.0], [1.5, 0.25]], np.float32)
    wide = np.repeat(np.repeat(scale, 32, axis=0), 32, axis=1)
    return (weight / wide).astype(FP8), {"weight_scale_inv": scale}, wide


def int8_rows(weight):
    top = np.abs(weight).max(axis=1).astype(np.float32)
    return np.round(weight / top[:, None] * 127).astype(np.int8), {"SCB": top}, top[:, None] / 127


FORMS = [per_tensor, per_channel, per_block, int8_rows]


@pytest.mark.parametrize("form", FORMS)
def test_quantised_weights_on_request(command, tmp_path, form):
    weight = toy.normal(96, D)
    small, beside, factor = form(weight)

    def change(config, tensors):
        config["quantization_config"] = {"weight_block_size": [32, 32]}
        tensors[f"{NAME}weight"] = small
        tensors[f"{NAME}input_scale"] = np.ones(1, np.float32)
        tensors.update({f"{NAME}{name}": array for name, array in beside.items()})

    folder = toy.write(tmp_path / "draft", change)
    command.refused("WEIGHT_QUANTISED", "--dequantise multiplies", folder)
    manifest = command.converted(folder, "--dequantise")
    assert codes(manifest) == ["WEIGHT_DEQUANTISED"]
    found = command.stored()["layers.0.mlp.up.weight"]
    np.testing.assert_array_equal(found, small.astype(np.float32) * np.float32(factor))
    np.testing.assert_allclose(found, weight, rtol=0.1, atol=0.05)
    assert command.stored()["layers.0.mlp.gate.weight"].dtype == np.float32


def odd_scale(tensors):
    tensors[f"{NAME}weight"] = toy.normal(96, D).astype(FP8)
    tensors[f"{NAME}weight_scale"] = np.ones((5, 7), np.float32)


def no_scale(tensors):
    tensors[f"{NAME}weight"] = toy.normal(96, D).astype(FP8)


def lone_scale(tensors):
    tensors["midlayer.mlp.other.weight_scale"] = np.ones(1, np.float32)


def packed(tensors):
    del tensors[f"{NAME}weight"]
    tensors[f"{NAME}weight_packed"] = np.zeros((96, 8), np.int32)


@pytest.mark.parametrize(
    ("spoil", "match"),
    [
        (odd_scale, "neither one number, nor one a row, nor one a block"),
        (no_scale, "has no scale beside it"),
        (lone_scale, "is not understood"),
        (packed, "packed numbers below 8 bits"),
    ],
)
def test_forms_that_are_not_understood(command, tmp_path, spoil, match):
    def change(config, tensors):
        spoil(tensors)

    folder = toy.write(tmp_path / "draft", change)
    command.refused("WEIGHT_QUANTISED", match, folder, "--dequantise")


def test_the_targets_quantisation_does_not_matter(command, tmp_path):
    target = toy.write_target(tmp_path / "target", quantization_config={"quant_method": "fp8"})
    folder = toy.write(tmp_path / "draft")
    assert codes(command.converted(folder, "--target", target)) == []
    plain = stored(command.out)
    command.converted(folder, "--target", target, "--dequantise")
    assert {n: t.tobytes() for n, t in plain.items()} == {
        n: t.tobytes() for n, t in command.stored().items()
    }


def test_adapters_are_refused(command, tmp_path):
    folder = tmp_path / "adapter"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(toy.config()))
    made = {"base_model.model.midlayer.self_attn.q_proj.lora_A.weight": toy.normal(4, 128)}
    save_file(made, folder / "model.safetensors")
    command.refused("ARCH_ADAPTER", "a LoRA adapter: not supported", folder)


def fused(made: toy.Tensors, layer: str) -> toy.Tensors:
    """q, k, v and gate, up stacked into one tensor each."""
    parts = {"self_attn.qkv_proj": "q k v", "mlp.gate_up_proj": "gate up"}
    for whole, names in parts.items():
        block = whole.split(".")[0]
        rows = [made.pop(f"{layer}{block}.{n}_proj.weight") for n in names.split()]
        made[f"{layer}{whole}.weight"] = np.concatenate(rows)
    return made


SPELLINGS = {
    "midlayer": lambda c, t: None,
    "layers.0": lambda c, t: toy.layers0(t),
    "model.layers.0": lambda c, t: {f"model.{n}": v for n, v in toy.layers0(t).items()},
    "fused": lambda c, t: fused(toy.layers0(t), "layers.0."),
}


def test_four_spellings_are_one_draft(command, tmp_path):
    found = {}
    for i, (name, change) in enumerate(SPELLINGS.items()):
        command.out = tmp_path / f"out{i}"
        folder = toy.write(tmp_path / f"draft{i}", change)
        found[name] = digests(command.converted(folder))
    assert len({tuple(sorted(d.items())) for d in found.values()}) == 1


@pytest.mark.parametrize("rows", [127, 96])
def test_fused_rows_that_are_not_the_config_s(command, tmp_path, rows):
    def change(config, tensors):
        made = fused(tensors, "midlayer.")
        name = "midlayer.mlp.gate_up_proj.weight" if rows == 127 else QKV
        made[name] = made[name][:rows]
        return made

    folder = toy.write(tmp_path / "draft", change)
    match = "two halves" if rows == 127 else "4 query and 2 key/value heads of 16: 128"
    command.refused("WEIGHT_FUSED", match, folder)


QKV = "midlayer.self_attn.qkv_proj.weight"


def test_a_fused_tensor_beside_its_parts(command, tmp_path):
    def change(config, tensors):
        whole = fused(dict(tensors), "midlayer.")
        tensors[QKV] = whole[QKV]

    folder = toy.write(tmp_path / "draft", change)
    command.refused("WEIGHT_DUPLICATE", "mean the same one", folder)

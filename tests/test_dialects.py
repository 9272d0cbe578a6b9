"""Names of every dialect, and drafts of other kinds refused by theirs."""

import pytest
from toy_drafts import CANONICAL, config, layers0, tensors

from eagle3_jax.dialects import detect, match, strip_prefixes
from eagle3_jax.draft_layers import read_windows
from eagle3_jax.findings import ConvertError, Findings
from eagle3_jax.refusals import refuse_other_kinds
from eagle3_jax.source_config import SourceConfig

NAMES = list(tensors())


def plain(names):
    return {name: name for name in names}


@pytest.mark.parametrize("layer", ["midlayer.", "layers.0."])
@pytest.mark.parametrize(
    "prefix", ["", "model.", "module.", "_orig_mod.", "eagle_module.", "module.draft_model."]
)
def test_every_spelling_of_a_name_is_one_tensor(layer, prefix):
    names = [prefix + name.replace("midlayer.", layer) for name in NAMES]
    found = match(strip_prefixes(names))
    for name, canonical in CANONICAL.items():
        assert found.sources[canonical] == (prefix + name.replace("midlayer.", layer),)
    assert found.sources["d2t"] == (f"{prefix}d2t",)
    assert found.layer == layer
    assert found.ignored == {}


def test_a_prefix_may_cover_some_names_only():
    """NeMo and Hugging Face leave the head and the vocabulary map bare."""
    bare = ("lm_head.weight", "d2t", "t2d")
    names = [name if name in bare else f"model.{name}" for name in layers0(tensors())]
    found = match(strip_prefixes(names))
    assert found.sources["lm_head.weight"] == ("lm_head.weight",)
    assert found.sources["fc.weight"] == ("model.fc.weight",)


def test_optional_names():
    extra = {
        "fc.bias": "fc.bias",
        "input_norm.weight": "input_norm.weight",
        "embed_tokens.weight": "embed.weight",
        "midlayer.self_attn.q_proj.bias": "layers.0.attn.q.bias",
        "midlayer.self_attn.o_proj.bias": "layers.0.attn.o.bias",
        "midlayer.mlp.down_proj.bias": "layers.0.mlp.down.bias",
    }
    found = match(plain([*NAMES, *extra]))
    for name, canonical in extra.items():
        assert found.sources[canonical] == (name,)
        assert found.spelled(canonical) == name


@pytest.mark.parametrize(
    "names",
    [
        [f"fc_norm.{i}.weight" for i in range(3)],
        [f"aux_norm_{which}.weight" for which in ("low", "mid", "high")],
    ],
)
def test_one_norm_per_state_in_order_whatever_the_alias(names):
    assert match(plain([*reversed(names), *NAMES])).sources["fc_norm.weight"] == tuple(names)


def test_one_fc_norm_is_a_norm_over_all_states():
    found = match(plain([*NAMES, "fc_norm.weight"]))
    assert found.sources["input_norm.weight"] == ("fc_norm.weight",)


@pytest.mark.parametrize("layer", ["midlayer.", "layers.0."])
def test_tensors_that_carry_nothing_are_listed(layer):
    names = [name.replace("midlayer.", layer) for name in NAMES]
    extra = ["verifier_lm_head.weight", "verifier_norm.weight", "rotary_emb.inv_freq"]
    extra += [f"{layer}self_attn.rotary_emb.inv_freq"]
    found = match(plain([*names, *extra]))
    assert sorted(found.ignored) == sorted(extra)
    assert all(found.ignored.values())


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("midlayer.self_attn.q_proj.weight", "midlayer.attn.q_proj.weight"),
        ("midlayer.hidden_norm.weight", "midlayer.hiddennorm.weight"),
        ("fc.weight", "fc.weights"),
        ("lm_head.weight", "lmhead.weight"),
        ("d2t", "d2t_map"),
    ],
)
def test_an_unknown_name_is_refused_with_the_closest_absent_one(old, new):
    names = [new if name == old else name for name in NAMES]
    with pytest.raises(ConvertError, match=f"'{new}' is not one of .* absent: {old}$") as caught:
        match(plain(names))
    assert caught.value.code == "WEIGHT_UNMATCHED_KEY"


def test_all_unknown_names_are_told():
    with pytest.raises(ConvertError, match=r"'zzz' is not one of .*; also unknown: 'yyy'"):
        match(plain([*NAMES, "zzz", "yyy"]))


@pytest.mark.parametrize(
    ("names", "first"),
    [
        (["fc_norm.weight", "input_norm.weight"], "fc_norm.weight"),
        (["fc_norm.0.weight", "aux_norm_low.weight"], "fc_norm.0.weight"),
    ],
)
def test_two_spellings_of_one_tensor_are_refused(names, first):
    with pytest.raises(ConvertError, match=f"'{first}' and .* mean the same") as caught:
        match(plain([*NAMES, *names]))
    assert caught.value.code == "WEIGHT_DUPLICATE"


def test_names_that_differ_by_their_prefix_only_are_refused():
    with pytest.raises(ConvertError, match=r"'fc\.weight' and 'model\.fc\.weight' are both"):
        strip_prefixes([*NAMES, "model.fc.weight"])


def test_a_gap_in_the_norms_is_refused():
    with pytest.raises(ConvertError, match=r"fc_norm has tensors \[0, 2\], expected 0..2"):
        match(plain([*NAMES, "fc_norm.0.weight", "fc_norm.2.weight"]))


@pytest.mark.parametrize(
    ("names", "raw", "dialect"),
    [
        (NAMES, config(), "official"),
        (list(layers0(tensors())), config(), "official"),
        (list(layers0(tensors())), {"speculators_model_type": "eagle3"}, "speculators"),
        (NAMES, {"speculators_model_type": "eagle3"}, "speculators"),
        ([n for n in layers0(tensors()) if n != "t2d"], config(), "modelopt"),
        ([n for n in layers0(tensors()) if n != "t2d"], {}, "official"),
        ([n for n in NAMES if n != "t2d"], config(), "official"),
        (
            [*(n for n in layers0(tensors()) if n != "t2d"), "embed_tokens.weight"],
            config(),
            "official",
        ),
    ],
)
def test_the_config_then_the_tensors_tell_the_dialect(names, raw, dialect):
    found = detect(match(plain(names)), SourceConfig(raw, "config.json"), Findings())
    assert found.name == dialect


def check(names, raw=None, *, shapes=None, dtypes=None):
    known = dict.fromkeys(names, (64, 64)) | {"fc.weight": (64, 192)} | (shapes or {})
    refuse_other_kinds(
        plain(names),
        {name: known[name] for name in names},
        dict.fromkeys(names, "float32") | {"d2t": "int64", "t2d": "bool"} | (dtypes or {}),
        SourceConfig(config() if raw is None else raw, "config.json"),
    )


def test_the_base_draft_passes():
    check(NAMES)


@pytest.mark.parametrize(
    ("names", "code", "match"),
    [
        (["layers.0.self_attn.qkv_proj.weight", *NAMES], "WEIGHT_FUSED", "fused .*qkv_proj"),
        (["midlayer.mlp.gate_up_proj.weight", *NAMES], "WEIGHT_FUSED", "fused .*gate_up_proj"),
        (["mask_hidden", *NAMES], "ARCH_PEAGLE", "P-EAGLE"),
        (["medusa_heads.0.0.linear.weight"], "ARCH_MEDUSA", "Medusa"),
        (["0.0.linear.weight", "0.1.weight"], "ARCH_MEDUSA", "Medusa"),
        (["parallel_draft_heads.0.medusa_layers.0.linear.weight", *NAMES], "ARCH_MEDUSA", "paral"),
        (["layers.61.enorm.weight", "layers.61.eh_proj.weight"], "ARCH_MTP", "MTP"),
        (["midlayer.self_attn.q_proj.lora_A.weight", *NAMES], "ARCH_ADAPTER", "LoRA.*PEFT"),
        (["base_model.model.fc.lora_B.default.weight"], "ARCH_ADAPTER", "LoRA adapter"),
        (
            ["embed_tokens.weight", "layers.0.self_attn.q_proj.weight", "norm.weight"],
            "ARCH_NOT_EAGLE3",
            "a plain language model",
        ),
        (["midlayer.mlp.up_proj.weight_scale", *NAMES], "WEIGHT_QUANTISED", "weight_scale"),
        (["midlayer.mlp.up_proj.qweight", *NAMES], "WEIGHT_QUANTISED", "qweight"),
        (["midlayer.self_attn.g_proj.weight", *NAMES], "ARCH_UNKNOWN_VARIANT", "g_proj"),
        (["midlayer.mlp.router.weight", *NAMES], "ARCH_UNKNOWN_VARIANT", "router"),
        (["model.norm.weight"], "ARCH_NOT_EAGLE3", "no fc.weight"),
        ([], "ARCH_NOT_EAGLE3", "no tensors"),
    ],
)
def test_other_kinds_are_refused_by_name(names, code, match):
    with pytest.raises(ConvertError, match=match) as caught:
        check(names)
    assert caught.value.code == code


@pytest.mark.parametrize("extra", [[], ["fc.bias"], ["embed_tokens.weight"]])
def test_eagle_1_and_2_are_refused(extra):
    names = ["fc.weight", *extra, "layers.0.self_attn.q_proj.weight", "layers.1.mlp.up_proj.weight"]
    with pytest.raises(ConvertError, match=r"EAGLE-1/2 draft .* HASS") as caught:
        check(names, shapes={"fc.weight": (64, 128)})
    assert caught.value.code == "ARCH_EAGLE1"


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "int8", "uint8", "int32"])
def test_other_number_types_are_refused(dtype):
    with pytest.raises(ConvertError, match=f"'fc.weight' is {dtype}") as caught:
        check(NAMES, dtypes={"fc.weight": dtype})
    assert caught.value.code == "WEIGHT_QUANTISED"


@pytest.mark.parametrize(
    ("raw", "code", "match"),
    [
        ({"speculators_model_type": "eagle"}, "ARCH_EAGLE1", "EAGLE-1/2"),
        ({"speculators_model_type": "peagle"}, "ARCH_PEAGLE", "P-EAGLE"),
        ({"speculators_model_type": "dflash"}, "ARCH_DFLASH", "DFlash"),
        ({"speculators_model_type": "new"}, "ARCH_UNKNOWN_VARIANT", "'new': this is an unknown"),
        ({"speculators_model_type": 3}, "CONFIG_INVALID", "expected a string"),
        ({"architectures": ["PEagleDraftModel"]}, "ARCH_PEAGLE", "PEagleDraftModel"),
        ({"architectures": ["Qwen3DFlashModel"]}, "ARCH_DFLASH", "Qwen3DFlashModel"),
        ({"architectures": ["DFlash2DraftModel"]}, "ARCH_DFLASH2", "DFlash-2"),
        ({"architectures": ["DSparkForCausalLM"]}, "ARCH_DSPARK", "SGLang"),
        ({"speculators_model_type": "domino"}, "ARCH_DOMINO", "Domino"),
        ({"speculators_model_type": "xpress"}, "ARCH_XPRESS", "Xpress"),
        ({"speculators_model_type": "mtp"}, "ARCH_MTP", "beside its target"),
        ({"speculators_model_type": "mlp_speculator"}, "ARCH_MLP_SPECULATOR", "vLLM"),
        ({"peft_type": "LORA"}, "ARCH_ADAPTER", "merge it"),
        ({"eagle_config": {"use_mtp_layernorm": True}}, "ARCH_UNKNOWN_VARIANT", "use_mtp"),
        ({"eagle_config": {"parallel_draft_step": 4}}, "ARCH_UNKNOWN_VARIANT", "parallel"),
        ({"eagle_config": 3}, "CONFIG_INVALID", "eagle_config is 3, expected an object"),
        ({"hidden_act": "situ"}, "ARCH_UNKNOWN_VARIANT", "hidden_act 'situ'"),
        (
            {"transformer_layer_config": {"model_type": "gemma3_text"}},
            "ARCH_UNKNOWN_VARIANT",
            "1 . weight",
        ),
    ],
)
def test_configs_of_other_kinds_are_refused(raw, code, match):
    with pytest.raises(ConvertError, match=match) as caught:
        check(NAMES, raw)
    assert caught.value.code == code


@pytest.mark.parametrize(
    "raw",
    [
        {"hidden_act": "silu"},
        {"eagle_config": {"use_aux_hidden_state": True, "parallel_draft_step": 1}},
        {"quantization_config": {"quant_method": "fp8"}},
    ],
)
def test_configs_that_only_look_odd_pass(raw):
    check(NAMES, raw)


FULL, SLIDING = "full_attention", "sliding_attention"


@pytest.mark.parametrize(
    ("raw", "layers", "windows"),
    [
        ({}, 1, ()),
        ({"sliding_window": None}, 1, ()),
        ({"layer_types": [FULL], "sliding_window": 2048}, 1, ()),
        ({"layer_types": [SLIDING], "use_sliding_window": False}, 1, ()),
        ({"sliding_window": 2048, "use_sliding_window": False}, 1, ()),
        ({"layer_types": [SLIDING], "sliding_window": 512}, 1, (512,)),
        ({"layer_types": [FULL, SLIDING], "sliding_window": 4}, 2, (None, 4)),
        ({"layer_types": [SLIDING] * 36, "sliding_window": 8}, 2, (8, 8)),
        ({"sliding_window": 9, "use_sliding_window": True}, 1, (9,)),
        (
            {"sliding_window": 9, "use_sliding_window": True, "max_window_layers": 1},
            2,
            (None, 9),
        ),
        (
            {"sliding_window": 9, "use_sliding_window": True, "max_window_layers": 28},
            1,
            (),
        ),
    ],
)
def test_windows_by_layer(raw, layers, windows):
    assert read_windows(SourceConfig(raw, "config.json"), Findings(), layers)[0] == windows


@pytest.mark.parametrize(
    ("raw", "code", "match"),
    [
        ({"layer_types": [SLIDING]}, "POS_SLIDING_WINDOW", "there is no sliding_window"),
        ({"layer_types": ["linear_attention"]}, "POS_SLIDING_WINDOW", "linear_attention"),
        (
            {"layer_types": [FULL, SLIDING], "sliding_window": 4},
            "POS_SLIDING_WINDOW",
            "2 layers of two kinds",
        ),
        ({"layer_types": "full"}, "CONFIG_INVALID", "list of layer types"),
        ({"layer_types": [SLIDING], "sliding_window": "4"}, "CONFIG_INVALID", "an integer"),
        ({"sliding_window": 512}, "POS_SLIDING_WINDOW_UNCLEAR", "sliding_window is 512"),
    ],
)
def test_windows_that_do_not_fit_are_refused(raw, code, match):
    with pytest.raises(ConvertError, match=match) as caught:
        read_windows(SourceConfig(raw, "config.json"), Findings(), 1)
    assert caught.value.code == code


def test_an_unclear_window_can_be_allowed():
    findings = Findings(["POS_SLIDING_WINDOW_UNCLEAR"])
    raw = SourceConfig({"sliding_window": 512}, "config.json")
    assert read_windows(raw, findings, 1)[0] == ()
    assert [item.code for item in findings.items] == ["POS_SLIDING_WINDOW_UNCLEAR"]


def test_a_variant_names_all_that_is_strange():
    raw = {"hidden_act": "situ"}
    with pytest.raises(ConvertError, match=r"g_proj.*; hidden_act 'situ'"):
        check(["midlayer.self_attn.g_proj.weight", *NAMES], raw)

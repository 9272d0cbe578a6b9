"""What no tensor shows is stated, asked for or a named default; what tensors show is checked."""

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


def speculators(tmp_path, extra=(), **keys):
    def change(config, tensors):
        tensors |= {name: toy.normal(*shape) for name, shape in extra}
        return toy.layers0(tensors)

    return toy.write(tmp_path / "draft", change, start=toy.speculators_config(**keys))


def switch(manifest, name):
    return manifest["config"][name], manifest["origins"][name]


# norm_before_residual


@pytest.mark.parametrize("value", [True, False])
def test_norm_before_residual_is_read_or_given(command, tmp_path, value):
    word = str(value).lower()
    name = "norm_before_residual"
    folder = official(tmp_path, norm_before_residual=value)
    assert switch(command.converted(folder), name) == (value, f"config:{name}")
    flag = ("--norm-before-residual", word)
    folder = official(tmp_path, norm_before_residual=not value)
    assert switch(command.converted(folder, *flag), name) == (value, "flag --norm-before-residual")
    folder = speculators(tmp_path, norm_before_residual=value)
    assert switch(command.converted(folder), name) == (value, f"config:{name}")


def test_speculators_without_norm_before_residual_asks(command, tmp_path):
    folder = speculators(tmp_path, norm_before_residual=None)
    command.refused("NORM_BEFORE_RESIDUAL", "give --norm-before-residual", folder)
    manifest = command.converted(folder, "--norm-before-residual", "true")
    assert switch(manifest, "norm_before_residual") == (True, "flag --norm-before-residual")
    assert manifest["dialect"] == "speculators"


def test_a_speculators_layer_without_a_type_is_noted(command, tmp_path):
    layer = toy.speculators_config()["transformer_layer_config"]
    del layer["model_type"]
    manifest = command.converted(speculators(tmp_path, transformer_layer_config=layer))
    assert codes(manifest) == ["ARCH_LAYER_TYPE"]


# feedback and final norm


@pytest.mark.parametrize(("stated", "value"), [(True, "post_norm"), (False, "pre_norm")])
def test_norm_output_is_clear_in_speculators(command, tmp_path, stated, value):
    manifest = command.converted(speculators(tmp_path, norm_output=stated))
    assert switch(manifest, "feedback") == (value, "config:norm_output")
    manifest = command.converted(speculators(tmp_path))
    assert switch(manifest, "feedback") == ("pre_norm", "default:speculators")


def test_norm_output_true_is_ambiguous_elsewhere(command, tmp_path):
    folder = official(tmp_path, norm_output=True)
    err = command.refused("NORM_OUTPUT_AMBIGUOUS", "--feedback pre_norm", folder)
    assert "--feedback post_norm" in err
    for value in ("pre_norm", "post_norm"):
        manifest = command.converted(folder, "--feedback", value)
        assert switch(manifest, "feedback") == (value, "flag --feedback")
        assert manifest["config"]["final_norm"]


def test_norm_output_false_keeps_the_norm_that_is_there(command, tmp_path):
    folder = official(tmp_path, norm_output=False)
    manifest = command.converted(folder)
    assert switch(manifest, "feedback") == ("pre_norm", "config:norm_output")
    assert switch(manifest, "final_norm") == (True, "tensor norm.weight")
    assert codes(manifest) == ["NORM_OUTPUT_AMBIGUOUS"]
    manifest = command.converted(folder, "--final-norm", "false")
    assert switch(manifest, "final_norm") == (False, "flag --final-norm")
    assert manifest["ignored"]["norm.weight"] == "flag --final-norm false"
    assert codes(manifest) == []
    folder = official(tmp_path, norm_output=False, drop=["norm.weight"])
    assert command.converted(folder)["config"]["final_norm"] is False


def test_a_lost_final_norm_is_an_error(command, tmp_path):
    folder = official(tmp_path, drop=["norm.weight"])
    command.refused("WEIGHT_MISSING", "--final-norm false", folder)
    command.refused("WEIGHT_MISSING", "--final-norm true", folder, "--final-norm", "true")
    flags = ("--final-norm", "false", "--feedback", "post_norm")
    command.refused("NORM_OUTPUT_AMBIGUOUS", "needs the final norm", folder, *flags)
    assert command.converted(folder, "--final-norm", "false")["config"]["final_norm"] is False


def test_trt_s_name_of_the_fed_back_state(command, tmp_path):
    folder = official(tmp_path, return_hidden_post_norm=True)
    manifest = command.converted(folder)
    assert switch(manifest, "feedback") == ("post_norm", "config:return_hidden_post_norm")


# double norm


def modelopt(tmp_path, start=None):
    def change(config, tensors):
        del tensors["t2d"]
        return toy.layers0(tensors)

    return toy.write(tmp_path / "draft", change, start=start)


def test_modelopt_asks_for_the_double_norm(command, tmp_path):
    folder = modelopt(tmp_path)
    err = command.refused("NORM_DOUBLE", "--double-norm true", folder)
    assert "ModelOpt" in err
    for value in (True, False):
        manifest = command.converted(folder, "--double-norm", str(value).lower())
        assert switch(manifest, "double_norm") == (value, "flag --double-norm")
        assert manifest["dialect"] == "modelopt"
    manifest = command.converted(folder, "--dialect", "official")
    assert switch(manifest, "double_norm") == (False, "default:official")
    assert manifest["dialect"] == "official"


def test_older_modelopt_names_are_warned_about(command, tmp_path):
    ids = {"eagle_aux_hidden_state_layer_ids": [1, 3, 4]}
    folder = official(tmp_path, eagle_config=ids | {"use_last_layernorm": True})
    manifest = command.converted(folder)
    assert codes(manifest) == ["NORM_DOUBLE"]
    assert switch(manifest, "double_norm") == (False, "default:official")


# norms that tensors show


NORMS = {
    "norm_before_fc": ("NORM_BEFORE_FC", [("input_norm.weight", (192,))]),
    "fc_norm": ("NORM_FC", [(f"fc_norm.{i}.weight", (64,)) for i in range(3)]),
}


@pytest.mark.parametrize("write", [official, speculators])
@pytest.mark.parametrize("name", NORMS)
def test_tensors_decide_the_state_norms_and_the_config_must_agree(command, tmp_path, name, write):
    code, extra = NORMS[name]
    manifest = command.converted(write(tmp_path, extra, **{name: True}))
    assert switch(manifest, name) == (True, f"config:{name}, tensor {extra[0][0]}")
    assert codes(manifest) == []
    manifest = command.converted(write(tmp_path, extra))
    assert switch(manifest, name) == (True, f"tensor {extra[0][0]}")
    assert codes(manifest) == [code]
    command.out = tmp_path / "other"
    folder = write(tmp_path, extra, **{name: False})
    command.refused(code, f"{name} is false, but the file holds", folder)
    folder = write(tmp_path, **{name: True})
    command.refused(code, f"{name} is true, but the file has no {extra[0][0]}", folder)


def test_state_norms_exclude_each_other_and_must_fit(command, tmp_path):
    both = [*NORMS["norm_before_fc"][1], *NORMS["fc_norm"][1]]
    command.refused("NORM_FC", "exclude each other", official(tmp_path, both))
    command.refused(
        "WEIGHT_SHAPE", "2 fc_norm tensors", official(tmp_path, NORMS["fc_norm"][1][:2])
    )
    folder = official(tmp_path, [("input_norm.weight", (64,))])
    command.refused("WEIGHT_SHAPE", "shape [64], expected [192]", folder)
    folder = official(tmp_path, NORMS["fc_norm"][1], fc_norm=True, use_aux_norm=False)
    command.refused("NORM_FC", "fc_norm is true and use_aux_norm is false", folder)


# biases


QKV = [
    ("midlayer.self_attn.q_proj.bias", (64,)),
    ("midlayer.self_attn.k_proj.bias", (32,)),
    ("midlayer.self_attn.v_proj.bias", (32,)),
]
OUT = [("midlayer.self_attn.o_proj.bias", (64,))]
MLP = [(f"midlayer.mlp.{n}_proj.bias", (s,)) for n, s in (("gate", 96), ("up", 96), ("down", 64))]
FC = [("fc.bias", (64,))]


@pytest.mark.parametrize(
    ("extra", "keys", "on"),
    [
        (QKV, {}, ["qkv_bias"]),
        (QKV + OUT, {"attention_bias": True}, ["qkv_bias", "output_bias"]),
        (OUT, {"attention_bias": True}, ["output_bias"]),
        (MLP, {"mlp_bias": True}, ["mlp_bias"]),
        (FC, {"bias": True, "attention_bias": False}, ["fc_bias"]),
        (FC, {"bias": False}, ["fc_bias"]),
    ],
)
def test_biases_are_what_the_tensors_say(command, tmp_path, extra, keys, on):
    manifest = command.converted(official(tmp_path, extra, **keys))
    names = ("qkv_bias", "output_bias", "mlp_bias", "fc_bias")
    assert [name for name in names if manifest["config"][name]] == on
    stated = any(keys.values())
    assert codes(manifest) == ([] if stated else ["BIAS_UNSTATED"])
    written = command.stored()
    for name, shape in extra:
        canonical = next(c for c, r in manifest["tensors"].items() if r["from"] == [name])
        assert written[canonical].tobytes() == toy.normal(*shape).tobytes()


@pytest.mark.parametrize(
    ("extra", "keys", "code", "text"),
    [
        (QKV[:2], {}, "WEIGHT_MISSING", "missing: midlayer.self_attn.v_proj.bias, though"),
        (MLP[1:], {}, "WEIGHT_MISSING", "missing: midlayer.mlp.gate_proj.bias"),
        ([], {"attention_bias": True}, "BIAS_DISAGREES", "attention_bias is true, but"),
        ([], {"mlp_bias": True}, "BIAS_DISAGREES", "mlp_bias is true"),
        ([], {"bias": True}, "BIAS_DISAGREES", "bias is true, but the file has no fc.bias"),
        ([("fc.bias", (63,))], {}, "WEIGHT_SHAPE", "shape [63], expected [64]"),
        ([], {"attention_bias": 1}, "CONFIG_INVALID", "attention_bias is 1, expected true"),
    ],
)
def test_biases_that_do_not_fit_are_refused(command, tmp_path, extra, keys, code, text):
    command.refused(code, text, official(tmp_path, extra, **keys))


# aux layers through the command


def test_default_boundaries_wait_for_the_target(command, tmp_path):
    folder = official(tmp_path, eagle_config=None)
    manifest = command.converted(folder)
    assert manifest["config"]["aux_boundaries"] == "default(2, L//2, L-3)"
    assert codes(manifest) == ["AUX_FALLBACK_USED"]
    target = toy.write_target(tmp_path / "target", num_hidden_layers=12)
    manifest = command.converted(folder, "--target", target)
    assert manifest["config"]["aux_boundaries"] == [2, 6, 9]
    shallow = toy.write_target(tmp_path / "shallow", num_hidden_layers=4)
    command.out = tmp_path / "other"
    command.refused("AUX_IDS_INVALID", "(2, 2, 1)", folder, "--target", shallow)


def test_the_convention_can_be_given(command, tmp_path):
    folder = official(tmp_path)
    manifest = command.converted(folder, "--aux-convention", "index")
    assert manifest["config"]["aux_boundaries"] == [1, 3, 4]
    assert manifest["origins"]["aux_boundaries"].endswith("flag --aux-convention")

"""Engine profiles: what SGLang 0.5.23 makes of a checkpoint, switch by switch."""

import dataclasses
import json

import numpy as np
import pytest
import toy_drafts as toy
from convert_command import Command

from eagle3_jax.checkpoint import load_draft, manifest_config, read_manifest
from eagle3_jax.config import DEFAULT_BOUNDARIES, ConfigError, DraftConfig, RopeConfig
from eagle3_jax.engines import ENGINES, Profile, run_as

ENGINE = "sglang-0.5.23"
LLAMA3 = RopeConfig(10000.0, "llama3", 8.0, 1.0, 4.0, 64)
DYNAMIC = RopeConfig(10000.0, "dynamic", 4.0, original_max_position_embeddings=512)
YARN = RopeConfig(
    10000.0,
    "yarn",
    8.0,
    original_max_position_embeddings=64,
    beta_fast=16.0,
    beta_slow=2.0,
    attention_factor=1.3,
)
TWO_LAYERS = {"num_layers": 2, "next_layers": "hidden_norm", "next_spare_norm": True}

VARIANTS: dict[str, tuple[dict, dict]] = {
    "draft": ({}, {}),
    "draft_attn_bias": (
        {"qkv_bias": True, "output_bias": True},
        {"qkv_bias": False, "output_bias": True},
    ),
    "draft_aux_1_3_6": ({"aux_boundaries": (2, 4, 7)}, {"aux_boundaries": (2, 4, 7)}),
    "draft_aux_6_1_3": ({"aux_boundaries": (7, 2, 4)}, {"aux_boundaries": (2, 4, 7)}),
    "draft_aux_toplevel": ({"aux_boundaries": (1, 3, 6)}, {"aux_boundaries": (2, 4, 5)}),
    "draft_fc_bias": ({"fc_bias": True}, {"fc_bias": True}),
    "draft_fc_norm": ({"fc_norm": True}, {"fc_norm": True}),
    "draft_nolmhead_null": (
        {"head": "target", "draft_vocab_size": 128},
        {"head": "target", "draft_vocab_size": 128},
    ),
    "draft_norm_before_fc": ({"norm_before_fc": True}, {"norm_before_fc": True}),
    "draft_norm_before_residual": (
        {"norm_before_residual": True},
        {"norm_before_residual": False},
    ),
    "draft_norm_output": ({"feedback": "post_norm"}, {"feedback": "post_norm"}),
    "draft_novocabmap": ({"draft_vocab_size": 128}, {"draft_vocab_size": 128}),
    "draft_own_embed": ({"embed": "draft"}, {"embed": "target"}),
    "draft_rope_dynamic": ({"rope": DYNAMIC}, {"rope": RopeConfig(10000.0 * 13 ** (8 / 6))}),
    "draft_rope_llama3": ({"rope": LLAMA3}, {"rope": LLAMA3}),
    "draft_rope_yarn": ({"rope": YARN}, {"rope": dataclasses.replace(YARN, attention_factor=None)}),
    "draft_two_layers": (TWO_LAYERS, TWO_LAYERS),
    "draft_window": ({"windows": (4,)}, {"windows": ()}),
}
"""Variant -> how its config differs from the plain draft's, as trained and as SGLang runs it."""

FLAGS = {
    "draft_norm_output": ("--feedback", "post_norm"),
    "draft_two_layers": ("--next-layer-norm", "hidden_norm"),
}


@pytest.fixture(scope="module")
def plain() -> DraftConfig:
    sizes = {"hidden_size": 32, "target_hidden_size": 32, "num_aux": 3, "intermediate_size": 64}
    sizes |= {"num_heads": 4, "num_kv_heads": 2, "head_dim": 8}
    return DraftConfig(
        **sizes, vocab_size=128, draft_vocab_size=80, rms_norm_eps=1e-5, aux_boundaries=(2, 4, 5)
    )


@pytest.fixture
def command(tmp_path, capsys) -> Command:
    return Command(tmp_path, capsys)


@pytest.mark.parametrize("name", VARIANTS)
def test_every_recorded_variant(name, plain, converted, variant_folder, sglang_models):
    target = ("--target", str(sglang_models / "target"))
    folder = converted(variant_folder(name), *target, *FLAGS.get(name, ()))
    manifest = read_manifest(folder)
    trained, effective = (dataclasses.replace(plain, **changes) for changes in VARIANTS[name])
    assert manifest_config(manifest, folder) == trained
    profile = run_as(
        ENGINE,
        trained,
        manifest["source_config"],
        list(manifest["source_tensors"]),
        target_layers=8,
    )
    assert profile.config == effective
    assert profile.draft_attention == "beam_slots"
    changed = [f.name for f in dataclasses.fields(plain)]
    changed = [f for f in changed if getattr(trained, f) != getattr(effective, f)]
    noted = [note.split(" is ")[0] for note in profile.notes if ", trained with " in note]
    assert noted == changed
    loaded = load_draft(folder, as_engine=ENGINE)
    assert (loaded.engine, loaded.draft_attention) == (ENGINE, "beam_slots")
    assert set(loaded.config.tensor_shapes()) == set(effective.tensor_shapes())


RECORDED = [name.removeprefix("draft_") for name in VARIANTS if name != "draft"]


@pytest.mark.parametrize("name", RECORDED)
def test_boundaries_are_those_sglang_captured(name, sglang_models):
    variants = sglang_models.parent / "variants"
    recorded = np.load(variants / f"{name}.npz")["single0/prefill/boundaries"]
    effective = VARIANTS[f"draft_{name}"][1].get("aux_boundaries", (2, 4, 5))
    assert sorted(recorded.tolist()) == list(effective)


def profile_of(command: Command, folder, *flags, layers=8) -> Profile:
    manifest = command.converted(folder, *flags)
    return run_as(
        ENGINE,
        manifest_config(manifest, command.out),
        manifest["source_config"],
        list(manifest["source_tensors"]),
        d2t_kind=manifest["d2t"]["kind"],
        target_layers=layers,
    )


def refused(command: Command, match: str, folder, *flags, layers=8):
    with pytest.raises(ConfigError, match=match) as caught:
        profile_of(command, folder, *flags, layers=layers)
    assert ENGINE in str(caught.value)
    assert "\n" not in str(caught.value)


def official(tmp_path, extra=(), drop=(), **keys):
    def change(config, tensors):
        config |= keys
        for key in [key for key, value in keys.items() if value == "absent"]:
            del config[key]
        tensors |= {name: toy.normal(*shape) for name, shape in extra}
        return {name: tensor for name, tensor in tensors.items() if name not in drop}

    return toy.write(tmp_path / "draft", change)


def test_flags_of_the_conversion_do_not_reach_the_engine(command, tmp_path):
    """It reads the file: its base, its numbering, its feedback."""
    scaling = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0}
    scaling |= {"high_freq_factor": 4.0, "original_max_position_embeddings": 64}
    folder = official(tmp_path, rope_theta=5e5, rope_scaling=scaling, norm_output=True)
    flags = ("--rope-theta", 10000, "--ignore-rope-scaling", "--feedback", "pre_norm")
    flags += ("--aux-convention", "index", "--norm-before-residual", "true")
    flags += ("--double-norm", "true")
    profile = profile_of(command, folder, *flags)
    config = profile.config
    assert config.rope == dataclasses.replace(LLAMA3, theta=5e5)
    assert config.feedback == "post_norm"
    assert config.aux_boundaries == (2, 4, 5)
    assert not config.norm_before_residual
    assert not config.double_norm
    assert {note.split()[0] for note in profile.notes} == {
        "rope",
        "feedback",
        "aux_boundaries",
        "norm_before_residual",
        "double_norm",
    }


def test_tensors_whose_key_is_absent_are_not_used(command, tmp_path):
    norms = [(f"fc_norm.{i}.weight", (64,)) for i in range(3)]
    mlp = [
        (f"midlayer.mlp.{n}_proj.bias", (s,)) for n, s in (("gate", 96), ("up", 96), ("down", 64))
    ]
    extra = [*norms, *mlp, ("fc.bias", (64,)), ("midlayer.self_attn.o_proj.bias", (64,))]
    profile = profile_of(command, official(tmp_path, extra))
    for switch in ("fc_norm", "mlp_bias", "fc_bias", "output_bias"):
        assert not getattr(profile.config, switch)
        assert f"{switch} is False, trained with True" in profile.notes
    loaded = load_draft(command.out, as_engine=ENGINE)
    assert loaded.fc_norm is None
    assert load_draft(command.out).fc_norm is not None


def test_the_default_boundaries_wait_for_the_depth(command, tmp_path):
    folder = official(tmp_path, eagle_config=None)
    assert profile_of(command, folder, layers=None).config.aux_boundaries == DEFAULT_BOUNDARIES
    assert profile_of(command, folder, layers=32).config.aux_boundaries == (2, 16, 29)
    loaded = load_draft(command.out, as_engine=ENGINE)
    assert loaded.config.aux_boundaries == DEFAULT_BOUNDARIES


def test_an_own_embedding_is_kept_for_another_width_only(command, tmp_path):
    extra = [("embed_tokens.weight", (256, 64))]
    for stated in (None, 64):
        folder = official(tmp_path, extra, target_hidden_size=stated)
        assert profile_of(command, folder).config.embed == "target"


def test_an_o_proj_bias_the_file_lacks_is_taken_as_zero(command, tmp_path):
    folder = official(tmp_path, [("fc.bias", (64,))], bias=True)
    profile = profile_of(command, folder)
    assert not profile.config.output_bias
    assert any("o_proj gets a bias" in note for note in profile.notes)


def test_another_architecture_is_noted(command, tmp_path):
    folder = official(tmp_path, architectures=["LlamaForCausalLM"])
    assert (
        f"{ENGINE} wants architecture LlamaForCausalLMEagle3" in profile_of(command, folder).notes
    )


def ids(*numbers):
    return {"eagle_aux_hidden_state_layer_ids": list(numbers)}


@pytest.mark.parametrize(
    ("keys", "flags", "layers", "match"),
    [
        ({"draft_vocab_size": "absent"}, (), 8, "AttributeError"),
        ({"draft_vocab_size": None}, (), 8, "takes the target's head"),
        ({"draft_vocab_size": 100}, (), 8, "builds 100 head rows, the file has 64"),
        ({"tie_word_embeddings": True}, (), 8, "tie_word_embeddings.*not modelled"),
        ({"num_hidden_layers": 40}, (), 8, "random weights"),
        ({}, ("--final-norm", "false"), 8, "final norm"),
        ({"rope_scaling": {"type": "yarn"}}, ("--ignore-rope-scaling",), 8, "yarn.*no 'factor'"),
        ({"eagle_config": ids(1, 3, 7)}, (), 8, r"captures 2 \(\(2, 4\)\).*shape error"),
        ({"eagle_config": None}, (), 6, "default boundaries"),
    ],
)
def test_what_sglang_cannot_run_is_refused(command, tmp_path, keys, flags, layers, match):
    refused(command, match, official(tmp_path, **keys), *flags, layers=layers)


def test_names_sglang_skips_or_does_not_know(command, tmp_path):
    def wrapped(config, tensors):
        return {f"module.{name}": tensor for name, tensor in tensors.items()}

    refused(command, r"skips 'module\.", toy.write(tmp_path / "draft", wrapped))

    def single(config, tensors):
        config["norm_before_fc"] = True
        tensors["fc_norm.weight"] = toy.normal(192)

    folder = toy.write(tmp_path / "other", single)
    refused(command, "spells it otherwise", folder)


def test_a_map_of_target_ids_is_refused(command, tmp_path):
    def absolute(config, tensors):
        tensors["d2t"] = toy.target_ids()

    folder = toy.write(tmp_path / "draft", absolute)
    refused(command, "reads d2t as offsets", folder, "--d2t-kind", "absolute")


def test_a_random_head_is_refused(command, tmp_path):
    drop = ("lm_head.weight", "d2t", "t2d")
    folder = official(tmp_path, drop=drop, draft_vocab_size=256)
    refused(command, "random head", folder)


def test_a_speculators_config_is_refused(command, tmp_path):
    folder = toy.write(
        tmp_path / "draft", lambda c, t: toy.layers0(t), start=toy.speculators_config()
    )
    refused(command, "official names", folder)


def test_unknown_engines_and_drafts_without_a_source_are_refused(plain):
    with pytest.raises(ConfigError, match=r"unknown engine 'sglang': known are sglang-0\.5\.23"):
        run_as("sglang", plain, toy.config(), ["fc.weight"])
    with pytest.raises(ConfigError, match="has no source"):
        run_as(ENGINE, plain, {}, [])
    assert list(ENGINES) == [ENGINE, "sglang-0.5.10", "vllm", "trt-llm", "official"]


def test_load_draft_passes_the_refusal_on(command, tmp_path):
    folder = official(tmp_path, draft_vocab_size="absent")
    command.converted(folder)
    with pytest.raises(ConfigError, match="AttributeError"):
        load_draft(command.out, as_engine=ENGINE)
    assert json.loads((command.out / "draft.json").read_text())["config"]["head"] == "draft"

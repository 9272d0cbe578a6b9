"""Engines beside SGLang 0.5.23: each deviation that `engine_rules` states, one test each."""

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import toy_drafts as toy

from eagle3_jax.config import DEFAULT_BOUNDARIES, ConfigError, DraftConfig, LatentSizes, RopeConfig
from eagle3_jax.engine_rules import DEEPSEEK, ENGINES, FILE
from eagle3_jax.engines import Profile, run_as

TRAINED = DraftConfig(
    hidden_size=toy.D,
    target_hidden_size=toy.E,
    num_aux=3,
    intermediate_size=toy.F,
    num_heads=toy.N,
    num_kv_heads=toy.K,
    head_dim=toy.H,
    vocab_size=toy.V,
    draft_vocab_size=toy.W,
    rms_norm_eps=1e-5,
    aux_boundaries=(2, 4, 5),
)
LATENT = {
    "latent": LatentSizes(16, 10, 6, 8, q_lora_rank=24),
    "num_kv_heads": toy.N,
    "head_dim": 16,
}


IDS = {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 3, 4]}}


def profile(
    engine: str,
    trained: dict | None = None,
    keys: dict | None = None,
    *,
    start: dict | None = None,
    extra: tuple[str, ...] = (),
    names: list[str] | None = None,
    layers: int | None = 8,
    architecture: str | None = None,
) -> Profile:
    """What an engine makes of the toy draft, trained as `trained` says, with `keys` in its file."""
    raw = (toy.config() if start is None else start) | (keys or {})
    return run_as(
        engine,
        dataclasses.replace(TRAINED, **(trained or {})),
        {key: value for key, value in raw.items() if value != "absent"},
        [*(list(toy.tensors()) if names is None else names), *extra],
        target_layers=layers,
        target_architecture=architecture,
    )


@pytest.mark.parametrize("engine", ENGINES)
def test_the_plain_draft_runs_as_it_was_trained(engine):
    keys = {"eagle_aux_hidden_state_layer_ids": [2, 4, 5]} if engine == "vllm" else {}
    found = profile(engine, keys=keys)
    assert found.config == TRAINED
    assert found.notes == ()
    assert found.draft_attention == ("beam_slots" if engine.startswith("sglang") else "ancestors")


ON = {
    "norm_before_residual": (True, {"norm_before_residual": True}, ()),
    "double_norm": (True, {}, ()),
    "feedback": ("post_norm", {"norm_output": True}, ()),
    "fc_norm": (True, {"fc_norm": True}, ("fc_norm.0.weight",)),
    "norm_before_fc": (True, {"eagle_config": {"norm_before_fc": True}}, ("input_norm.weight",)),
    "qkv_bias": (True, {"attention_bias": True}, ("midlayer.self_attn.q_proj.bias",)),
    "mlp_bias": (True, {"mlp_bias": True}, ("midlayer.mlp.up_proj.bias",)),
    "fc_bias": (True, {"bias": True}, ("fc.bias",)),
    "qk_norm": (True, {}, ("midlayer.self_attn.q_norm.weight",)),
    "windows": ((32,), {"layer_types": ["sliding_attention"], "sliding_window": 32}, ()),
}
"""Switch -> value it was trained with, keys that say so, names of its tensors."""

HEEDED = {
    "sglang-0.5.23": {"feedback", "fc_norm", "norm_before_fc", "fc_bias"},
    "sglang-0.5.10": {"fc_bias"},
    "vllm": {
        "norm_before_residual",
        "feedback",
        "fc_norm",
        "norm_before_fc",
        "qkv_bias",
        "mlp_bias",
        "windows",
    },
    "trt-llm": {"feedback", "fc_norm", "norm_before_fc", "qkv_bias", "mlp_bias", "fc_bias"},
    "official": set(),
}
STOPS = {"vllm": {"fc_bias", "qk_norm"}}
"""Tensors vLLM has no place for stop it; the others drop them without a word."""


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("switch", ON)
def test_which_switches_are_heeded(engine, switch):
    value, keys, extra = ON[switch]
    trained = {switch: value}
    if keys.keys() & {"attention_bias", "bias"} and (engine, switch) != ("vllm", "fc_bias"):
        trained["output_bias"] = True  # the same key stands for it

    def run():
        stated = {} if (engine, switch) == ("vllm", "fc_bias") else keys
        if "eagle_config" in keys:
            stated = {"eagle_config": IDS["eagle_config"] | keys["eagle_config"]}
        aux = {"eagle_aux_hidden_state_layer_ids": [2, 4, 5]} if engine == "vllm" else {}
        return profile(engine, trained, stated | aux, extra=extra)

    if switch in STOPS.get(engine, ()):
        with pytest.raises(
            ConfigError, match=rf"{engine} has no place for the tensors of {switch}"
        ):
            run()
        return
    found = run()
    heeded = switch in HEEDED[engine]
    assert (getattr(found.config, switch) == value) == heeded
    told = [note for note in found.notes if note.startswith(f"{switch} is ")]
    assert len(told) == (not heeded)


@pytest.mark.parametrize("engine", [e for e in ENGINES if e != "official"])
def test_a_switch_without_its_tensor_is_no_draft_for_the_engine(engine):
    if "fc_norm" not in HEEDED[engine]:
        assert not profile(engine, keys={"fc_norm": True}).config.fc_norm
        return
    with pytest.raises(ConfigError, match=f"{engine} builds fc_norm, the file has no tensor"):
        profile(engine, keys={"fc_norm": True})


@pytest.mark.parametrize(
    ("engine", "wide", "own", "expected"),
    [
        ("sglang-0.5.23", None, True, "target"),
        ("sglang-0.5.10", None, True, "target"),
        ("trt-llm", None, True, "target"),
        ("official", None, True, "target"),
        ("official", 128, True, "draft"),
        ("trt-llm", 128, True, "draft"),
        ("sglang-0.5.10", 128, True, "draft"),
        ("vllm", None, True, "draft"),
        ("vllm", None, False, "target"),
    ],
)
def test_whose_embedding(engine, wide, own, expected):
    trained = {"embed": "draft" if own else "target"}
    if wide:
        trained["target_hidden_size"] = wide
    keys = {"target_hidden_size": wide} if wide else {}
    extra = ("embed_tokens.weight",) if own else ()
    assert profile(engine, trained, keys, extra=extra).config.embed == expected


@pytest.mark.parametrize(
    ("engine", "keys", "layers", "boundaries"),
    [
        ("sglang-0.5.10", {}, 8, (2, 4, 5)),
        ("trt-llm", {}, 8, (2, 4, 5)),
        ("vllm", {}, 8, (1, 3, 4)),
        ("vllm", {"eagle_aux_hidden_state_layer_ids": [5, 2, 4]}, 8, (2, 4, 5)),
        ("vllm", {"eagle_aux_hidden_state_layer_ids": [2, 4, 8]}, 8, (2, 4, 8)),
        ("vllm", {"eagle_config": "absent"}, 8, (2, 4, 5)),
        ("official", {}, 12, (2, 6, 9)),
        ("official", {}, None, DEFAULT_BOUNDARIES),
        (
            "trt-llm",
            {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 3, 7]}},
            8,
            (2, 4, 8),
        ),
    ],
)
def test_which_states(engine, keys, layers, boundaries):
    assert profile(engine, keys=keys, layers=layers).config.aux_boundaries == boundaries


def ids(*numbers):
    return {"eagle_config": {"eagle_aux_hidden_state_layer_ids": list(numbers)}}


@pytest.mark.parametrize(
    ("engine", "architecture", "keys", "boundaries"),
    [
        ("sglang-0.5.23", "LlamaForCausalLM", ids(1, 3, 4), (2, 4, 5)),
        *(("sglang-0.5.23", name, ids(1, 3, 4), (2, 4, 5)) for name in DEEPSEEK),
        *(("sglang-0.5.23", name, ids(2, 3, 4), (2, 3, 4)) for name in DEEPSEEK),
        ("sglang-0.5.10", "DeepseekV3ForCausalLM", ids(2, 3, 4), (3, 4, 5)),
        ("sglang-0.5.23", "GptOssForCausalLM", ids(1, 3, 4), (2, 4, 5)),
        ("sglang-0.5.23", "GptOssForCausalLM", ids(4, 6, 8), (4, 6, 8)),
        ("sglang-0.5.23", "GptOssForCausalLM", ids(1, 3, 7), (2, 4, 8)),
        ("sglang-0.5.23", "Gemma3ForCausalLM", ids(1, 3, 7), (2, 4, 8)),
        ("sglang-0.5.23", "MiniMaxM3SparseForConditionalGeneration", ids(1, 3, 4), (2, 4, 5)),
        (
            "sglang-0.5.23",
            "MiniMaxM3SparseForConditionalGeneration",
            {"eagle_config": "absent"},
            (3, 5, 6),
        ),
        ("sglang-0.5.23", "MiniMaxM3SparseForCausalLM", {"eagle_config": "absent"}, (2, 4, 5)),
    ],
)
def test_target_families_count_in_their_own_way(engine, architecture, keys, boundaries):
    found = profile(engine, keys=keys, architecture=architecture)
    assert found.config.aux_boundaries == boundaries


def test_a_state_that_is_never_captured_makes_fc_too_wide():
    for engine in ("sglang-0.5.10", "sglang-0.5.23"):
        with pytest.raises(ConfigError, match="captures 2"):
            profile(engine, keys=ids(1, 3, 7), architecture="GptOss" if "10" in engine else None)
    architecture = "MiniMaxM3SparseForConditionalGeneration"
    keys = {"eagle_config": "absent"}
    with pytest.raises(ConfigError, match="needs the target's depth"):
        profile("sglang-0.5.23", keys=keys, layers=None, architecture=architecture)


YARN = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}


@pytest.mark.parametrize(
    ("engine", "scaling", "expected"),
    [
        ("vllm", YARN | {"attention_factor": 1.5}, {"attention_factor": 1.5}),
        ("sglang-0.5.10", YARN | {"attention_factor": 1.5}, {"attention_factor": None}),
        ("official", {"type": "linear", "factor": 2.0}, {"theta": 10000.0}),
        ("official", {"type": "dynamic", "factor": 2.0}, {"theta": 10000.0, "kind": "dynamic"}),
        ("official", None, {"theta": 5e5}),
        ("trt-llm", {"type": "dynamic", "factor": 2.0}, {"kind": "default"}),
    ],
)
def test_rope(engine, scaling, expected):
    keys = {"rope_theta": 5e5, "rope_scaling": scaling}
    found = profile(engine, keys=keys).config.rope
    assert {name: getattr(found, name) for name in expected} == expected
    if engine == "trt-llm":
        assert found == RopeConfig(5e5 * 3 ** (16 / 14))


@pytest.mark.parametrize(
    ("engine", "norm", "spare", "result"),
    [
        ("sglang-0.5.23", "hidden_norm", False, "hidden_norm"),
        ("sglang-0.5.23", "input_layernorm", True, "hidden_norm"),
        ("sglang-0.5.23", "input_layernorm", False, "hidden_norm"),
        ("vllm", "input_layernorm", False, "input_layernorm"),
        ("vllm", "hidden_norm", True, "input_layernorm"),
        ("vllm", "hidden_norm", False, "the file has none there"),
        ("trt-llm", "hidden_norm", False, "hidden_norm"),
        ("trt-llm", "input_layernorm", True, "hidden_norm"),
        ("trt-llm", "input_layernorm", False, "the file has none there"),
        ("trt-llm", "wide", False, "first layer only"),
        ("sglang-0.5.10", "hidden_norm", False, "runs one layer"),
        ("official", "hidden_norm", False, "runs one layer"),
        ("vllm", "wide", False, "first layer only"),
    ],
)
def test_later_layers(engine, norm, spare, result):
    trained = {"num_layers": 2, "next_layers": norm, "next_spare_norm": spare}
    keys = {"num_hidden_layers": 2}
    if " " in result:
        with pytest.raises(ConfigError, match=result):
            profile(engine, trained, keys)
        return
    found = profile(engine, trained, keys)
    assert found.config.next_layers == result
    lacking = norm != result and not spare
    assert found.at_one == (("layers.1.norm_hidden.weight",) if lacking else ())


def test_only_trt_llm_feeds_the_embedding_to_every_layer():
    trained = {"num_layers": 2, "next_layers": "wide"}
    keys = {"num_hidden_layers": 2}
    keys["eagle_config"] = IDS["eagle_config"] | {"next_layer_regular": False}
    assert profile("trt-llm", trained, keys).config.next_layers == "wide"
    with pytest.raises(ConfigError, match="first layer only"):
        profile("sglang-0.5.23", trained, keys)


def test_an_output_bias_the_file_lacks():
    keys = {"attention_bias": True}
    assert any("taken as zero" in n for n in profile("sglang-0.5.10", keys=keys).notes)
    with pytest.raises(ConfigError, match="builds qkv_bias, the file has none"):
        profile("trt-llm", keys=keys)
    with pytest.raises(ConfigError, match="builds output_bias, the file has none"):
        profile("vllm", keys={"bias": True})


@pytest.mark.parametrize("engine", ENGINES)
def test_latent_attention(engine):
    arch = {"architectures": ["Eagle3DeepseekV2ForCausalLM"]}
    if engine in ("sglang-0.5.10", "official"):
        with pytest.raises(ConfigError, match="no draft with latent attention"):
            profile(engine, LATENT, arch)
        return
    assert profile(engine, LATENT, arch).config.latent == LATENT["latent"]
    if engine == "sglang-0.5.23":
        direct = LATENT | {"latent": dataclasses.replace(LATENT["latent"], q_lora_rank=None)}
        with pytest.raises(ConfigError, match="wants q_lora_rank"):
            profile(engine, direct, arch)
        normed = LATENT | {"norm_before_fc": True}
        found = profile(engine, normed, arch | {"norm_before_fc": True})
        assert not found.config.norm_before_fc


@pytest.mark.parametrize("engine", ENGINES)
def test_a_draft_of_one_state(engine):
    trained = {"num_aux": 1, "aux_boundaries": ("final_norm",), "fuse": "none"}
    trained |= {"hidden_norm": False}
    keys = {"eagle_config": {"use_aux_hidden_state": False}}
    if engine in ("sglang-0.5.10", "official"):
        with pytest.raises(ConfigError, match="without aux states"):
            profile(engine, trained, keys)
        return
    found = profile(engine, trained, keys)
    assert found.config.aux_boundaries == ("final_norm",)
    assert found.at_one == ("layers.0.norm_hidden.weight",)
    assert "stay one" in found.notes[-1]


@pytest.mark.parametrize("engine", ENGINES)
def test_a_speculators_file(engine):
    if engine != "vllm":
        with pytest.raises(ConfigError, match="reads no speculators config"):
            profile(engine, start=toy.speculators_config())
        return
    names = list(toy.layers0(toy.tensors()))
    for stated, expected in ((True, True), (False, False), ("absent", True)):
        raw = toy.speculators_config() | {"norm_before_residual": stated}
        found = profile("vllm", {"norm_before_residual": expected}, start=raw, names=names)
        assert found.config.norm_before_residual == expected
        assert found.config.aux_boundaries == (2, 4, 5)


@pytest.mark.parametrize("engine", ENGINES)
def test_names_an_engine_does_not_look_for(engine):
    names = list(toy.layers0(toy.tensors()))
    if ENGINES[engine].layer_stems == ("midlayer",):
        with pytest.raises(ConfigError, match=r"skips 'layers\.0\..*random"):
            profile(engine, names=names)
    else:
        assert profile(engine, names=names).config.num_layers == 1
    with pytest.raises(ConfigError, match=r"skips 'eagle_module\."):
        profile(engine, names=[f"eagle_module.{name}" for name in names])


def test_official_ignores_head_dim():
    with pytest.raises(ConfigError, match="hidden_size / num_heads"):
        profile("official", {"head_dim": 32})
    assert profile("vllm", {"head_dim": 32}).config.head_dim == 32


def test_only_sglang_dies_without_a_vocabulary_key():
    keys = {"draft_vocab_size": "absent"}
    for engine in ENGINES:
        if engine.startswith("sglang"):
            with pytest.raises(ConfigError, match="AttributeError"):
                profile(engine, keys=keys)
        else:
            assert profile(engine, keys=keys).config.head == "draft"


def test_only_sglang_skips_fc_where_the_widths_are_equal():
    trained = {"num_aux": 2, "target_hidden_size": 32, "aux_boundaries": (2, 4), "embed": "draft"}
    keys = ids(1, 3) | {"target_hidden_size": 32}
    assert profile("sglang-0.5.23", trained, keys).config.fuse == "none"
    assert profile("trt-llm", trained, keys).config.fuse == "fc"


def test_two_loaded_drafts_differ_where_engines_do(tmp_path, capsys):
    """One file through `load_draft`: SGLang and vLLM take other states and another residual."""
    from convert_command import Command

    from eagle3_jax.checkpoint import load_draft

    def change(config, tensors):
        config |= {"norm_before_residual": True}

    command = Command(tmp_path, capsys)
    command.converted(toy.write(tmp_path / "draft", change))
    loaded = {engine: load_draft(command.out, as_engine=engine) for engine in ENGINES}
    found = {
        engine: (d.config.norm_before_residual, d.config.aux_boundaries, d.draft_attention)
        for engine, d in loaded.items()
    }
    assert found == {
        "sglang-0.5.23": (False, (2, 4, 5), "beam_slots"),
        "sglang-0.5.10": (False, (2, 4, 5), "beam_slots"),
        "vllm": (True, (1, 3, 4), "ancestors"),
        "trt-llm": (False, (2, 4, 5), "ancestors"),
        "official": (False, DEFAULT_BOUNDARIES, "ancestors"),
    }
    weights = {np.asarray(d.fc.weight[...]).tobytes() for d in loaded.values()}
    assert len(weights) == 1


def switch_rows() -> list[str]:
    """The table of `docs/drafts.md`, from the rules themselves."""

    def cells(name: str, word) -> str:
        return f"| {name} | " + " | ".join(word(engine) for engine in ENGINES.values()) + " |"

    def switch(name: str):
        words = {(): "-", FILE: "file"}
        return lambda engine: words.get(engine.switches[name], "yes")

    fields = [name for name in ENGINES["vllm"].switches if name != "double_norm"]
    rows = [cells("", lambda engine: engine.name), "|" + " --- |" * (len(ENGINES) + 1)]
    rows += [cells(f"`{name}`", switch(name)) for name in fields]
    rows += [
        cells("later layers' norm", lambda engine: engine.next_norm or "one layer"),
        cells("embedding", lambda engine: engine.embedding),
        cells("latent attention", lambda e: "-" if e.architectures.get("mla") == () else "yes"),
        cells("one state, no `fc`", lambda engine: "yes" if engine.single_state else "-"),
        cells("layers' names", lambda engine: ", ".join(f"`{s}`" for s in engine.layer_stems)),
        cells("other tensors", lambda engine: engine.unknown),
        cells("dynamic rope", lambda engine: engine.dynamic),
    ]
    return rows


def test_the_page_has_the_table():
    page = (Path(__file__).parent.parent / "docs/drafts.md").read_text(encoding="utf-8")
    assert "\n".join(switch_rows()) in page

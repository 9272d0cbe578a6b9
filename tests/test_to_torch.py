"""A converted draft written for another framework: the same tensors, the same meaning."""

import json
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import toy_drafts as toy
from safetensors.numpy import load_file
from test_convert_kinds import latent, second_layer, single

from convert import from_torch, to_torch
from eagle3_jax import export_tensors
from eagle3_jax.checkpoint import manifest_config, read_manifest
from eagle3_jax.config import RopeConfig
from eagle3_jax.engine_rules import ENGINES
from eagle3_jax.export_rope import scaling_table

D, E, A, F, N, K, H, V, W = toy.D, toy.E, toy.A, toy.F, toy.N, toy.K, toy.H, toy.V, toy.W
DIALECTS = ("official", "specforge", "sglang", "speculators", "modelopt", "vllm")


class Exporter:
    """Converts a toy draft, exports it, and says what came out."""

    def __init__(self, tmp_path, capsys):
        self.folder, self.capsys = tmp_path, capsys
        self.draft, self.out = tmp_path / "converted", tmp_path / "exports" / "draft"

    def convert(self, change, *flags):
        source = toy.write(self.folder / "source", change)
        argv = [str(source), "--out", str(self.draft), *flags]
        assert from_torch.main(argv) == 0, self.capsys.readouterr().err
        return load_file(source / "model.safetensors")

    def run(self, dialect, *flags):
        self.capsys.readouterr()
        argv = [str(self.draft), "--dialect", dialect, "--out", str(self.out)]
        status = to_torch.main([*argv, *map(str, flags)])
        captured = self.capsys.readouterr()
        return status, captured.out, captured.err

    def exported(self, dialect, *flags):
        status, _, err = self.run(dialect, "--verify", "--force", *flags)
        assert (status, err) == (0, "")
        config = json.loads((self.out / "config.json").read_text())
        return config, load_file(self.out / "model.safetensors")

    def refused(self, dialect, *texts, code="EXPORT_CANNOT", flags=()):
        status, out, err = self.run(dialect, *flags)
        assert (status, out) == (2, "")
        assert err.startswith(f"error [{code}]: ")
        assert err.count("\n") == 1
        assert all(text in err for text in texts), err
        return err


@pytest.fixture
def exporter(tmp_path, capsys) -> Exporter:
    return Exporter(tmp_path, capsys)


def unsorted(config, tensors):
    """Ids in no order, as ModelOpt's."""
    ids = np.random.default_rng(5).permutation(V)[:W].astype(np.int64)
    tensors |= {"d2t": ids - np.arange(W), "t2d": np.isin(np.arange(V), ids)}


STEMS = {"official": "midlayer.", "specforge": "midlayer.", "sglang": "midlayer."}


@pytest.mark.parametrize("dialect", DIALECTS)
def test_every_byte_under_the_dialects_names(exporter, dialect):
    source = exporter.convert(unsorted)
    config, made = exporter.exported(dialect)
    stem = STEMS.get(dialect, "layers.0.")
    expected = {n.replace("midlayer.", stem): t for n, t in source.items()}
    if dialect == "modelopt":
        del expected["t2d"]
    assert {n: (t.dtype, t.tobytes()) for n, t in made.items()} == {
        n: (t.dtype, t.tobytes()) for n, t in expected.items()
    }
    layer = config.get("transformer_layer_config", config)
    sizes = (D, F, 1, N, K, H, V)
    keys = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    keys += ("num_key_value_heads", "head_dim", "vocab_size")
    assert tuple(layer[key] for key in keys) == sizes
    assert config["draft_vocab_size"] == W
    assert layer["rms_norm_eps"] == 1e-5
    assert layer["max_position_embeddings"] == 2048


def test_keys_of_each_dialect(exporter):
    exporter.convert(lambda config, tensors: None)
    ids = "eagle_aux_hidden_state_layer_ids"
    found = {dialect: exporter.exported(dialect)[0] for dialect in DIALECTS}
    assert {d: c["architectures"] for d, c in found.items()} == {
        "official": ["LlamaForCausalLM"],
        "specforge": ["LlamaForCausalLMEagle3"],
        "sglang": ["LlamaForCausalLMEagle3"],
        "speculators": ["Eagle3DraftModel"],
        "modelopt": ["LlamaForCausalLMEagle3"],
        "vllm": ["LlamaForCausalLMEagle3"],
    }
    places = {d: (c.get(ids), c.get("eagle_config", {}).get(ids)) for d, c in found.items()}
    assert places == {
        "official": (None, None),
        "specforge": (None, [1, 3, 4]),
        "sglang": (None, [1, 3, 4]),
        "speculators": ([2, 4, 5], None),
        "modelopt": (None, [1, 3, 4]),
        "vllm": ([2, 4, 5], None),
    }
    speculators = found["speculators"]
    assert speculators["speculators_model_type"] == "eagle3"
    for key in ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output"):
        assert speculators[key] is False
    assert speculators["transformer_layer_config"]["rope_parameters"] == {
        "rope_theta": 10000.0,
        "rope_type": "default",
    }
    assert found["modelopt"]["eagle_config"]["use_aux_hidden_state"] is True
    assert "norm_before_residual" not in found["vllm"]


def keep(config, tensors):
    return None


def key(name, **made):
    def change(config, tensors):
        config[name] = True
        tensors |= {n.replace("__", "."): toy.normal(*s) for n, s in made.items()}

    return change


def biases(config, tensors):
    config["attention_bias"] = True
    for name, rows in (("q", N * H), ("k", K * H), ("v", K * H), ("o", D)):
        tensors[f"midlayer.self_attn.{name}_proj.bias"] = toy.normal(rows)


def output_bias(config, tensors):
    tensors["midlayer.self_attn.o_proj.bias"] = toy.normal(D)


def mlp_biases(config, tensors):
    config["mlp_bias"] = True
    for name, rows in (("gate", F), ("up", F), ("down", D)):
        tensors[f"midlayer.mlp.{name}_proj.bias"] = toy.normal(rows)


def attention_norms(config, tensors):
    for name in "qk":
        tensors[f"midlayer.self_attn.{name}_norm.weight"] = toy.normal(H)


def state_norms(config, tensors):
    config["fc_norm"] = True
    tensors |= {f"fc_norm.{i}.weight": toy.normal(E, seed=i) for i in range(A)}


def no_final_norm(config, tensors):
    config["norm_output"] = False
    del tensors["norm.weight"]


def own_embedding(config, tensors):
    tensors["embed_tokens.weight"] = toy.normal(V, D)


def wide_target(config, tensors):
    config["target_hidden_size"] = 80
    tensors["fc.weight"] = toy.normal(D, A * 80)
    tensors["embed_tokens.weight"] = toy.normal(V, D)


def window(config, tensors):
    config |= {"layer_types": ["sliding_attention"], "sliding_window": 32}


def targets_head(config, tensors):
    config["draft_vocab_size"] = None
    return {n: t for n, t in tensors.items() if n not in ("lm_head.weight", "d2t", "t2d")}


def layers(*norms, width=D):
    def change(config, tensors):
        config["eagle_config"]["next_layer_regular"] = width == D
        return second_layer(tensors, *norms, width=width)

    return change


def rope(**table):
    def change(config, tensors):
        config["rope_scaling"] = table

    return change


def four_states(config, tensors):
    config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] = [0, 2, 3, 6]
    tensors["fc.weight"] = toy.normal(D, 4 * E)


def other_states(config, tensors):
    config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] = [0, 2, 6]


def no_order(config, tensors):
    config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] = [6, 1, 3]


LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
POST = ("--feedback", "post_norm")
TRUE = ("--norm-before-residual", "true")
EVERY = DIALECTS

SWITCHES = {
    "norm_before_residual": (keep, TRUE, ("speculators", "vllm")),
    "norm_before_fc": (
        key("norm_before_fc", input_norm__weight=(A * E,)),
        (),
        ("sglang", "speculators", "modelopt", "vllm"),
    ),
    "fc_norm": (state_norms, (), ("specforge", "sglang", "speculators", "vllm")),
    "feedback": (keep, POST, ("specforge", "sglang", "speculators", "vllm")),
    "final_norm": (no_final_norm, (), ("specforge",)),
    "double_norm": (keep, ("--double-norm", "true"), ("modelopt",)),
    "fc_bias": (key("bias", fc__bias=(D,)), (), ("sglang",)),
    "qkv_bias": (biases, (), ("speculators", "modelopt", "vllm")),
    "output_bias": (output_bias, (), ("sglang", "vllm")),
    "mlp_bias": (mlp_biases, (), ("speculators", "modelopt", "vllm")),
    "qk_norm": (attention_norms, (), ("speculators",)),
    "embed": (own_embedding, (), ("speculators", "vllm")),
    "embed or target_hidden_size": (wide_target, (), ("official", "specforge", "sglang", "vllm")),
    "head": (targets_head, (), ("sglang", "vllm")),
    "windows": (window, (), ("speculators", "vllm")),
    "fuse": (single, (), ("modelopt",)),
    "num_layers": (layers("input_layernorm"), (), ("speculators", "modelopt", "vllm")),
    "next_layers": (layers("hidden_norm"), (), ("sglang",)),
    "next_layers wide": (layers("input_layernorm", "hidden_norm", width=2 * D), (), ("modelopt",)),
    "next_spare_norm": (
        layers("input_layernorm", "hidden_norm"),
        ("--next-layer-norm", "hidden_norm"),
        ("sglang",),
    ),
    "latent": (latent, (), ("sglang", "vllm")),
    "rope linear": (rope(type="linear", factor=2.0), (), EVERY),
    "rope dynamic": (rope(type="dynamic", factor=2.0), (), EVERY),
    "rope llama3": (
        rope(rope_type="llama3", original_max_position_embeddings=64, **LLAMA3),
        (),
        EVERY[1:],
    ),
    "rope yarn": (rope(**YARN, beta_fast=16.0, mscale=0.8), (), EVERY[1:]),
    "rope attention_factor": (
        rope(**YARN, attention_factor=1.5, truncate=False),
        (),
        ("speculators", "modelopt", "vllm"),
    ),
    "rope mrope_section": (rope(type="mrope", mrope_section=[H // 2 - 2, 1, 1]), (), EVERY[1:]),
    "rope mrope_interleaved": (
        rope(rope_type="default", mrope_section=[H // 2 - 2, 1, 1], mrope_interleaved=True),
        (),
        EVERY[2:],
    ),
    "aux_boundaries": (other_states, (), EVERY[1:]),
    "aux_boundaries or num_aux": (four_states, (), EVERY[2:]),
    "aux_boundaries unsorted": (no_order, (), ()),
}


@pytest.mark.parametrize("switch", SWITCHES)
def test_what_a_dialect_holds_and_what_it_names(exporter, switch):
    change, flags, holders = SWITCHES[switch]
    exporter.convert(change, *flags)
    trained = manifest_config(read_manifest(exporter.draft), exporter.draft)
    for dialect in DIALECTS:
        if dialect in holders:
            exporter.exported(dialect)
            continue
        field = "hidden_norm" if switch == "fuse" else switch.split()[0]
        if trained.num_layers > 1:
            field = "num_layers" if dialect in ("official", "specforge") else "next_layers"
        if " or " in switch and dialect in ("speculators", "specforge"):
            field = switch.split()[-1]
        exporter.refused(dialect, f"{field} ", flags=("--force",))


def matrix() -> str:
    """Markdown of what the test above shows: all are read, and written where marked."""
    lines = [f"| switch | {' | '.join(DIALECTS)} |", "| --- |" + " --- |" * len(DIALECTS)]
    for switch, (_, _, holders) in SWITCHES.items():
        cells = ("yes" if dialect in holders else "-" for dialect in DIALECTS)
        lines.append(f"| {switch} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def test_the_matrix_in_the_readme_is_this_one():
    readme = (Path(__file__).parent.parent / "README.md").read_text(encoding="utf-8")
    assert matrix() in readme, f"README.md should have\n\n{matrix()}"


def test_the_windows_key_and_the_biases_key(exporter):
    exporter.convert(window)
    config, _ = exporter.exported("vllm")
    assert (config["layer_types"], config["sliding_window"]) == (["sliding_attention"], 32)
    exporter.draft = exporter.folder / "biased"
    exporter.convert(biases)
    assert exporter.exported("speculators")[0]["transformer_layer_config"]["attention_bias"]


def test_fc_norms_are_rows_again(exporter):
    source = exporter.convert(state_norms)
    _, made = exporter.exported("sglang")
    for i in range(A):
        assert made[f"fc_norm.{i}.weight"].tobytes() == source[f"fc_norm.{i}.weight"].tobytes()


def test_layers_after_the_first_keep_their_norm(exporter):
    source = exporter.convert(layers("hidden_norm"))
    config, made = exporter.exported("sglang")
    assert config["num_hidden_layers"] == 2
    assert made.keys() == source.keys()
    assert all(made[name].tobytes() == source[name].tobytes() for name in source)


@pytest.mark.parametrize(
    ("architecture", "ids", "written"),
    [
        ("LlamaForCausalLM", [2, 4, 6], [2, 4, 6]),
        ("DeepseekV3ForCausalLM", [2, 4, 6], [3, 5, 7]),
        ("DeepseekV3ForCausalLM", [1, 4, 6], [1, 4, 6]),
        ("GptOssForCausalLM", [2, 4, 7], [2, 4, 7]),
        ("GptOssForCausalLM", [2, 4, 6], [2, 4, 6]),
    ],
)
def test_ids_are_those_the_targets_family_reads(exporter, architecture, ids, written):
    target = toy.write_target(exporter.folder / "target", architectures=[architecture])

    def change(config, tensors):
        config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] = ids

    exporter.convert(change)
    config, _ = exporter.exported("sglang", "--target", target)
    assert config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == written
    rule = ENGINES["sglang-0.5.23"].families.get(architecture, ENGINES["sglang-0.5.23"].aux)
    assert rule.captured(written, 8) == tuple(i + 1 for i in ids)


def test_a_state_the_target_does_not_give(exporter):
    target = toy.write_target(exporter.folder / "target", architectures=["LlamaForCausalLM"])

    def change(config, tensors):
        config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] = [2, 4, 7]

    exporter.convert(change)
    exporter.refused("sglang", "no list of layer ids captures", flags=("--target", target))
    other = toy.write_target(exporter.folder / "other", hidden_size=128)
    exporter.refused("sglang", "128", code="CONFIG_WRONG_PAIR", flags=("--target", other))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_another_dtype(exporter, dtype):
    source = exporter.convert(unsorted)
    config, made = exporter.exported("sglang", "--dtype", dtype)
    assert config["torch_dtype"] == dtype
    kind = np.dtype(dtype)
    for name, tensor in source.items():
        expected = tensor if name in ("d2t", "t2d") else tensor.astype(kind)
        assert made[name].tobytes() == expected.tobytes()
    assert kind == (ml_dtypes.bfloat16 if dtype == "bfloat16" else made["fc.weight"].dtype)


def test_values_that_a_dtype_cannot_hold(exporter):
    def change(config, tensors):
        tensors["fc.weight"][1, 2] = 7e4

    exporter.convert(change)
    exporter.refused("sglang", "fc.weight", code="WEIGHT_NOT_FINITE", flags=("--dtype", "float16"))
    assert not exporter.out.exists()
    assert list(exporter.out.parent.iterdir()) == []


def test_verify_sees_a_wrong_tensor_and_a_wrong_key(exporter, monkeypatch):
    exporter.convert(unsorted)
    arrays = export_tensors.Planned.arrays

    def swapped(self, array):
        for made in arrays(self, array):
            yield made[::-1] if self.canonical == "lm_head.weight" else made

    with monkeypatch.context() as patch:
        patch.setattr(export_tensors.Planned, "arrays", swapped)
        flags = ("--verify",)
        exporter.refused("vllm", "lm_head.weight has other", code="EXPORT_DIFFERS", flags=flags)
    assert list(exporter.out.parent.iterdir()) == []
    monkeypatch.setattr("eagle3_jax.export_rope.scaling_table", lambda rope: {"rope_type": "yarn"})
    exporter.refused("speculators", "factor", code="EXPORT_DIFFERS", flags=("--verify",))
    assert list(exporter.out.parent.iterdir()) == []


def test_what_may_be_replaced(exporter):
    exporter.convert(keep)
    exporter.exported("sglang")
    exporter.refused("vllm", "--force overwrites", code="FILE")
    exporter.exported("vllm")
    (exporter.out / "notes.txt").write_text("mine")
    exporter.refused("vllm", "notes.txt", code="FILE", flags=("--force",))
    names = sorted(path.name for path in exporter.out.iterdir())
    assert names == ["config.json", "model.safetensors", "notes.txt"]


def test_json_and_the_flags_to_convert_again(exporter):
    exporter.convert(unsorted, *POST)
    status, out, _ = exporter.run("sglang", "--json")
    found = json.loads(out)
    assert status == 0
    assert found["tensors"]["t2d"] == {"dtype": "bool", "shape": [V], "from": "draft_to_target"}
    assert found["config"]["norm_output"] is True
    again = exporter.folder / "again"
    argv = [str(exporter.out), "--out", str(again), *found["convert_flags"]]
    assert from_torch.main(argv) == 0
    both = [read_manifest(path) for path in (exporter.draft, again)]
    assert both[0]["config"] == both[1]["config"]
    assert (
        both[0]["tensors"]["draft_to_target"]["sha256"]
        == (both[1]["tensors"]["draft_to_target"]["sha256"])
    )


def test_only_a_converted_draft_is_exported(exporter):
    exporter.draft = toy.write(exporter.folder / "source")
    exporter.refused("sglang", "not a converted draft", code="CHECKPOINT")


FLAGS = {
    "draft_norm_output": POST,
    "draft_two_layers": ("--next-layer-norm", "hidden_norm"),
    "draft_own_embed": ("--embed", "target"),
}
LOST = {
    "draft_attn_bias",
    "draft_aux_6_1_3",
    "draft_norm_before_residual",
    "draft_rope_yarn",
    "draft_window",
}
VARIANTS = (
    "draft",
    "draft_attn_bias",
    "draft_aux_1_3_6",
    "draft_aux_6_1_3",
    "draft_aux_toplevel",
    "draft_fc_bias",
    "draft_fc_norm",
    "draft_nolmhead_null",
    "draft_norm_before_fc",
    "draft_norm_before_residual",
    "draft_norm_output",
    "draft_novocabmap",
    "draft_own_embed",
    "draft_rope_dynamic",
    "draft_rope_llama3",
    "draft_rope_yarn",
    "draft_two_layers",
    "draft_window",
)


@pytest.mark.parametrize("name", VARIANTS)
def test_sglangs_own_drafts_come_back_as_they_were(
    name, variant_folder, converted, sglang_models, tmp_path, capsys
):
    """The drafts SGLang was recorded on: exported for it, their weights and their numbers."""
    source, target = variant_folder(name), sglang_models / "target"
    folder = converted(source, "--target", str(target), *FLAGS.get(name, ()))
    out = tmp_path / "out"
    argv = [str(folder), "--dialect", "sglang", "--out", str(out), "--verify"]
    status = to_torch.main([*argv, "--target", str(target)])
    err = capsys.readouterr().err
    if name in LOST:
        assert status == 2
        assert "EXPORT_CANNOT" in err
        return
    assert (status, err) == (0, "")
    before, after = (load_file(p / "model.safetensors") for p in (source, out))
    if name == "draft_own_embed":
        del before["embed_tokens.weight"]
    before = {n.replace("layers.0.", "midlayer."): t for n, t in before.items()}
    after = {n.replace("layers.0.", "midlayer."): t for n, t in after.items()}
    assert {n: t.tobytes() for n, t in after.items()} == {n: t.tobytes() for n, t in before.items()}


@pytest.mark.parametrize("dialect", ["specforge", "modelopt", "speculators"])
def test_frameworks_own_files_come_back_to_them(dialect, converted, tmp_path):
    source = toy_folder(dialect)
    flags = ("--double-norm", "true") if dialect == "modelopt" else ()
    folder, out = converted(source, *flags), tmp_path / "out"
    argv = [str(folder), "--dialect", dialect, "--out", str(out), "--verify"]
    assert to_torch.main(argv) == 0
    before, after = (load_file(p / "model.safetensors") for p in (source, out))
    assert {n: t.tobytes() for n, t in after.items()} == {n: t.tobytes() for n, t in before.items()}
    was, now = (json.loads((p / "config.json").read_text()) for p in (source, out))
    shared = was.keys() & now.keys() - {"transformer_layer_config", "torch_dtype", "dtype"}
    if dialect == "modelopt":
        shared -= {"eagle_config"}
        assert now["eagle_config"].items() <= was["eagle_config"].items()
    assert {key: now[key] for key in shared} == {key: was[key] for key in shared}
    inner = was.get("transformer_layer_config", {})
    made = now.get("transformer_layer_config", {})
    assert {key: made[key] for key in made.keys() & inner.keys()} == {
        key: inner[key] for key in made.keys() & inner.keys()
    }
    assert made.keys() >= {"rope_parameters"} if inner else made == {}


def toy_folder(dialect):
    from pathlib import Path

    return Path(__file__).parent / "data/dialects" / dialect


def test_a_rope_table_reads_back():
    for rope_config in (
        RopeConfig(5e5, "llama3", 8.0, 1.0, 4.0, 64),
        RopeConfig(1e4, "yarn", 4.0, original_max_position_embeddings=64, mscale=0.7),
    ):
        table = scaling_table(rope_config)
        kind = table.pop("rope_type")
        assert RopeConfig(rope_config.theta, kind, **table) == rope_config


def test_a_damaged_tensor_stops_the_export(exporter):
    exporter.convert(keep)
    manifest = json.loads((exporter.draft / "draft.json").read_text())
    manifest["tensors"]["fc.weight"]["sha256"] = "0" * 64
    (exporter.draft / "draft.json").write_text(json.dumps(manifest))
    exporter.refused("sglang", "fc.weight", code="CHECKPOINT")
    assert list(exporter.out.parent.iterdir()) == []

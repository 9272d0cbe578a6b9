"""What `eagle3 inspect` says of drafts whose state is known, and how it exits."""

import itertools
import json

import numpy as np
import pytest
import toy_drafts as toy
from convert_command import Command
from test_convert_kinds import latent, second_layer

from eagle3_jax.checkpoint import load_draft, read_manifest
from eagle3_jax.command import Parser, run_command
from eagle3_jax.inspection import command as inspect_command
from eagle3_jax.inspection.patch import merged
from eagle3_jax.inspection.weights import different_rows, row_ranges

D, E, A, V, W, N, H = toy.D, toy.E, toy.A, toy.V, toy.W, toy.N, toy.H
IDS = "eagle_aux_hidden_state_layer_ids"


class Inspector:
    """Runs the command in this process."""

    def __init__(self, capsys):
        self.capsys = capsys

    def text(self, *argv):
        parser = Parser(prog="eagle3")
        inspect_command.add_parser(parser.add_subparsers(required=True))
        self.capsys.readouterr()
        arguments = ["inspect", *map(str, argv)]
        status = run_command(parser, lambda args: args.run(args), arguments)
        captured = self.capsys.readouterr()
        return status, captured.out, captured.err

    def found(self, *argv):
        status, out, err = self.text(*argv, "--json")
        assert err == ""
        found = json.loads(out)
        assert found["status"] == status
        return found


@pytest.fixture
def inspector(capsys) -> Inspector:
    return Inspector(capsys)


def codes(found, severity=None):
    return [f["code"] for f in found["findings"] if severity in (None, f["severity"])]


def fields(found, engine):
    return [line["code"].removeprefix("ENGINE_").lower() for line in found["engines"][engine]]


def test_a_clean_draft(inspector, tmp_path):
    folder = toy.write(tmp_path / "draft")
    found = inspector.found(folder)
    assert (found["status"], found["kind"], found["dialect"]) == (0, "PyTorch draft", "official")
    assert codes(found, "warning") == []
    sizes = {row["name"]: (row["used"], row["config"], row["agrees"]) for row in found["sizes"]}
    assert sizes["hidden_size"] == (D, D, True)
    assert sizes["num_kv_heads"] == (2, 2, True)
    assert sizes["target_hidden_size"] == (E, None, True)
    switches = {row["name"]: row for row in found["switches"]}
    assert switches["norm_before_residual"]["origin"] == "default:official"
    assert switches["fc_bias"]["value"] is False
    rows = {row["name"]: row for row in found["tensors"]}
    fc = toy.tensors()["fc.weight"]
    assert rows["fc.weight"]["max_abs"] == pytest.approx(float(np.abs(fc).max()))
    assert (rows["fc.weight"]["nan"], rows["fc.weight"]["inf"]) == (0, 0)
    assert "nan" not in rows["d2t"]


def test_the_page_has_what_the_json_has(inspector, tmp_path):
    status, out, err = inspector.text(toy.write(tmp_path / "draft"))
    assert (status, err) == (0, "")
    for part in ("sizes", "switches", "target states", "vocabulary", "rope", "tensors", "engines"):
        assert f"\n{part}" in out
    assert "clean" in out.splitlines()[0]
    assert "after block 4" in out


def test_the_table_of_target_states(inspector, tmp_path):
    target = toy.write_target(tmp_path / "target", architectures=["LlamaForCausalLM"])
    found = inspector.found(toy.write(tmp_path / "draft"), "--target", target)
    table = [(r["slot"], r["id"], r["boundary"], r["meaning"]) for r in found["aux"]]
    assert table == [
        (0, 1, 2, "after block 2"),
        (1, 3, 4, "after block 4"),
        (2, 4, 5, "after block 5"),
    ]
    engines = {name: [r["engines"][name] for r in found["aux"]] for name in found["engines"]}
    assert engines["sglang-0.5.23"] == [2, 4, 5]
    assert engines["vllm"] == [1, 3, 4]
    assert engines["official"] == [2, 4, 5]
    assert fields(found, "vllm") == ["aux_boundaries"]
    assert fields(found, "sglang-0.5.23") == []


def test_ids_mean_other_states_for_another_family(inspector, tmp_path):
    def change(config, tensors):
        config["eagle_config"][IDS] = [2, 4, 5]

    folder = toy.write(tmp_path / "draft", change)
    target = toy.write_target(tmp_path / "target", architectures=["DeepseekV3ForCausalLM"])
    found = inspector.found(folder, "--target", target)
    assert [r["engines"]["sglang-0.5.23"] for r in found["aux"]] == [2, 4, 5]
    assert [r["engines"]["sglang-0.5.10"] for r in found["aux"]] == [3, 5, 6]
    assert [r["boundary"] for r in found["aux"]] == [3, 5, 6]


def test_the_vocabulary_map(inspector, tmp_path):
    def change(config, tensors):
        ids = np.random.default_rng(5).permutation(V)[:W].astype(np.int64)
        tensors |= {"d2t": ids - np.arange(W), "t2d": np.isin(np.arange(V), ids)}

    found = inspector.found(toy.write(tmp_path / "draft", change))["vocabulary"]
    ids = np.random.default_rng(5).permutation(V)[:W]
    assert (found["kind"], found["sorted"], found["coverage"]) == ("offset", False, W / V)
    assert found["range"] == [ids.min(), ids.max()]
    rows = [(r["draft"], r["offset"], r["target"]) for r in found["first"]]
    assert rows == [(i, ids[i] - i, ids[i]) for i in range(6)]


def test_the_text_of_tokens(inspector, tmp_path):
    tokenizers = pytest.importorskip("tokenizers")
    words = {f"w{i}": i for i in range(V)}
    model = tokenizers.models.WordLevel(words, unk_token="w0")
    target = toy.write_target(tmp_path / "target")
    tokenizers.Tokenizer(model).save(str(target / "tokenizer.json"))
    found = inspector.found(toy.write(tmp_path / "draft"), "--target", target)
    ids = toy.target_ids()
    assert [r["text"] for r in found["vocabulary"]["first"]] == [f"w{i}" for i in ids[:6]]


def nan_and_infinity(config, tensors):
    tensors["fc.weight"][0, :3] = np.nan
    tensors["fc.weight"][1, 0] = -np.inf
    tensors["norm.weight"][5] = np.inf


def test_nan_and_infinity_are_counted_by_tensor(inspector, tmp_path):
    found = inspector.found(toy.write(tmp_path / "draft", nan_and_infinity))
    rows = {r["name"]: (r["nan"], r["inf"]) for r in found["tensors"] if "nan" in r}
    assert rows["fc.weight"] == (3, 1)
    assert rows["norm.weight"] == (0, 1)
    assert sum(map(sum, rows.values())) == 5
    assert codes(found, "error") == ["WEIGHT_NOT_FINITE"] * 2
    assert found["status"] == 2


def test_values_past_float16(inspector, tmp_path):
    def change(config, tensors):
        tensors["fc.weight"][0, 0] = 9e4

    found = inspector.found(toy.write(tmp_path / "draft", change))
    assert codes(found, "warning") == ["NUMERIC_FP16_RANGE"]
    assert found["status"] == 1


def yarn(config, tensors):
    config["rope_scaling"] = {
        "rope_type": "yarn",
        "factor": 32.0,
        "original_max_position_embeddings": 64,
    }


def modelopt(config, tensors):
    yarn(config, tensors)
    config["eagle_config"]["use_last_layernorm"] = True


def angelslim(config, tensors):
    config |= {"rope_theta": 1e6, "aux_hidden_states_layer_ids": [1, 3, 4]}
    del config["eagle_config"]


def official(config, tensors):
    config |= {"architectures": ["LlamaForCausalLM"], "rope_theta": 5e5}
    del config["eagle_config"]


def unknown(config, tensors):
    config["rope_theta"] = 1e6


@pytest.mark.parametrize(
    ("change", "why", "sure"),
    [
        (modelopt, "ModelOpt", True),
        (angelslim, "AngelSlim", True),
        (official, "official trainer", True),
        (unknown, "SpecForge before 2025-10-30", False),
    ],
)
def test_rope_as_trained(inspector, tmp_path, change, why, sure):
    found = inspector.found(toy.write(tmp_path / "draft", change))
    trained = found["rope"]["trained"]
    assert why in trained["why"]
    assert (trained["theta"], trained["kind"], trained["sure"]) == (10000.0, "default", sure)
    assert ("POS_THETA_UNTRUE" in codes(found, "warning")) is sure


def test_nothing_is_said_of_a_rope_that_was_trained_so(inspector, tmp_path):
    assert inspector.found(toy.write(tmp_path / "a"))["rope"]["trained"] is None
    assert inspector.found(toy.write(tmp_path / "b", yarn))["rope"]["trained"] is not None
    start = toy.speculators_config()
    start["transformer_layer_config"]["rope_theta"] = 1e6
    folder = toy.write(tmp_path / "c", lambda c, t: toy.layers0(t), start=start)
    assert inspector.found(folder)["rope"]["trained"] is None


def without_residual(config, tensors):
    del config["norm_before_residual"]
    return toy.layers0(tensors)


def modelopt_names(config, tensors):
    made = toy.layers0(tensors)
    del made["t2d"]
    return made


def norm_output(config, tensors):
    config["norm_output"] = True


def both_norms(config, tensors):
    config["num_hidden_layers"] = 2
    return second_layer(tensors, "input_layernorm", "hidden_norm")


@pytest.mark.parametrize(
    ("change", "start", "code", "switch", "value"),
    [
        (
            without_residual,
            toy.speculators_config(),
            "NORM_BEFORE_RESIDUAL",
            "norm_before_residual",
            True,
        ),
        (modelopt_names, None, "NORM_DOUBLE", "double_norm", False),
        (norm_output, None, "NORM_OUTPUT_AMBIGUOUS", "feedback", "post_norm"),
        (both_norms, None, "CONFIG_MULTI_LAYER", "next_layers", "input_layernorm"),
    ],
)
def test_what_only_the_user_knows_is_shown_as_undecided(
    inspector, tmp_path, change, start, code, switch, value
):
    found = inspector.found(toy.write(tmp_path / "draft", change, start=start))
    line = next(f for f in found["findings"] if f["code"] == code)
    assert line["message"].startswith("not decidable from the file")
    assert line["fix"]
    assert {row["name"]: row["value"] for row in found["switches"]}[switch] == value
    assert found["status"] == 1


def test_a_map_of_target_ids_is_unusable_but_shown(inspector, tmp_path):
    def change(config, tensors):
        tensors["d2t"] = np.flatnonzero(tensors["t2d"])[::-1].astype(np.int64)

    found = inspector.found(toy.write(tmp_path / "draft", change))
    assert found["status"] == 2
    assert codes(found, "error") == ["VOCAB_MAP_ABSOLUTE"]
    assert found["vocabulary"]["kind"] == "absolute"


def own_embedding(config, tensors):
    tensors["embed_tokens.weight"] = toy.normal(V, D)


def window(config, tensors):
    config |= {"sliding_window": 8, "layer_types": ["sliding_attention"]}


def residual(config, tensors):
    config["norm_before_residual"] = True


@pytest.mark.parametrize(
    ("change", "engine", "field"),
    [
        (own_embedding, "sglang-0.5.23", "embed"),
        (window, "trt-llm", "windows"),
        (residual, "sglang-0.5.23", "norm_before_residual"),
    ],
)
def test_an_engine_that_overwrites_or_ignores(inspector, tmp_path, change, engine, field):
    folder = toy.write(tmp_path / "draft", change)
    found = inspector.found(folder)
    line = next(one for one in found["engines"][engine] if one["code"] == f"ENGINE_{field.upper()}")
    assert (line["severity"], "\n" in line["message"]) == ("warning", False)
    assert line["fix"]
    assert field not in fields(found, "vllm")
    assert found["status"] == 0


def test_an_engine_that_cannot_load_it(inspector, tmp_path):
    folder = toy.write(tmp_path / "draft", latent)
    found = inspector.found(folder)
    assert fields(found, "official") == ["cannot"]
    assert found["engines"]["official"][0]["severity"] == "error"
    assert found["status"] == 0


def test_the_patch_makes_the_engine_run_it_as_trained(inspector, tmp_path):
    def change(config, tensors):
        config |= {IDS: [2, 4, 5], "tie_word_embeddings": True, "num_hidden_layers": 8}
        del config["eagle_config"]
        del config["draft_vocab_size"]

    folder = toy.write(tmp_path / "draft", change)
    found = inspector.found(folder, "--patch", "sglang")
    assert found["status"] == 2
    assert fields(found, "sglang-0.5.23") == ["cannot"]
    patch = found["patch"]
    assert patch["config"] == {
        "num_hidden_layers": 1,
        "draft_vocab_size": W,
        "tie_word_embeddings": False,
        "eagle_config": {IDS: [1, 3, 4]},
    }
    assert patch["left"] == []
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(merged(config, patch["config"])))
    again = inspector.found(folder, "--patch", "sglang")
    assert fields(again, "sglang-0.5.23") == []
    assert again["patch"]["config"] == {}


def test_the_patch_for_vllm_and_what_no_key_cures(inspector, tmp_path):
    def change(config, tensors):
        tensors["fc.bias"] = toy.normal(D)
        config["bias"] = True

    folder = toy.write(tmp_path / "draft")
    assert inspector.found(folder, "--patch", "vllm")["patch"]["config"] == {IDS: [2, 4, 5]}
    assert inspector.found(folder, "--patch", "vllm")["status"] == 1
    found = inspector.found(toy.write(tmp_path / "biased", change), "--patch", "vllm")
    assert any("fc_bias" in problem for problem in found["patch"]["problems"])
    assert found["patch"]["left"]
    assert found["status"] == 2


def test_the_patch_undoes_modelopts_yarn(inspector, tmp_path):
    found = inspector.found(toy.write(tmp_path / "draft", modelopt), "--patch", "sglang")
    assert found["patch"]["config"] == {"rope_theta": 10000.0, "rope_scaling": None}
    assert found["patch"]["left"] == []


def test_a_converted_draft_reads_the_same(inspector, tmp_path, capsys):
    folder = toy.write(tmp_path / "draft")
    command = Command(tmp_path, capsys)
    command.converted(folder)
    before, after = inspector.found(folder), inspector.found(command.out)
    assert after["kind"] == "converted draft"
    for part in ("sizes", "switches", "aux", "vocabulary", "rope", "engines", "status"):
        assert after[part] == before[part]
    names = {row["name"] for row in after["tensors"]}
    assert names == set(load_draft(command.out).config.tensor_shapes())
    other = toy.write_target(tmp_path / "target", hidden_size=128)
    wrong = inspector.found(command.out, "--target", other)
    assert (wrong["usable"], wrong["error"]["code"]) == (False, "CONFIG_WRONG_PAIR")


def test_a_converted_draft_that_is_damaged(inspector, tmp_path, capsys):
    command = Command(tmp_path, capsys)
    command.converted(toy.write(tmp_path / "draft"))
    manifest = read_manifest(command.out)
    manifest["tensors"]["fc.weight"]["sha256"] = "0" * 64
    (command.out / "draft.json").write_text(json.dumps(manifest))
    status, out, err = inspector.text(command.out)
    assert (status, out, err.count("\n")) == (2, "", 1)
    assert "fc.weight" in err


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("dialect", None),
        ("findings", [{"code": "X"}]),
        ("aux", {"ids": [1]}),
        ("rope", 3),
        ("source_tensors", {"fc.weight": 1}),
        ("source_config", {"eagle_config": {IDS: "1"}}),
    ],
)
def test_a_manifest_that_is_damaged_is_one_line(inspector, tmp_path, capsys, key, value):
    command = Command(tmp_path, capsys)
    command.converted(toy.write(tmp_path / "draft"))
    manifest = read_manifest(command.out) | {key: value}
    (command.out / "draft.json").write_text(json.dumps(manifest))
    found = inspector.found(command.out)
    assert (found["status"], found["usable"]) == (2, False)
    assert "draft.json" in found["error"]["message"]


def test_odd_names_of_classes(inspector, tmp_path):
    def change(config, tensors):
        config["architectures"] = [{}, 3, "LlamaForCausalLMEagle3"]

    found = inspector.found(toy.write(tmp_path / "draft", change), "--patch", "sglang")
    assert (found["status"], found["patch"]["config"]) == (0, {})


def test_nothing_there(inspector, tmp_path):
    status, out, err = inspector.text(tmp_path / "nowhere")
    assert (status, out) == (2, "")
    assert err.startswith("error [FILE]: ")


def test_weights_that_are_no_draft(inspector, tmp_path):
    def change(config, tensors):
        return {"model.layers.3.mlp.up_proj.weight": toy.normal(8, 8)}

    found = inspector.found(toy.write(tmp_path / "draft", change))
    assert (found["status"], found["usable"]) == (2, False)
    assert found["error"]["code"].startswith("ARCH_")
    assert [row["name"] for row in found["tensors"]] == ["model.layers.3.mlp.up_proj.weight"]
    status, out, _ = inspector.text(tmp_path / "draft")
    assert (status, "unusable" in out.splitlines()[0]) == (2, True)


@pytest.mark.parametrize("rows", [1, 7, 4096, 9000])
def test_ranges_of_rows_against_brute_force(rows):
    rng = np.random.default_rng(rows)
    ours = rng.standard_normal((rows, 3)).astype(np.float32)
    theirs = ours.copy()
    wrong = rng.random(rows) < 0.3
    theirs[wrong, 1] += 1
    ranges = different_rows(ours, theirs)
    assert [i for a, b in ranges for i in range(a, b)] == np.flatnonzero(wrong).tolist()
    assert all(b < c for (_, b), (c, _) in itertools.pairwise(ranges))
    assert row_ranges([(0, 2), (5, 6)]) == "0..1, 5..5"

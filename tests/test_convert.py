"""`convert.from_torch` as a command: what it writes, what it says, what it refuses."""

import json
import os
import subprocess
import sys
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import toy_drafts as toy
from convert_command import Command, codes, digests, stored
from safetensors.numpy import load_file, save_file

from convert import from_torch
from eagle3_jax import cli
from eagle3_jax.checkpoint import read_manifest

DIALECTS = Path(__file__).parent / "data/dialects"


@pytest.fixture
def command(tmp_path, capsys) -> Command:
    return Command(tmp_path, capsys)


def test_every_tensor_is_a_copy_under_its_canonical_name(command, tmp_path):
    folder = toy.write(tmp_path / "draft")
    manifest = command.converted(folder)
    written = command.stored()
    for name, canonical in toy.CANONICAL.items():
        assert written[canonical].tobytes() == toy.tensors()[name].tobytes()
        assert manifest["tensors"][canonical]["from"] == [name]
        assert manifest["origins"][canonical] == f"tensor {name}"
    assert written["draft_to_target"].tolist() == toy.target_ids().tolist()
    assert written["draft_to_target"].dtype == np.int32
    assert set(written) == {*toy.CANONICAL.values(), "draft_to_target"}
    assert manifest["ignored"] == {"t2d": "checked: true for the 64 target ids of the map"}


def test_the_manifest_says_what_was_read(command, tmp_path):
    manifest = command.converted(toy.write(tmp_path / "draft"))
    config = manifest["config"]
    sizes = {"hidden_size": 64, "target_hidden_size": 64, "num_aux": 3, "intermediate_size": 96}
    sizes |= {"num_heads": 4, "num_kv_heads": 2, "head_dim": 16}
    sizes |= {"vocab_size": 256, "draft_vocab_size": 64, "rms_norm_eps": 1e-5}
    assert {key: config[key] for key in sizes} == sizes
    assert config["aux_boundaries"] == [2, 4, 5]
    assert manifest["aux"] == {"ids": [1, 3, 4], "convention": "output", "boundaries": [2, 4, 5]}
    assert manifest["origins"]["aux_boundaries"] == (
        "config:eagle_config.eagle_aux_hidden_state_layer_ids, default:eagle_config"
    )
    assert manifest["origins"]["norm_before_residual"] == "default:official"
    assert manifest["origins"]["embed"] == "target: no embed_tokens.weight in the file"
    assert manifest["origins"]["hidden_size"] == "tensor fc.weight"
    assert manifest["dialect"] == "official"
    assert manifest["format"] == 2
    ids = toy.target_ids()
    assert manifest["d2t"] == {
        "kind": "offset",
        "sorted": True,
        "range": [int(ids.min()), int(ids.max())],
        "coverage": 0.25,
        "first": [[i, int(ids[i] - i), int(ids[i])] for i in range(4)],
    }
    assert manifest["source_config"] == toy.config()
    assert manifest["source_tensors"]["fc.weight"] == ["float32", [64, 192]]
    assert set(manifest["sources"]) == {"config.json", "model.safetensors"}
    assert {"eagle3_jax", "jax", "orbax-checkpoint", "python"} <= set(manifest["versions"])
    assert "target" not in manifest
    assert "null" not in json.dumps({k: v for k, v in manifest.items() if k != "source_config"})


def test_source_digests_are_sha256sum_s(command, tmp_path):
    folder = toy.write(tmp_path / "draft")
    manifest = command.converted(folder)
    for name, digest in manifest["sources"].items():
        line = subprocess.run(
            ["sha256sum", folder / name], capture_output=True, text=True, check=True
        )
        assert line.stdout.split()[0] == digest


def test_the_report_is_one_page_with_everything_on_it(command, tmp_path):
    status, out, err = command.run(toy.write(tmp_path / "draft"))
    assert (status, err) == (0, "")
    assert len(out.splitlines()) < 60
    assert "\x1b" not in out
    ids = toy.target_ids()
    for line in (
        "official draft, 14 tensors, float32",
        "hidden_size          D = 64",
        "norm_before_residual false        default:official",
        "slot 0: id 1 (output) = boundary 2, after block 2",
        "slot 2: id 4 (output) = boundary 5, after block 5",
        "64 of 256 target ids (25.0%)",
        f"0 +{ids[0]} -> {ids[0]}, 1 +{ids[1] - 1} -> {ids[1]}",
        "rope: base 10000 (config:rope_theta)",
        "t2d: checked",
    ):
        assert line in out


def test_json_prints_the_manifest(command, tmp_path):
    status, out, err = command.run(toy.write(tmp_path / "draft"), "--json")
    assert (status, err) == (0, "")
    printed = json.loads(out)
    assert printed.pop("out") == str(tmp_path / "out")
    assert printed == read_manifest(tmp_path / "out")


def test_json_prints_the_error(command, tmp_path):
    status, out, err = command.run(tmp_path / "absent", "--json")
    assert (status, err) == (2, "")
    assert json.loads(out)["error"]["code"] == "FILE"
    status, out, _ = command.run(tmp_path, "--json", "--dtype", "int8")
    assert (status, json.loads(out)["error"]["code"]) == (2, "USAGE")


def test_usage_errors_are_one_line(command, tmp_path):
    command.refused("USAGE", "invalid choice: 'int8'", tmp_path, "--dtype", "int8")
    command.refused(
        "USAGE", "expected true or false, found 'yes'", tmp_path, "--double-norm", "yes"
    )
    command.refused("USAGE", "expected a number above 0", tmp_path, "--rope-theta", "-1")
    command.refused("USAGE", "expected a number above 0", tmp_path, "--rope-theta", "nan")
    command.refused("USAGE", "unrecognized arguments: --nonsense", tmp_path, "--nonsense")


def test_allow_takes_several_known_codes_only(command, tmp_path):
    folder = toy.write(tmp_path / "draft")
    err = command.refused(
        "USAGE", "--allow VOCAB_T2D_DISAGREES", folder, "--allow", "VOCAB_T2D_DISAGREES"
    )
    assert "VOCAB_MAP_MISSING" in err
    two = ["--allow", "VOCAB_MAP_MISSING", "VOCAB_MAP_ALL_ZERO", "--allow", "WEIGHT_NOT_FINITE"]
    manifest = command.converted(folder, *two)
    assert manifest["options"] == {
        "allow": ["VOCAB_MAP_MISSING", "VOCAB_MAP_ALL_ZERO", "WEIGHT_NOT_FINITE"]
    }
    assert codes(manifest) == []


def test_dtype(command, tmp_path):
    def half(config, tensors):
        for name in tensors:
            if name.startswith("midlayer.mlp"):
                tensors[name] = tensors[name].astype(np.float16)
            elif name.startswith("midlayer"):
                tensors[name] = tensors[name].astype(ml_dtypes.bfloat16)

    folder = toy.write(tmp_path / "draft", half)
    source = load_file(folder / "model.safetensors")
    for dtype in ("keep", "float32", "bfloat16"):
        command.converted(folder, "--dtype", dtype)
        for name, canonical in toy.CANONICAL.items():
            tensor, want = command.stored()[canonical], source[name]
            want = want if dtype == "keep" else want.astype(np.dtype(dtype))
            assert (tensor.dtype, tensor.tobytes()) == (want.dtype, want.tobytes())
        assert command.stored()["draft_to_target"].dtype == np.int32


def test_path_may_be_the_weight_file(command, tmp_path):
    folder = toy.write(tmp_path / "draft")
    whole = command.converted(folder)
    assert digests(command.converted(folder / "model.safetensors")) == digests(whole)
    (folder / "config.json").rename(tmp_path / "config.json")


def test_shards_give_the_same_draft(command, tmp_path):
    whole = command.converted(toy.write(tmp_path / "draft"))
    folder, made = tmp_path / "shards", toy.tensors()
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(toy.config()))
    weight_map = {name: f"m-{i % 2}.safetensors" for i, name in enumerate(made)}
    for file in set(weight_map.values()):
        part = {name: made[name] for name in made if weight_map[name] == file}
        save_file(part, folder / file)
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": weight_map}))
    sharded = command.converted(folder)
    assert digests(sharded) == digests(whole)
    assert set(sharded["sources"]) == {"config.json", index.name, *weight_map.values()}


def test_bin_gives_the_same_draft(command, tmp_path):
    torch = pytest.importorskip("torch")
    folder = toy.write(tmp_path / "draft")
    whole = command.converted(folder)
    state = {name: torch.from_numpy(tensor.copy()) for name, tensor in toy.tensors().items()}
    torch.save(state, folder / "pytorch_model.bin")
    assert codes(command.converted(folder)) == ["FILE_CHOICE"]
    (folder / "model.safetensors").unlink()
    assert digests(command.converted(folder)) == digests(whole)


@pytest.mark.parametrize("name", ["specforge", "speculators", "modelopt"])
def test_checkpoints_their_own_frameworks_saved(command, name, tmp_path):
    flags = ("--double-norm", "true", "--ignore-rope-scaling") if name == "modelopt" else ()
    manifest = command.converted(DIALECTS / name, *flags)
    expected = {
        "specforge": ("official", False, False, "pre_norm", 10000.0, "target", False),
        "speculators": ("speculators", True, True, "post_norm", 1e6, "draft", False),
        "modelopt": ("modelopt", False, False, "pre_norm", 10000.0, "target", True),
    }[name]
    config = manifest["config"]
    assert expected == (
        manifest["dialect"],
        config["norm_before_residual"],
        config["norm_before_fc"],
        config["feedback"],
        config["rope"]["theta"],
        config["embed"],
        config["double_norm"],
    )
    source = load_file(DIALECTS / name / "model.safetensors")
    layer = "midlayer" if name == "specforge" else "layers.0"
    written = command.stored()
    for official, canonical in toy.CANONICAL.items():
        want = source[official.replace("midlayer", layer)]
        assert written[canonical].tobytes() == want.tobytes()
    ids = source["d2t"] + np.arange(24)
    assert written["draft_to_target"].tolist() == ids.tolist()
    used = {n for record in manifest["tensors"].values() for n in record["from"]}
    assert used | set(manifest["ignored"]) == set(source)


def test_an_existing_folder_is_only_replaced_when_it_is_ours(command, tmp_path):
    folder, out = toy.write(tmp_path / "draft"), tmp_path / "out"
    out.mkdir()
    assert command.run(folder)[0] == 0
    first = (out / "draft.json").read_text()
    command.refused("CHECKPOINT", "--force", folder)
    assert command.run(folder, "--force", "--dtype", "bfloat16")[0] == 0
    assert (out / "draft.json").read_text() != first
    (out / "notes.txt").write_text("mine")
    command.refused("CHECKPOINT", "holds 'notes.txt'", folder, "--force")
    assert (out / "notes.txt").read_text() == "mine"


def test_foreign_folders_files_and_links_are_never_replaced(command, tmp_path):
    folder, out = toy.write(tmp_path / "draft"), tmp_path / "out"
    out.write_text("x")
    command.refused("CHECKPOINT", "not a folder", folder, "--force")
    out.unlink()
    out.symlink_to(folder)
    command.refused("CHECKPOINT", "not a folder", folder, "--force")
    out.unlink()
    status = from_torch.main([str(folder), "--out", str(folder), "--force"])
    assert status == 2
    assert sorted(os.listdir(folder)) == ["config.json", "model.safetensors"]


def test_a_failed_write_leaves_nothing(command, tmp_path, monkeypatch):
    folder = toy.write(tmp_path / "draft")

    def fail(*args, **kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("orbax.checkpoint.Checkpointer.save", fail)
    command.refused("CHECKPOINT", "No space left on device", folder)


def test_a_failed_replacement_keeps_the_old_draft(command, tmp_path, monkeypatch):
    folder, out = toy.write(tmp_path / "draft"), tmp_path / "out"
    assert command.run(folder)[0] == 0
    before = stored(out)
    replace = os.replace

    def fail(source, destination):
        if str(source).endswith(".tmp"):
            raise OSError(5, "Input/output error")
        replace(source, destination)

    monkeypatch.setattr("os.replace", fail)
    status, _, err = command.run(folder, "--force", "--dtype", "bfloat16")
    assert (status, err.count("\n")) == (2, 1)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["draft", "out"]
    assert {n: t.tobytes() for n, t in stored(out).items()} == {
        n: t.tobytes() for n, t in before.items()
    }


def test_an_unwritable_parent_is_one_error(command, tmp_path):
    folder = toy.write(tmp_path / "draft")
    (tmp_path / "file").write_text("")
    status = from_torch.main([str(folder), "--out", str(tmp_path / "file/out")])
    assert status == 2
    assert command.capsys.readouterr().err.startswith("error [CHECKPOINT]: ")
    command.refused("FILE", "no such file or folder", tmp_path / "some-org/some-model")


def test_the_command_runs_on_its_own(tmp_path):
    folder = toy.write(tmp_path / "draft")
    for i, command in enumerate((["-m", "convert.from_torch"], ["-m", "eagle3_jax", "convert"])):
        out = tmp_path / f"out{i}"
        arguments = [sys.executable, *command, str(folder), "--out", str(out)]
        done = subprocess.run(arguments, capture_output=True, text=True, check=False)
        assert (done.returncode, done.stderr) == (0, "")
        assert done.stdout.startswith(f"{out}: official draft")
        again = subprocess.run(arguments, capture_output=True, text=True, check=False)
        assert (again.returncode, again.stdout) == (2, "")
        assert again.stderr == f"error [CHECKPOINT]: {out}: exists: --force overwrites it\n"


def test_eagle3_convert_is_the_same_command(tmp_path, capsys):
    folder = toy.write(tmp_path / "draft")
    assert cli.main(["convert", str(folder), "--out", str(tmp_path / "a")]) == 0
    assert from_torch.main([str(folder), "--out", str(tmp_path / "b")]) == 0
    a, b = (read_manifest(tmp_path / name) for name in "ab")
    assert a == b
    capsys.readouterr()
    assert cli.main([]) == 2
    assert capsys.readouterr().err.startswith("error [USAGE]: ")

"""Faults that users met, each on a tiny draft, as `eagle3 inspect` must show them."""

import json

import numpy as np
import pytest
import toy_drafts as toy
from convert_command import Command, stored
from test_inspect import IDS, Inspector, codes

D, E, A, V, W = toy.D, toy.E, toy.A, toy.V, toy.W


@pytest.fixture
def inspector(capsys) -> Inspector:
    return Inspector(capsys)


def without_ids(config, tensors):
    del config["eagle_config"]


def refused(inspector, *argv):
    found = inspector.found(*argv)
    assert (found["status"], found["usable"]) == (2, False)
    status, out, err = inspector.text(*argv)
    assert (status, err) == (2, "")
    assert found["error"]["message"] in out
    return found["error"]["code"], found["error"]["message"]


@pytest.mark.parametrize(("depth", "list_"), [(4, "(2, 2, 1)"), (1, "(2, 0, -2)")])
def test_e3_006_the_default_does_not_fit_a_tiny_target(inspector, tmp_path, depth, list_):
    folder = toy.write(tmp_path / "draft", without_ids)
    target = toy.write_target(tmp_path / "target", num_hidden_layers=depth)
    code, message = refused(inspector, folder, "--target", target)
    assert code == "AUX_IDS_INVALID"
    assert list_ in message


def test_e3_007_stating_the_default_changes_nothing(inspector, tmp_path, capsys):
    def stated(config, tensors):
        config["eagle_config"] = {IDS: [1, 3, 4]}

    target = toy.write_target(tmp_path / "target")
    tables, weights = [], []
    for name, change in (("omitted", without_ids), ("stated", stated)):
        folder = toy.write(tmp_path / name, change)
        found = inspector.found(folder, "--target", target)
        tables.append([row["boundary"] for row in found["aux"]])
        assert [row["engines"]["sglang-0.5.23"] for row in found["aux"]] == [2, 4, 5]
        command = Command(tmp_path, capsys)
        command.out = tmp_path / f"{name}-converted"
        command.converted(folder, "--target", target)
        weights.append({n: t.tobytes() for n, t in stored(command.out).items()})
    assert tables == [[2, 4, 5], [2, 4, 5]]
    assert weights[0] == weights[1]


def test_e3_014_a_map_of_zeros(inspector, tmp_path):
    def whole(config, tensors):
        config["draft_vocab_size"] = V
        tensors |= {
            "lm_head.weight": toy.normal(V, D),
            "d2t": np.zeros(V, np.int64),
            "t2d": np.ones(V, np.bool_),
        }

    def part(config, tensors):
        tensors |= {"d2t": np.zeros(W, np.int64), "t2d": np.arange(V) < W}

    def unstated(config, tensors):
        del config["draft_vocab_size"]
        return toy.full_vocabulary(tensors)

    found = inspector.found(toy.write(tmp_path / "a", whole))
    assert found["status"] == 0
    assert found["vocabulary"]["meaning"] == "identity: the whole vocabulary"
    found = inspector.found(toy.write(tmp_path / "b", part))
    assert (found["status"], codes(found, "warning")) == (1, ["VOCAB_MAP_ALL_ZERO"])
    assert found["vocabulary"]["meaning"] == f"the first {W} target ids only: suspicious"
    found = inspector.found(toy.write(tmp_path / "c", unstated))
    assert found["status"] == 0
    size = next(row for row in found["sizes"] if row["name"] == "draft_vocab_size")
    assert (size["used"], size["config"], size["origin"]) == (V, None, "tensor lm_head.weight")


def test_e3_015_four_sizes_of_one_vocabulary(inspector, tmp_path):
    def change(config, tensors):
        ids = np.sort(np.random.default_rng(3).choice(250, W, replace=False)).astype(np.int64)
        tensors |= {
            "embed_tokens.weight": toy.normal(V, D),
            "d2t": ids - np.arange(W),
            "t2d": np.isin(np.arange(250), ids),
        }

    folder = toy.write(tmp_path / "draft", change)
    target = tmp_path / "target"
    target.mkdir()
    text = {"hidden_size": E, "num_hidden_layers": 8, "vocab_size": 250}
    (target / "config.json").write_text(json.dumps({"text_config": text}))
    found = inspector.found(folder, "--target", target)
    assert found["status"] == 1
    assert codes(found, "warning") == ["VOCAB_SIZE_DISAGREES"] * 2
    assert found["vocabulary"]["sizes"] == {
        "t2d": 250,
        "draft's config": 256,
        "draft's embedding rows": 256,
        "target's config": 250,
        "used": 250,
    }
    assert found["vocabulary"]["range"][1] < 250


def test_e3_027_a_layer_count_copied_from_the_target(inspector, tmp_path):
    def change(config, tensors):
        config["num_hidden_layers"] = 8

    found = inspector.found(toy.write(tmp_path / "draft", change))
    assert (found["status"], codes(found, "warning")) == (1, ["CONFIG_LAYER_COUNT"])
    size = next(row for row in found["sizes"] if row["name"] == "num_layers")
    assert (size["used"], size["config"], size["agrees"]) == (1, 8, False)


def test_e3_029_another_targets_draft(inspector, tmp_path):
    folder = toy.write(tmp_path / "draft")
    target = toy.write_target(tmp_path / "target", hidden_size=128)
    code, message = refused(inspector, folder, "--target", target)
    assert code == "CONFIG_WRONG_PAIR"
    assert "expects target width 64 (3 states" in message


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_e3_087_an_embedding_that_differs_in_part(inspector, tmp_path, dtype):
    theirs = toy.normal(V, D).astype(dtype)

    def change(config, tensors):
        ours = theirs.copy()
        ours[:128] += dtype(1)
        tensors["embed_tokens.weight"] = ours

    folder = toy.write(tmp_path / "draft", change)
    target = toy.write_target(tmp_path / "target", {"model.embed_tokens.weight": theirs})
    found = inspector.found(folder, "--target", target)
    assert found["target"]["rows_different"] == [[0, 128]]
    line = next(f for f in found["findings"] if f["code"] == "WEIGHT_OWNER")
    assert line["message"].startswith("own embedding: 128 of 256 rows differ")
    assert "rows 0..127" in line["message"]
    assert found["status"] == 1
    taken = {name: [one["code"] for one in lines] for name, lines in found["engines"].items()}
    assert "ENGINE_EMBED" in taken["sglang-0.5.23"]
    assert "ENGINE_EMBED" not in taken["vllm"]


def test_e3_087_an_embedding_that_is_the_targets(inspector, tmp_path):
    def change(config, tensors):
        tensors["embed_tokens.weight"] = toy.normal(V, D)

    folder = toy.write(tmp_path / "draft", change)
    target = toy.write_target(tmp_path / "target", {"embed.weight": toy.normal(4, 4)})
    assert "rows_different" not in inspector.found(folder, "--target", target)["target"]
    made = {"embed_tokens.weight": toy.normal(V, D)}
    target = toy.write_target(tmp_path / "other", made, tie_word_embeddings=True)
    found = inspector.found(folder, "--target", target)
    assert (found["status"], found["target"]["rows_different"]) == (0, [])
    severities = {one["severity"] for one in found["engines"]["sglang-0.5.23"]}
    assert severities == {"note"}


def test_e3_100_a_draft_of_one_state(inspector, tmp_path):
    def single(config, tensors):
        config["eagle_config"] = {"use_aux_hidden_state": False}
        tensors["fc.weight"] = toy.normal(D, E)

    def eagle1(config, tensors):
        config["eagle_config"] = {"use_aux_hidden_state": False}
        tensors["fc.weight"] = toy.normal(D, 2 * E)

    code, message = refused(inspector, toy.write(tmp_path / "single", single))
    assert code == "ARCH_SINGLE_STATE"
    assert "use_aux_hidden_state is false" in message
    assert "one state through fc: not run here" in message
    code, message = refused(inspector, toy.write(tmp_path / "eagle1", eagle1))
    assert code == "ARCH_SINGLE_STATE"
    assert "EAGLE-1 style, embedding and state through fc: not run here" in message

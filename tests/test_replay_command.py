"""`eagle3 replay` from files: a record, a converted draft, a target of a family nobody knows."""

import json

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from scripted_draft import Sizes
from scripted_records import Request, Scripted, make

from convert import from_torch
from eagle3_jax.command import Parser, run_command
from eagle3_jax.config import ConfigError, TreeConfig
from eagle3_jax.record import RecordWriter
from eagle3_jax.replay import replay
from eagle3_jax.replays import command as replay_command
from eagle3_jax.replays.cost import sweep
from eagle3_jax.replays.shared import read_shared


def eagle3(*argv: str) -> int:
    parser = Parser(prog="eagle3")
    replay_command.add_parser(parser.add_subparsers(required=True))
    return run_command(parser, lambda args: args.run(args), ["replay", *map(str, argv)])


class Files:
    """A scripted record, its draft through the converter, its target."""

    def __init__(self, folder, made: Scripted, *, embedding: bool = True):
        self.made = made
        self.target = made.write_target(folder / "target")
        self.torch = made.write_draft(folder / "torch", norm_before_residual=None, norm_output=None)
        self.draft = folder / "draft"
        status = from_torch.main([str(self.torch), "--out", str(self.draft)])
        assert status == 0
        self.record = folder / "record.safetensors"
        record = made.record
        with RecordWriter(
            self.record,
            boundaries=record.boundaries,
            kind=record.kind,
            vocab_size=record.vocab_size,
            num_layers=record.num_layers,
            embedding=self.target if embedding else None,
            partial_context=record.partial_context,
        ) as writer:
            for sequence in record.sequences:
                writer.append(sequence)

    def __iter__(self):
        return iter((self.record, "--draft", self.draft))


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> Files:
    made = make(
        [Request(tags=("code",)), Request(tokens=200, tags=("chat",))],
        sizes=Sizes(window=128),
        top=4,
    )
    return Files(tmp_path_factory.mktemp("replay"), made)


def page(capsys, *argv) -> dict:
    assert eagle3(*argv, "--json") == 0
    return json.loads(capsys.readouterr().out)


def test_any_target(files, capsys):
    """E3-103: only the embedding is read, of a `foo_moe` whose layers are not even there."""
    found = page(capsys, *files, "--tree", "3,1", "--tree", "3,4,16")
    tree = found["trees"][0]
    assert tree["tree"] == {"num_steps": 3, "topk": 1, "num_draft_tokens": 4}
    assert tree["accept_lengths"] == [[a + 1 for a in row] for row in files.made.accepted]
    assert found["exact"] is True
    assert found["window"] == 128
    assert {row["label"] for row in tree["by_tag"]} == {"chat", "code"}
    assert found["trees"][1]["tree"]["topk"] == 4
    assert 1 < found["trees"][1]["accept_length"] < 4


def test_pinned_in_two_dtypes(files, capsys):
    found = page(capsys, *files, "--tree", "3", "--mode", "pinned", "--also-dtype", "bfloat16")
    engine = found["trees"][0]["engine"]
    assert engine["equal"] == engine["compared"] == sum(map(len, files.made.accepted))
    assert found["also"]["dtype"] == "bfloat16"
    gap = found["also"]["trees"][0]["accept_length"] - found["trees"][0]["accept_length"]
    assert abs(gap) < 0.3


def test_the_page(files, capsys, tmp_path):
    trace = tmp_path / "trace.jsonl"
    cost = "decode=10,draft=0.5,verify=4:11,verify=64:20"
    argv = [*files, "--cost", cost, "--temperature", "1", "--trace", trace]
    assert eagle3(*argv) == 0
    out = capsys.readouterr().out
    assert "3/1/4 in detail" in out
    assert "best: --speculative-num-steps" in out
    assert "beyond max_position_embeddings=128" in out
    assert "expected accept length by temperature" in out
    assert trace.read_text().count('"type":"round"') == sum(map(len, files.made.accepted))


def test_a_sweep_ends_with_flags(files, capsys, monkeypatch, request):
    everything = sweep(64)
    assert len(everything) > 40
    if not request.config.getoption("--exhaustive"):
        few = [t for t in everything if t.num_steps in (2, 3) and t.topk < 4]
        monkeypatch.setattr("eagle3_jax.replays.command.sweep", lambda rows: few)
    argv = [*files, "--sweep", "--cost", "decode=10,draft=0.5,verify=4:11,verify=64:30"]
    found = page(capsys, *argv)
    lengths = {tuple(t["tree"].values()): t["accept_length"] for t in found["trees"]}
    assert lengths[3, 1, 4] == pytest.approx(files.made.accept_length)
    assert lengths[3, 2, 8] >= lengths[2, 2, 4]
    speeds = [p["speedup"] for p in found["priced"]]
    assert speeds == sorted(speeds, reverse=True)


def test_kept_draft_kv(files, capsys):
    found = page(capsys, *files, "--keep-draft-kv")
    assert found["refresh"] is False
    assert found["trees"][0]["accept_length"] < files.made.accept_length - 0.5


ERRORS = {
    "tree": (["--tree", "3,4"], "num_draft_tokens is required"),
    "tree text": (["--tree", "3x"], "STEPS,TOPK,NODES"),
    "both": (["--tree", "3", "--sweep"], "not allowed with"),
    "cost": (["--cost", "decode=1"], "draft is missing"),
    "nodes": (
        ["--tree", "3,4,16", "--cost", "decode=1,draft=1,verify=4:2"],
        "4 nodes, the tree has 16",
    ),
    "topk": (["--tree", "1,100,50"], "exceeds the draft vocabulary of 64"),
    "kept": (["--tree", "3,4,8", "--keep-draft-kv"], "chains in free mode"),
    "target": (["--target", "nowhere"], "nowhere: no such folder"),
    "trace": (["--trace", "no/such/folder/trace"], "no folder"),
    "engine": (["--as-engine", "vroom"], "vroom"),
}


@pytest.mark.parametrize("name", ERRORS)
def test_one_line_for_an_error(files, name, capsys):
    more, message = ERRORS[name]
    assert eagle3(*files, *more) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert message in captured.err
    assert captured.err.count("\n") == 1
    assert eagle3(*files, *more, "--json") == 2
    assert message in json.loads(capsys.readouterr().out)["error"]["message"]


def test_a_record_without_a_target(tmp_path, capsys):
    files = Files(tmp_path, make(Request(tokens=60)), embedding=False)
    assert eagle3(*files) == 2
    assert "give --target" in capsys.readouterr().err
    found = page(capsys, *files, "--target", files.target, "--tree", "3")
    assert found["trees"][0]["accept_length"] == pytest.approx(files.made.accept_length)


def test_fewer_states_than_the_draft_takes(tmp_path, capsys):
    """E3-098 as a command."""
    files = Files(tmp_path, make(Request(tokens=60), capture=(2,)))
    assert eagle3(*files) == 2
    assert "needs 3 states, got 1" in capsys.readouterr().err


def test_shared_matrices_by_structure(tmp_path):
    """Composite configs, other names, tied heads; refusals name tensor and shape."""
    made = make(Request(tokens=40))
    config = made.draft().config
    folder = tmp_path / "vision"
    folder.mkdir()
    text = {"hidden_size": 64, "vocab_size": 256, "num_hidden_layers": 8}
    (folder / "config.json").write_text(json.dumps({"model_type": "x", "text_config": text}))
    weights = {
        "language_model.model.embed_tokens.weight": made.embedding,
        "vision.patch.weight": np.zeros((3, 3), np.float32),
    }
    save_file(weights, folder / "model.safetensors")
    shared = read_shared(folder, config)
    assert shared is not None
    assert np.array_equal(np.asarray(shared.embedding), made.embedding)
    assert shared.head.shape == (0, 64)
    found = replay(made.record, made.draft(), TreeConfig(3), shared=shared)
    assert found.trees[0].accept_length == made.accept_length
    save_file({"other.weight": made.embedding}, folder / "model.safetensors")
    with pytest.raises(ConfigError, match="no single tensor is the target's embedding"):
        read_shared(folder, config)
    small = made.write_target(tmp_path / "small", vocab_size=200)
    tensors = load_file(small / "model.safetensors")
    tensors["model.embed_tokens.weight"] = tensors["model.embed_tokens.weight"][:200].copy()
    save_file(tensors, small / "model.safetensors")
    with pytest.raises(ConfigError, match="has 200 rows, the draft's vocabulary 256"):
        read_shared(small, config)
    wide = made.write_target(tmp_path / "wide", hidden_size=128)
    with pytest.raises(ConfigError, match="not a pair"):
        read_shared(wide, config)

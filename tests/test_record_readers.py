"""Records from trainers' files, SGLang's dumper and `.npz`, each written as its tool writes it."""

import gzip
import zipfile
from pathlib import Path

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy
from record_commands import fails, run

import eagle3_jax as e3
from eagle3_jax import record
from eagle3_jax.layers import Rows
from eagle3_jax.records import arrays
from eagle3_jax.records.types import RecordError
from eagle3_jax.wirings.explain import engine_tree

DATA = Path(__file__).parent / "data/records"
T, E, LAYERS = 10, 6, 8


def states(rows: int = T, slots: int = 3, seed: int = 1) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(rows, slots, E)).astype(np.float32)


def ids() -> np.ndarray:
    return np.arange(20, 20 + T, dtype=np.int64)


def mask() -> np.ndarray:
    return np.array([0, 0, 0, 1, 1, 1, 0, 0, 1, 1], np.int64)


def read(command: str, source: Path, out: Path, *flags: object):
    boundaries = () if "--boundaries" in flags else ("--boundaries", "2,4,5")
    kind = () if "--kind" in flags else ("--kind", "text")
    assert run(command, source, "--out", out, *boundaries, *kind, *flags) == 0
    return record.load(out)


def save_npz(path: Path, **changes):
    arrays = {"tokens": ids(), "aux": states(), "prompt_length": 4} | changes
    np.savez(path, **{name: value for name, value in arrays.items() if value is not None})


def test_npz(tmp_path):
    folder = tmp_path / "states"
    folder.mkdir()
    save_npz(
        folder / "2.npz",
        loss_mask=mask(),
        top_ids=np.ones((T, 2), int),
        top_logprobs=np.zeros((T, 2)),
    )
    save_npz(folder / "10.npz", aux=states(seed=2).reshape(T, -1), prompt_length=None)
    save_npz(
        folder / "1.npz",
        tokens=None,
        input_ids=ids(),
        aux=None,
        hidden_states=states(seed=3)[None],
        positions=np.arange(T),
        boundaries=np.array([2, 4, 5]),
    )
    found = read(
        "from-npz", folder, tmp_path / "r", "--prompt-length", 5, "--tag", "mine"
    ).sequences
    assert [s.name for s in found] == ["1", "2", "10"]
    assert [s.prompt_length for s in found] == [4, 4, 5]
    assert np.array_equal(found[1].loss_mask, mask() == 1)
    assert found[1].top_ids.shape == (T, 2)
    for item, seed in zip(found, (3, 1, 2), strict=True):
        assert np.array_equal(item.aux, states(seed=seed))
        assert np.array_equal(item.tokens, ids())
        assert item.tags == ("mine",)


def test_npz_holds_the_bits_of_bfloat16(tmp_path):
    values = states().astype(ml_dtypes.bfloat16)
    save_npz(tmp_path / "a.npz", aux=values.view(np.uint16))
    found = read("from-npz", tmp_path / "a.npz", tmp_path / "r").sequences[0].aux
    assert found.dtype == ml_dtypes.bfloat16
    assert np.array_equal(found, values)


def test_npz_of_a_cached_prefix(tmp_path, capsys):
    save_npz(tmp_path / "a.npz", aux=states(T - 3), positions=np.arange(3, T))
    given = ["from-npz", tmp_path / "a.npz", "--boundaries", "2,4,5", "--kind", "greedy"]
    message = fails(capsys, *given, "--out", tmp_path / "r")
    assert "draft context incomplete: no states for positions 0..2" in message
    assert run(*given, "--out", tmp_path / "r", "--partial-context") == 0
    assert record.load(tmp_path / "r").sequences[0].first == 3
    assert "context    partial in 1 sequences" in capsys.readouterr().out


NPZ_FAULTS = {
    "gap": (
        {"tokens": np.arange(64), "aux": states(40), "positions": [*range(16), *range(40, 64)]},
        "gap 16..39",
    ),
    "rows": ({"aux": states(5)}, "5 rows of states from position 0 for 10 tokens, expected 9"),
    "positions": ({"positions": np.arange(4)}, "4 positions for 10 rows"),
    "no states": ({"aux": None}, "has neither, expected one of ('aux', 'hidden_states')"),
    "two": ({"input_ids": ids()}, "expected one of ('tokens', 'input_ids')"),
    "unknown": ({"logits": np.ones(3)}, "key 'logits', expected aux, boundaries"),
    "boundaries": ({"boundaries": [1, 2, 3]}, "boundaries [1, 2, 3], --boundaries names [2, 4, 5]"),
    "mask": ({"loss_mask": np.ones(3)}, "loss_mask is [3], expected [10]"),
    "pickled": ({"tokens": np.array([{}, 1], object)}, "not a .npz file of plain arrays"),
    "prompt": ({"prompt_length": 1.5}, "prompt_length is no whole number"),
    "ids": ({"tokens": np.ones(T)}, "tokens are float64 [10], expected ids [T]"),
    "nan": ({"aux": np.full((T, 3, E), np.nan)}, "10 rows with NaN or infinity, at positions 0..9"),
}


@pytest.mark.parametrize("name", NPZ_FAULTS)
def test_npz_that_does_not_fit(name, tmp_path, capsys):
    changes, message = NPZ_FAULTS[name]
    save_npz(tmp_path / "a.npz", **changes)
    given = ["--boundaries", "2,4,5", "--kind", "text", "--out", tmp_path / "r"]
    assert message in fails(capsys, "from-npz", tmp_path / "a.npz", *given)
    assert [p.name for p in tmp_path.iterdir()] == ["a.npz"]


def test_no_files(tmp_path, capsys):
    given = ["--boundaries", "2,4,5", "--kind", "text", "--out", tmp_path / "r"]
    assert "no *.npz in it" in fails(capsys, "from-npz", tmp_path, *given)
    assert "no such file or folder" in fails(capsys, "from-npz", tmp_path / "x", *given)
    (tmp_path / "a.npz").write_bytes(b"PK\x03\x04 nothing")
    assert "not a .npz file" in fails(capsys, "from-npz", tmp_path / "a.npz", *given)


def save_speculators(path: Path, slots: int = 4, **changes):
    tensors = {"token_ids": ids(), "hidden_states": states(slots=slots)} | changes
    safetensors.numpy.save_file(tensors, path)


def test_speculators(tmp_path, capsys):
    folder = tmp_path / "hidden_states"
    folder.mkdir()
    for i in (0, 2, 11):
        save_speculators(folder / f"hs_{i}.safetensors")
    layers = ["--num-layers", LAYERS]
    for number, boundaries in enumerate(("2,4,5", "2,4,5,8", "default")):
        flags = ["--boundaries", boundaries, *layers]
        found = read("from-speculators", folder, tmp_path / str(number), *flags)
        assert found.boundaries == (2, 4, 5, 8)
        assert [s.name for s in found.sequences] == ["hs_0", "hs_2", "hs_11"]
        assert np.array_equal(found.sequences[1].aux, states(slots=4))
    given = ["from-speculators", folder, "--kind", "text", "--out", tmp_path / "r", "--boundaries"]
    assert "boundary L: say L with" in fails(capsys, *given, "2,4,5")
    message = fails(capsys, *given, "2,4", *layers)
    assert "states are [10, 4, 6], expected [rows, 2 * width]" in message
    save_speculators(tmp_path / "hs_0.safetensors", token_ids=ids()[:4])
    given[1] = tmp_path / "hs_0.safetensors"
    assert "10 rows of states from position 0 for 4 tokens" in fails(capsys, *given, "2,4,5,8")
    safetensors.numpy.save_file({"hidden_states": states(slots=4)}, given[1])
    assert "no tensor 'token_ids'" in fails(capsys, *given, "2,4,5,8")
    safetensors.numpy.save_file({"token_ids": ids()}, given[1])
    assert "no tensor 'hidden_states'" in fails(capsys, *given, "2,4,5,8")


def save_torch(path: Path, tensors: dict):
    import torch

    values = {
        k: torch.from_numpy(v) if isinstance(v, np.ndarray) else v for k, v in tensors.items()
    }
    torch.save(values, path)


def specforge(**changes) -> dict:
    found = {
        "input_ids": ids(),
        "loss_mask": mask(),
        "aux_hidden_state": states().reshape(1, T, 3 * E),
        "hidden_state": states(slots=1, seed=7).reshape(1, T, E),
    }
    return {k: v for k, v in (found | changes).items() if v is not None}


def test_specforge(tmp_path, capsys):
    pytest.importorskip("torch")
    folder = tmp_path / "rows_0-5000"
    folder.mkdir()
    for i in (0, 3, 20):
        save_torch(folder / f"data_{i}.ckpt", specforge())
    (folder / "data_4.ckpt.gz").write_bytes(gzip.compress((folder / "data_3.ckpt").read_bytes()))
    found = read("from-specforge", tmp_path, tmp_path / "r", "--vocab-size", 40)
    assert [s.name for s in found.sequences] == ["data_0", "data_3", "data_4", "data_20"]
    for item in found.sequences:
        assert np.array_equal(item.tokens, ids())
        assert np.array_equal(item.aux, states())
        assert np.array_equal(item.loss_mask, mask() == 1)
        assert item.prompt_length == 3
    flags = ["--boundaries", "2,4,5,final_norm", "--num-layers", LAYERS]
    both = read("from-specforge", folder / "data_0.ckpt", tmp_path / "b", *flags)
    assert both.boundaries == (2, 4, 5, "final_norm")
    assert np.array_equal(both.sequences[0].aux[:, 3:], states(slots=1, seed=7))

    given = ["--boundaries", "2,4,5", "--kind", "text", "--out", tmp_path / "x"]
    bad = tmp_path / "bad.ckpt"
    for changes, message in (
        ({"aux_hidden_state": None}, "no 'aux_hidden_state', found input_ids, loss_mask"),
        ({"loss_mask": mask() * 0}, "1 of 1 loss masks (100%) count no token"),
        ({"loss_mask": mask()[1:]}, "loss_mask is [9], expected [10]"),
        ({"input_ids": [1, 2]}, "is a list, expected a dense tensor"),
        (
            {"input_ids": ids()[:4], "loss_mask": None},
            "10 rows of states from position 0 for 4 tokens",
        ),
    ):
        save_torch(bad, specforge(**changes))
        assert message in fails(capsys, "from-specforge", bad, *given)
    (tmp_path / "cut.ckpt.gz").write_bytes(gzip.compress(b"x" * 100)[:-9])
    assert "cannot be unpacked" in fails(capsys, "from-specforge", tmp_path / "cut.ckpt.gz", *given)
    bad.write_bytes(b"no pickle")
    assert "torch cannot load it" in fails(capsys, "from-specforge", bad, *given)


def test_modelopt(tmp_path):
    torch = pytest.importorskip("torch")
    folder = tmp_path / "dump"
    folder.mkdir()
    aux = torch.from_numpy(states()).to(torch.bfloat16)
    for name, extra in {
        "post": {},
        "pre": {"base_hidden_prenorm": True, "loss_mask": torch.from_numpy(mask())},
    }.items():
        data = {
            "input_ids": torch.from_numpy(ids()),
            "hidden_states": torch.from_numpy(states(slots=1, seed=7)[:, 0]).to(torch.bfloat16),
            "aux_hidden_states": aux.reshape(T, 3 * E),
            "conversation_id": f"{name}-1",
        }
        torch.save(data | extra, folder / f"{name}.pt")
    found = read("from-modelopt", folder, tmp_path / "r", "--num-layers", LAYERS)
    assert [s.name for s in found.sequences] == ["post-1", "pre-1"]
    expected = states().astype(ml_dtypes.bfloat16)
    assert all(np.array_equal(s.aux, expected) for s in found.sequences)
    assert found.sequences[0].loss_mask is None
    assert found.sequences[1].prompt_length == 3
    last = states(slots=1, seed=7).astype(ml_dtypes.bfloat16)
    for name, boundary in (("post", "final_norm"), ("pre", "8")):
        flags = ["--boundaries", f"2,4,5,{boundary}", "--num-layers", LAYERS]
        one = read("from-modelopt", folder / f"{name}.pt", tmp_path / name, *flags)
        assert np.array_equal(one.sequences[0].aux[:, 3:], last)


@pytest.fixture
def dumped(tmp_path) -> Path:
    """Steps 0-7 of SGLang 0.5.23: a prompt of 8, a chain of 3, one round and half the next."""
    folder = tmp_path / "exp"
    with zipfile.ZipFile(DATA / "sglang_dumper.zip") as archive:
        archive.extractall(folder)
    return folder


def target_states(target, tokens) -> np.ndarray:
    given = jnp.asarray([list(map(int, tokens))], jnp.int32)
    rows, cache = Rows.prefill(1, len(tokens)), target.new_cache(1, len(tokens))
    return np.asarray(target.states(given, rows, cache, (2, 4, 5))[1][0])


def test_the_dumper_with_a_draft(dumped, tmp_path, tiny_target, sglang_models):
    pytest.importorskip("torch")
    flags = ["--kind", "greedy", "--target", sglang_models / "target"]
    (item,) = read("from-dumper", dumped, tmp_path / "r", *flags).sequences
    assert item.tokens.tolist() == [5, 17, 33, 91, 120, 7, 100, 45, 40, 93, 71]
    assert (item.prompt_length, item.first) == (8, 0)
    assert item.rounds == (record.EngineRound(8, 1, (93, 93, 93), 71),)
    assert engine_tree(record.load(tmp_path / "r")) == e3.TreeConfig(3)
    expected = target_states(tiny_target, item.tokens)[: len(item.aux)]
    assert len(item.aux) == 10
    assert np.abs(item.aux - expected).max() < 5e-6


def test_the_dumper_with_trees_in_a_batch(tmp_path, tiny_target, tiny_draft, sglang_models):
    """Three requests under the tree 3/4/8, 12 new tokens each, which end in different passes."""
    pytest.importorskip("torch")
    with zipfile.ZipFile(DATA / "sglang_dumper_tree.zip") as archive:
        archive.extractall(tmp_path / "exp")
    flags = ["--kind", "greedy", "--target", sglang_models / "target"]
    found = read("from-dumper", tmp_path / "exp", tmp_path / "r", *flags).sequences
    assert engine_tree(record.load(tmp_path / "r")) == e3.TreeConfig(3, 4, 8)
    prompts = [[5, 17, 33, 91, 120, 7, 100, 45], [64, 3, 88, 21, 9], [77]]
    ours = e3.speculate(
        tiny_target,
        tiny_draft,
        prompts,
        max_new_tokens=12,
        tree=e3.TreeConfig(3, 4, 8),
        draft_attention="beam_slots",
        stop_token_ids=(),
    )
    for i, (item, prompt) in enumerate(zip(found, prompts, strict=True)):
        assert item.prompt_length == len(prompt)
        text = prompt + ours.tokens[i]
        assert len(item.tokens) > len(prompt) + 5
        assert item.tokens.tolist() == text[: len(item.tokens)]
        assert [r.accepted + 1 for r in item.rounds] == ours.accept_lengths[i][:-1]
        assert [text[r.start + r.accepted + 1] for r in item.rounds] == [
            r.bonus for r in item.rounds
        ]
        expected = target_states(tiny_target, item.tokens)[: len(item.aux)]
        assert np.abs(item.aux - expected).max() < 5e-6


def test_the_dumper_without_a_draft(dumped, tmp_path, tiny_target, sglang_models):
    pytest.importorskip("torch")
    for path in dumped.iterdir():
        if "fc.inputs" in path.name or not path.name.startswith("step=0_"):
            path.unlink()
    flags = ["--kind", "greedy", "--target", sglang_models / "target"]
    (item,) = read("from-dumper", dumped, tmp_path / "r", *flags).sequences
    assert item.tokens.tolist() == [5, 17, 33, 91, 120, 7, 100, 45]
    assert item.rounds is None
    assert np.abs(item.aux - target_states(tiny_target, item.tokens)).max() < 5e-6


def test_a_dump_of_a_multi_axis_target(dumped, tmp_path, capsys):
    """Positions [3, N]: the same three times for text; an image's tell no token."""
    torch = pytest.importorskip("torch")
    given = ["--boundaries", "2,4,5", "--kind", "greedy"]
    (plain,) = read("from-dumper", dumped, tmp_path / "plain", *given).sequences
    files = list(dumped.glob("*name=positions*"))
    for file in files:
        found = torch.load(file, weights_only=False)
        found["value"] = found["value"][None].repeat(3, 1)
        torch.save(found, file)
    (item,) = read("from-dumper", dumped, tmp_path / "r", *given).sequences
    np.testing.assert_array_equal(item.tokens, plain.tokens)
    np.testing.assert_array_equal(item.aux, plain.aux)
    found = torch.load(files[0], weights_only=False)
    found["value"][2] += 1
    torch.save(found, files[0])
    said = fails(capsys, "from-dumper", dumped, *given, "--out", tmp_path / "s")
    assert "which differ by axis: an image's do not say which token a row is" in said


def test_a_dump_that_does_not_do(dumped, tmp_path, capsys):
    pytest.importorskip("torch")
    given = ["--boundaries", "2,4,5", "--kind", "greedy", "--out", tmp_path / "r"]
    one = next(dumped.glob("step=3_*name=positions*"))
    content = one.read_bytes()
    one.unlink()
    assert "step 3: no 'positions' was dumped" in fails(capsys, "from-dumper", dumped, *given)
    one.write_bytes(content)
    other = Path(str(one).replace("rank=0", "rank=1"))
    other.write_bytes(content)
    assert "ranks 0, 1: give one rank's folder" in fails(capsys, "from-dumper", dumped, *given)
    other.unlink()
    assert "expected one: a rank's dump" in fails(capsys, "from-dumper", dumped, dumped, *given)
    assert "no such folder" in fails(capsys, "from-dumper", tmp_path / "none", *given)
    (tmp_path / "none").mkdir()
    assert "no step=*.pt files" in fails(capsys, "from-dumper", tmp_path / "none", *given)
    for path in dumped.iterdir():
        if "non_intrusive" in path.name:
            path.unlink()
    assert "no target states: neither" in fails(capsys, "from-dumper", dumped, *given)


def test_the_flags_of_a_target(tmp_path, capsys, sglang_models):
    save_npz(tmp_path / "a.npz")
    given = ["from-npz", tmp_path / "a.npz", "--kind", "text", "--out", tmp_path / "r"]
    target = ["--target", sglang_models / "target"]
    three = ["--boundaries", "2,4,5"]
    assert "states of the target's width 32" in fails(capsys, *given, *three, *target)
    assert "--num-layers is 9, --target says 8" in fails(
        capsys, *given, *three, *target, "--num-layers", 9
    )
    assert "boundary 5 lies outside the target's 0..4" in fails(
        capsys, *given, *three, "--num-layers", 4
    )
    assert "id 20 at position 0 is outside" in fails(capsys, *given, *three, "--vocab-size", 20)
    assert "found '2,x'" in fails(capsys, *given, "--boundaries", "2,x")
    assert "repeat a boundary" in fails(capsys, *given, "--boundaries", "2,2,4")
    assert "no such folder" in fails(capsys, *given, *three, "--target", tmp_path / "no")


@pytest.mark.parametrize("damage", ["empty", "bytes"])
def test_a_damaged_npz_is_one_error(damage, tmp_path):
    """NumPy raises EOFError for an empty file, zlib its own error for wrong compressed bytes."""
    path = tmp_path / "a.npz"
    np.savez_compressed(path, aux=np.random.default_rng(0).random(4096))
    whole = bytearray(path.read_bytes())
    whole[100:200] = b"\xff" * 100
    path.write_bytes(b"" if damage == "empty" else whole)
    with pytest.raises(RecordError, match=r"a\.npz: not a \.npz file of plain arrays"):
        next(arrays.read_npz([path], None))  # type: ignore[arg-type]

"""Weight files: what is read equals what safetensors and torch wrote; damage is named."""

import json
import os
import struct
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from eagle3_jax.files import torchfile
from eagle3_jax.files.shards import FileError, has_weights, open_weights, read_json

TENSORS = {
    "a.weight": np.arange(12, dtype=np.float32).reshape(3, 4),
    "b.weight": np.arange(6).astype(ml_dtypes.bfloat16).reshape(2, 3),
    "c": np.arange(5, dtype=np.int64) - 2,
    "d": np.array([True, False, True]),
    "e": np.arange(3, dtype=np.float16),
    "f": np.zeros((0, 7), np.float32),
    "g": np.array(3.5, np.float32),
}


def write_raw(path: Path, header: object, data: bytes = b"", length: int | None = None) -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text) if length is None else length) + text + data)
    return path


def entry(dtype: str, shape: list[int], start: int, stop: int) -> dict:
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, stop]}


def write_index(folder: Path, weight_map: object, name: str = "model.safetensors.index.json"):
    (folder / name).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def check_equal(source, expected: dict[str, np.ndarray]):
    assert sorted(source.names()) == sorted(expected)
    for name, tensor in expected.items():
        assert source.shape(name) == tensor.shape
        assert source.dtype(name) == tensor.dtype.name
        read = source.read(name)
        assert read.dtype == tensor.dtype
        assert read.shape == tensor.shape
        assert read.tobytes() == tensor.tobytes()
        assert not read.flags.writeable or read.size == 0


def test_every_dtype_and_shape_is_read_as_written(tmp_path):
    save_file(TENSORS, tmp_path / "model.safetensors", metadata={"format": "pt"})
    source = open_weights(tmp_path)
    check_equal(source, load_file(tmp_path / "model.safetensors"))
    assert source.files == (tmp_path / "model.safetensors",)
    assert source.notes == ()
    assert source.where("c") == str(tmp_path / "model.safetensors")
    check_equal(open_weights(tmp_path / "model.safetensors"), TENSORS)


def test_unaligned_tensors_are_read(tmp_path):
    values = np.arange(5, dtype=np.float64)
    header = {"x": entry("U8", [3], 0, 3), "y": entry("F64", [5], 3, 43)}
    text = json.dumps(header).encode().ljust(200)
    path = write_raw(tmp_path / "m.safetensors", text, bytes(3) + values.tobytes())
    read = open_weights(path).read("y")
    assert read.flags.aligned
    assert read.tolist() == values.tolist()


def test_opening_reads_the_header_alone(tmp_path, monkeypatch):
    save_file(TENSORS, tmp_path / "model.safetensors")

    def refuse(*args, **kwargs):
        raise AssertionError("mapped before a tensor was asked for")

    monkeypatch.setattr("mmap.mmap", refuse)
    assert open_weights(tmp_path).shape("a.weight") == (3, 4)


def test_a_file_replaced_after_opening_is_refused(tmp_path):
    save_file(TENSORS, tmp_path / "model.safetensors")
    source = open_weights(tmp_path)
    os.truncate(tmp_path / "model.safetensors", 50)
    with pytest.raises(FileError, match="changed since it was opened"):
        source.read("a.weight")


@pytest.fixture
def sharded(tmp_path):
    save_file({"a": TENSORS["a.weight"]}, tmp_path / "model-00001-of-00002.safetensors")
    save_file({"b": TENSORS["c"]}, tmp_path / "model-00002-of-00002.safetensors")
    return tmp_path


def test_shards_with_an_index(sharded):
    first, second = (f"model-0000{i}-of-00002.safetensors" for i in (1, 2))
    write_index(sharded, {"a": first, "b": second})
    expected = {"a": TENSORS["a.weight"], "b": TENSORS["c"]}
    source = open_weights(sharded)
    check_equal(source, expected)
    assert [file.name for file in source.files] == [first, second, "model.safetensors.index.json"]
    assert source.where("b") == str(sharded / second)
    check_equal(open_weights(sharded / "model.safetensors.index.json"), expected)


def test_numbered_shards_without_an_index(sharded):
    source = open_weights(sharded)
    check_equal(source, {"a": TENSORS["a.weight"], "b": TENSORS["c"]})
    with pytest.raises(FileError, match="no file has a tensor 'x'"):
        source.read("x")
    (sharded / "model-00001-of-00002.safetensors").unlink()
    with pytest.raises(FileError, match=r"shard model-00001-of-00002\.safetensors is missing"):
        open_weights(sharded)


def test_a_numbered_set_with_a_gap_names_the_missing_shard(tmp_path):
    for i in (1, 3):
        save_file({str(i): TENSORS["c"]}, tmp_path / f"model-0000{i}-of-00003.safetensors")
    with pytest.raises(FileError, match=r"shard model-00002-of-00003\.safetensors is missing"):
        open_weights(tmp_path)


def test_hub_cache_links_are_followed(tmp_path):
    """A snapshot holds links to blobs outside it: the index's own paths stay inside."""
    blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshots/abc"
    blobs.mkdir()
    snapshot.mkdir(parents=True)
    save_file({"a": TENSORS["c"]}, blobs / "1234")
    (snapshot / "x.safetensors").symlink_to("../../blobs/1234")
    write_index(snapshot, {"a": "x.safetensors"})
    check_equal(open_weights(snapshot), {"a": TENSORS["c"]})


@pytest.mark.parametrize(
    ("weight_map", "message"),
    [
        ({"a": "../x.safetensors"}, "not a file of this folder"),
        ({"a": "/etc/passwd"}, "not a file of this folder"),
        ({"a": "C:\\x.safetensors"}, "not a file of this folder"),
        ({"a": ""}, "not a file of this folder"),
        ({"a": 3}, "not a file of this folder"),
        ({"a": "gone.safetensors"}, "shard gone.safetensors is missing, it holds tensor 'a'"),
        ({"a": "model-00002-of-00002.safetensors"}, "lists tensor 'a' in model-00002-of-00002"),
        ({"z": "model-00001-of-00002.safetensors"}, "lists tensor 'z'"),
        (
            {"a": "model-00001-of-00002.safetensors"},
            "model-00002-of-00002.safetensors is not listed",
        ),
        ({}, "no weight_map"),
        ([1], "no weight_map"),
        ({"a": "notes.txt"}, "unknown kind of weight file"),
    ],
)
def test_a_wrong_index_is_refused(sharded, weight_map, message):
    (sharded / "notes.txt").write_text("")
    write_index(sharded, weight_map)
    with pytest.raises(FileError, match=message):
        open_weights(sharded)


def test_a_tensor_in_two_shards_names_both(tmp_path):
    for name in ("x", "y"):
        save_file({"a": TENSORS["c"], name: TENSORS["c"]}, tmp_path / f"{name}.safetensors")
    write_index(tmp_path, {"a": "x.safetensors", "x": "x.safetensors", "y": "y.safetensors"})
    with pytest.raises(FileError, match=r"'a' is in two files: .*x\.safetensors and .*y\.safet"):
        open_weights(tmp_path)


def test_a_tensor_no_index_lists_is_refused(tmp_path):
    save_file({"a": TENSORS["c"], "b": TENSORS["c"]}, tmp_path / "x.safetensors")
    write_index(tmp_path, {"a": "x.safetensors"})
    with pytest.raises(FileError, match=r"holds tensor 'b', which .*index\.json does not list"):
        open_weights(tmp_path)


def test_what_a_folder_holds_decides(tmp_path):
    with pytest.raises(FileError, match=r"no weights: .* found nothing"):
        open_weights(tmp_path)
    assert not has_weights(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(FileError, match=r"no weights: .* found config\.json"):
        open_weights(tmp_path)
    assert not has_weights(tmp_path)
    save_file(TENSORS, tmp_path / "model.safetensors")
    assert has_weights(tmp_path)
    save_file(TENSORS, tmp_path / "consolidated.safetensors")
    with pytest.raises(FileError, match=r"2 weight files and no index: .*: name the file"):
        open_weights(tmp_path)
    check_equal(open_weights(tmp_path / "consolidated.safetensors"), TENSORS)
    with pytest.raises(FileError, match="no such file or folder"):
        open_weights(tmp_path / "absent")
    with pytest.raises(FileError, match="unknown kind of weight file"):
        open_weights(tmp_path / "config.json")


GOOD = {"x": entry("F32", [2], 0, 8)}


@pytest.mark.parametrize(
    ("header", "data", "message"),
    [
        (GOOD, b"1234567", "ends at byte 8 of the data, the file has 7: truncated"),
        (GOOD, b"123456789", "take 8 bytes, the file has 9 bytes of data"),
        ({"x": entry("F32", [3], 0, 8)}, bytes(8), r"8 bytes for F32 \[3\], expected 12"),
        ({"x": entry("F9", [2], 0, 8)}, bytes(8), "dtype 'F9' is not one of"),
        ({"x": entry("F32", [2, -1], 0, 8)}, bytes(8), "not a list of sizes"),
        ({"x": entry("F32", [True], 0, 4)}, bytes(4), "not a list of sizes"),
        ({"x": entry("F32", [2], 8, 0)}, bytes(8), "-8 bytes for"),
        ({"x": entry("F32", [0, 1 << 60], 0, 0)}, b"", "larger than any array"),
        ({"x": {"dtype": "F32"}}, b"", "expected dtype, shape and data_offsets"),
        ({"x": 3}, b"", "expected dtype, shape and data_offsets"),
        ({"x": {**GOOD["x"], "data_offsets": [0]}}, bytes(8), "not two positions"),
        (
            {"x": entry("F32", [2], 0, 8), "y": entry("F32", [2], 4, 12)},
            bytes(12),
            "starts at byte 4, expected 8: it overlaps 'x'",
        ),
        (
            {"x": entry("F32", [2], 0, 8), "y": entry("F32", [1], 12, 16)},
            bytes(16),
            "starts at byte 12, expected 8: it leaves a hole after 'x'",
        ),
        ({"__metadata__": 3, **GOOD}, bytes(8), "__metadata__ is 3"),
        (b'{"x": 1, "x": 2}', b"", "key 'x' is given twice"),
        (b"[1]", b"", "JSON list, expected an object"),
        (b"{nonsense", b"", "not JSON: .* line 1 column 2"),
        (b"[" * 100_000, b"", "not usable JSON"),
        (b'{"x": ' + b"9" * 5000 + b"}", b"", "not usable JSON"),
        (b"\xff\xfe", b"", "not UTF-8"),
    ],
)
def test_a_damaged_header_is_named(tmp_path, header, data, message):
    path = write_raw(tmp_path / "m.safetensors", header, data)
    with pytest.raises(FileError, match=message) as caught:
        open_weights(path)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize(
    ("length", "message"),
    [(1 << 62, "header claims"), (99, "header claims"), (1 << 27, "header claims")],
)
def test_an_absurd_header_length_is_refused(tmp_path, length, message):
    with pytest.raises(FileError, match=message):
        open_weights(write_raw(tmp_path / "m.safetensors", GOOD, bytes(8), length))


def test_an_empty_and_a_foreign_file_are_refused(tmp_path):
    path = tmp_path / "m.safetensors"
    path.write_bytes(b"")
    with pytest.raises(FileError, match="0 bytes, too short"):
        open_weights(path)
    path.write_bytes(b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 1\n")
    with pytest.raises(FileError, match="not a safetensors file"):
        open_weights(path)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b"", "not JSON"),
        (b"[]", "holds a JSON list"),
        (b'{"a": 1,}', "not JSON: .* line 1"),
        (b'{"a": 1, "a": 2}', "key 'a' is given twice"),
        (b"\x80", "not UTF-8"),
    ],
)
def test_read_json_names_the_problem(tmp_path, text, message):
    path = tmp_path / "config.json"
    path.write_bytes(text)
    with pytest.raises(FileError, match=message) as caught:
        read_json(path)
    assert str(path) in str(caught.value)


def test_read_json_reads_an_object(tmp_path):
    path = tmp_path / "config.json"
    path.write_bytes(b'\xef\xbb\xbf{"a": [1, null]}')
    assert read_json(path) == {"a": [1, None]}
    with pytest.raises(FileError, match="no such file"):
        read_json(tmp_path / "other.json")
    with pytest.raises(FileError, match="cannot be read"):
        read_json(tmp_path)


def test_without_torch_a_bin_names_the_extra(tmp_path, monkeypatch):
    (tmp_path / "pytorch_model.bin").write_bytes(b"PK\x03\x04")
    monkeypatch.setitem(__import__("sys").modules, "torch", None)
    with pytest.raises(FileError, match=r"pip install 'eagle3-jax\[torch\]'"):
        open_weights(tmp_path)


@pytest.fixture
def torch():
    return pytest.importorskip("torch")


def as_torch(torch, tensors):
    made = {}
    for name, tensor in tensors.items():
        if tensor.dtype == ml_dtypes.bfloat16:
            made[name] = torch.from_numpy(tensor.view(np.int16)).view(torch.bfloat16)
        else:
            made[name] = torch.from_numpy(tensor.copy())
    return made


@pytest.mark.parametrize("zipped", [True, False])
def test_bin_files_equal_what_torch_saved(torch, tmp_path, zipped):
    path = tmp_path / "pytorch_model.bin"
    torch.save(as_torch(torch, TENSORS), path, _use_new_zipfile_serialization=zipped)
    check_equal(open_weights(tmp_path), TENSORS)
    check_equal(open_weights(path), TENSORS)


def test_bin_shards_and_views(torch, tmp_path):
    whole = torch.arange(20.0).reshape(4, 5)
    torch.save({"a": whole[:, 1:3], "b": whole.T}, tmp_path / "pytorch_model-00001-of-00002.bin")
    torch.save({"c": whole}, tmp_path / "pytorch_model-00002-of-00002.bin")
    names = {"a": 1, "b": 1, "c": 2}
    files = {name: f"pytorch_model-0000{part}-of-00002.bin" for name, part in names.items()}
    write_index(tmp_path, files, "pytorch_model.bin.index.json")
    values = np.arange(20, dtype=np.float32).reshape(4, 5)
    check_equal(open_weights(tmp_path), {"a": values[:, 1:3], "b": values.T, "c": values})


def test_safetensors_win_over_bin_and_say_so(torch, tmp_path):
    save_file(TENSORS, tmp_path / "model.safetensors")
    torch.save({"other": torch.zeros(1)}, tmp_path / "pytorch_model.bin")
    source = open_weights(tmp_path)
    check_equal(source, TENSORS)
    assert source.notes == ("safetensors were read; passed over: pytorch_model.bin",)


def test_bin_files_that_are_not_plain_tensors_are_refused(torch, tmp_path):
    path = tmp_path / "x.bin"
    for value, message in (
        ({"model": {"a": torch.zeros(1)}}, "entry 'model' is a dict"),
        ([torch.zeros(1)], "holds a list"),
        ({}, "holds a dict"),
        ({"a": torch.zeros(2).to_sparse()}, "not a plain dense tensor"),
        ({3: torch.zeros(1)}, "entry 3"),
        ({"a": Path("x")}, "torch cannot load it weights-only"),
    ):
        torch.save(value, path)
        with pytest.raises(FileError, match=message):
            open_weights(path)
    for data in (b"", b"garbage", b"PK\x03\x04garbage"):
        path.write_bytes(data)
        with pytest.raises(FileError, match="torch cannot load it weights-only") as caught:
            open_weights(path)
        assert "\n" not in str(caught.value)


def test_a_pickle_that_would_run_code_is_refused(torch, tmp_path):
    marker = tmp_path / "ran"

    class Evil:
        def __reduce__(self):
            return os.mkdir, (str(marker),)

    torch.save({"a": Evil()}, tmp_path / "x.bin")
    with pytest.raises(FileError, match="weights-only"):
        open_weights(tmp_path / "x.bin")
    assert not marker.exists()


def test_torch_suffixes_are_all_opened(torch, tmp_path):
    for suffix in torchfile.TORCH_SUFFIXES:
        torch.save(as_torch(torch, TENSORS), tmp_path / f"x{suffix}")
        check_equal(open_weights(tmp_path / f"x{suffix}"), TENSORS)

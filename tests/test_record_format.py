"""Records on disk: what is written is read, mapped and lazily; damage is one clear error."""

import dataclasses
import json
import os
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy

from eagle3_jax import record
from eagle3_jax.config import ConfigError
from eagle3_jax.files.source import FileError
from eagle3_jax.record import EngineRound, RecordError, RecordSequence, RecordWriter

FORMS = ("one.safetensors", "many.record")
BOUNDARIES = (2, 4, "final_norm")


def sequence(seed: int, tokens: int = 9, dtype=np.float32, **changes) -> RecordSequence:
    rng = np.random.default_rng(seed)
    rows = tokens - 1
    given = RecordSequence(
        tokens=rng.permutation(50)[:tokens].astype(np.int32),
        aux=rng.normal(size=(rows, 3, 6)).astype(dtype),
        prompt_length=3,
        loss_mask=rng.random(tokens) < 0.7,
        top_ids=rng.integers(0, 50, (rows, 2)).astype(np.int32),
        top_logprobs=-rng.random((rows, 2)).astype(np.float32),
        rounds=(EngineRound(3, 2, (7, 8, 9), 4), EngineRound(6, 0, None, None)),
        name=f"request {seed}",
        tags=("chat", "long"),
    )
    return dataclasses.replace(given, **changes)


def write(path: Path, sequences, **options):
    given = {"boundaries": BOUNDARIES, "kind": "text", "vocab_size": 50, "num_layers": 8}
    with RecordWriter(path, **(given | options)) as writer:
        for item in sequences:
            writer.append(item)
    return path


def same(a: RecordSequence, b: RecordSequence) -> bool:
    for field in dataclasses.fields(RecordSequence):
        x, y = getattr(a, field.name), getattr(b, field.name)
        if isinstance(x, np.ndarray):
            if x.dtype != y.dtype or x.tobytes() != y.tobytes() or x.shape != y.shape:
                return False
        elif x != y:
            return False
    return True


@pytest.mark.parametrize("dtype", [np.float32, np.float16, np.float64, ml_dtypes.bfloat16])
@pytest.mark.parametrize("form", FORMS)
def test_what_is_written_is_read(tmp_path, form, dtype):
    bare = {"loss_mask": None, "top_ids": None, "top_logprobs": None, "rounds": None}
    items = [sequence(i, 8 + i, dtype) for i in range(4)]
    items.append(sequence(9, 3, dtype, **bare, name="", tags=()))
    path = write(
        tmp_path / form,
        items,
        part_bytes=400,
        provenance={"reader": "test"},
        embedding=tmp_path / "target",
    )
    found = record.load(path)
    assert (found.boundaries, found.kind) == (BOUNDARIES, "text")
    assert (found.vocab_size, found.num_layers) == (50, 8)
    assert found.embedding == tmp_path / "target"
    assert found.provenance["reader"] == "test"
    assert len(found.sequences) == len(items)
    assert all(same(a, b) for a, b in zip(found.sequences, items, strict=True))
    assert all(isinstance(s.aux, np.memmap) and not s.aux.flags.writeable for s in found.sequences)


def test_sequences_are_indexed_as_a_list_is(tmp_path):
    found = record.load(write(tmp_path / "r", map(sequence, range(5)), part_bytes=200)).sequences
    assert found[-1].name == found[4].name == "request 4"
    assert [s.name for s in found[1:5:2]] == ["request 1", "request 3"]
    assert [s.name for s in found[1:][:2]] == ["request 1", "request 2"]
    with pytest.raises(IndexError):
        found[5]


@pytest.mark.parametrize("form", FORMS)
def test_the_parts_are_plain_safetensors(tmp_path, form):
    path = write(tmp_path / form, [sequence(1), sequence(2)])
    part = path if path.is_file() else path / "000000.safetensors"
    tensors = safetensors.numpy.load_file(part)
    assert np.array_equal(tensors["000001.aux"], sequence(2).aux)
    assert np.array_equal(tensors["000000.tokens"], sequence(1).tokens)
    assert record.load(part).sequences[1].name == "request 2"


def test_a_header_may_outgrow_the_room_left_for_it(tmp_path):
    items = [sequence(i, name=f"{'long ' * 40}{i}") for i in range(150)]
    path = write(tmp_path / "r.safetensors", items)
    assert int.from_bytes(path.read_bytes()[:8], "little") > 64 << 10
    assert all(same(a, b) for a, b in zip(record.load(path).sequences, items, strict=True))


def test_loading_reads_no_state(tmp_path):
    path = write(tmp_path / "r", map(sequence, range(3)), part_bytes=1)
    os.truncate(path / "000002.safetensors", 100)
    found = record.load(path)
    assert same(found.sequences[1], sequence(1))
    with pytest.raises(FileError, match=r"000002\.safetensors"):
        found.sequences[2]


def test_states_do_not_stay_in_memory(tmp_path):
    """600 MB of states through one process, written and read: its peak grows by far less."""
    import subprocess
    import sys

    script = """
import resource, sys
from pathlib import Path
import numpy as np
from eagle3_jax import record
peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
tokens = np.arange(2000, dtype=np.int32)
states = np.ones((1999, 3, 512), np.float32)
states[:, 0, 0] = np.arange(1999)
before = peak()
with record.RecordWriter(Path(sys.argv[1]), boundaries=(1, 2, 3), kind="text") as writer:
    for _ in range(50):
        writer.append(record.RecordSequence(tokens, states, 0))
written = peak()
total = 0.0
for sequence in record.load(sys.argv[1]).sequences:
    total += float(sequence.aux.sum(dtype=np.float64))
assert total == 50 * states.sum(dtype=np.float64)
print(written - before, peak() - before)
"""
    path = tmp_path / "big.record"
    done = subprocess.run(
        [sys.executable, "-c", script, str(path)], capture_output=True, text=True, check=True
    )
    writing, both = map(int, done.stdout.split())
    assert sum(p.stat().st_size for p in path.iterdir()) > 600e6
    assert writing < 150_000
    assert both < 200_000


@pytest.mark.parametrize("form", FORMS)
def test_nothing_is_left_of_a_write_that_failed(tmp_path, form):
    def half():
        yield sequence(1)
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        write(tmp_path / form, half())
    assert list(tmp_path.iterdir()) == []


def test_a_refused_sequence_cannot_be_ignored(tmp_path):
    bad = sequence(2, aux=np.full((8, 3, 6), np.nan, np.float32))

    def stubborn():
        with RecordWriter(tmp_path / "r", boundaries=BOUNDARIES, kind="text") as writer:
            writer.append(sequence(1))
            with pytest.raises(RecordError, match="NaN"):
                writer.append(bad)

    with pytest.raises(RecordError, match="refused half-way"):
        stubborn()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("form", FORMS)
def test_only_a_record_is_replaced_and_only_by_force(tmp_path, form):
    path = write(tmp_path / form, [sequence(1)])
    with pytest.raises(RecordError, match="--force"):
        write(path, [sequence(2)])
    assert record.load(path).sequences[0].name == "request 1"
    write(path, [sequence(2)], force=True)
    assert record.load(path).sequences[0].name == "request 2"
    assert [p.name for p in tmp_path.iterdir()] == [form]


def test_a_folder_of_something_else_is_never_replaced(tmp_path):
    (tmp_path / "r").mkdir()
    (tmp_path / "r" / "thesis.txt").write_text("years of work")
    with pytest.raises(RecordError, match="never overwritten"):
        write(tmp_path / "r", [sequence(1)], force=True)
    (tmp_path / "r.safetensors").write_text("notes")
    with pytest.raises(RecordError, match="never overwritten"):
        write(tmp_path / "r.safetensors", [sequence(1)], force=True)
    with pytest.raises(RecordError, match="no such folder"):
        write(tmp_path / "no" / "r", [sequence(1)])
    with pytest.raises(RecordError, match="no sequences"):
        write(tmp_path / "empty", [])


def test_sequences_share_width_and_dtype(tmp_path):
    other = sequence(2, aux=np.ones((8, 3, 7), np.float32))
    with pytest.raises(RecordError, match="width 7, expected float32 of width 6"):
        write(tmp_path / "r", [sequence(1), other])
    with pytest.raises(RecordError, match="float16"):
        write(tmp_path / "r", [sequence(1), sequence(2, dtype=np.float16)])


def edit_index(change):
    def edit(path: Path):
        index = json.loads((path / "record.json").read_text())
        change(index)
        (path / "record.json").write_text(json.dumps(index))

    return edit


DAMAGE = {
    "no index": (lambda path: (path / "record.json").unlink(), "no record.json"),
    "not JSON": (lambda path: (path / "record.json").write_text("{"), "not JSON"),
    "lost part": (lambda path: (path / "000001.safetensors").unlink(), "000001.safetensors: no"),
    "newer": (edit_index(lambda i: i.update(format=2)), "format 2, this version reads 1"),
    "kind": (edit_index(lambda i: i.update(kind="magic")), "kind is 'magic'"),
    "no boundaries": (edit_index(lambda i: i.update(boundaries=[])), "names no boundaries"),
    "boundaries": (edit_index(lambda i: i.update(boundaries=[1, 2, 99])), "boundary 99"),
    "no kind": (edit_index(lambda i: i.pop("kind")), "KeyError"),
    "parts": (edit_index(lambda i: i.update(parts={})), "parts is {}"),
    "path": (
        edit_index(lambda i: i["parts"][0].update(file="../x.safetensors")),
        "not a file of this folder",
    ),
    "vocabulary": (edit_index(lambda i: i.update(vocab_size="many")), "vocab_size is 'many'"),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_a_damaged_index_is_one_error(tmp_path, name):
    path = write(tmp_path / "r", map(sequence, range(2)), part_bytes=1)
    damage, message = DAMAGE[name]
    damage(path)
    with pytest.raises((RecordError, FileError)) as error:
        record.load(path)
    assert message in str(error.value)
    assert str(path) in str(error.value)


def test_an_index_that_disagrees_with_its_parts(tmp_path):
    path = write(tmp_path / "r", map(sequence, range(3)), part_bytes=1)
    edit_index(lambda i: i["parts"][1].update(sequences=2))(path)
    with pytest.raises(RecordError, match="1 sequences at boundaries"):
        record.load(path).sequences[1]
    edit_index(lambda i: i.update(boundaries=[1, 2, 3]))(path)
    with pytest.raises(RecordError, match="at boundaries"):
        record.load(path).sequences[0]
    edit_index(lambda i: i["parts"][1].update(i["parts"][0]))(path)
    with pytest.raises(RecordError, match="listed more than once"):
        record.load(path)


def test_any_broken_byte_of_a_header_is_an_error_or_harmless(tmp_path):
    path = write(tmp_path / "r.safetensors", [sequence(1)])
    good = path.read_bytes()
    end = 8 + len(good[8 : 8 + (64 << 10)].rstrip())
    rng = np.random.default_rng(5)
    refused = 0
    for _ in range(400):
        at, value = int(rng.integers(0, end)), int(rng.integers(0, 256))
        path.write_bytes(good[:at] + bytes([value]) + good[at + 1 :])
        try:
            for item in record.load(path).sequences:
                np.asarray(item.aux).sum()
        except (ConfigError, FileError):
            refused += 1
    assert refused > 150


def test_other_files_are_no_records(tmp_path):
    plain = tmp_path / "x.safetensors"
    safetensors.numpy.save_file({"a": np.ones(3, np.float32)}, plain)
    with pytest.raises(RecordError, match="not a record"):
        record.load(plain)
    with pytest.raises(RecordError, match="no such record"):
        record.load(tmp_path / "nothing")

"""Our dumps in SGLang's format, tensor by tensor against dumps that SGLang itself wrote."""

import collections
import pickle
import zipfile
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from crosscheck_data import TREES, dump_folder

import eagle3_jax as e3
from eagle3_jax.crosscheck.dumping import write_sglang_dump
from eagle3_jax.crosscheck.types import CrosscheckError
from eagle3_jax.files import torchsave

PROMPTS = [
    [5, 17, 33, 91, 120, 7, 100, 45],
    [64, 3, 88, 21, 9],
    [11, 12, 13, 14, 15, 16, 17, 18, 19, 20, 21, 22],
    [77],
]
ROUNDING = 1e-5
DTYPES = {"FloatStorage": np.float32, "LongStorage": np.int64}


class Unpickler(pickle.Unpickler):
    """Reads a torch file of float32 and int64 tensors without torch, as torch's format says."""

    def __init__(self, archive: zipfile.ZipFile):
        self.archive = archive
        self.root = archive.namelist()[0].split("/")[0]
        super().__init__(archive.open(f"{self.root}/data.pkl"))

    def find_class(self, module, name):
        known = {
            ("torch._utils", "_rebuild_tensor_v2"): self.rebuild,
            ("collections", "OrderedDict"): collections.OrderedDict,
        }
        return name if module == "torch" else known[module, name]

    def persistent_load(self, pid):
        kind, storage, key, device, count = pid
        assert (kind, device) == ("storage", "cpu")
        data = np.frombuffer(self.archive.read(f"{self.root}/data/{key}"), DTYPES[storage])
        assert len(data) == count
        return data

    @staticmethod
    def rebuild(storage, offset, size, stride, requires_grad, hooks):
        assert (requires_grad, hooks) == (False, {})
        strides = [step * storage.itemsize for step in stride]
        return np.lib.stride_tricks.as_strided(storage[offset:], size, strides)


def load(path: Path) -> dict:
    with zipfile.ZipFile(path) as archive:
        return Unpickler(archive).load()


def by_place(folder: Path) -> dict[tuple[int, str, str], Path]:
    """Files by step, name and layer."""
    found = {}
    for path in folder.glob("*.pt"):
        fields = dict(part.split("=", 1) for part in path.stem.split("___"))
        place = (int(fields["step"]), fields["name"], fields.get("layer_id", ""))
        assert place not in found
        found[place] = path
    return found


@pytest.fixture(scope="module")
def dumped(tmp_path_factory, tiny_target, tiny_draft):
    """`dumped(kind, count, tokens)`: our dump of the first `count` prompts, made once."""
    made = {}

    def dump(kind: str, count: int, tokens: int) -> Path:
        key = (kind, count, tokens)
        if key not in made:
            folder = tmp_path_factory.mktemp("ours") / "dump"
            write_sglang_dump(
                folder,
                tiny_target,
                tiny_draft,
                PROMPTS[:count],
                max_new_tokens=tokens,
                tree=e3.TreeConfig(*TREES[kind]),
                batch_size=count,
                draft_attention="beam_slots",
                stop_token_ids=(),
            )
            made[key] = folder
        return made[key]

    return dump


def differing(ours: Path, theirs: Path) -> list[tuple[int, str, str]]:
    """Places where a tensor of SGLang's dump has another shape or value in ours, in order."""
    mine, found = by_place(ours), by_place(theirs)
    wrong = []
    for place in found:
        if place[1] == "req_pool_indices":  # which rows of a pool were free
            continue
        a, b = load(mine[place])["value"], load(found[place])["value"]
        assert a.dtype == b.dtype
        close = ROUNDING * max(1.0, np.abs(b).max()) if a.dtype == np.float32 else 0
        if a.shape != b.shape or np.abs(a - b).max() > close:
            wrong.append(place)
    return sorted(wrong, key=lambda place: load(found[place])["meta"]["dump_index"])


@pytest.mark.parametrize(
    ("kind", "name", "count", "tokens"),
    [
        pytest.param("chain", "right", 1, 10, marks=pytest.mark.exhaustive),
        ("tree", "right", 1, 10),
        ("tree", "right_batch4", 4, 4),
    ],
)
def test_every_tensor_is_sglangs(kind, name, count, tokens, dumped, tmp_path):
    ours, theirs = dumped(kind, count, tokens), dump_folder(kind, name, tmp_path / "theirs")
    assert differing(ours, theirs) == []
    places = by_place(theirs)
    assert {p[0] for p in by_place(ours)} == {p[0] for p in places}
    assert set(by_place(ours)) - set(places) == {
        (step, "non_intrusive__model.embed_tokens.output", "") for step, _, _ in places
    }


@pytest.mark.parametrize(
    ("fault", "first"),
    [
        ("draft_position", (2, "positions", "")),
        ("aux_one_early", (0, "non_intrusive__logits_processor.inputs.4.0", "")),
        ("norm_before_residual", (1, "non_intrusive__logits_processor.inputs.4", "")),
        ("d2t_as_ids", (2, "input_ids", "")),
    ],
)
def test_a_fault_of_sglang_is_seen_where_it_begins(fault, first, dumped, tmp_path):
    wrong = differing_upto(dumped("tree", 1, 10), dump_folder("tree", fault, tmp_path / "theirs"))
    assert wrong[0] == first


def differing_upto(ours: Path, theirs: Path) -> list[tuple[int, str, str]]:
    """As `differing`, over the steps of the first round."""
    for path in theirs.glob("*.pt"):
        if int(path.name.split("___")[0].removeprefix("step=")) > 4:
            path.unlink()
    return differing(ours, theirs)


def test_names_and_meta_are_the_dumpers(dumped):
    path = by_place(dumped("tree", 1, 10))[
        2, "non_intrusive__model.layers.0.hidden_norm.inputs.0", "0"
    ]
    assert "___rank=0___" in path.name
    assert path.name.endswith("___recompute_status=disabled___layer_id=0.pt")
    found = load(path)
    assert found["value"].shape == (4, 32)
    assert found["meta"]["step"] == 2
    assert found["meta"]["layer_id"] == 0
    assert f"dump_index={found['meta']['dump_index']}___" in path.name


def test_our_reader_takes_our_dump(dumped):
    pytest.importorskip("torch")
    from eagle3_jax.crosscheck.dumps import read_dump

    run = read_dump(dumped("tree", 4, 4))
    assert sorted(request.prompt for request in run.requests) == sorted(PROMPTS)
    assert all(request.rounds for request in run.requests)


def test_torch_loads_what_we_save(tmp_path):
    torch = pytest.importorskip("torch")
    arrays = {
        name: np.arange(6).reshape(2, 3).astype(name)
        for name in (*("float64", "float32", "float16"), *("int64", "int32", "int16", "int8"))
    }
    arrays |= {"uint8": np.uint8([255]), "bool": np.array([True, False])}
    arrays["bfloat16"] = np.array([[1.5, -2.0]], ml_dtypes.bfloat16)
    plain = {"none": None, "yes": True, "no": False, "f": -0.1, "i": [0, 1, -1, 127, 128, 2**40]}
    value = {"a": arrays, "plain": plain, "s": "é\u2028", "t": (1, "x"), "e": {}, "l": []}
    strided = np.arange(12, dtype=np.float32).reshape(3, 4)[:, ::2].T
    value |= {"strided": strided, "scalar": np.array(3), "empty": np.zeros((0, 4), np.float32)}
    torchsave.save(value, tmp_path / "x.pt")
    for options in ({}, {"mmap": True}):
        found = torch.load(tmp_path / "x.pt", weights_only=True, **options)
        for name, array in arrays.items():
            tensor = found["a"].pop(name)
            assert str(tensor.dtype) == f"torch.{name}"
            assert tensor.float().numpy().tolist() == array.astype(np.float32).tolist()
        assert found.pop("strided").numpy().tolist() == strided.tolist()
        assert found.pop("scalar").item() == 3
        assert found.pop("empty").shape == (0, 4)
        assert found == {"a": {}, "plain": plain, "s": "é\u2028", "t": (1, "x"), "e": {}, "l": []}


@pytest.mark.parametrize("value", [{"x": {1, 2}}, {"x": np.array(["a"])}, {"x": np.complex64([1])}])
def test_what_has_no_form_is_refused(tmp_path, value):
    with pytest.raises(TypeError, match="has no"):
        torchsave.save(value, tmp_path / "x.pt")
    assert list(tmp_path.iterdir()) == []


def test_no_folder_is_overwritten(tmp_path, tiny_target, tiny_draft):
    tree = e3.TreeConfig(3)
    with pytest.raises(CrosscheckError, match="exists: name a new folder"):
        write_sglang_dump(tmp_path, tiny_target, tiny_draft, [[1]], max_new_tokens=4, tree=tree)
    gone = tmp_path / "a/b"
    with pytest.raises(CrosscheckError, match="no such folder"):
        write_sglang_dump(gone, tiny_target, tiny_draft, [[1]], max_new_tokens=4, tree=tree)
    assert list(tmp_path.iterdir()) == []


def test_prompts_one_after_the_other(dumped, tmp_path, tiny_target, tiny_draft):
    """Alone, each prompt's steps are those of its own dump."""
    folder = tmp_path / "two"
    write_sglang_dump(
        folder,
        tiny_target,
        tiny_draft,
        [PROMPTS[0], PROMPTS[0]],
        max_new_tokens=10,
        tree=e3.TreeConfig(*TREES["tree"]),
        draft_attention="beam_slots",
        stop_token_ids=(),
    )
    alone, both = by_place(dumped("tree", 1, 10)), by_place(folder)
    steps = 1 + max(step for step, _, _ in alone)
    assert len(both) == 2 * len(alone)
    for (step, name, layer), path in alone.items():
        value = load(path)["value"]
        for begins in (0, steps):
            found = load(both[begins + step, name, layer])["value"]
            if name == "req_pool_indices":
                assert found.tolist() == [1 + (begins > 0)]
            else:
                assert np.array_equal(found, value)

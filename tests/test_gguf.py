"""GGUF to a Hugging Face folder: the real target bit for bit, a tiny one feature by feature."""

import hashlib
import json
import os
import sys
from pathlib import Path

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Kind
from real_model import smollm2_folder
from safetensors import safe_open
from safetensors.numpy import load_file
from tiny_gguf import HEAD_DIM, HEADS, HIDDEN, KV_HEADS, TinyGguf, tiny

from convert.from_gguf import convert, intact, main
from eagle3_jax.files import gguf_model
from eagle3_jax.files.source import FileError

DATA = Path(__file__).parent / "data" / "smollm2"


@pytest.fixture(scope="module")
def smollm2() -> Path:
    return smollm2_folder()


def converted(model: TinyGguf, folder: Path) -> tuple[dict[str, np.ndarray], dict]:
    out = folder / "hf"
    convert(model.write(folder / "tiny.gguf"), out)
    return load_file(out / "model.safetensors"), json.loads((out / "config.json").read_text())


@pytest.mark.smollm2
def test_real_tensors_equal_the_recorded_digests(smollm2: Path):
    recorded = json.loads((DATA / "target_tensors.json").read_text())
    with safe_open(smollm2 / "model.safetensors", "np") as file:
        assert set(file.keys()) == set(recorded)
        for name, (shape, digest) in recorded.items():
            value = file.get_tensor(name)
            assert (value.dtype, list(value.shape)) == (np.float32, shape), name
            assert hashlib.sha256(value.tobytes()).hexdigest() == digest, name


@pytest.mark.smollm2
def test_real_config(smollm2: Path):
    config = json.loads((smollm2 / "config.json").read_text())
    facts = {
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": 576,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "head_dim": 64,
        "intermediate_size": 1536,
        "vocab_size": 49152,
        "rope_theta": 100000.0,
        "rope_scaling": None,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 8192,
        "tie_word_embeddings": True,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 2,
    }
    assert {key: config[key] for key in facts} == facts
    generation = json.loads((smollm2 / "generation_config.json").read_text())
    assert generation == {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 2}


def rotate(x: np.ndarray, position: int, theta: float, *, interleaved: bool) -> np.ndarray:
    """Rotates one head: pairs (2i, 2i + 1) as llama.cpp does, or (i, i + H/2) as transformers."""
    half = len(x) // 2
    angle = position * theta ** (-np.arange(half) / half)
    first, second = (x[0::2], x[1::2]) if interleaved else (x[:half], x[half:])
    rotated = (
        first * np.cos(angle) - second * np.sin(angle),
        first * np.sin(angle) + second * np.cos(angle),
    )
    return np.stack(rotated, 1).ravel() if interleaved else np.concatenate(rotated)


def test_scores_of_rotated_queries_and_keys_are_kept(tmp_path):
    """What a row order has to keep: q . k of every query head at any two positions."""
    model = tiny(attention_bias=True)
    weights, config = converted(model, tmp_path)
    x = np.random.default_rng(1).standard_normal((2, HIDDEN))

    def scores(q, k, q_bias, k_bias, interleaved):
        queries = (q.astype(np.float64) @ x[0] + q_bias).reshape(HEADS, HEAD_DIM)
        keys = (k.astype(np.float64) @ x[1] + k_bias).reshape(KV_HEADS, HEAD_DIM)
        turn = {"theta": config["rope_theta"], "interleaved": interleaved}
        return [
            rotate(query, 7, **turn) @ rotate(keys[n * KV_HEADS // HEADS], 3, **turn)
            for n, query in enumerate(queries)
        ]

    for i in range(2):
        names = ("attn_q.weight", "attn_k.weight", "attn_q.bias", "attn_k.bias")
        there = scores(*(model.tensors[f"blk.{i}.{n}"] for n in names), True)
        names = ("q_proj.weight", "k_proj.weight", "q_proj.bias", "k_proj.bias")
        here = scores(*(weights[f"model.layers.{i}.self_attn.{n}"] for n in names), False)
        np.testing.assert_allclose(here, there, rtol=1e-12)


@pytest.mark.parametrize("kind", [Kind.F16, Kind.BF16, Kind.Q8_0, Kind.Q4_0, Kind.Q5_1])
def test_quantised_tensors_equal_their_whole_dequantisation(tmp_path, monkeypatch, kind):
    monkeypatch.setattr(gguf_model, "CHUNK_ELEMENTS", 5 * HIDDEN)
    model = tiny(tied=False)
    names = ["output.weight", "blk.1.ffn_down.weight", "blk.0.attn_q.weight"]
    model.kinds = dict.fromkeys(names, kind)
    weights, _ = converted(model, tmp_path)
    values = [
        gguf.quants.dequantize(gguf.quants.quantize(model.tensors[n], kind), kind) for n in names
    ]
    values[2] = values[2].reshape(HEADS, HEAD_DIM // 2, 2, HIDDEN).swapaxes(1, 2)
    np.testing.assert_array_equal(weights["lm_head.weight"], values[0])
    np.testing.assert_array_equal(weights["model.layers.1.mlp.down_proj.weight"], values[1])
    query = weights["model.layers.0.self_attn.q_proj.weight"]
    np.testing.assert_array_equal(query, values[2].reshape(query.shape))


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize(
    ("attention_bias", "mlp_bias"), [(False, False), (True, False), (True, True)]
)
def test_transformers_loads_the_folder(tmp_path, tied, attention_bias, mlp_bias):
    """Nothing missing, nothing unexpected, no bias or head that its own rules would not build."""
    pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    weights, _ = converted(
        tiny(tied=tied, attention_bias=attention_bias, mlp_bias=mlp_bias), tmp_path
    )
    model, info = transformers.LlamaForCausalLM.from_pretrained(
        tmp_path / "hf", output_loading_info=True
    )
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    assert not info["mismatched_keys"]
    state = {name: value.numpy() for name, value in model.state_dict().items()}
    for name, value in weights.items():
        np.testing.assert_array_equal(state[name], value)


def llama3_divisors(factor: float) -> np.ndarray:
    """As llama.cpp's converter writes them, wave by wave."""
    divisors = []
    for i in range(HEAD_DIM // 2):
        wave = 2 * np.pi * 5000.0 ** (2 * i / HEAD_DIM)
        if wave < 8192 / 4:
            divisors.append(1.0)
        elif wave > 8192 / 1:
            divisors.append(factor)
        else:
            smooth = (8192 / wave - 1) / (4 - 1)
            divisors.append(1 / ((1 - smooth) / factor + smooth))
    return np.asarray(divisors, np.float32)


def test_llama3_divisors_become_rope_scaling(tmp_path):
    model = tiny()
    model.tensors["rope_freqs.weight"] = llama3_divisors(32.0)
    assert len(set(model.tensors["rope_freqs.weight"].tolist())) == 3
    weights, config = converted(model, tmp_path)
    assert config["rope_scaling"] == {
        "rope_type": "llama3",
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    assert not any("rope" in name for name in weights)


def test_end_of_turn_is_a_second_stop_id(tmp_path):
    model = tiny()
    model.keys["tokenizer.ggml.eot_token_id"] = 2
    _, config = converted(model, tmp_path)
    generation = json.loads((tmp_path / "hf" / "generation_config.json").read_text())
    assert config["eos_token_id"] == generation["eos_token_id"] == [1, 2]


def edit(**changes):
    """Sets keys (`_` stands for `.` after the first name), or with None removes them."""

    def apply(model: TinyGguf):
        for key, value in changes.items():
            model.keys[key] = value
            if value is None:
                del model.keys[key]

    return apply


def drop(name):
    return lambda model: model.tensors.pop(name)


def put(name, shape):
    return lambda model: model.tensors.update({name: np.zeros(shape, np.float32)})


def retoken(index, token):
    return lambda model: model.tokens.__setitem__(index, token)


REFUSALS = {
    "another architecture": (
        lambda model: setattr(model, "architecture", "qwen2"),
        "architecture is 'qwen2', supported: 'llama'",
    ),
    "experts": (edit(**{"llama.expert_count": 8}), "llama.expert_count is not 0"),
    "unknown key": (edit(**{"llama.logit_scale": 2.0}), "key 'llama.logit_scale' is not supported"),
    "missing key": (edit(**{"llama.block_count": None}), "key 'llama.block_count' is missing"),
    "wrong type": (edit(**{"llama.block_count": "2"}), "'llama.block_count' is str, expected int"),
    "split": (edit(**{"split.count": 2}), "one part of a split GGUF"),
    "scaled rope": (edit(**{"llama.rope.scaling.type": "yarn"}), "scaling.type is 'yarn'"),
    "partial rope": (
        edit(**{"llama.rope.dimension_count": 8}),
        "dimension_count is 8, expected 16",
    ),
    "other divisors": (
        lambda model: model.tensors.update({"rope_freqs.weight": 2 * llama3_divisors(8.0)}),
        "'rope_freqs.weight' is not llama3 scaling",
    ),
    "vocabulary size": (
        edit(**{"llama.vocab_size": 5}),
        "llama.vocab_size is 5, the embedding has",
    ),
    "missing tensor": (drop("blk.1.ffn_up.weight"), "'blk.1.ffn_up.weight' is missing"),
    "missing embedding": (drop("token_embd.weight"), "'token_embd.weight' is missing"),
    "unknown tensor": (put("blk.0.attn_q_norm.weight", (16,)), "'blk.0.attn_q_norm.weight' has no"),
    "layer too many": (put("blk.2.attn_norm.weight", (64,)), "'blk.2.attn_norm.weight' has no"),
    "wrong shape": (
        put("blk.1.attn_k.weight", (64, 64)),
        "'blk.1.attn_k.weight' is (64, 64), expected (32, 64)",
    ),
    "half the biases": (
        put("blk.0.attn_q.bias", (64,)),
        "'blk.0.attn_q.bias' is there and 'blk.0.attn_k.bias' is not",
    ),
    "tokenizer model": (edit(**{"tokenizer.ggml.model": "llama"}), "ggml.model is 'llama'"),
    "pre-tokenizer": (
        edit(**{"tokenizer.ggml.pre": "tekken"}),
        "tokenizer.ggml.pre is 'tekken', supported: gpt-2, smollm, llama-bpe",
    ),
    "space prefix": (edit(**{"tokenizer.ggml.add_space_prefix": True}), "add_space_prefix is true"),
    "id too large": (edit(**{"tokenizer.ggml.eos_token_id": 999}), "eos_token_id is 999, outside"),
    "bos without id": (
        edit(**{"tokenizer.ggml.add_bos_token": True, "tokenizer.ggml.bos_token_id": None}),
        "bos or eos is to be added to text but has no id",
    ),
    "token twice": (retoken(-1, "he"), "token 'he' is given twice"),
    "token too few": (lambda model: model.tokens.pop(), "tokens and"),
    "byte token": (lambda model: model.types.__setitem__(9, 6), "has type 6"),
    "merge of no token": (retoken(-2, "other"), "merge 6 is 'Ġ he'"),
    "no merges": (lambda model: model.merges.clear(), "'tokenizer.ggml.merges' is missing"),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_refusals_are_one_line_and_leave_nothing(tmp_path, capsys, name):
    change, message = REFUSALS[name]
    model = tiny()
    change(model)
    path = model.write(tmp_path / "tiny.gguf")
    assert main([str(path), "--out", str(tmp_path / "hf")]) == 2
    output = capsys.readouterr()
    assert output.out == ""
    assert output.err.startswith(f"error [FILE]: {path}: ")
    assert message in output.err
    assert output.err.count("\n") == 1
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("keep", [0, 3, 20, 500, 5000, 60000, -1])
def test_truncated_files_are_refused(tmp_path, capsys, keep):
    whole = tiny().write(tmp_path / "whole.gguf").read_bytes()
    path = tmp_path / "cut.gguf"
    path.write_bytes(whole[:keep])
    assert main([str(path), "--out", str(tmp_path / "hf")]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"error [FILE]: {path}: damaged, or not a GGUF file")
    assert error.count("\n") == 1
    assert not (tmp_path / "hf").exists()


def test_missing_file(tmp_path, capsys):
    assert main([str(tmp_path / "no.gguf"), "--out", str(tmp_path / "hf")]) == 2
    assert capsys.readouterr().err == f"error [FILE]: {tmp_path / 'no.gguf'}: no such file\n"


def test_wrong_usage_is_one_line(capsys):
    assert main(["a.gguf"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error [USAGE]: ")
    assert error.count("\n") == 1


def test_missing_package_names_the_extra(tmp_path, monkeypatch):
    path = tiny().write(tmp_path / "tiny.gguf")
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(FileError, match=r"pip install 'eagle3-jax\[gguf\]'"):
        convert(path, tmp_path / "hf")


def test_command_reports_in_text_and_json(tmp_path, capsys):
    path = tiny().write(tmp_path / "tiny.gguf")
    out = tmp_path / "deep" / "hf"
    assert main([str(path), "--out", str(out)]) == 0
    text = capsys.readouterr().out
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    assert digest in text
    assert "4 query and 2 kv heads of 16" in text
    assert main([str(path), "--out", str(out), "--force", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["source"]["sha256"] == digest
    assert report["config"]["num_hidden_layers"] == 2
    assert set(report["files"]) | {"provenance.json"} == {p.name for p in out.iterdir()}
    assert [p.name for p in out.parent.iterdir()] == ["hf"]


def test_only_own_folders_are_overwritten_and_only_by_force(tmp_path, capsys):
    path = tiny().write(tmp_path / "tiny.gguf")
    foreign = tmp_path / "foreign"
    foreign.mkdir()
    (foreign / "thesis.txt").write_text("words")
    for flags in ([], ["--force"]):
        assert main([str(path), "--out", str(foreign), *flags]) == 2
        assert capsys.readouterr().err.startswith(f"error [FILE]: {foreign}: ")
    assert (foreign / "thesis.txt").read_text() == "words"


def test_failure_keeps_the_folder_that_was_there(tmp_path, monkeypatch):
    path = tiny().write(tmp_path / "tiny.gguf")
    out = tmp_path / "hf"
    convert(path, out)
    before = (out / "model.safetensors").read_bytes()

    def full(self):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(gguf_model.Weight, "chunks", full)
    with pytest.raises(FileError, match="cannot be written: No space left on device"):
        convert(path, out, force=True)
    assert (out / "model.safetensors").read_bytes() == before
    assert sorted(p.name for p in tmp_path.iterdir()) == ["hf", "tiny.gguf"]


def test_intact_sees_other_sources_and_missing_bytes(tmp_path):
    path = tiny().write(tmp_path / "tiny.gguf")
    out = tmp_path / "hf"
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    assert not intact(out, digest)
    convert(path, out)
    assert intact(out, digest)
    assert not intact(out, "0" * 64)
    with (out / "model.safetensors").open("r+b") as file:
        file.truncate(1000)
    assert not intact(out, digest)
    (out / "model.safetensors").unlink()
    assert not intact(out, digest)


def test_failed_rename_puts_the_old_folder_back(tmp_path, monkeypatch):
    path = tiny().write(tmp_path / "tiny.gguf")
    out = tmp_path / "hf"
    convert(path, out)
    (out / "mark").touch()
    replace = os.replace

    def refuse_new(source, target):
        if Path(source).name == "new":
            raise OSError(5, "Input/output error")
        replace(source, target)

    monkeypatch.setattr("os.replace", refuse_new)
    with pytest.raises(FileError, match="Input/output error"):
        convert(path, out, force=True)
    assert (out / "mark").exists()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["hf", "tiny.gguf"]


@pytest.mark.parametrize("extra", range(8))
def test_data_starts_on_eight_bytes(tmp_path, monkeypatch, extra):
    name = "self_attn.o_proj" + "x" * extra
    monkeypatch.setitem(gguf_model.LAYER_TENSORS, "attn_output", name)
    converted(tiny(), tmp_path)
    data = (tmp_path / "hf" / "model.safetensors").read_bytes()
    length = int.from_bytes(data[:8], "little")
    assert length % 8 == 0
    assert json.loads(data[8 : 8 + length])["__metadata__"] == {"format": "pt"}

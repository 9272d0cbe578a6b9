"""A target folder is read as Hugging Face writes it, or refused with one precise error."""

import json
import re
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

import eagle3_jax as e3
from eagle3_jax.config import ConfigError, RopeConfig
from eagle3_jax.files.shards import FileError

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 8,
    "intermediate_size": 12,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 6,
    "vocab_size": 11,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500.0,
    "max_position_embeddings": 64,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "eos_token_id": 3,
}
SHAPES = {
    "self_attn.q_proj.weight": (12, 8),
    "self_attn.k_proj.weight": (6, 8),
    "self_attn.v_proj.weight": (6, 8),
    "self_attn.o_proj.weight": (8, 12),
    "mlp.gate_proj.weight": (12, 8),
    "mlp.up_proj.weight": (12, 8),
    "mlp.down_proj.weight": (8, 12),
    "input_layernorm.weight": (8,),
    "post_attention_layernorm.weight": (8,),
}
ATTENTION_BIASES = {"q_proj": (12,), "k_proj": (6,), "v_proj": (6,), "o_proj": (8,)}
MLP_BIASES = {"gate_proj": (12,), "up_proj": (12,), "down_proj": (8,)}
Q, HEAD, EMBED = (
    "model.layers.1.self_attn.q_proj.weight",
    "lm_head.weight",
    "model.embed_tokens.weight",
)
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
REMOVED = object()


def random_tensors(layers: int = 2, biases: bool = False) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    shapes = {EMBED: (11, 8), "model.norm.weight": (8,), HEAD: (11, 8)}
    for layer in range(layers):
        block = dict(SHAPES)
        if biases:
            block |= {f"self_attn.{name}.bias": s for name, s in ATTENTION_BIASES.items()}
            block |= {f"mlp.{name}.bias": s for name, s in MLP_BIASES.items()}
        shapes |= {f"model.layers.{layer}.{name}": shape for name, shape in block.items()}
    return {name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}


def write(folder: Path, config: dict, tensors: dict[str, np.ndarray]) -> Path:
    """`REMOVED` deletes a key or a tensor."""
    folder.mkdir(exist_ok=True)
    kept = {key: value for key, value in (CONFIG | config).items() if value is not REMOVED}
    (folder / "config.json").write_text(json.dumps(kept))
    save_file(
        {name: tensor for name, tensor in tensors.items() if tensor is not REMOVED},
        folder / "model.safetensors",
    )
    return folder


def shard(folder: Path) -> list[Path]:
    """Rewrites the weights as three shards with an index."""
    tensors = random_tensors()
    (folder / "model.safetensors").unlink()
    files = [folder / f"model-0000{i + 1}-of-00003.safetensors" for i in range(3)]
    where = {name: files[i % 3] for i, name in enumerate(tensors)}
    for file in files:
        save_file({n: t for n, t in tensors.items() if where[n] == file}, file)
    index = {"metadata": {}, "weight_map": {name: file.name for name, file in where.items()}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return files


def every_tensor(target) -> dict[str, np.ndarray]:
    """The target's arrays under Hugging Face's names, written out by hand."""
    found = {EMBED: target.embed.weight, "model.norm.weight": target.norm.weight}
    if target.lm_head is not None:
        found[HEAD] = target.lm_head.weight
    found = {name: np.asarray(value[...]) for name, value in found.items()}
    for i, block in enumerate(target.layers):
        layer = f"model.layers.{i}."
        found[f"{layer}input_layernorm.weight"] = np.asarray(block.norm_in.weight[...])
        found[f"{layer}post_attention_layernorm.weight"] = np.asarray(block.norm_post.weight[...])
        stacked = {  # in groups: of one KV head, and of a common divisor of the width and 8
            "self_attn": (block.attn.qkv, 1, {"q_proj": 12, "k_proj": 6, "v_proj": 6}),
            "mlp": (block.mlp.gate_up, 4, {"gate_proj": 12, "up_proj": 12}),
        }
        for place, (module, groups, rows) in stacked.items():
            for kind in ("weight", "bias"):
                if getattr(module, kind) is None:
                    continue
                dealt = np.asarray(getattr(module, kind)[...])
                rest = dealt.shape[1:]
                dealt, first = dealt.reshape(groups, -1, *rest), 0
                for name, count in rows.items():
                    part = dealt[:, first : first + count // groups]
                    found[f"{layer}{place}.{name}.{kind}"] = part.reshape(count, *rest)
                    first += count // groups
        narrow = {"self_attn.o_proj": block.attn.o, "mlp.down_proj": block.mlp.down}
        for name, module in narrow.items():
            found[f"{layer}{name}.weight"] = np.asarray(module.weight[...]).T
            if module.bias is not None:
                found[f"{layer}{name}.bias"] = np.asarray(module.bias[...])
    return found


@pytest.mark.parametrize("biases", [False, True])
def test_every_tensor_lands_in_its_place(tmp_path, biases):
    tensors = random_tensors(biases=biases)
    folder = write(tmp_path, {"attention_bias": biases, "mlp_bias": biases}, tensors)
    found = every_tensor(e3.load_target(folder))
    assert found.keys() == tensors.keys()
    for name, tensor in tensors.items():
        np.testing.assert_array_equal(found[name], tensor, err_msg=name)


def test_config_is_read(tmp_path):
    target = e3.load_target(write(tmp_path, {"rope_scaling": LLAMA3}, random_tensors()))
    assert target.config == e3.TargetConfig(
        architecture="LlamaForCausalLM",
        hidden_size=8,
        intermediate_size=12,
        num_layers=2,
        num_heads=2,
        num_kv_heads=1,
        head_dim=6,
        vocab_size=11,
        rms_norm_eps=1e-5,
        rope=RopeConfig(500.0, "llama3", 8.0, 1.0, 4.0, 32),
        max_position_embeddings=64,
        eos_token_ids=(3,),
    )
    assert target.folder.path == tmp_path


def test_defaults_are_those_of_transformers(tmp_path):
    """`LlamaConfig` of transformers 5.24: absent and null mean the same."""
    tensors = random_tensors()
    for layer in range(2):
        name = f"model.layers.{layer}.self_attn."
        rows = tensors[f"{name}q_proj.weight"][:8]
        tensors |= {f"{name}{p}.weight": rows.copy() for p in ("q_proj", "k_proj", "v_proj")}
        tensors[f"{name}o_proj.weight"] = rows.copy()
    keys = ("num_key_value_heads", "head_dim", "rope_theta", "hidden_act", "tie_word_embeddings")
    for value in (REMOVED, None):
        config = dict.fromkeys((*keys, "eos_token_id", "rope_scaling", "mlp_bias"), value)
        read = e3.load_target(write(tmp_path, config, tensors)).config
        assert (read.num_kv_heads, read.head_dim, read.rope) == (2, 4, RopeConfig(10000.0))
        assert (read.tie_word_embeddings, read.mlp_bias, read.eos_token_ids) == (False, False, ())


def test_shards_and_dtypes(tmp_path):
    folder = write(tmp_path, {}, random_tensors())
    shard(folder)
    expected = random_tensors()
    for dtype in ("float32", "bfloat16", "float16"):
        found = every_tensor(e3.load_target(folder, dtype=dtype))
        for name, tensor in expected.items():
            wanted = tensor.astype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)
            assert found[name].dtype == wanted.dtype
            np.testing.assert_array_equal(found[name], wanted, err_msg=name)
    with pytest.raises(ConfigError, match="float64 needs 64-bit types"):
        e3.load_target(folder, dtype="float64")
    with pytest.raises(ConfigError, match="dtype 'int8' is not one of"):
        e3.load_target(folder, dtype="int8")


def test_a_tied_head_is_the_embedding(tmp_path):
    tensors = random_tensors()
    tied = {"tie_word_embeddings": True}
    for head in (REMOVED, tensors[EMBED]):
        target = e3.load_target(write(tmp_path, tied, tensors | {HEAD: head}))
        assert target.lm_head is None
        np.testing.assert_array_equal(target.shared().head, tensors[EMBED])
    write(tmp_path, tied, tensors)
    with pytest.raises(
        ConfigError, match=r"model\.safetensors: tie_word_embeddings is true, but lm_head\.weight"
    ):
        e3.load_target(tmp_path)


def test_rotary_buffers_are_unused(tmp_path):
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    tensors = random_tensors() | {name: np.ones(3, np.float32)}
    assert name not in every_tensor(e3.load_target(write(tmp_path, {}, tensors)))


@pytest.mark.parametrize(
    ("config", "generation", "expected"),
    [
        (3, None, (3,)),
        ([3, 5], None, (3, 5)),
        (None, None, ()),
        (REMOVED, None, ()),
        ([], None, ()),
        (3, {"eos_token_id": [4, 6]}, (4, 6)),
        (3, {"eos_token_id": 4}, (4,)),
        (3, {"eos_token_id": None}, (3,)),
        ([3, 5], {}, (3, 5)),
        (None, {"eos_token_id": 4}, (4,)),
    ],
)
def test_eos(tmp_path, config, generation, expected):
    write(tmp_path, {"eos_token_id": config}, random_tensors())
    if generation is not None:
        (tmp_path / "generation_config.json").write_text(json.dumps(generation))
    assert e3.load_target(tmp_path).config.eos_token_ids == expected


DYNAMIC = {"rope_type": "dynamic", "factor": 4.0, "original_max_position_embeddings": 32}
BAD_CONFIGS = {
    "architecture": (
        {"architectures": ["GptOssForCausalLM"]},
        "architectures is ['GptOssForCausalLM'], supported as a target: LlamaForCausalLM, "
        "MistralForCausalLM, Qwen2ForCausalLM, Qwen3ForCausalLM; replay and doctor need no",
    ),
    "no architecture": ({"architectures": None}, "architectures is None"),
    "architecture of another type": ({"architectures": 7}, "architectures is 7"),
    "architecture objects": ({"architectures": [{}, []]}, "architectures is [{}, []]"),
    "no hidden_size": (
        {"hidden_size": REMOVED},
        "hidden_size is missing, expected a positive integer",
    ),
    "null vocab_size": ({"vocab_size": None}, "vocab_size is missing"),
    "no rms_norm_eps": ({"rms_norm_eps": REMOVED}, "rms_norm_eps is missing"),
    "string": ({"hidden_size": "8"}, "hidden_size is '8', expected an integer of at least 1"),
    "negative": ({"intermediate_size": -12}, "intermediate_size is -12, expected an integer"),
    "zero": ({"num_attention_heads": 0}, "num_attention_heads is 0, expected an integer"),
    "heads": (
        {"num_attention_heads": 3, "num_key_value_heads": 2},
        "num_attention_heads is 3, expected a multiple of num_key_value_heads 2",
    ),
    "more kv heads": ({"num_key_value_heads": 4}, "a multiple of num_key_value_heads 4"),
    "head_dim left out": (
        {"head_dim": None, "num_attention_heads": 3},
        "hidden_size is 8, expected a multiple of num_attention_heads 3, since there is no "
        "head_dim",
    ),
    "odd head_dim": ({"head_dim": 5}, "head_dim is 5, rotary embedding needs an even number"),
    "capped": (
        {"final_logit_softcapping": 30.0},
        "final_logit_softcapping is 30.0, which LlamaForCausalLM does not have",
    ),
    "scaled": ({"embedding_multiplier": 12}, "embedding_multiplier is 12, which Llama"),
    "gelu": ({"hidden_act": "gelu"}, "hidden_act is 'gelu', supported: silu"),
    "dynamic": (
        {"rope_scaling": DYNAMIC},
        "the rope is of kind dynamic, whose base depends on how many rows a call has; supported",
    ),
    "longrope, new keys": (
        {
            "rope_theta": REMOVED,
            "rope_parameters": {"rope_type": "longrope", "rope_theta": 500.0, "factor": 2.0},
        },
        "rope_parameters asks for 'longrope' rope, supported are default",
    ),
    "two bases": (
        {"rope_parameters": {"rope_type": "default", "rope_theta": 10.0}},
        "rope_theta is 500.0, but rope_parameters.rope_theta is 10.0",
    ),
    "llama3 without a factor": (
        {"rope_scaling": LLAMA3 | {"factor": None}},
        "rope_scaling of kind llama3 has no 'factor'",
    ),
    "llama3 bands": (
        {"rope_scaling": LLAMA3 | {"high_freq_factor": 1.0}},
        "llama3 rope needs high_freq_factor > low_freq_factor",
    ),
    "tensor parallel": ({"pretraining_tp": 2}, "pretraining_tp is 2, supported: 1"),
    "quantised": ({"quantization_config": {"quant_method": "fp8"}}, "has a quantization_config"),
    "attention bias": (
        {"attention_bias": True},
        "attention_bias is true, but the weights have no such tensor: expected "
        "model.layers.0.self_attn.q_proj.bias",
    ),
    "mlp bias": (
        {"mlp_bias": True},
        "mlp_bias is true, but the weights have no such tensor: expected "
        "model.layers.0.mlp.gate_proj.bias",
    ),
    "layers": (
        {"num_hidden_layers": 3},
        "num_hidden_layers is 3, but the weights have the blocks 0..1",
    ),
    "fewer layers": ({"num_hidden_layers": 1}, "num_hidden_layers is 1, but the weights have"),
    "absurd layers": ({"num_hidden_layers": 10**12}, "but the weights have the blocks 0..1"),
    "eos text": ({"eos_token_id": "</s>"}, "eos_token_id is '</s>', expected token ids"),
    "eos outside the vocabulary": (
        {"eos_token_id": [3, 11]},
        "eos_token_id is [3, 11], expected token ids in 0..10",
    ),
    "eos in lists": ({"eos_token_id": [3, None]}, "eos_token_id is [3, None], expected token ids"),
}


@pytest.mark.parametrize("name", BAD_CONFIGS)
def test_bad_configs(tmp_path, name):
    changes, message = BAD_CONFIGS[name]
    write(tmp_path, changes, random_tensors())
    with pytest.raises(ConfigError) as caught:
        e3.load_target(tmp_path)
    assert str(caught.value).startswith(f"{tmp_path / 'config.json'}: ")
    assert message in str(caught.value)
    assert "--" not in str(caught.value)


def test_bad_eos_in_generation_config(tmp_path):
    write(tmp_path, {}, random_tensors())
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": true}')
    with pytest.raises(ConfigError, match=r"generation_config\.json: eos_token_id is True"):
        e3.load_target(tmp_path)


BIAS = "model.layers.1.mlp.up_proj.bias"
BAD_TENSORS = {
    "missing": ({}, {Q: REMOVED}, f"tensor {Q} is missing, expected shape [12, 8]"),
    "several missing": (
        {},
        {"model.norm.weight": REMOVED, Q: REMOVED},
        "tensor model.norm.weight is missing, expected shape [8] (and 1 more)",
    ),
    "no head": (
        {},
        {HEAD: REMOVED},
        "tie_word_embeddings is not true, but tensor lm_head.weight is missing",
    ),
    "unknown": (
        {},
        {"model.layers.0.self_attn.q_norm.weight": np.ones(6, np.float32)},
        "model.safetensors: tensor model.layers.0.self_attn.q_norm.weight has no place in "
        "LlamaForCausalLM",
    ),
    "shape": (
        {},
        {Q: np.ones((12, 9), np.float32)},
        f"model.safetensors: tensor {Q} has shape [12, 9], expected [12, 8]",
    ),
    "transposed": ({}, {Q: np.ones((8, 12), np.float32)}, "has shape [8, 12], expected [12, 8]"),
    "padded vocabulary": (
        {},
        {EMBED: np.ones((16, 8), np.float32)},
        f"tensor {EMBED} has shape [16, 8], expected [11, 8]",
    ),
    "integers": ({}, {Q: np.ones((12, 8), np.int8)}, f"tensor {Q} is int8, expected float32"),
    "bias not announced": (
        {},
        {BIAS: np.ones(12, np.float32)},
        f"config.json: mlp_bias is not true, but the weights have {BIAS}",
    ),
    "half the biases": (
        {"mlp_bias": True},
        {BIAS: np.ones(12, np.float32)},
        "tensor model.layers.0.mlp.gate_proj.bias is missing, expected shape [12] (and 4 more)",
    ),
}


@pytest.mark.parametrize("name", BAD_TENSORS)
def test_bad_tensors(tmp_path, name):
    config, changes, message = BAD_TENSORS[name]
    write(tmp_path, config, random_tensors() | changes)
    with pytest.raises(ConfigError) as caught:
        e3.load_target(tmp_path)
    assert str(caught.value).startswith(str(tmp_path))
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("rename", "message"),
    [
        (
            ("layers.1.", "layers.4."),
            "num_hidden_layers is 2, but the weights have the blocks [0, 4]",
        ),
        (("model.layers.", "transformer.h."), "no tensor is named model.layers.0"),
        (("layers.1.", "layers.99999999999999999999."), "have the blocks 0..0"),
    ],
)
def test_other_block_names(tmp_path, rename, message):
    tensors = {name.replace(*rename): tensor for name, tensor in random_tensors().items()}
    write(tmp_path, {}, tensors)
    with pytest.raises(ConfigError, match=re.escape(message)):
        e3.load_target(tmp_path)


def test_missing_and_damaged_files(tmp_path):
    folder = tmp_path / "model"
    with pytest.raises(FileError, match=f"{folder}: no such folder"):
        e3.load_target(folder)
    write(folder, {}, random_tensors())
    with pytest.raises(FileError, match=r"model\.safetensors: no such folder"):
        e3.load_target(folder / "model.safetensors")
    (folder / "config.json").write_text('{"hidden_size": 8,')
    with pytest.raises(FileError, match=r"config\.json: not JSON"):
        e3.load_target(folder)
    (folder / "config.json").write_text("[1]")
    with pytest.raises(FileError, match=r"config\.json: holds a JSON list, expected an object"):
        e3.load_target(folder)
    (folder / "config.json").unlink()
    with pytest.raises(FileError, match=r"config\.json: no such file"):
        e3.load_target(folder)
    write(folder, {}, random_tensors())
    (folder / "generation_config.json").write_text("{")
    with pytest.raises(FileError, match=r"generation_config\.json: not JSON"):
        e3.load_target(folder)
    (folder / "generation_config.json").unlink()
    files = shard(folder)
    files[1].unlink()
    with pytest.raises(FileError, match=f"shard {files[1].name} is missing"):
        e3.load_target(folder)
    for file in (*files[::2], folder / "model.safetensors.index.json"):
        file.unlink()
    with pytest.raises(FileError, match=f"{folder}: no weights"):
        e3.load_target(folder)


OPTIONAL_KEYS = (
    "rope_scaling",
    "rope_parameters",
    "attention_bias",
    "mlp_bias",
    "pretraining_tp",
    "bos_token_id",
    "quantization_config",
)


def refusal(folder: Path) -> str | None:
    try:
        e3.load_target(folder)
    except (ConfigError, FileError) as error:
        return str(error)
    return None


@pytest.mark.parametrize("key", [*CONFIG, *OPTIONAL_KEYS])
def test_no_value_escapes_as_another_error(tmp_path, key):
    """Whatever stands under a key: it loads, or one line says what is wrong with which file."""
    values = (None, "", "x", "8", -1, 0, 1, 7, 1.5, True, False, [], [1], [None], {}, {"a": 1})
    extremes = (10**30, -(10**30), float("nan"), float("inf"), 1e-320, [[]], {"rope_type": []})
    write(tmp_path, {}, random_tensors())
    messages = []
    for value in (*values, *extremes):
        (tmp_path / "config.json").write_text(json.dumps(CONFIG | {key: value}))
        messages.append(refusal(tmp_path))
    refused = [message for message in messages if message is not None]
    assert len(refused) >= 12
    for message in refused:
        assert message.startswith(str(tmp_path))
        assert "\n" not in message
        assert len(message) < 400

"""Damaged and hostile input: a draft, or one error of one line, never a traceback."""

import json
import random
import struct

import numpy as np
import pytest
import toy_drafts as toy
from convert_command import Command
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from eagle3_jax.checkpoint import load_draft

ROUNDS = 12
"""Damaged files per seed; seeds times rounds is a few hundred."""


@pytest.fixture
def command(tmp_path, capsys) -> Command:
    return Command(tmp_path, capsys)


def small(config, tensors):
    """A draft of a few KB, so that a random byte often hits the header."""
    made = {"d2t": np.array([1, 3, 3, 4]), "t2d": np.isin(np.arange(12), [1, 4, 5, 7])}
    config |= {"hidden_size": 4, "intermediate_size": 6, "num_attention_heads": 2, "head_dim": 2}
    config |= {"num_key_value_heads": 1, "vocab_size": 12, "draft_vocab_size": 4}
    resized = {64: 4, 128: 8, 32: 2, 96: 6}
    for name, shape in toy.LAYER_SHAPES.items():
        made[f"midlayer.{name}"] = toy.normal(*(resized[n] for n in shape))
    q, o = "midlayer.self_attn.q_proj.weight", "midlayer.self_attn.o_proj.weight"
    made |= {q: toy.normal(4, 8), o: toy.normal(4, 4)}
    made |= {"fc.weight": toy.normal(4, 12), "norm.weight": toy.normal(4)}
    return made | {"lm_head.weight": toy.normal(4, 4)}


def check(command: Command, folder, *flags) -> int:
    """Exit 0 with a draft that loads, or exit 2 with one line and nothing written."""
    before = {path.name for path in command.folder.iterdir()}
    status, out, err = command.run(folder, *flags)
    after = {path.name for path in command.folder.iterdir()}
    if status == 0:
        assert err == ""
        assert after == before | {"out"}
        load_draft(command.out)
        (command.out / "draft.json").unlink()
        for path in sorted((command.out / "weights").rglob("*"), reverse=True):
            path.rmdir() if path.is_dir() else path.unlink()
        (command.out / "weights").rmdir()
        command.out.rmdir()
    else:
        assert status == 2
        assert out == ""
        assert err.startswith("error [")
        assert err.count("\n") == 1
        assert after == before
    return status


def damage(data: bytes, rng: random.Random, header: int) -> bytes:
    """One of: some bytes changed, a piece cut out, a tail lost, bytes added."""
    kind = rng.randrange(5)
    made = bytearray(data)
    if kind <= 1:
        end = header if kind == 0 else len(made)
        for _ in range(rng.randint(1, 4)):
            made[rng.randrange(end)] = rng.randrange(256)
    elif kind == 2:
        start = rng.randrange(len(made))
        del made[start : start + rng.randint(1, 64)]
    elif kind == 3:
        del made[rng.randrange(len(made)) :]
    else:
        place = rng.randrange(len(made))
        made[place:place] = rng.randbytes(rng.randint(1, 16))
    return bytes(made)


@pytest.mark.parametrize("seed", range(16))
def test_damaged_weights(command, tmp_path, seed):
    folder = toy.write(tmp_path / "draft", small)
    assert check(command, folder) == 0
    file, rng = folder / "model.safetensors", random.Random(seed)
    whole = file.read_bytes()
    header = 8 + struct.unpack("<Q", whole[:8])[0]
    statuses = []
    for _ in range(ROUNDS):
        file.write_bytes(damage(whole, rng, header))
        statuses.append(check(command, folder))
    assert 2 in statuses


@pytest.mark.parametrize("seed", range(8))
def test_damaged_configs(command, tmp_path, seed):
    folder, rng = toy.write(tmp_path / "draft", small), random.Random(seed)
    file = folder / "config.json"
    whole = file.read_bytes()
    statuses = []
    for _ in range(ROUNDS):
        file.write_bytes(damage(whole, rng, len(whole)))
        statuses.append(check(command, folder))
    assert 2 in statuses


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(10**20), 10**20)
    | st.floats()
    | st.text(max_size=8)
    | st.sampled_from(["default", "llama3", "yarn", "eagle3", 3, [1, 3, 4], [4, 3, 1]]),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=6), inner),
    max_leaves=6,
)
KEYS = [
    *toy.config(),
    "attention_bias",
    "bias",
    "mlp_bias",
    "fc_norm",
    "norm_before_fc",
    "norm_before_residual",
    "norm_output",
    "layer_types",
    "sliding_window",
    "use_sliding_window",
    "rope_scaling",
    "rope_parameters",
    "partial_rotary_factor",
    "target_hidden_size",
    "num_aux_hidden_states",
    "eagle_aux_hidden_state_layer_ids",
    "aux_hidden_states_layer_ids",
    "speculators_model_type",
    "transformer_layer_config",
]


@settings(
    max_examples=250,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(changes=st.dictionaries(st.sampled_from(KEYS), JSON, min_size=1, max_size=3))
def test_any_value_under_any_key(command, tmp_path, changes):
    folder = toy.write(tmp_path / "draft", small)
    raw = json.loads((folder / "config.json").read_text()) | changes
    (folder / "config.json").write_text(json.dumps(raw))
    check(command, folder)


@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(changes=st.dictionaries(st.sampled_from(["text_config", *toy.config()]), JSON, max_size=3))
def test_any_target_config(command, tmp_path, changes):
    folder = toy.write(tmp_path / "draft", small)
    target = toy.write_target(tmp_path / "target", hidden_size=4, vocab_size=12)
    raw = json.loads((target / "config.json").read_text()) | changes
    (target / "config.json").write_text(json.dumps(raw))
    check(command, folder, "--target", target)


@pytest.mark.parametrize(
    "name",
    ["a\nb", "\ud800", "midlayer.\u2028.weight", "x" * 10_000, "", "fc_norm.99999999.weight"],
)
def test_hostile_tensor_names_stay_on_one_line(command, tmp_path, name):
    folder = toy.write(tmp_path / "draft", small)
    file = folder / "model.safetensors"
    whole = file.read_bytes()
    length = struct.unpack("<Q", whole[:8])[0]
    header = json.loads(whole[8 : 8 + length])
    text = json.dumps({(name if key == "norm.weight" else key): v for key, v in header.items()})
    file.write_bytes(struct.pack("<Q", len(text)) + text.encode() + whole[8 + length :])
    assert check(command, folder) == 2

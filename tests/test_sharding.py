"""Which axis of each tensor goes over devices, and that a split changes no token."""

import json
import subprocess
import sys

import jax
import numpy as np
import pytest
from conftest import TESTS
from jax.sharding import AbstractMesh, AxisType
from jax.sharding import PartitionSpec as P
from random_models import draft_config, random_draft, random_target, target_config

from eagle3_jax import sharding
from eagle3_jax.cache import KVCache
from eagle3_jax.config import ConfigError
from eagle3_jax.modules import take_apart, tensors_of

SIZES = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_heads": 8,
    "num_kv_heads": 4,
    "head_dim": 8,
    "vocab_size": 64,
}


def test_every_large_tensor_is_split_and_every_vector_of_norms_is_whole():
    target = random_target(target_config(**SIZES, qk_norm=True, qkv_bias=True), 0, np.float32)
    leaves, _ = take_apart(target)
    specs = sharding.weight_specs(target, 4)
    assert len(specs) == len(leaves)
    for leaf, spec in zip(leaves, specs, strict=True):
        split = [axis for axis, name in enumerate(spec) if name is not None]
        if leaf.ndim == 2 or leaf.shape == ((8 + 2 * 4) * 8,):  # matrices, and the qkv bias
            (axis,) = split
            assert leaf.shape[axis] % 4 == 0
        else:
            assert split == []


def test_one_devices_share_of_a_fused_weight_is_whole_heads_of_one_group():
    target = random_target(target_config(**SIZES), 1, np.float32)
    tensors = tensors_of(target)
    stored = np.asarray(target.layers[0].attn.qkv.weight[...])
    stored = stored.T if target.layers[0].attn.qkv.narrows else stored
    for group, share in enumerate(np.split(stored, 4)):
        q, k, v = (
            tensors[f"layers.0.attn.{name}.weight"].reshape(4, -1, 32)[group] for name in "qkv"
        )
        np.testing.assert_array_equal(share, np.concatenate((q, k, v)))
    both = np.asarray(target.layers[0].mlp.gate_up.weight[...])
    both = both.T if target.layers[0].mlp.gate_up.narrows else both
    gate, up = (tensors[f"layers.0.mlp.{name}.weight"] for name in ("gate", "up"))
    np.testing.assert_array_equal(np.split(both, 8)[3], np.concatenate((gate[18:24], up[18:24])))


@pytest.mark.parametrize(
    ("data", "model", "expected"),
    [
        (AxisType.Auto, AxisType.Auto, P("data", None, "model")),
        (AxisType.Auto, AxisType.Explicit, P("data")),
        (AxisType.Manual, AxisType.Auto, P(None, None, "model")),
        (AxisType.Explicit, AxisType.Manual, P()),
    ],
)
def test_only_auto_axes_are_pinned(data, model, expected):
    """JAX refuses a constraint that names others."""
    mesh = AbstractMesh((2, 2), ("data", "model"), (data, model))
    cache = jax.ShapeDtypeStruct((4, 16, 2, 8), np.float32)
    assert sharding._divided(cache, P("data", None, "model"), mesh) == expected


def test_what_does_not_divide_is_named():
    target = random_target(target_config(**SIZES | {"intermediate_size": 50}), 0, np.float32)
    with pytest.raises(ConfigError, match=r"layers\.0\.mlp\.down\.weight has shape"):
        sharding.weight_specs(target, 4)
    with pytest.raises(ConfigError, match="6 key/value heads do not divide by 4 devices"):
        sharding.cache_specs(KVCache.zeros(1, 1, 8, 6, 4, np.float32), 4)


def test_a_single_head_stays_whole():
    specs = sharding.cache_specs(KVCache.zeros(1, 2, 8, 1, 4, np.float32), 4)
    assert specs.k == (P("data"),)


SCRIPT = """
import json, sys
sys.path[:0] = {paths}
import jax, numpy as np
from jax.sharding import AxisType
from test_sharding import SIZES, draft_config, random_draft, random_target, target_config
from eagle3_jax import TreeConfig, loop, sharding
from eagle3_jax.run import Run
from eagle3_jax.state import Weights

target = random_target(target_config(**SIZES), 3, np.float32)
draft = random_draft(
    draft_config(target.config, num_heads=4, num_kv_heads=4, head_dim=8, intermediate_size=16,
                 draft_vocab_size=32), 4, np.float32)
prompts = [[1, 2, 3], [4, 5], [6, 7, 8, 9], [10]]
run = Run(target, draft, prompts, max_new_tokens=12, tree=TreeConfig(3, 4, 8), stop_token_ids=())
whole = run.finish().tokens
mesh = jax.make_mesh((2, 4), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
specs = Weights(sharding.weight_specs(target, 4), sharding.weight_specs(draft, 4))
with jax.set_mesh(mesh):
    weights = sharding.put(run.weights, specs, mesh)
    state, _ = run._start(False)
    state = sharding.put(state, sharding.state_specs(state, 4), mesh)
    where = jax.tree.map(lambda x: x.sharding, state)
    state, _, _ = loop.round_jit(run.program, weights, state, run.limits)
    kept = [jax.tree.map(lambda x: x.sharding, state) == where]
    state = loop.finish_jit(run.program, weights, state, run.limits)
split = [row[:n].tolist() for row, n in zip(np.asarray(state.out), np.asarray(state.num_new))]
kept.append(jax.tree.map(lambda x: x.sharding, state) == where)
used = len(state.target_cache.k[0].sharding.device_set)
print(json.dumps([whole, split, used, kept]))
"""


@pytest.mark.exhaustive
def test_eight_devices_give_the_tokens_of_one():
    paths = [str(TESTS), str(TESTS.parent)]
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT.format(paths=paths)],
        env={
            "XLA_FLAGS": "--xla_force_host_platform_device_count=8",
            "JAX_PLATFORMS": "cpu",
            "PATH": "",
        },
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    whole, split, used, kept = json.loads(done.stdout.splitlines()[-1])
    assert kept == [True, True]  # no array is sent around between rounds
    assert split == whole
    assert used == 8


def test_the_draft_is_split_too():
    heads = {"num_heads": 4, "num_kv_heads": 4, "head_dim": 8}
    config = draft_config(target_config(**SIZES), intermediate_size=16, **heads)
    draft = random_draft(config, 2, np.float32)
    leaves, _ = take_apart(draft)
    with pytest.raises(ConfigError, match="lm_head"):
        sharding.weight_specs(draft, 4)  # 61 rows
    assert len(sharding.weight_specs(draft, 1)) == len(leaves) == len(jax.tree.leaves(leaves))

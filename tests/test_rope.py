"""Frequencies and rotations of every kind, against transformers' own numbers."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from rope_goldens import CASES, FILE, LENGTHS, made

from eagle3_jax.config import ConfigError, RopeConfig
from eagle3_jax.rope import inverse_frequencies, rotate, rotations
from eagle3_jax.rope_config import read_rope
from eagle3_jax.source_config import SourceConfig

STORED = json.loads(FILE.read_text())


def rope_of(name: str) -> RopeConfig:
    """The case through the converter's reading of a config.json."""
    raw = {"rope_parameters": CASES[name][1], "max_position_embeddings": 64}
    return read_rope(SourceConfig(raw, "config.json")).effective


@pytest.mark.parametrize("name", [name for name in CASES if name != "dynamic"])
def test_frequencies_and_factors(name):
    rope = rope_of(name)
    found = inverse_frequencies(rope, CASES[name][0])
    np.testing.assert_allclose(found, STORED[name]["frequencies"], rtol=2e-6)
    assert rope.amplitude == pytest.approx(STORED[name]["amplitude"], rel=1e-12)
    assert rope.latent_sharpness == pytest.approx(STORED[name]["sharpness"], rel=1e-12)


def test_a_dynamic_base_grows_with_the_row_s_own_position():
    head_dim = CASES["dynamic"][0]
    positions = np.array([[n - 1 for n in LENGTHS]], np.int32)
    with jax.enable_x64(True):
        args = (rope_of("dynamic"), head_dim, jnp.asarray(positions), jnp.float64)
        cos, sin = (np.asarray(x)[0, :, 0] for x in rotations(*args))
    for row, length in enumerate(LENGTHS):
        angles = (length - 1) * np.array(STORED["dynamic"]["frequencies"][str(length)])
        np.testing.assert_allclose(cos[row], np.cos(angles), atol=2e-5)
        np.testing.assert_allclose(sin[row], np.sin(angles), atol=2e-5)
    plain = inverse_frequencies(RopeConfig(), head_dim)
    np.testing.assert_allclose(STORED["dynamic"]["frequencies"]["64"], plain, rtol=2e-6)
    assert not np.allclose(STORED["dynamic"]["frequencies"]["65"], plain, rtol=1e-5)


@pytest.mark.parametrize("name", ["kimi", "yarn", "yarn attention_factor"])
def test_the_factor_is_on_cos_and_sin(name):
    rope, head_dim = rope_of(name), CASES[name][0]
    positions = jnp.arange(5, dtype=jnp.int32)[None]
    cos, sin = (np.asarray(x) for x in rotations(rope, head_dim, positions, jnp.float32))
    np.testing.assert_allclose(cos**2 + sin**2, STORED[name]["amplitude"] ** 2, rtol=1e-6)


def test_interleaved_pairs_turn_as_complex_numbers():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(1, 3, 2, 6)).astype(np.float32)
    angles = rng.normal(size=(1, 3, 1, 3)).astype(np.float32)
    found = rotate(jnp.asarray(x), jnp.cos(angles), jnp.sin(angles), interleaved=True)
    turned = (x[..., 0::2] + 1j * x[..., 1::2]) * np.exp(1j * angles)
    expected = np.concatenate((turned.real, turned.imag), axis=-1)
    np.testing.assert_allclose(found, expected, atol=1e-6)
    halves = rotate(jnp.asarray(x), jnp.cos(angles), jnp.sin(angles))
    turned = (x[..., :3] + 1j * x[..., 3:]) * np.exp(1j * angles)
    expected = np.concatenate((turned.real, turned.imag), axis=-1)
    np.testing.assert_allclose(halves, expected, atol=1e-6)


@pytest.mark.parametrize(
    ("fields", "match"),
    [
        ({"kind": "longrope"}, "longrope"),
        ({"kind": "linear", "factor": 0.0}, "factor above 0"),
        ({"kind": "dynamic", "factor": 2.0}, "original_max_position_embeddings above 0"),
        (
            {"kind": "dynamic", "factor": 0.5, "original_max_position_embeddings": 8},
            "at least 1",
        ),
        (
            {"kind": "yarn", "original_max_position_embeddings": 8, "beta_fast": 1.0},
            "beta_fast > beta_slow",
        ),
        ({"theta": -1.0}, "rope_theta"),
    ],
)
def test_impossible_values_are_refused(fields, match):
    with pytest.raises(ConfigError, match=match):
        RopeConfig(**fields)


def test_transformers_still_gives_these_numbers():
    pytest.importorskip("transformers")
    found = made()
    assert found.keys() == STORED.keys()
    for name, stored in STORED.items():
        assert found[name]["amplitude"] == stored["amplitude"]
        assert found[name]["sharpness"] == stored["sharpness"]
        table = stored["frequencies"]
        parts = table.items() if isinstance(table, dict) else [(None, table)]
        for key, values in parts:
            now = found[name]["frequencies"]
            np.testing.assert_allclose(now if key is None else now[key], values, rtol=1e-6)

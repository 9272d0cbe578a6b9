"""Prefill attention against NumPy in float64; `attend` itself is in test_tree_attention.py."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_cases import DTYPES, TOLERANCES, naive

from eagle3_jax.ops import attention, prefill
from eagle3_jax.ops.blockwise import rows_of_a_block

# (B, T, K, G, H), and whether there are a window, a softcap and sinks
CASES = [
    ((1, 1, 1, 1, 2), None, None, False, "float32"),
    ((2, 9, 2, 3, 4), None, None, False, "float64"),
    ((2, 9, 2, 3, 4), 2, None, False, "bfloat16"),
    ((1, 70, 3, 2, 8), 9, 1.5, True, "float32"),
    ((1, 70, 3, 2, 8), None, None, True, "float16"),
]


@pytest.fixture(params=["xla", "blocks", "interpret"])
def causal(request, monkeypatch):
    """`attend_causal` in one program; `blocks`: the einsum in blocks of 16 rows."""
    if request.param == "blocks":
        monkeypatch.setattr(attention, "rows_of_a_block", lambda q: min(16, q.shape[1]))
    implementation = "xla" if request.param == "blocks" else request.param
    run = functools.partial(attention.attend_causal, implementation=implementation)
    return jax.jit(run, static_argnames=("scale", "window", "softcap", "width"))


@pytest.mark.parametrize(("shape", "window", "softcap", "with_sinks", "dtype"), CASES)
def test_attend_causal(causal, shape, window, softcap, with_sinks, dtype):
    B, T, K, G, H = shape
    rng = np.random.default_rng(T)
    sizes = ((B, T, K * G, H), (B, T, K, H), (B, T, K, H + 1))
    q, k, v = (rng.normal(size=size).astype(DTYPES[dtype]) for size in sizes)
    sinks = rng.normal(size=K * G) if with_sinks else None
    with jax.enable_x64(dtype == "float64"):
        found = causal(
            *map(jnp.asarray, (q, k, v)),
            scale=0.7,
            window=window,
            softcap=softcap,
            sinks=None if sinks is None else jnp.asarray(sinks),
        )
    check_causal(found, q, k, v, window, softcap, sinks)


def check_causal(found, q, k, v, window=None, softcap=None, sinks=None):
    B, T = q.shape[:2]
    near = np.tril(np.ones((T, T), bool))
    if window is not None:
        near &= np.arange(T)[:, None] - np.arange(T)[None] < window
    assert found.dtype == q.dtype
    sees = np.broadcast_to(near, (B, T, T))
    expected, bound = naive(q, k, v, sees, 0.7, softcap, sinks)
    allowed = TOLERANCES[str(q.dtype)] * bound
    assert np.all(np.abs(np.asarray(found, np.float64) - expected) <= allowed)


def test_values_inside_the_keys(causal):
    """Latent attention's prefill, two chunks of the kernel and five blocks."""
    rng = np.random.default_rng(0)
    q, k = (rng.normal(size=(2, 67, n, 24)).astype(np.float32) for n in (6, 1))
    found = causal(jnp.asarray(q), jnp.asarray(k), None, scale=0.7, width=16)
    check_causal(found, q, k, k[..., :16])


def test_long_prompts_go_block_by_block():
    """No array of T x T in what XLA compiles, for a CPU and in float64."""
    T = 8192
    with jax.enable_x64(True):
        shapes = [jax.ShapeDtypeStruct((1, T, n, 64), np.float64) for n in (32, 8, 8)]
        run = jax.jit(functools.partial(attention.attend_causal, scale=0.1))
        text = run.trace(*shapes).lower().as_text()
    assert f"{T}x{T}" not in text
    assert "stablehlo.while" in text
    assert rows_of_a_block(jax.ShapeDtypeStruct((1, 1024, 32, 64), np.float32)) == 1024


@pytest.mark.parametrize(
    ("capability", "dtype", "H", "takes"),
    [
        ("9.0", "bfloat16", 128, True),
        ("9.0", "float16", 256, True),
        ("8.0", "bfloat16", 256, False),
        ("8.9", "bfloat16", 128, True),
        ("7.5", "float16", 64, False),
        ("9.0", "float32", 64, False),
        ("9.0", "bfloat16", 84, False),
        ("gfx942", "bfloat16", 64, False),
    ],
)
def test_what_cudnn_takes(capability, dtype, H, takes, monkeypatch):
    class Device:
        compute_capability = capability

    q = jax.ShapeDtypeStruct((1, 8, 4, H), dtype)
    k = jax.ShapeDtypeStruct((1, 8, 2, H), dtype)
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(jax, "devices", lambda: [Device()])
    assert prefill.cudnn_takes(q, k, k) == takes
    assert not prefill.cudnn_takes(q, k, jax.ShapeDtypeStruct((1, 8, 2, H - 2), dtype))

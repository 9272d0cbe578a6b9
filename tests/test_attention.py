"""Prefill attention against NumPy in float64; `attend` itself is in test_tree_attention.py."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_cases import DTYPES, TOLERANCES, naive

from eagle3_jax.ops import prefill
from eagle3_jax.ops.attention import attend_causal

# (B, T, K, G, H), and whether there are a window, a softcap and sinks
CASES = [
    ((1, 1, 1, 1, 2), None, None, False, "float32"),
    ((2, 9, 2, 3, 4), None, None, False, "float64"),
    ((2, 9, 2, 3, 4), 2, None, False, "bfloat16"),
    ((1, 70, 3, 2, 8), 9, 1.5, True, "float32"),
    ((1, 70, 3, 2, 8), None, None, True, "float16"),
]


@pytest.mark.parametrize(("shape", "window", "softcap", "with_sinks", "dtype"), CASES)
def test_attend_causal(shape, window, softcap, with_sinks, dtype):
    B, T, K, G, H = shape
    rng = np.random.default_rng(T)
    sizes = ((B, T, K * G, H), (B, T, K, H), (B, T, K, H + 1))
    q, k, v = (rng.normal(size=size).astype(DTYPES[dtype]) for size in sizes)
    sinks = rng.normal(size=K * G) if with_sinks else None
    near = np.tril(np.ones((T, T), bool))
    if window is not None:
        near &= np.arange(T)[:, None] - np.arange(T)[None] < window
    with jax.enable_x64(dtype == "float64"):
        found = jax.jit(attend_causal, static_argnames=("scale", "window", "softcap"))(
            *map(jnp.asarray, (q, k, v)),
            scale=0.7,
            window=window,
            softcap=softcap,
            sinks=None if sinks is None else jnp.asarray(sinks),
        )
    assert found.dtype == q.dtype
    sees = np.broadcast_to(near, (B, T, T))
    expected, bound = naive(q, k, v, sees, 0.7, softcap, sinks)
    assert np.all(np.abs(np.asarray(found, np.float64) - expected) <= TOLERANCES[dtype] * bound)


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

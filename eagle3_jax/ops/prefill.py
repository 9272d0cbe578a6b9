"""Prefill by cuDNN's flash attention, where there is one and it takes the arguments."""

import jax
import jax.numpy as jnp


def cudnn_takes(q: jax.Array, k: jax.Array, v: jax.Array) -> bool:
    """Whether `cudnn_causal` can run here: decided when traced, by the machine's own backend.

    Its rules are those of jax's `check_is_flash_attention`. A program that a machine without a GPU
    lowers for one therefore has the einsum.
    """
    H = q.shape[3]
    if q.dtype not in (jnp.bfloat16, jnp.float16) or k.dtype != q.dtype or v.shape != k.shape:
        return False
    if H % 8 or jax.default_backend() != "gpu":
        return False
    capability = getattr(jax.devices()[0], "compute_capability", "0.0")  # a ROCm device: gfx...
    if not capability.replace(".", "").isdigit() or float(capability) < 8.0:
        return False
    hopper = float(capability) >= 9.0
    return H <= 128 or (hopper and H <= 256)


def cudnn_causal(
    q: jax.Array,  # [B, T, N, H]
    k: jax.Array,  # [B, T, K, H]
    v: jax.Array,  # [B, T, K, H]
    *,
    scale: float,
    window: int | None,
) -> jax.Array:  # [B, T, N, H]
    """`ops.attention.attend_causal`; no [T, T] array exists."""
    return jax.nn.dot_product_attention(
        q,
        k,
        v,
        scale=scale,
        is_causal=True,
        local_window_size=None if window is None else (window - 1, 0),
        implementation="cudnn",
    )

"""Root-mean-square norm."""

import jax
import jax.numpy as jnp

from eagle3_jax.precision import accum_dtype


def rms_norm(x: jax.Array, weight: jax.Array, eps: float) -> jax.Array:
    """Normalises the last axis in float32 (float64 for float64), rounds, then multiplies.

    That order is transformers' `LlamaRMSNorm`. The weight may have leading axes.
    """
    wide = x.astype(jnp.dtype(accum_dtype(x.dtype)))
    mean = jnp.mean(wide * wide, axis=-1, keepdims=True)
    return (wide * jax.lax.rsqrt(mean + eps)).astype(x.dtype) * row(weight, x.ndim)


def row(weight: jax.Array, ndim: int) -> jax.Array:
    """With leading axes of 1, for the last axes of an array of so many."""
    return weight.reshape((1,) * (ndim - weight.ndim) + weight.shape)

"""Which dtype holds weights and activations and which one sums: decided here, nowhere else."""

import dataclasses

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jax import lax

from eagle3_jax.config import DTYPES, ConfigError


@dataclasses.dataclass(frozen=True)
class Precision:
    """`compute` is for weights and activations, `accum` for sums, norms, softmax and logits.

    `float64` (CPU, x64) is the judge, `float32` the oracle; `bfloat16` and `float16` round where
    the engines do: after every matrix product, norm and residual sum.
    """

    name: str

    @property
    def compute(self) -> np.dtype:
        """dtype of weights and activations."""
        return {"bfloat16": np.dtype(ml_dtypes.bfloat16)}.get(self.name) or np.dtype(self.name)

    @property
    def accum(self) -> np.dtype:
        """dtype of sums, norms, softmax and logits."""
        return np.dtype(np.float64 if self.name == "float64" else np.float32)


def precision(name: str) -> Precision:
    """The policy of that name.

    Raises:
      ConfigError: an unknown name, or `float64` while jax has 64-bit types switched off.
    """
    if name not in DTYPES:
        raise ConfigError(f"dtype {name!r} is not one of {', '.join(DTYPES)}")
    if name == "float64" and not jax.config.read("jax_enable_x64"):
        raise ConfigError(
            "dtype float64 needs 64-bit types in jax: jax.config.update('jax_enable_x64', True)"
        )
    return Precision(name)


def accum_dtype(dtype) -> np.dtype:
    """The dtype in which values of `dtype` are summed."""
    return np.dtype(np.float64 if dtype == np.float64 else np.float32)


def matmul(x: jax.Array, weight: jax.Array, *, transposed: bool = False) -> jax.Array:
    """`x [..., in] @ weight[out, in].T`, summed and returned in the accumulation dtype.

    `transposed`: weight is `[in, out]`. Full precision, so that a GPU does not fall to TF32 for
    float32. One bfloat16 row is computed as two on a CPU, where XLA's matrix-vector product is ten
    times slower than its matrix product.
    """
    accum = jnp.dtype(accum_dtype(x.dtype))

    def multiply(x: jax.Array, weight: jax.Array) -> jax.Array:
        return lax.dot_general(
            x,
            weight,
            (((x.ndim - 1,), (0 if transposed else 1,)), ((), ())),
            precision=lax.Precision.HIGHEST,
            preferred_element_type=accum,
        )

    if x.dtype != jnp.bfloat16 or x.size != x.shape[-1]:
        return multiply(x, weight)

    def twice(x: jax.Array, weight: jax.Array) -> jax.Array:
        rows = jnp.broadcast_to(x.reshape(1, -1), (2, x.shape[-1]))
        return multiply(rows, weight)[0].reshape(*x.shape[:-1], -1)

    return lax.platform_dependent(x, weight, cpu=twice, default=multiply)

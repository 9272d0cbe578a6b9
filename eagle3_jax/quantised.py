"""Quantised weights: what a file holds, and plain weights out of it on request."""

import re
from collections.abc import Mapping, Sequence

import numpy as np

from eagle3_jax.files.source import TensorSource, WrappedSource
from eagle3_jax.findings import ConvertError, Findings

FLOATS = ("float16", "bfloat16", "float32", "float64")
WHOLE_BYTES = ("float8_e4m3fn", "float8_e5m2", "int8")

SCALES = re.compile(
    r"(weight_scale|weight_scale_inv|input_scale|_scale|weight_packed|weight_zero_point|"
    r"qweight|qzeros|scales|g_idx|SCB|quant_state\..*|weight_shape)$"
)
"""Names beside a quantised weight."""

WEIGHT_SCALE = re.compile(r"(.*\.)(weight_scale|weight_scale_inv|SCB)$")
DROPPED = re.compile(r"(input_scale|output_scale|k_scale|v_scale|q_scale|kv_scale)$")
"""Scales of activations and caches: a weight does not need them."""


def describe_quantised(names: Mapping[str, str] | Sequence[str]) -> str:
    """What to do about a quantised draft, for its refusal."""
    packed = next((n for n in names if n.endswith(("weight_packed", "qweight", "qzeros"))), None)
    if packed is not None:
        return "packed numbers below 8 bits, not readable: export it unquantised"
    return "--dequantise multiplies fp8 and int8 weights by their scales"


class DequantisedSource(WrappedSource):
    """A source whose fp8 and int8 weights are multiplied by their scales when read, as float32.

    The scale of `x.weight` is `x.weight_scale` (compressed-tensors, ModelOpt: a number, one a row,
    or one a block), `x.weight_scale_inv` (DeepSeek: one a block, a factor despite its name), or
    `x.SCB` (bitsandbytes int8: the row's largest value, 127 steps). Blocks are the weight's shape
    over the scale's, rounded up; `block` says their size where the config does.

    Raises:
      ConvertError: WEIGHT_QUANTISED for a form that is not understood, a weight without its scale,
        a scale without its weight, or shapes that do not fit.
    """

    def __init__(self, source: TensorSource, block: tuple[int, int] | None, findings: Findings):
        super().__init__(source)
        self._block = block
        names = set(source.names())
        self._scales: dict[str, str] = {}
        dropped = [name for name in names if DROPPED.search(name)]
        left = []
        for name in sorted(names - set(dropped)):
            found = WEIGHT_SCALE.match(name)
            weight = f"{found[1]}weight" if found else ""
            if weight in names:
                self._scales[weight] = name
            elif SCALES.search(name):
                left.append(name)
        if left:
            raise ConvertError(
                "WEIGHT_QUANTISED",
                f"{left[0]!r}: this form of quantisation is not understood: "
                f"{describe_quantised(left)}",
            )
        hidden = {*self._scales.values(), *dropped}
        self._names = tuple(name for name in source.names() if name not in hidden)
        for name in self._names:
            self._check(name)
        if self._scales:
            findings.warn(
                "WEIGHT_DEQUANTISED",
                f"{len(self._scales)} quantised weights were multiplied by their scales "
                f"({sorted(self._scales)[0]!r} and others), as --dequantise asks: float32 now",
            )

    def names(self) -> Sequence[str]:  # noqa: D102
        return self._names

    def dtype(self, name: str) -> str:  # noqa: D102
        return "float32" if name in self._scales else super().dtype(name)

    def read(self, name: str) -> np.ndarray:  # noqa: D102
        weight = super().read(name)
        if name not in self._scales:
            return weight
        scale = self._source.read(self._scales[name]).astype(np.float32)
        if self._scales[name].endswith("SCB"):
            scale = scale / np.float32(127.0)
        wide = weight.astype(np.float32)
        if scale.size == 1:
            return wide * scale.reshape(())
        if scale.ndim == 1 or scale.shape[1] == 1:
            return wide * scale.reshape(-1, 1)
        rows, columns = self._block or (1, 1)
        if self._block is None:
            rows, columns = (-(-n // s) for n, s in zip(weight.shape, scale.shape, strict=True))
        for i in range(scale.shape[0]):
            part = wide[i * rows : (i + 1) * rows]
            part *= np.repeat(scale[i], columns)[None, : weight.shape[1]]
        return wide

    def _check(self, name: str):
        dtype = self._source.dtype(name)
        if name not in self._scales:
            if dtype in WHOLE_BYTES and name.endswith("weight"):
                raise ConvertError(
                    "WEIGHT_QUANTISED", f"tensor {name!r} is {dtype} and has no scale beside it"
                )
            return
        scale, shape = self._source.shape(self._scales[name]), self._source.shape(name)
        kind = self._source.dtype(self._scales[name])
        if dtype not in WHOLE_BYTES or kind not in FLOATS or len(shape) != 2:
            raise ConvertError(
                "WEIGHT_QUANTISED",
                f"tensor {name!r} is {dtype} {list(shape)} with scales of {kind}: expected a "
                "matrix of float8 or int8 and scales of 16 or 32 bits",
            )
        blocks = self._block and tuple(-(-n // b) for n, b in zip(shape, self._block, strict=True))
        fits = (
            int(np.prod(scale)) == 1
            or scale in ((shape[0],), (shape[0], 1))
            or (len(scale) == 2 and scale == blocks)
            or (
                blocks is None
                and len(scale) == 2
                and 0 not in scale
                and all(n % s == 0 for n, s in zip(shape, scale, strict=True))
            )
        )
        if not fits:
            raise ConvertError(
                "WEIGHT_QUANTISED",
                f"tensor {self._scales[name]!r} has shape {list(scale)}: neither one number, nor "
                f"one a row, nor one a block of {name!r} {list(shape)}",
            )

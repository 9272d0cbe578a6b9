"""Fused projections taken apart: q, k, v in one tensor, gate and up in another."""

import re
from collections.abc import Sequence

import numpy as np

from eagle3_jax.files.source import TensorSource, WrappedSource
from eagle3_jax.findings import ConvertError, Findings
from eagle3_jax.source_config import SourceConfig

FUSED = re.compile(r"(.*\.)(qkv|gate_up)_proj\.(weight|bias)$")


class SplitSource(WrappedSource):
    """A source whose fused projections appear under the names of their parts.

    Rows stand in the order of the name, as vLLM and SGLang stack them: all query heads, all key
    heads, all value heads; gate, then up.

    Raises:
      ConvertError: WEIGHT_FUSED when the rows are not those of the config's heads.
    """

    def __init__(self, source: TensorSource, config: SourceConfig, findings: Findings):
        super().__init__(source)
        self._parts: dict[str, tuple[str, int, int]] = {}
        names: list[str] = []
        for name in source.names():
            found = FUSED.match(name)
            if not found:
                names.append(name)
                continue
            prefix, which, kind = found.groups()
            start = 0
            for part, rows in _rows(source, name, which, config):
                names.append(f"{prefix}{part}_proj.{kind}")
                self._parts[names[-1]] = name, start, start + rows
                start += rows
        twice = next((name for name in self._parts if names.count(name) > 1), None)
        if twice is not None:
            raise ConvertError(
                "WEIGHT_DUPLICATE",
                f"tensors {twice!r} and {self._parts[twice][0]!r} mean the same one",
            )
        self._names = tuple(names)
        if self._parts:
            fused = sorted({name for name, _, _ in self._parts.values()})
            findings.note("WEIGHT_FUSED", f"fused projections were split: {', '.join(fused)}")

    def names(self) -> Sequence[str]:  # noqa: D102
        return self._names

    def shape(self, name: str) -> tuple[int, ...]:  # noqa: D102
        if name not in self._parts:
            return super().shape(name)
        whole, start, stop = self._parts[name]
        return (stop - start, *self._source.shape(whole)[1:])

    def dtype(self, name: str) -> str:  # noqa: D102
        return super().dtype(self._whole(name))

    def where(self, name: str) -> str:  # noqa: D102
        return super().where(self._whole(name))

    def read(self, name: str) -> np.ndarray:  # noqa: D102
        if name not in self._parts:
            return super().read(name)
        whole, start, stop = self._parts[name]
        return self._source.read(whole)[start:stop]

    def _whole(self, name: str) -> str:
        return self._parts[name][0] if name in self._parts else name


def _rows(
    source: TensorSource, name: str, which: str, config: SourceConfig
) -> list[tuple[str, int]]:
    shape = source.shape(name)
    rows = shape[0] if shape else 0
    if which == "gate_up":
        if rows % 2:
            raise ConvertError(
                "WEIGHT_FUSED", f"tensor {name!r} has {rows} rows, expected two halves"
            )
        return [("gate", rows // 2), ("up", rows // 2)]
    heads = config.integer(config.layer("num_attention_heads"))
    kv = config.integer(config.layer("num_key_value_heads")) or heads
    if heads is None or kv is None:
        raise ConvertError(
            "WEIGHT_FUSED",
            f"tensor {name!r} holds q, k and v, and {config.where} has no num_attention_heads to "
            "split it by",
        )
    width = config.integer(config.layer("head_dim")) or rows // (heads + 2 * kv)
    if rows != (heads + 2 * kv) * width:
        raise ConvertError(
            "WEIGHT_FUSED",
            f"tensor {name!r} has {rows} rows, but {config.where} gives {heads} query and {kv} "
            f"key/value heads of {width}: {(heads + 2 * kv) * width}",
        )
    return [("q", heads * width), ("k", kv * width), ("v", kv * width)]

"""The RoPE an engine runs a draft's file with."""

import dataclasses
from collections.abc import Callable

from eagle3_jax.config import ConfigError, RopeConfig
from eagle3_jax.engine_rules import Engine
from eagle3_jax.findings import ConvertError
from eagle3_jax.rope_config import ALTERNATE, read_rope
from eagle3_jax.source_config import SourceConfig


def engine_rope(
    engine: Engine, source: SourceConfig, rotary_dim: int, cannot: Callable[[str], ConfigError]
) -> RopeConfig:
    """By the engine's own rules; `cannot` makes the error for a file it does not run."""
    try:
        rope = read_rope(source).effective
    except ConvertError as error:
        raise cannot(f"runs the file's RoPE, which is not supported: {error}") from None
    axes = {name: getattr(rope, name) for name in ("mrope_section", *ALTERNATE)}
    if rope.mrope_section and engine.axes == "none":
        raise cannot("knows no multi-axis rope")
    if rope.mrope_section and engine.axes == "unscaled":
        return RopeConfig(rope.theta, **axes)
    if rope.kind not in engine.scalings:
        raise cannot(f"knows no {rope.kind} rope")
    if rope.kind != "default" and engine.scaled_base is not None:
        rope = dataclasses.replace(rope, theta=engine.scaled_base)
    if rope.kind == "yarn" and not engine.yarn_reads_attention_factor:
        rope = dataclasses.replace(rope, attention_factor=None)
    if rope.kind == "dynamic" and engine.dynamic == "static":
        raised = rope.factor**2 - rope.factor + 1
        return RopeConfig(rope.theta * raised ** (rotary_dim / (rotary_dim - 2)), **axes)
    return rope

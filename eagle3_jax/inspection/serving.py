"""What each engine makes of a draft's file: states captured, and every difference from training."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from eagle3_jax.aux_ids import AUX_KEY
from eagle3_jax.config import Boundary, ConfigError, DraftConfig, default_boundaries
from eagle3_jax.engine_rules import ENGINES, Engine
from eagle3_jax.engines import run_as
from eagle3_jax.export import changed
from eagle3_jax.export_ids import TargetShape
from eagle3_jax.inspection.subject import Line

FIXES: Mapping[str, str] = {
    "aux_boundaries": "--patch prints the layer ids it needs",
    "embed": "no key while both are as wide; harmless if the rows are the target's",
    "norm_before_residual": "no key: vLLM runs it",
    "norm_before_fc": "norm_before_fc: true",
    "fc_norm": "fc_norm: true",
    "feedback": "norm_output says it where the engine has it",
    "windows": "no key: vLLM runs it; the same while contexts are shorter than the window",
    "qkv_bias": "no key: vLLM and TensorRT-LLM run it",
    "mlp_bias": "no key: vLLM and TensorRT-LLM run it",
    "fc_bias": "bias: true where the engine has it",
    "rope": "none in config.json: the engine's own rule",
    "double_norm": "none: every server norms the state once",
    "fuse": "none: fc is skipped when the features are as wide as the draft",
    "hidden_norm": "none: the engine always norms the state",
    "next_layers": "export for an engine that runs this norm",
    "head": "draft_vocab_size decides whose head",
}
DIALECTS = {"sglang-0.5.23": "sglang", "sglang-0.5.10": "sglang", "vllm": "vllm"}
PATCHED = {"sglang": "sglang-0.5.23", "vllm": "vllm"}


@dataclasses.dataclass(frozen=True)
class Served:
    """One engine's reading; `captured`: boundaries, a rule as text, or None if it reads no ids."""

    engine: str
    captured: tuple[Boundary, ...] | str | None
    lines: tuple[Line, ...]


def serve(
    engine: str,
    config: DraftConfig,
    source_config: Mapping[str, Any],
    source_tensors: Mapping[str, Any],
    *,
    d2t_kind: str,
    target: TargetShape,
    same_embedding: bool = False,
) -> Served:
    """Runs one profile on the file and says every difference, a line each.

    `same_embedding`: the draft's own rows are the target's, so that whose is taken is no matter.
    """
    rules = ENGINES[engine]
    taken = captured(rules, source_config, target, config)
    try:
        profile = run_as(
            engine,
            config,
            source_config,
            tuple(source_tensors),
            d2t_kind=d2t_kind,
            target_layers=target.layers,
            target_architecture=target.architecture,
        )
    except ConfigError as error:
        message = str(error).removeprefix(f"{engine} ").removeprefix(f"{engine}: ")
        fix = f"eagle3 export --dialect {DIALECTS[engine]}" if engine in DIALECTS else ""
        return Served(engine, taken, (Line("ENGINE_CANNOT", "error", message, fix),))
    lines = []
    for field, (ours, theirs) in changed(config, profile.config, target.layers).items():
        harmless = field == "embed" and same_embedding
        lines.append(
            Line(
                f"ENGINE_{field.upper()}",
                "note" if harmless else "warning",
                f"{field} is {shown(theirs)}, trained with {shown(ours)}"
                + (": its own rows are the target's" if harmless else ""),
                "" if harmless else FIXES.get(field, ""),
            )
        )
    said = {f"{field.name} is " for field in dataclasses.fields(DraftConfig)}
    for note in profile.notes:
        if not note.startswith(tuple(said)):
            warns = "wants architecture" in note or "not used" in note
            lines.append(Line("ENGINE_NOTE", "warning" if warns else "note", note))
    return Served(engine, taken, tuple(lines))


def captured(
    engine: Engine, source: Mapping[str, Any], target: TargetShape, config: DraftConfig
) -> tuple[Boundary, ...] | str | None:
    """The boundaries an engine's target captures for this file's layer ids."""
    if config.fuse == "none":
        return config.aux_boundaries if engine.single_state else None
    if source.get("transformer_layer_config") is not None and not engine.speculators:
        return None
    rule = engine.families.get(target.architecture or "", engine.aux)
    tables = {"eagle_config": source.get("eagle_config") or {}, "top": source}
    ids = next((i for place in rule.places if (i := tables[place].get(AUX_KEY))), None)
    if ids:
        return rule.captured(ids, target.layers)
    if target.layers is None:
        return "default" if not rule.default_added else f"default + {rule.default_added}"
    try:
        default = default_boundaries(target.layers)
    except ConfigError:
        return None
    return tuple(b + rule.default_added for b in default if isinstance(b, int))


def shown(value: Any) -> str:
    """A field's value in a line; a RoPE by what it is."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        plain = type(value)()
        parts = dataclasses.asdict(value)
        told = {k: v for k, v in parts.items() if k == "theta" or v != getattr(plain, k)}
        return " ".join(f"{key} {item}" for key, item in told.items())
    if isinstance(value, tuple):
        return str(list(value))
    return str(value).lower() if isinstance(value, bool) else str(value)

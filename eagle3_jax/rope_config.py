"""RoPE as a config.json states it: three spellings, read together, never guessed apart."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from eagle3_jax.config import ConfigError, RopeConfig
from eagle3_jax.findings import ConvertError
from eagle3_jax.source_config import Field, SourceConfig, shorten

LLAMA3_KEYS = (
    "factor",
    "low_freq_factor",
    "high_freq_factor",
    "original_max_position_embeddings",
)
PARTIAL = "partial_rotary_factor"
KIND_KEYS = ("rope_type", "type")
HINT = "--ignore-rope-scaling runs the draft without scaling"


@dataclasses.dataclass(frozen=True)
class RopeChoice:
    """What the file says and what the draft will use.

    Attributes:
      effective: the rope the draft runs with. theta_origin, kind_origin: where its parts come from.
      configured: the file's own fields, for the report; empty when it says nothing.
    """

    effective: RopeConfig
    theta_origin: str
    kind_origin: str
    configured: dict[str, Any]


def read_rope(
    config: SourceConfig, *, theta: float | None = None, ignore_scaling: bool = False
) -> RopeChoice:
    """RoPE from `rope_parameters`, `rope_scaling` and `rope_theta` (top level or nested).

    A missing base is 10000, the default of every trainer read. `theta` and `ignore_scaling` are the
    user's overrides.

    Raises:
      ConvertError: POS_THETA_NESTED when the places disagree on the base; POS_SCALING_UNSUPPORTED
        for a kind or a key that is not understood; CONFIG_INVALID for values of another type.
    """
    tables = _tables(config)
    configured: dict[str, Any] = {field.key: dict(field.value) for field in tables}
    thetas = [f for f in (config.top("rope_theta"), config.layer("rope_theta")) if f]
    configured |= {field.key: field.value for field in thetas}
    thetas += filter(None, (_inside(field, "rope_theta") for field in tables))
    values = [config.number(field) for field in thetas]
    for field, value in zip(thetas, values, strict=True):
        if value != values[0] and theta is None:
            raise ConvertError(
                "POS_THETA_NESTED",
                f"{config.where}: {thetas[0].key} is {thetas[0].value}, but {field.key} is "
                f"{field.value}: --rope-theta names the one to use",
            )
    if theta is not None:
        base, theta_origin = theta, "flag --rope-theta"
    elif values and values[0] is not None:
        base, theta_origin = values[0], thetas[0].origin
    else:
        base, theta_origin = 10000.0, "default: 10000, the file names no base"
    partials = [config.anywhere(PARTIAL), *(_inside(field, PARTIAL) for field in tables)]
    for partial in filter(None, partials):
        if config.number(partial) != 1.0:
            raise ConvertError(
                "POS_SCALING_UNSUPPORTED",
                f"{config.where}: {partial.key} is {partial.value}: partial rotary, not supported",
            )
    if ignore_scaling:
        return RopeChoice(RopeConfig(base), theta_origin, "flag --ignore-rope-scaling", configured)
    effective, kind_origin = RopeConfig(base), "default"
    seen: list[tuple[str, RopeConfig]] = []
    for field in tables:
        effective, kind_origin = _scaled(config, field, base), field.origin
        seen.append((field.key, effective))
    scaled = [item for item in seen if item[1].kind != "default"]
    if scaled and len({rope for _, rope in seen}) > 1:
        raise ConvertError(
            "POS_SCALING_UNSUPPORTED",
            f"{config.where}: {' and '.join(key for key, _ in seen)} disagree; {HINT}",
        )
    return RopeChoice(effective, theta_origin, kind_origin, configured)


def _tables(config: SourceConfig) -> list[Field]:
    """The `rope_parameters` and `rope_scaling` objects, each place once."""
    fields: dict[str, Field] = {}
    for key in ("rope_parameters", "rope_scaling"):
        for field in (config.layer(key), config.top(key)):
            if field is None:
                continue
            if not isinstance(field.value, dict):
                raise config.wrong(field, "an object or null")
            if any(isinstance(value, dict) for value in field.value.values()):
                raise ConvertError(
                    "POS_SCALING_UNSUPPORTED",
                    f"{config.where}: {field.key} holds one rope per layer type "
                    f"({', '.join(map(repr, field.value))}): expected one for the draft's layer",
                )
            fields[field.key] = field
    return list(fields.values())


def _inside(table: Field, key: str) -> Field | None:
    value = table.value.get(key)
    return None if value is None else Field(value, f"{table.key}.{key}")


def _scaled(config: SourceConfig, field: Field, base: float) -> RopeConfig:
    table: Mapping[str, Any] = {k: v for k, v in field.value.items() if v is not None}
    kinds = {key: table[key] for key in KIND_KEYS if key in table}
    if len(set(map(repr, kinds.values()))) > 1:
        raise ConvertError(
            "POS_SCALING_UNSUPPORTED",
            f"{config.where}: {field.key} has rope_type {kinds['rope_type']!r} and type "
            f"{kinds['type']!r}; {HINT}",
        )
    kind = next(iter(kinds.values()), "default")
    if kind not in ("default", "llama3"):
        raise ConvertError(
            "POS_SCALING_UNSUPPORTED",
            f"{config.where}: {field.key} asks for {shorten(kind)} rope, supported are default and "
            f"llama3; {HINT}",
        )
    expected = LLAMA3_KEYS if kind == "llama3" else ()
    known = {*expected, *KIND_KEYS, "rope_theta", PARTIAL}
    unknown = sorted(table.keys() - known)
    missing = [key for key in expected if key not in table]
    if unknown or missing:
        what = f"unknown key {unknown[0]!r}" if unknown else f"no {missing[0]!r}"
        raise ConvertError(
            "POS_SCALING_UNSUPPORTED",
            f"{config.where}: {field.key} of kind {kind} has {what}; {HINT}",
        )
    if kind == "default":
        return RopeConfig(base)
    values = {key: Field(table[key], f"{field.key}.{key}") for key in expected}
    length = config.integer(values.pop("original_max_position_embeddings"))
    factors = {key: config.number(value) or 0.0 for key, value in values.items()}
    try:
        return RopeConfig(base, "llama3", **factors, original_max_position_embeddings=length or 0)
    except ConfigError as error:
        raise ConvertError("CONFIG_INVALID", f"{config.where}: {field.key}: {error}") from None

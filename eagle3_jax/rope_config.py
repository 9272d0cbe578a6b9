"""RoPE as a config.json states it: three spellings, read together, never guessed apart."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from eagle3_jax.config import ConfigError, RopeConfig
from eagle3_jax.findings import ConvertError, Findings
from eagle3_jax.source_config import Field, SourceConfig, shorten

LENGTH = "original_max_position_embeddings"
LLAMA3_KEYS = ("factor", "low_freq_factor", "high_freq_factor", LENGTH)
YARN_NUMBERS = ("beta_fast", "beta_slow", "attention_factor", "mscale", "mscale_all_dim")
KINDS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "default": ((), ()),
    "linear": (("factor",), ()),
    "dynamic": (("factor",), (LENGTH,)),
    "llama3": (LLAMA3_KEYS, ()),
    "yarn": (("factor",), (LENGTH, *YARN_NUMBERS, "truncate", "finetuned")),
}
"""Keys a kind needs, and keys it may have besides; `finetuned` changes no number."""

ALTERNATE = ("mrope_interleaved", "mrope_interleaved_glm")
OMNI = "interleaved"
"""Qwen3-Omni's second word for `mrope_interleaved`."""
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
    config: SourceConfig,
    findings: Findings | None = None,
    *,
    theta: float | None = None,
    ignore_scaling: bool = False,
    rotary_dim: int | None = None,
) -> RopeChoice:
    """RoPE from `rope_parameters`, `rope_scaling` and `rope_theta` (top level or nested).

    A missing base is 10000, the default of every trainer read. `theta` and `ignore_scaling` are the
    user's overrides. Multi-axis rope (mrope, vision) is plain rope for text, where all three
    positions of a token are equal: a finding says so. `rotary_dim`: elements of a head that turn,
    which its sections must share.

    Raises:
      ConvertError: POS_THETA_NESTED when the places disagree on the base; POS_SCALING_UNSUPPORTED
        for a kind or a key that is not understood; FEATURE_MROPE for sections that are none or do
        not fit; CONFIG_INVALID for values of another type.
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
        effective, kind_origin = _scaled(config, field, base, rotary_dim), field.origin
        seen.append((field.key, effective))
    scaled = [item for item in seen if item[1] != RopeConfig(base)]
    if scaled and len({rope for _, rope in seen}) > 1:
        raise ConvertError(
            "POS_SCALING_UNSUPPORTED",
            f"{config.where}: {' and '.join(key for key, _ in seen)} disagree; {HINT}",
        )
    if effective.mrope_section and findings is not None:
        findings.note(
            "FEATURE_MROPE",
            f"{scaled[0][0]}: multi-axis rope, {axes_in_words(effective)}: plain rope for text; "
            "where there were images a record gives the positions",
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


def axes_in_words(rope: RopeConfig) -> str:
    """How a multi-axis rope shares a head's pairs among time, height and width."""
    how = "interleaved" if rope.mrope_interleaved else "in blocks"
    how = "interleaved as GLM does" if rope.mrope_interleaved_glm else how
    return f"sections {list(rope.mrope_section)} {how}"


def stated_axes(rope: Mapping[str, Any]) -> str:
    """`axes_in_words` of a rope as draft.json has it; "" for one axis."""
    if not rope.get("mrope_section"):
        return ""
    said = {key: rope.get(key, False) for key in ALTERNATE}
    return axes_in_words(RopeConfig(mrope_section=tuple(rope["mrope_section"]), **said))


def _scaled(config: SourceConfig, field: Field, base: float, rotary_dim: int | None) -> RopeConfig:
    table: dict[str, Any] = {k: v for k, v in field.value.items() if v is not None}
    kinds = {key: table[key] for key in KIND_KEYS if key in table}
    if len(set(map(repr, kinds.values()))) > 1:
        raise ConvertError(
            "POS_SCALING_UNSUPPORTED",
            f"{config.where}: {field.key} has rope_type {kinds['rope_type']!r} and type "
            f"{kinds['type']!r}; {HINT}",
        )
    kind, shares = next(iter(kinds.values()), "default"), {}
    if kind == "mrope" or "mrope_section" in table:
        kind, shares = "default" if kind == "mrope" else kind, _mrope(config, field, table)
    if not isinstance(kind, str) or kind not in KINDS:
        raise ConvertError(
            "POS_SCALING_UNSUPPORTED",
            f"{config.where}: {field.key} asks for {shorten(kind)} rope, supported are "
            f"{', '.join(KINDS)} and mrope; {HINT}",
        )
    needed, optional = KINDS[kind]
    known = {*needed, *optional, *KIND_KEYS, "rope_theta", PARTIAL}
    unknown = sorted(table.keys() - known)
    missing = [key for key in needed if key not in table]
    if unknown or missing:
        what = f"unknown key {unknown[0]!r}" if unknown else f"no {missing[0]!r}"
        raise ConvertError(
            "POS_SCALING_UNSUPPORTED",
            f"{config.where}: {field.key} of kind {kind} has {what}; {HINT}",
        )
    numbers = {} if kind == "default" else _numbers(config, field, table, kind)
    try:
        rope = RopeConfig(base, kind, **numbers)  # type: ignore[arg-type]
    except ConfigError as error:
        raise ConvertError("CONFIG_INVALID", f"{config.where}: {field.key}: {error}") from None
    try:
        rope = dataclasses.replace(rope, **shares)
        if rotary_dim is not None:
            rope.check_sections(rotary_dim)
    except ConfigError as error:
        raise ConvertError("FEATURE_MROPE", f"{config.where}: {field.key}: {error}") from None
    return rope


def _numbers(
    config: SourceConfig, field: Field, table: Mapping[str, Any], kind: str
) -> dict[str, Any]:
    values = {key: Field(value, f"{field.key}.{key}") for key, value in table.items()}
    fields: dict[str, Any] = {"factor": config.number(values.get("factor"))}
    if kind == "llama3":
        fields |= {key: config.number(values[key]) for key in LLAMA3_KEYS if key != LENGTH}
    if kind == "yarn":
        # SpecForge needs mscale_all_dim, 0 for none, which is how transformers takes a 0.
        none = {key for key in ("mscale", "mscale_all_dim") if table.get(key) == 0}
        given = {key: config.number(values.get(key)) for key in YARN_NUMBERS if key not in none}
        fields |= {key: value for key, value in given.items() if value is not None}
        if (truncate := config.flag(values.get("truncate"))) is not None:
            fields["truncate"] = truncate
    if kind != "linear":
        length = config.integer(values.get(LENGTH))
        if length is None:
            length = config.integer(config.layer("max_position_embeddings"))
        if length is None:
            raise ConvertError(
                "POS_SCALING_UNSUPPORTED",
                f"{config.where}: {field.key} of kind {kind} has no {LENGTH!r}, and there is no "
                f"max_position_embeddings; {HINT}",
            )
        fields[LENGTH] = length
    return fields


def _mrope(config: SourceConfig, field: Field, table: dict[str, Any]) -> dict[str, Any]:
    """`RopeConfig`'s fields of a multi-axis rope; its keys leave `table`."""
    sections = table.pop("mrope_section", None)
    if not isinstance(sections, list) or len(sections) != 3:
        raise ConvertError(
            "FEATURE_MROPE",
            f"{config.where}: {field.key} asks for mrope, but mrope_section is "
            f"{shorten(sections)}, expected a list of three sizes",
        )
    said = {
        key: config.flag(Field(table.pop(key), f"{field.key}.{key}"))
        for key in (*ALTERNATE, OMNI)
        if key in table
    }
    if said.get(OMNI, False) and not any(said.get(key) for key in ALTERNATE):
        raise ConvertError(
            "FEATURE_MROPE",
            f"{config.where}: {field.key}.{OMNI} is true and {ALTERNATE[0]} is not: engines read "
            "the latter, expected both alike",
        )
    said.pop(OMNI, None)
    return {"mrope_section": tuple(sections), **{key: bool(value) for key, value in said.items()}}

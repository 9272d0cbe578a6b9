"""A target's config.json as a `TargetConfig`; a vision model's text part by its structure."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from eagle3_jax.config import ConfigError, RopeConfig, TargetConfig
from eagle3_jax.findings import ConvertError, Findings
from eagle3_jax.rope_config import read_rope
from eagle3_jax.source_config import Field, SourceConfig, shorten
from eagle3_jax.targets.families import (
    ARCHITECTURES,
    FLAT_WRAPPERS,
    PLAIN_BASE,
    TEXT_TYPES,
    Family,
)

PLAIN_DTYPES = ("float32", "bfloat16", "float16", "float64")
NO_CLASS_NEEDED = (
    "replay and doctor need no target class, they take an engine's record of its states"
)


@dataclasses.dataclass(frozen=True)
class Text:
    """The language model a config.json describes.

    Attributes:
      architecture: the class the file names, a wrapper's too. config: the text part's own keys.
      top: those of the whole file. wrapped: whether there are other parts beside the text.
    """

    architecture: str
    family: Family
    config: SourceConfig
    top: SourceConfig
    wrapped: bool

    @property
    def default_base(self) -> float:
        """The RoPE base of a file that names none."""
        kind = self.config.text(self.config.top("model_type"))
        if not self.wrapped or kind is None or kind not in self.family.text_types:
            return PLAIN_BASE
        return self.family.text_types[kind]


def find_text(raw: Mapping[str, Any], where: str) -> Text:
    """The text model: the file itself, or what stands under `text_config`.

    Raises:
      ConfigError: no supported class, and no text part of a supported kind.
      ConvertError: `text_config` is no object.
    """
    top = SourceConfig(raw, where)
    for name in top.architectures:
        if name in ARCHITECTURES:
            return Text(name, ARCHITECTURES[name], _filled(raw, where, name), top, False)
    named = top.top("text_config")
    if named is None:
        for name in top.architectures:
            if name in FLAT_WRAPPERS:
                family = FLAT_WRAPPERS[name]
                return Text(name, family, _filled(raw, where, family.architecture), top, True)
        raise ConfigError(
            f"{where}: architectures is {shorten(raw.get('architectures'))}, supported as a "
            f"target: {', '.join(ARCHITECTURES)}; {NO_CLASS_NEEDED}"
        )
    if not isinstance(named.value, dict):
        raise top.wrong(named, "an object")
    part = f"{where}: text_config"
    inner = SourceConfig(named.value, part)
    classes = [ARCHITECTURES[name] for name in inner.architectures if name in ARCHITECTURES]
    kind = inner.text(inner.top("model_type"))
    families = [*classes, *([TEXT_TYPES[kind]] if kind in TEXT_TYPES else [])]
    if not families:
        raise ConfigError(
            f"{part}.model_type is {shorten(kind)}, supported as a target's text part: "
            f"{', '.join(TEXT_TYPES)}; {NO_CLASS_NEEDED}"
        )
    family = families[0]
    architecture = next(iter(top.architectures), family.architecture)
    config = _filled(named.value, part, family.architecture)
    return Text(architecture, family, config, top, True)


def _filled(raw: Mapping[str, Any], where: str, architecture: str) -> SourceConfig:
    return SourceConfig({**ARCHITECTURES[architecture].defaults, **raw}, where)


def read_target_config(text: Text) -> tuple[TargetConfig, list[str]]:
    """Hugging Face keys -> `TargetConfig` without its windows, and notes for the user.

    Absent keys are what transformers takes for them.

    Raises:
      ConfigError, ConvertError: a missing key, a value of another type or range, an activation
        other than silu, a RoPE that depends on the length of the call, quantised weights.
    """
    config, family = text.config, text.family
    hidden, heads = _size(config, "hidden_size"), _size(config, "num_attention_heads")
    kv_heads = _size(config, "num_key_value_heads", heads)
    if heads % kv_heads:
        raise ConfigError(
            f"{config.where}: num_attention_heads is {heads}, expected a multiple of "
            f"num_key_value_heads {kv_heads}"
        )
    if config.top("head_dim") is None and hidden % heads:
        raise ConfigError(
            f"{config.where}: hidden_size is {hidden}, expected a multiple of num_attention_heads "
            f"{heads}, since there is no head_dim"
        )
    eps = config.number(config.top("rms_norm_eps"))
    if eps is None:
        raise ConfigError(f"{config.where}: rms_norm_eps is missing, expected a number above 0")
    _refuse_other_arithmetic(text)
    rope, notes = _rope(text)
    if family.window is None and config.top("sliding_window") is not None:
        notes.append(
            f"{config.where}: sliding_window is {shorten(config.raw['sliding_window'])}, which "
            f"{family.architecture} does not read: every layer sees all positions"
        )
    try:
        found = TargetConfig(
            architecture=text.architecture,
            hidden_size=hidden,
            intermediate_size=_size(config, "intermediate_size"),
            num_layers=_size(config, "num_hidden_layers"),
            num_heads=heads,
            num_kv_heads=kv_heads,
            head_dim=_size(config, "head_dim", hidden // heads),
            vocab_size=_size(config, "vocab_size"),
            rms_norm_eps=eps,
            rope=rope,
            max_position_embeddings=_size(config, "max_position_embeddings"),
            tie_word_embeddings=any(
                place.flag(place.top("tie_word_embeddings")) for place in (config, text.top)
            ),
            qkv_bias=_decided(config, family.qkv_bias),
            output_bias=_decided(config, family.output_bias),
            mlp_bias=_decided(config, family.mlp_bias),
            bos_token_id=config.integer(config.top("bos_token_id"), least=0),
            qk_norm=family.qk_norm,
        )
    except ConfigError as error:
        named = str(error).startswith(config.where)
        raise error if named else ConfigError(f"{config.where}: {error}") from None
    return found, notes


def _size(config: SourceConfig, key: str, default: int | None = None) -> int:
    value = config.integer(config.top(key))
    if value is None and default is None:
        raise ConfigError(f"{config.where}: {key} is missing, expected a positive integer")
    return default if value is None else value  # type: ignore[return-value]


def _decided(config: SourceConfig, rule: bool | str) -> bool:
    """A family's rule: fixed, or what the config says under a key."""
    return rule if isinstance(rule, bool) else config.flag(config.top(rule)) or False


def _refuse_other_arithmetic(text: Text):
    config = text.config
    activation = config.text(config.top("hidden_act"))
    if activation not in (None, "silu", "swish"):
        raise ConfigError(f"{config.where}: hidden_act is {activation!r}, supported: silu")
    for scaling in config.scalings():
        raise ConfigError(
            f"{config.where}: {scaling.key} is {shorten(scaling.value)}, which "
            f"{text.family.architecture} does not have"
        )
    if _size(config, "pretraining_tp", 1) != 1:
        raise ConfigError(
            f"{config.where}: pretraining_tp is {config.raw['pretraining_tp']}, supported: 1"
        )
    for place in (config, text.top):
        if place.top("quantization_config") is not None:
            raise ConfigError(
                f"{place.where}: has a quantization_config, expected weights in "
                f"{', '.join(PLAIN_DTYPES)}"
            )


def _rope(text: Text) -> tuple[RopeConfig, list[str]]:
    config, findings = text.config, Findings()
    choice = read_rope(config, findings)
    rope = choice.effective.one_axis
    if rope.kind == "dynamic":
        raise ConfigError(
            f"{config.where}: the rope is of kind dynamic, whose base depends on how many rows a "
            f"call has; supported for a target: default, linear, llama3, yarn; {NO_CLASS_NEEDED}"
        )
    if choice.theta_origin.startswith("default"):
        rope = dataclasses.replace(rope, theta=text.default_base)
    notes = [
        f"{config.where}: multi-axis rope is run as plain rope, which is the same for text"
        for finding in findings.items
        if finding.code == "FEATURE_MROPE"
    ]
    return rope, notes


def read_windows(text: Text, layers: int) -> tuple[int | None, ...]:
    """The positions each of `layers` sees, by the family's rule; () when none has a window.

    Raises:
      ConfigError, ConvertError: `layer_types` of other kinds or another length, or one that
        contradicts the family or `use_sliding_window`.
    """
    config, family = text.config, text.family
    if family.window is None:
        return ()
    size = config.integer(config.top("sliding_window"))
    kinds = _layer_types(config, layers)
    if family.window == "all":
        windows = (size,) * layers
        if kinds is not None and [w is not None for w in windows] != kinds:
            raise ConfigError(
                f"{config.where}: layer_types is {shorten(config.raw['layer_types'])}, but "
                f"{family.architecture} gives every layer its sliding_window {size}"
            )
    else:
        size = size if config.flag(config.top("use_sliding_window")) else None
        if kinds is None:
            first = config.integer(config.top("max_window_layers"), least=0)
            if first is None:
                raise ConfigError(f"{config.where}: max_window_layers is null, expected a number")
            kinds = [size is not None and layer >= first for layer in range(layers)]
        if size is None and any(kinds):
            raise ConfigError(
                f"{config.where}: layer_types asks for sliding_attention, but use_sliding_window "
                "is not true or there is no sliding_window"
            )
        windows = tuple(size if slides else None for slides in kinds)
    return windows if any(windows) else ()


def _layer_types(config: SourceConfig, layers: int) -> list[bool] | None:
    """Whether each layer slides; None when the file does not say."""
    field: Field | None = config.top("layer_types")
    if field is None:
        return None
    kinds = {"full_attention": False, "sliding_attention": True}
    known = isinstance(field.value, list) and all(
        isinstance(kind, str) and kind in kinds for kind in field.value
    )
    if not known or len(field.value) != layers:
        raise ConvertError(
            "CONFIG_INVALID",
            f"{config.where}: layer_types is {shorten(field.value)}, expected {layers} of "
            "full_attention and sliding_attention",
        )
    return [kinds[kind] for kind in field.value]

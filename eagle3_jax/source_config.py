"""Typed reads of a checkpoint's config.json, which may nest, omit or null any field."""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from eagle3_jax.findings import ConvertError

LARGEST = 1 << 53
"""No size of a model comes near; JSON readers elsewhere keep integers exact up to it."""

SCALINGS: dict[str, float | None] = {
    "attention_multiplier": None,
    "attn_logit_softcapping": None,
    "embedding_multiplier": 1.0,
    "final_logit_softcapping": None,
    "logit_scale": 1.0,
    "logits_scaling": 1.0,
    "residual_multiplier": 1.0,
}
"""Keys of other families' arithmetic, with the value that leaves Llama's as it is."""


@dataclasses.dataclass(frozen=True)
class Field:
    """A value and where it stands, for origins and messages."""

    value: Any
    key: str

    @property
    def origin(self) -> str:
        """As `draft.json` stores it."""
        return f"config:{self.key}"


class SourceConfig:
    """A draft's config.json.

    `layer` is the part with the decoder layer's sizes: `transformer_layer_config` (speculators) or
    the top level. A null field counts as absent everywhere.
    """

    def __init__(self, raw: Mapping[str, Any], where: str):
        self.raw = raw
        self.where = where
        nested = self._table(raw, "transformer_layer_config", "")
        self.nested = nested is not None
        self.eagle = self._table(raw, "eagle_config", "") or {}
        self._layer: Mapping[str, Any] = raw if nested is None else nested
        self._layer_prefix = "" if nested is None else "transformer_layer_config."

    def top(self, key: str) -> Field | None:
        """A field of the top level."""
        value = self.raw.get(key)
        return None if value is None else Field(value, key)

    def layer(self, key: str) -> Field | None:
        """A field of the decoder layer's part."""
        value = self._layer.get(key)
        return None if value is None else Field(value, self._layer_prefix + key)

    def scalings(self) -> list[Field]:
        """Factors and caps of Granite, Cohere and Gemma that Llama lacks, unless neutral."""
        found = [self.layer(key) for key in SCALINGS]
        return [f for f in found if f is not None and f.value != SCALINGS[f.key.split(".")[-1]]]

    def eagle_config(self, key: str) -> Field | None:
        """A field of `eagle_config`."""
        value = self.eagle.get(key)
        return None if value is None else Field(value, f"eagle_config.{key}")

    def anywhere(self, key: str) -> Field | None:
        """A field of the top level, `eagle_config` or the layer's part, which must agree.

        Raises:
          ConvertError: two places hold different values.
        """
        found = [f for f in (self.top(key), self.eagle_config(key), self.layer(key)) if f]
        for other in found[1:]:
            if other.value != found[0].value:
                raise ConvertError(
                    "CONFIG_CONFLICT",
                    f"{self.where}: {found[0].key} is {found[0].value!r}, but {other.key} is "
                    f"{other.value!r}",
                )
        return found[0] if found else None

    def integer(self, field: Field | None, least: int = 1) -> int | None:
        """The field as an integer of at least `least`; None when absent."""
        if field is None:
            return None
        value = field.value
        if not isinstance(value, int) or isinstance(value, bool) or not least <= value < LARGEST:
            raise self.wrong(field, f"an integer of at least {least}")
        return value

    def number(self, field: Field | None) -> float | None:
        """The field as a finite number above 0; None when absent."""
        if field is None:
            return None
        value = field.value
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.wrong(field, "a number")
        try:
            value = float(value)
        except OverflowError:
            raise self.wrong(field, "a number a float can hold") from None
        if not math.isfinite(value) or value <= 0:
            raise self.wrong(field, "a finite number above 0")
        return value

    def flag(self, field: Field | None) -> bool | None:
        """The field as a boolean; None when absent."""
        if field is not None and not isinstance(field.value, bool):
            raise self.wrong(field, "true or false")
        return None if field is None else field.value

    def text(self, field: Field | None) -> str | None:
        """The field as a string; None when absent."""
        if field is not None and not isinstance(field.value, str):
            raise self.wrong(field, "a string")
        return None if field is None else field.value

    def wrong(self, field: Field, expected: str) -> ConvertError:
        """The error for a field of another type or range."""
        return ConvertError(
            "CONFIG_INVALID",
            f"{self.where}: {field.key} is {shorten(field.value)}, expected {expected}",
        )

    def weight_block(self) -> tuple[int, int] | None:
        """Rows and columns that share a scale, as the draft's own `quantization_config` says."""
        table = self._table(self.raw, "quantization_config", "") or {}
        found = [table.get("weight_block_size")]
        groups = table.get("config_groups")
        for group in groups.values() if isinstance(groups, dict) else ():
            weights = group.get("weights") if isinstance(group, dict) else None
            found.append(weights.get("block_structure") if isinstance(weights, dict) else None)
        for value in filter(None, found):
            field = Field(value, "quantization_config's block size")
            if not isinstance(value, list) or len(value) != 2:
                raise self.wrong(field, "two integers")
            rows, columns = (self.integer(Field(n, field.key)) for n in value)
            assert rows is not None
            assert columns is not None
            return rows, columns
        return None

    @property
    def architectures(self) -> tuple[str, ...]:
        """Class names the file claims; never enough to decide a dialect."""
        value = self.raw.get("architectures")
        if not isinstance(value, list):
            return ()
        return tuple(item for item in value if isinstance(item, str))

    def _table(self, table: Mapping[str, Any], key: str, prefix: str) -> Mapping[str, Any] | None:
        value = table.get(key)
        if value is not None and not isinstance(value, dict):
            raise self.wrong(Field(value, prefix + key), "an object")
        return value


@dataclasses.dataclass(frozen=True)
class TargetFacts:
    """What a target's config.json says that a draft must fit; absent keys are None."""

    where: str
    hidden_size: int
    vocab_size: int | None
    num_layers: int | None
    tie_word_embeddings: bool

    @classmethod
    def read(cls, raw: Mapping[str, Any], where: str) -> "TargetFacts":
        """From the raw config; composite models keep the sizes in `text_config` or another nest.

        Raises:
          ConvertError: a size of another type, or no hidden_size anywhere.
        """
        text = raw.get("text_config")
        if not isinstance(text, dict):
            nests = [v for v in raw.values() if isinstance(v, dict)] if _lacks(raw) else []
            text = next((nest for nest in nests if not _lacks(nest)), {})
        table = {**raw, **{key: value for key, value in text.items() if value is not None}}
        if table.get("hidden_size") is None:
            raise ConvertError(
                "CONFIG_MISSING", f"{where}: has no hidden_size: not a target config"
            )
        config = SourceConfig({}, where)

        def size(key: str) -> int | None:
            value = table.get(key)
            return None if value is None else config.integer(Field(value, key))

        hidden_size = size("hidden_size")
        assert hidden_size is not None
        return cls(
            where,
            hidden_size,
            size("vocab_size"),
            size("num_hidden_layers"),
            table.get("tie_word_embeddings") is True,
        )


def _lacks(table: Mapping[str, Any]) -> bool:
    return table.get("hidden_size") is None or table.get("vocab_size") is None


def shorten(value: Any, limit: int = 80) -> str:
    """`repr` cut to one short line, for messages about values the user wrote."""
    try:
        text = repr(value)
    except ValueError:  # Python writes no integer of more than 4,300 digits
        holds = "" if isinstance(value, int) else f"{type(value).__name__} with "
        text = f"{holds}an int too long to write"
    return text if len(text) <= limit else text[: limit - 3] + "..."

"""A draft as an engine would serve it: its config under the rules of `engine_rules`."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from eagle3_jax.aux_ids import AUX_KEY
from eagle3_jax.config import (
    DEFAULT_BOUNDARIES,
    Boundary,
    ConfigError,
    DraftConfig,
    default_boundaries,
)
from eagle3_jax.engine_rope import engine_rope
from eagle3_jax.engine_rules import ENGINES, FILE, Engine
from eagle3_jax.findings import ConvertError
from eagle3_jax.source_config import SourceConfig

__all__ = ["ENGINES", "Engine", "Profile", "run_as"]


@dataclasses.dataclass(frozen=True)
class Profile:
    """The draft an engine runs: its config, and a line for every difference from training.

    `at_one`: canonical names of norms the engine has and the file lacks; their weights stay one.
    """

    engine: str
    config: DraftConfig
    draft_attention: str
    notes: tuple[str, ...]
    at_one: tuple[str, ...] = ()


def run_as(
    engine: str,
    config: DraftConfig,
    source_config: Mapping[str, Any],
    source_tensors: Sequence[str],
    *,
    d2t_kind: str = "offset",
    target_layers: int | None = None,
    target_architecture: str | None = None,
) -> Profile:
    """The draft as `engine` would run the checkpoint it was converted from.

    Args:
      config: as trained. source_config: the checkpoint's config.json. source_tensors: its names.
      d2t_kind: how its d2t was read. target_layers, target_architecture: the target's, if known.

    Raises:
      ConfigError: an unknown engine, or a checkpoint this engine cannot load or would run with
        random weights; the message says what it would do.
    """
    if engine not in ENGINES:
        raise ConfigError(f"unknown engine {engine!r}: known are {', '.join(ENGINES)}")
    if not source_config or not source_tensors:
        raise ConfigError(f"as_engine={engine!r} needs a converted checkpoint, this has no source")
    reading = _Reading(ENGINES[engine], config, source_config, source_tensors, target_layers)
    reading.aux_rule = reading.engine.families.get(target_architecture or "", reading.engine.aux)
    try:
        effective = reading.effective(d2t_kind)
    except ConvertError as error:
        raise ConfigError(f"{engine}: {error}") from None
    lacking = effective.tensor_shapes().keys() - config.tensor_shapes().keys()
    at_one = tuple(sorted(name for name in lacking if ".norm_hidden." in name))
    if at_one:
        reading.notes.append(f"the weights of {', '.join(at_one)} stay one: the file has none")
    notes = tuple(reading.notes)
    return Profile(engine, effective, reading.engine.draft_attention, notes, at_one)


class _Reading:
    def __init__(
        self,
        engine: Engine,
        config: DraftConfig,
        source_config: Mapping[str, Any],
        source_tensors: Sequence[str],
        target_layers: int | None,
    ):
        self.engine, self.trained, self.layers = engine, config, target_layers
        self.aux_rule = engine.aux
        self.source = SourceConfig(source_config, "config.json")
        self.names = {name.removeprefix("model.") for name in source_tensors}
        self.notes: list[str] = []
        self.switches = engine.switches
        if config.latent is not None and engine.latent_switches is not None:
            self.switches = engine.latent_switches
        if self.source.nested and not engine.speculators:
            raise self._cannot("reads no speculators config: export the draft under official names")
        skipped = [n for n in source_tensors if n.startswith(engine.skipped_prefixes)]
        stems = {n.split(".")[0] for n in self.names if n.startswith(("midlayer.", "layers."))}
        if stems - {*engine.layer_stems}:
            stem = min(stems - {*engine.layer_stems})
            skipped += sorted(n for n in self.names if n.startswith(stem))
        if skipped:
            raise self._cannot(f"skips {skipped[0]!r}: its weights would be random")
        kind = "gqa" if config.latent is None else "mla"
        wanted = engine.architectures.get(kind)
        if wanted == ():
            raise self._cannot("has no draft with latent attention (MLA)")
        if wanted and config.latent is not None and config.latent.q_lora_rank is None:
            raise self._cannot("wants q_lora_rank in a draft with latent attention")
        if config.aux_boundaries == ("final_norm",) and not engine.single_state:
            raise self._cannot("knows no drafts without aux states (use_aux_hidden_state)")
        if wanted and not {*wanted} & {*self.source.architectures}:
            self.notes.append(f"{engine.name} wants architecture {wanted[0]}")

    def effective(self, d2t_kind: str) -> DraftConfig:
        trained = self.trained
        if d2t_kind == "absolute":
            raise self._cannot("reads d2t as offsets, this table holds target ids")
        if self.engine.wants_vocab_key and self._truthy("tie_word_embeddings"):
            raise self._cannot("ties the head to the embedding (tie_word_embeddings), not modelled")
        if not trained.final_norm:
            raise self._cannot("always applies a final norm, whose weight this draft does not have")
        if self.engine.name == "official" and trained.num_heads * trained.head_dim != (
            trained.hidden_size
        ):
            raise self._cannot("takes hidden_size / num_heads for head_dim: shape error")
        head = self._head()
        fields: dict[str, Any] = {name: self._switch(name) for name in self.switches}
        fields |= self._layers()
        fields |= {
            "aux_boundaries": self._boundaries(),
            "rope": engine_rope(
                self.engine, self.source, self.trained.attention().rotary_dim, self._cannot
            ),
            "head": head,
            "embed": self._embed(head),
            "fuse": self._fuse(),
            "hidden_norm": True,
        }
        for name, value in fields.items():
            own = getattr(trained, name)
            if value != own:
                self.notes.append(f"{name} is {value}, trained with {own}")
        return dataclasses.replace(trained, **fields)

    def _switch(self, name: str) -> Any:
        keys = self.switches[name]
        own = getattr(self.trained, name)
        if keys == FILE:
            return own
        wanted = any(self._anywhere(key) for key in keys)
        if name == "feedback":
            return "post_norm" if wanted else "pre_norm"
        if name == "windows":
            return ()
        if name == "norm_before_residual":
            missing = self.source.anywhere(name) is None and self.source.nested
            return self.engine.residual_default if keys and missing else wanted
        if own and not wanted and self.engine.unknown == "error" and name != "double_norm":
            raise self._cannot(f"has no place for the tensors of {name}: it stops at their names")
        if wanted and not own:
            return self._lacking(name)
        if wanted and name == "norm_before_fc" and "input_norm.weight" not in self.names:
            raise self._cannot("looks for input_norm.weight, the file spells it otherwise")
        return wanted

    def _lacking(self, name: str) -> bool:
        """A part the config asks for and the file has no tensor for."""
        if name == "output_bias" and self.engine.name.startswith("sglang"):
            self.notes.append(
                "o_proj gets a bias (attention_bias or bias) that the file lacks: allocated and "
                "never set, taken as zero here, as it was in the engine's recorded run"
            )
            return False
        if name in ("qkv_bias", "mlp_bias", "output_bias"):
            raise self._cannot(f"builds {name}, the file has none: its values would be random")
        if name == "fc_bias":
            raise self._cannot("builds fc with a random bias (bias is true), the file has none")
        raise self._cannot(f"builds {name}, the file has no tensor for it")

    def _layers(self) -> dict[str, Any]:
        trained, norm = self.trained, self.engine.next_norm
        stated = self.source.layer("num_hidden_layers")
        count = trained.num_layers
        asked = count if stated is None else self.source.integer(stated, 0)
        if self.engine.wants_vocab_key and asked != count:
            raise self._cannot(
                f"builds num_hidden_layers layers, the file has {count}: random weights"
            )
        if count == 1:
            return {}
        if norm is None or trained.latent is not None:
            raise self._cannot(f"runs one layer, the file has {count}")
        if trained.next_layers == "wide":
            if self.engine.wide_layers and self.source.eagle.get("next_layer_regular") is False:
                return {}
            raise self._cannot("feeds the embedding to the first layer only: shape error")
        if norm == trained.next_layers or trained.next_spare_norm:
            return {"next_layers": norm}
        if norm == "hidden_norm" and self.engine.name.startswith("sglang"):
            self.notes.append("input_layernorm of layers after the first is not used")
            return {"next_layers": norm}
        raise self._cannot(f"uses {norm} in layers after the first, the file has none there")

    def _head(self) -> str:
        raw = self.source.raw
        if not self.engine.wants_vocab_key:
            return self.trained.head
        if "draft_vocab_size" not in raw:
            raise self._cannot("needs the key draft_vocab_size (null is fine): AttributeError")
        stated = raw["draft_vocab_size"]
        rows = self.trained.draft_vocab_size
        if stated is None:
            if rows != self.trained.vocab_size:
                raise self._cannot(
                    f"takes the target's head when draft_vocab_size is null, but the map has {rows}"
                )
            return "target"
        if stated != rows:
            raise self._cannot(f"builds {stated} head rows, the file has {rows}")
        if "lm_head.weight" not in self.names:
            raise self._cannot(
                f"keeps a random head: draft_vocab_size is {stated}, but there is no lm_head.weight"
            )
        return "draft"

    def _embed(self, head: str) -> str:
        trained = self.trained
        if self.engine.embedding == "own":
            return "draft" if "embed_tokens.weight" in self.names else trained.embed
        wide = self.source.raw.get("target_hidden_size")
        own = wide is not None and wide != trained.hidden_size
        if not own and trained.hidden_size != trained.target_hidden_size:
            raise self._cannot(
                f"needs the key target_hidden_size for a draft {trained.hidden_size} wide"
            )
        return "draft" if own and head == "draft" else "target"

    def _fuse(self) -> str:
        """SGLang runs `fc` and its norms only where the features are not as wide as the draft."""
        if not self.engine.width_decides:
            return self.trained.fuse
        features = self.trained.num_aux * self.trained.target_hidden_size
        return "none" if features == self.trained.hidden_size else "fc"

    def _boundaries(self) -> tuple[Boundary, ...] | str:
        trained, rule, layers = self.trained, self.aux_rule, self.layers
        if trained.aux_boundaries == ("final_norm",):
            return trained.aux_boundaries
        tables = {"eagle_config": self.source.eagle, "top": self.source.raw}
        lists = (tables[place].get(AUX_KEY) for place in rule.places)
        ids = next((ids for ids in lists if ids is not None), None)
        if ids is not None:
            captured = rule.captured(ids, layers)
        elif layers is not None:
            captured = self._default_boundaries(layers)
        elif rule.default_added:
            raise self._cannot("shifts the default boundaries, which needs the target's depth")
        else:
            captured = DEFAULT_BOUNDARIES
        taken = 3 if isinstance(captured, str) else len(captured)
        built = self.engine.states or self._number(
            "num_aux_hidden_states", 3 if ids is None else len(ids)
        )
        if {built, taken} != {trained.num_aux}:
            raise self._cannot(
                f"builds fc for {built} states and captures {taken} ({captured}), but fc.weight "
                f"takes {trained.num_aux}: shape error"
            )
        return captured

    def _default_boundaries(self, layers: int) -> tuple[Boundary, ...]:
        try:
            default = default_boundaries(layers)
        except ConfigError as error:
            raise self._cannot(f"captures too few states: {error}") from None
        added = self.aux_rule.default_added
        return tuple(b + added if isinstance(b, int) else b for b in default)

    def _anywhere(self, key: str) -> bool:
        if key.startswith("eagle_config."):
            return bool(self.source.eagle.get(key.removeprefix("eagle_config.")))
        places = (self.source.raw, self.source.eagle)
        nested = self.source.layer(key) if self.source.nested else None
        return any(place.get(key) for place in places) or bool(nested and nested.value)

    def _truthy(self, key: str) -> bool:
        return bool(self.source.raw.get(key))

    def _number(self, key: str, default: int) -> int:
        value = self.source.raw.get(key)
        return default if value is None else value

    def _cannot(self, reason: str) -> ConfigError:
        return ConfigError(f"{self.engine.name} {reason}")

"""What an engine does to a draft it serves: which tensors and switches it ignores, as data."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from eagle3_jax.aux_ids import AUX_KEY, translate
from eagle3_jax.config import (
    DEFAULT_BOUNDARIES,
    Boundary,
    ConfigError,
    DraftConfig,
    RopeConfig,
    default_boundaries,
)
from eagle3_jax.findings import ConvertError
from eagle3_jax.rope_config import read_rope
from eagle3_jax.source_config import SourceConfig


@dataclasses.dataclass(frozen=True)
class Engine:
    """One engine's reading of a Llama-shaped EAGLE-3 checkpoint (facts of its source, run once).

    Attributes:
      name: what `as_engine` takes. architecture: the class name it wants in config.json.
      draft_attention: which slots a drafted node reads, see `speculate`.
      skipped_prefixes: names with these are dropped without a word.
    """

    name: str
    architecture: str
    draft_attention: str
    skipped_prefixes: tuple[str, ...]


ENGINES = {
    engine.name: engine
    for engine in (
        Engine(
            "sglang-0.5.23",
            "LlamaForCausalLMEagle3",
            "beam_slots",
            ("module.", "_orig_mod.", "draft_model."),
        ),
    )
}


@dataclasses.dataclass(frozen=True)
class Profile:
    """The draft an engine runs: its config, and a line for every difference from training."""

    engine: str
    config: DraftConfig
    draft_attention: str
    notes: tuple[str, ...]


def run_as(
    engine: str,
    config: DraftConfig,
    source_config: Mapping[str, Any],
    source_tensors: Sequence[str],
    *,
    d2t_kind: str = "offset",
    target_layers: int | None = None,
) -> Profile:
    """The draft as `engine` would run the checkpoint it was converted from.

    Args:
      config: as trained. source_config: the checkpoint's config.json. source_tensors: its names.
      d2t_kind: how its d2t was read. target_layers: the target's depth, if known.

    Raises:
      ConfigError: an unknown engine, or a checkpoint this engine cannot load or would run with
        random weights; the message says what it would do.
    """
    if engine not in ENGINES:
        raise ConfigError(f"unknown engine {engine!r}: known are {', '.join(ENGINES)}")
    if not source_config or not source_tensors:
        raise ConfigError(f"as_engine={engine!r} needs a converted checkpoint, this has no source")
    reading = _Reading(ENGINES[engine], config, source_config, source_tensors, target_layers)
    try:
        effective = reading.effective(d2t_kind)
    except ConvertError as error:
        raise ConfigError(f"{engine}: {error}") from None
    return Profile(engine, effective, reading.engine.draft_attention, tuple(reading.notes))


class _Reading:
    """SGLang 0.5.23, `models/llama_eagle3.py` and `eagle_worker_v2.py` of the engine named."""

    def __init__(
        self,
        engine: Engine,
        config: DraftConfig,
        source_config: Mapping[str, Any],
        source_tensors: Sequence[str],
        target_layers: int | None,
    ):
        self.engine, self.trained, self.layers = engine, config, target_layers
        self.source = SourceConfig(source_config, "config.json")
        self.names = {name.removeprefix("model.") for name in source_tensors}
        self.notes: list[str] = []
        if "transformer_layer_config" in source_config:
            raise self._cannot("reads no speculators config: export the draft under official names")
        skipped = [n for n in source_tensors if n.startswith(engine.skipped_prefixes)]
        if skipped:
            raise self._cannot(f"skips {skipped[0]!r}: its weights would be random")
        if engine.architecture not in self.source.architectures:
            self.notes.append(f"{engine.name} wants architecture {engine.architecture}")

    def effective(self, d2t_kind: str) -> DraftConfig:
        trained = self.trained
        if d2t_kind == "absolute":
            raise self._cannot("reads d2t as offsets, this table holds target ids")
        if self._truthy("tie_word_embeddings"):
            raise self._cannot("ties the head to the embedding (tie_word_embeddings), not modelled")
        if not trained.final_norm:
            raise self._cannot("always applies a final norm, whose weight this draft does not have")
        if self._number("num_hidden_layers", 1) != 1:
            raise self._cannot("builds num_hidden_layers layers, the file has 1: random weights")
        head = self._head()
        embed = self._embed(head)
        fields: dict[str, Any] = {
            "norm_before_residual": False,
            "double_norm": False,
            "qkv_bias": False,
            "mlp_bias": False,
            "output_bias": self._output_bias(),
            "fc_bias": self._fc_bias(),
            "fc_norm": self._norm(
                "fc_norm", self._truthy("fc_norm") or self._truthy("use_aux_norm")
            ),
            "norm_before_fc": self._norm("norm_before_fc", self._norm_before_fc()),
            "feedback": "post_norm" if self._truthy("norm_output") else "pre_norm",
            "aux_boundaries": self._boundaries(),
            "rope": self._rope(),
            "head": head,
            "embed": embed,
            "fuse": self._fuse(),
        }
        for name, value in fields.items():
            own = getattr(trained, name)
            if value != own:
                self.notes.append(f"{name} is {value}, trained with {own}")
        return dataclasses.replace(trained, **fields)

    def _head(self) -> str:
        raw = self.source.raw
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
        wide = self.source.raw.get("target_hidden_size")
        own = wide is not None and wide != self.trained.hidden_size
        if not own and self.trained.hidden_size != self.trained.target_hidden_size:
            raise self._cannot(
                f"needs the key target_hidden_size for a draft {self.trained.hidden_size} wide"
            )
        return "draft" if own and head == "draft" else "target"

    def _output_bias(self) -> bool:
        wanted = self._truthy("attention_bias") or self._truthy("bias")
        if wanted and not self.trained.output_bias:
            self.notes.append(
                "o_proj gets a bias (attention_bias or bias) that the file lacks: allocated and "
                "never set, taken as zero here, as it was in the engine's recorded run"
            )
        return wanted and self.trained.output_bias

    def _fc_bias(self) -> bool:
        wanted = self._truthy("bias")
        if wanted and not self.trained.fc_bias:
            raise self._cannot("builds fc with a random bias (bias is true), the file has none")
        return wanted

    def _norm(self, name: str, wanted: bool) -> bool:
        if wanted and not getattr(self.trained, name):
            raise self._cannot(f"builds {name}, the file has no tensor for it")
        if wanted and name == "norm_before_fc" and "input_norm.weight" not in self.names:
            raise self._cannot("looks for input_norm.weight, the file spells it otherwise")
        return wanted

    def _fuse(self) -> str:
        """`fc` and its norms run only when the features are wider or narrower than the draft."""
        features = self.trained.num_aux * self.trained.target_hidden_size
        return "none" if features == self.trained.hidden_size else "fc"

    def _norm_before_fc(self) -> bool:
        return bool(self.source.eagle.get("norm_before_fc")) or self._truthy("norm_before_fc")

    def _boundaries(self) -> tuple[Boundary, ...] | str:
        ids, layers = self.source.eagle.get(AUX_KEY), self.layers
        if ids is not None:
            above = max(ids) + 2 if layers is None else layers
            captured = tuple(sorted({b for b in translate(ids, "output") if b < above}))
        elif layers is not None:
            captured = self._default_boundaries(layers)
        else:
            captured = DEFAULT_BOUNDARIES
        taken = 3 if isinstance(captured, str) else len(captured)
        built = self._number("num_aux_hidden_states", 3 if ids is None else len(ids))
        if {built, taken} != {self.trained.num_aux}:
            raise self._cannot(
                f"builds fc for {built} states and captures {taken} ({captured}), but fc.weight "
                f"takes {self.trained.num_aux}: shape error"
            )
        return captured

    def _default_boundaries(self, layers: int) -> tuple[Boundary, ...]:
        try:
            return default_boundaries(layers)
        except ConfigError as error:
            raise self._cannot(f"captures too few states: {error}") from None

    def _rope(self) -> RopeConfig:
        try:
            return read_rope(self.source).effective
        except ConvertError as error:
            raise self._cannot(f"runs the file's RoPE, which is not supported: {error}") from None

    def _truthy(self, key: str) -> bool:
        return bool(self.source.raw.get(key))

    def _number(self, key: str, default: int) -> int:
        value = self.source.raw.get(key)
        return default if value is None else value

    def _cannot(self, reason: str) -> ConfigError:
        return ConfigError(f"{self.engine.name} {reason}")

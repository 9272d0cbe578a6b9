"""What to change in a draft's config.json so that an engine runs it as trained."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from eagle3_jax.aux_ids import AUX_KEY
from eagle3_jax.config import DraftConfig, RopeConfig
from eagle3_jax.export_config import ConfigWriter
from eagle3_jax.export_ids import TargetShape
from eagle3_jax.export_rules import FORMS
from eagle3_jax.inspection.serving import PATCHED, Served, serve
from eagle3_jax.inspection.trained_rope import BASE, TrainedRope
from eagle3_jax.source_config import SourceConfig

EAGLE = "eagle_config"
SIZES = ("num_hidden_layers", "draft_vocab_size", "target_hidden_size", "num_aux_hidden_states")
SWITCHES = ("tie_word_embeddings", "attention_bias", "bias", "fc_norm", "norm_output")
KEYS: Mapping[str, tuple[str, ...]] = {
    "sglang": ("architectures", *SIZES, *SWITCHES, "norm_before_fc"),
    "vllm": (
        AUX_KEY,
        *SIZES,
        *SWITCHES,
        "norm_before_fc",
        "norm_before_residual",
        "mlp_bias",
        "layer_types",
        "sliding_window",
        "use_sliding_window",
    ),
}
"""Keys of the top level that the engine reads and that change what it runs."""

NESTED = ("norm_before_fc", "norm_output", "fc_norm", "use_aux_norm")
OUTER = (AUX_KEY, "norm_before_residual", "norm_before_fc", "norm_output", "fc_norm")
"""Keys that stand at the top level of a speculators config, too."""


@dataclasses.dataclass(frozen=True)
class Patch:
    """Keys to set (null removes), and what the engine makes of the file then.

    `problems`: what no key of the engine says. `notes`: why a key is there.
    """

    engine: str
    config: dict[str, Any]
    after: Served
    problems: tuple[str, ...]
    notes: tuple[str, ...]


def make_patch(
    engine: str,
    config: DraftConfig,
    source: Mapping[str, Any],
    source_tensors: Mapping[str, Any],
    *,
    d2t_kind: str,
    target: TargetShape,
    rope: TrainedRope | None = None,
    same_embedding: bool = False,
) -> Patch:
    """The change for `engine` ("sglang" or "vllm"); `rope`: what is known of training."""
    form = FORMS[engine]
    problems: list[str] = []
    notes: list[str] = []
    change: dict[str, Any] = {}
    nested = source.get("transformer_layer_config") is not None
    if nested and engine == "sglang":
        problems.append("SGLang reads no speculators config: eagle3 export --dialect sglang")
    else:
        writer = ConfigWriter(form, config, source, target, "float32")
        wanted = writer.build()
        problems += writer.problems
        for key in KEYS[engine]:
            outside = nested and key not in OUTER
            if not outside and _differs(source.get(key), wanted.get(key), key in source):
                change[key] = wanted.get(key, False if source.get(key) is True else None)
        _eagle(change, source, wanted.get(EAGLE) or {}, engine)
        named = SourceConfig(source, "config.json").architectures
        if "architectures" in change and {*form.architectures.values()} & {*named}:
            del change["architectures"]
        if rope is not None and rope.sure:
            change |= {"rope_theta": BASE, "rope_scaling": None}
            notes.append(f"rope: {rope.why}")
            config = dataclasses.replace(config, rope=RopeConfig(BASE))
    after = serve(
        PATCHED[engine],
        config,
        merged(source, change),
        source_tensors,
        d2t_kind=d2t_kind,
        target=target,
        same_embedding=same_embedding,
    )
    return Patch(engine, change, after, tuple(problems), tuple(notes))


def merged(source: Mapping[str, Any], change: Mapping[str, Any]) -> dict[str, Any]:
    """The config after the change; an object is merged, null removes a key."""
    made = dict(source)
    for key, value in change.items():
        if isinstance(value, dict):
            made[key] = merged(made.get(key) or {}, value)
        elif value is None and key != "draft_vocab_size":
            made.pop(key, None)
        else:
            made[key] = value
    return made


def _differs(found: Any, wanted: Any, present: bool) -> bool:
    if wanted is None and found is None:
        return False
    if found is None and not present and wanted is False:
        return False
    if wanted is None and found is False:
        return False
    return found != wanted


def _eagle(
    change: dict[str, Any], source: Mapping[str, Any], wanted: Mapping[str, Any], engine: str
):
    """The part of the change inside `eagle_config`."""
    own = source.get(EAGLE) or {}
    inner: dict[str, Any] = {}
    for key in (AUX_KEY, "use_aux_hidden_state"):
        if key in wanted and own.get(key) != wanted[key]:
            inner[key] = wanted[key]
    if engine == "sglang" and AUX_KEY in own and AUX_KEY not in wanted:
        inner[AUX_KEY] = None
    for key in NESTED:
        if own.get(key) and not change.get(key) and key in change:
            inner[key] = None
    if inner:
        change[EAGLE] = inner

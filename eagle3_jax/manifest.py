"""`draft.json`: what was found, where every value comes from, and how to check it."""

import dataclasses
import platform
from pathlib import Path
from typing import Any

from eagle3_jax.aux_ids import AuxChoice
from eagle3_jax.config import DraftConfig
from eagle3_jax.dialects import Dialect, Matched
from eagle3_jax.draft_layers import Layers
from eagle3_jax.draft_sizes import Sizes
from eagle3_jax.draft_switches import Switches
from eagle3_jax.files.shards import TensorSource, sha256_file
from eagle3_jax.files.whole import finite
from eagle3_jax.findings import Findings
from eagle3_jax.rope_config import RopeChoice
from eagle3_jax.source_config import SourceConfig
from eagle3_jax.version import installed
from eagle3_jax.vocab import VocabMap, to_offsets

FORMAT = 2


@dataclasses.dataclass(frozen=True)
class SourceDraft:
    """A checkpoint understood: everything but the values of its tensors."""

    source: TensorSource
    config: SourceConfig
    config_file: Path
    matched: Matched
    dialect: Dialect
    sizes: Sizes
    layers: Layers
    switches: Switches
    aux: AuxChoice
    rope: RopeChoice


def conversion_manifest(
    draft: SourceDraft,
    config: DraftConfig,
    vocab: VocabMap,
    records: dict[str, dict[str, Any]],
    findings: Findings,
    map_file: Path | None = None,
) -> dict[str, Any]:
    """The manifest of a converted draft.

    `records` describes its stored tensors; `map_file` is where its vocabulary map came from when
    the weights have none.
    """
    source, files = draft.source, (draft.config_file, *draft.source.files)
    files = (*files, map_file) if map_file else files
    return {
        "format": FORMAT,
        "config": config_json(config),
        "dialect": draft.dialect.name,
        "origins": _origins(draft, config, vocab, map_file),
        "tensors": records,
        "ignored": _ignored(draft, vocab),
        "findings": [dataclasses.asdict(item) for item in findings.items],
        "aux": _aux_json(draft.aux),
        "d2t": _vocab_json(vocab, config),
        "rope": {
            "configured": finite(_without_nulls(draft.rope.configured)),
            "effective": _without_nulls(dataclasses.asdict(draft.rope.effective)),
        },
        "sources": {file.name: sha256_file(file) for file in files},
        "source_config": finite(draft.config.raw),
        "source_tensors": {
            name: [source.dtype(name), list(source.shape(name))] for name in source.names()
        },
        "versions": versions(),
    }


def config_json(config: DraftConfig) -> dict[str, Any]:
    """`DraftConfig` as JSON values: absent parts are left out, a layer without a window has 0."""
    fields = _without_nulls(dataclasses.asdict(config))
    if not isinstance(config.aux_boundaries, str):
        fields["aux_boundaries"] = list(config.aux_boundaries)
    fields["windows"] = [window or 0 for window in config.windows]
    return fields


def versions() -> dict[str, str]:
    """Of what computes and writes a checkpoint."""
    found = installed("jax", "numpy", "orbax-checkpoint")
    return {"python": platform.python_version(), **found}


def _origins(
    draft: SourceDraft, config: DraftConfig, vocab: VocabMap, map_file: Path | None
) -> dict[str, str]:
    eps = draft.config.layer("rms_norm_eps")
    origins = {
        **draft.sizes.origins,
        **draft.layers.origins,
        **draft.switches.origins,
        "rms_norm_eps": eps.origin if eps else "default: 1e-6, transformers' LlamaConfig",
        "rope.theta": draft.rope.theta_origin,
        "rope.kind": draft.rope.kind_origin,
        "aux_boundaries": draft.aux.origin,
    }
    for canonical in config.tensor_shapes():
        names = draft.matched.sources.get(canonical)
        if names:
            origins[canonical] = f"tensor {', '.join(names)}"
    if config.embed == "target":
        origins["embed.weight"] = "target"
    head = draft.matched.spelled("lm_head.weight")
    origins["head"] = f"tensor {head}"
    if config.head == "target":
        origins["head"] = f"target: no {head} in the file"
        origins["lm_head.weight"] = "target"
    table = draft.matched.sources.get("d2t")
    identity = "default: the identity, the file has no d2t"
    origins["draft_to_target"] = f"tensor {table[0]} as {vocab.kind}" if table else identity
    if map_file is not None:
        origins["draft_to_target"] = f"file {map_file.name} as {vocab.kind}"
    return origins


def _ignored(draft: SourceDraft, vocab: VocabMap) -> dict[str, str]:
    ignored = dict(draft.matched.ignored)
    for canonical, reason in draft.switches.dropped.items():
        ignored[draft.matched.sources[canonical][0]] = reason
    if "t2d" in draft.matched.sources:
        name = draft.matched.sources["t2d"][0]
        ignored[name] = f"checked: true for the {len(vocab.targets)} target ids of the map"
    return ignored


def _aux_json(aux: AuxChoice) -> dict[str, Any]:
    boundaries = aux.boundaries if isinstance(aux.boundaries, str) else list(aux.boundaries)
    found: dict[str, Any] = {"boundaries": boundaries}
    if aux.ids is not None and aux.convention is not None:
        found |= {"ids": list(aux.ids), "convention": aux.convention}
    return found


def _vocab_json(vocab: VocabMap, config: DraftConfig) -> dict[str, Any]:
    offsets = to_offsets(vocab.targets)
    first = [[i, int(offsets[i]), int(t)] for i, t in enumerate(vocab.targets[:4])]
    return {
        "kind": vocab.kind,
        "sorted": vocab.ascending,
        "range": [int(vocab.targets.min()), int(vocab.targets.max())],
        "coverage": config.draft_vocab_size / config.vocab_size,
        "first": first,
    }


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    return value

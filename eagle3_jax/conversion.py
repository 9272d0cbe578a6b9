"""From a PyTorch draft to canonical tensors, with a manifest that says where everything is from."""

import dataclasses
import os
from pathlib import Path
from typing import Any, Literal, cast

import numpy as np

from eagle3_jax.aux_ids import read_aux
from eagle3_jax.beside_target import beside_target, read_target
from eagle3_jax.canonical_tensors import check_shapes, read_tensors
from eagle3_jax.config import ConfigError, DraftConfig
from eagle3_jax.dialects import DIALECTS, detect, match, strip_prefixes
from eagle3_jax.draft_layers import read_layers
from eagle3_jax.draft_sizes import read_sizes
from eagle3_jax.draft_switches import Flags, read_switches
from eagle3_jax.files.shards import TensorSource, open_weights, read_json
from eagle3_jax.findings import ConvertError, Findings
from eagle3_jax.fused import SplitSource
from eagle3_jax.manifest import SourceDraft, conversion_manifest
from eagle3_jax.quantised import DequantisedSource
from eagle3_jax.refusals import refuse_other_kinds
from eagle3_jax.rope_config import read_rope
from eagle3_jax.side_vocab import find_side_map
from eagle3_jax.source_config import SourceConfig, TargetFacts
from eagle3_jax.vocab import VocabMap, resolve_map


@dataclasses.dataclass(frozen=True)
class Options:
    """What the user asked for; the defaults ask for nothing.

    Attributes:
      target: the target's folder or config.json. dtype: of the stored floating-point tensors.
      allow: codes of checks to turn into warnings (`findings.ALLOWABLE`).
      dequantise: multiply fp8 and int8 weights by their scales instead of refusing them.
    """

    target: Path | None = None
    dialect: str = "auto"
    dtype: Literal["keep", "float32", "bfloat16"] = "keep"
    aux_convention: Literal["auto", "output", "index"] = "auto"
    flags: Flags = dataclasses.field(default_factory=Flags)
    rope_theta: float | None = None
    ignore_rope_scaling: bool = False
    d2t_kind: Literal["auto", "offset", "absolute"] = "auto"
    allow: tuple[str, ...] = ()
    dequantise: bool = False

    def given(self) -> dict[str, Any]:
        """The options that differ from their defaults, for the manifest."""
        values = {**dataclasses.asdict(self), **dataclasses.asdict(self.flags)}
        defaults = {**dataclasses.asdict(Options()), **dataclasses.asdict(Flags())}
        changed = {key: value for key, value in values.items() if value != defaults[key]}
        changed.pop("flags", None)
        return {k: str(v) if isinstance(v, Path) else v for k, v in changed.items()}


@dataclasses.dataclass(frozen=True)
class Conversion:
    """A converted draft; `checkpoint.save_draft` writes it, `convert_report` prints it."""

    config: DraftConfig
    tensors: dict[str, np.ndarray]
    manifest: dict[str, Any]


def convert_draft(path: str | os.PathLike, options: Options | None = None) -> Conversion:
    """Reads, checks and renames a draft; nothing is written.

    Args:
      path: a folder, or one weight file with config.json beside it.

    Raises:
      ConvertError: the draft is not supported, incomplete, contradictory, or needs a flag.
      FileError: a file is missing or damaged.
    """
    path = Path(path)
    options = options or Options()
    findings = Findings(options.allow)
    try:
        return _convert(path, options, findings)
    except ConvertError as error:
        raise error.about(path) from None


@dataclasses.dataclass(frozen=True)
class Reading:
    """A draft understood and checked, its weights not read yet; `beside`: facts of the target."""

    draft: SourceDraft
    config: DraftConfig
    vocab: VocabMap
    map_file: Path | None
    beside: dict[str, Any]


def read_draft(path: Path, options: Options, findings: Findings) -> Reading:
    """What a checkpoint is, from its config, its tensors' shapes and its vocabulary map.

    Raises:
      ConvertError, FileError: as `convert_draft`.
    """
    if not path.exists():
        raise ConvertError("FILE", f"{path}: no such file or folder")
    config_file = (path if path.is_dir() else path.parent) / "config.json"
    source_config = SourceConfig(read_json(config_file), str(config_file))
    source = open_weights(path)
    for note in source.notes:
        findings.note("FILE_CHOICE", note)
    if options.dequantise:
        source = DequantisedSource(source, source_config.weight_block(), findings)
    source = SplitSource(source, source_config, findings)
    folder, target = read_target(options.target)
    draft = _understand(source, source_config, config_file, target, findings, options)
    config = _draft_config(draft, findings)
    check_shapes(source, draft.matched, config)
    vocab, map_file = _vocabulary(draft, config, options, findings)
    beside = beside_target(draft, folder, target, findings)
    return Reading(draft, config, vocab, map_file, beside)


def _convert(path: Path, options: Options, findings: Findings) -> Conversion:
    read = read_draft(path, options, findings)
    draft, config, vocab = read.draft, read.config, read.vocab
    tensors, records = read_tensors(
        draft.source, draft.matched, config, vocab.targets, options.dtype, findings
    )
    manifest = conversion_manifest(draft, config, vocab, records, findings, read.map_file)
    extra = {"target": read.beside, "options": options.given()}
    return Conversion(config, tensors, manifest | {k: v for k, v in extra.items() if v})


def _understand(
    source: TensorSource,
    config: SourceConfig,
    config_file: Path,
    target: TargetFacts | None,
    findings: Findings,
    options: Options,
) -> SourceDraft:
    plain = strip_prefixes(source.names(), findings)
    shapes = {short: source.shape(name) for short, name in plain.items()}
    dtypes = {short: source.dtype(name) for short, name in plain.items()}
    refuse_other_kinds(plain, shapes, dtypes, config)
    matched = match(plain)
    chosen = options.dialect
    dialect = detect(matched, config, findings) if chosen == "auto" else DIALECTS[chosen]
    single = {
        canonical: source.shape(names[0])
        for canonical, names in matched.sources.items()
        if canonical != "fc_norm.weight"
    }
    sizes = read_sizes(matched, single, config, target, findings)
    layers = read_layers(
        matched,
        single,
        config,
        findings,
        hidden_size=sizes.hidden_size,
        next_norm=options.flags.next_norm,
    )
    switches = read_switches(matched, config, dialect, options.flags, findings)
    aux = read_aux(
        config,
        findings,
        dialect=dialect.name,
        num_aux=sizes.num_aux,
        target_layers=target.num_layers if target else None,
        convention=options.aux_convention,
        single=sizes.fuse == "none",
    )
    rope = read_rope(
        config,
        findings,
        theta=options.rope_theta,
        ignore_scaling=options.ignore_rope_scaling,
        rotary_dim=sizes.latent.qk_rope_head_dim if sizes.latent else sizes.head_dim,
    )
    if dialect.theta_untrue and options.rope_theta is None and rope.effective.theta != 10000.0:
        findings.note(
            "POS_THETA_UNTRUE",
            f"RoPE base {rope.effective.theta:g} is the config's; AngelSlim, and SpecForge before "
            "2025-10-30, train at 10000 whatever the config says: --rope-theta 10000",
        )
    return SourceDraft(
        source, config, config_file, matched, dialect, sizes, layers, switches, aux, rope
    )


def _draft_config(draft: SourceDraft, findings: Findings) -> DraftConfig:
    config, sizes = draft.config, draft.sizes
    switches: dict[str, Any] = dict(draft.switches.fields)
    wide = sizes.hidden_size != sizes.target_hidden_size
    if wide and switches["embed"] == "target":
        raise ConvertError(
            "WEIGHT_OWNER",
            f"the draft is {sizes.hidden_size} wide, the target {sizes.target_hidden_size}: it "
            f"needs its own {draft.matched.spelled('embed.weight')}",
        )
    eps = config.number(config.layer("rms_norm_eps"))
    try:
        built = DraftConfig(
            **sizes.fields(),
            **cast(dict[str, Any], draft.layers.fields),
            **switches,
            rms_norm_eps=1e-6 if eps is None else eps,
            rope=draft.rope.effective,
            aux_boundaries=draft.aux.boundaries,
            head=_head(draft, findings),
        )
    except ConfigError as error:
        raise ConvertError("CONFIG_INVALID", f"{config.where}: {error}") from None
    _all_used(draft, built)
    return built


def _all_used(draft: SourceDraft, config: DraftConfig):
    """Every tensor that has a meaning has a place."""
    used = {*config.tensor_shapes(), *draft.switches.dropped, "d2t", "t2d"}
    left = [name for name in draft.matched.sources if name not in used]
    if left:
        raise ConvertError(
            "WEIGHT_UNUSED",
            f"tensor {draft.matched.spelled(left[0])!r} has no use in this draft: its other "
            "tensors and config.json describe one without it",
        )


def _head(draft: SourceDraft, findings: Findings) -> Literal["draft", "target"]:
    sizes, sources = draft.sizes, draft.matched.sources
    field = draft.config.anywhere("tie_word_embeddings")
    tied = draft.config.flag(field)
    if "lm_head.weight" in sources:
        if tied:
            findings.note(
                "WEIGHT_TIED_HEAD",
                "tie_word_embeddings is true, but the file has its own lm_head: used; SGLang would "
                "replace it by the embedding",
            )
        return "draft"
    full = sizes.draft_vocab_size == sizes.vocab_size
    if full and sizes.hidden_size == sizes.target_hidden_size:
        if tied and "embed.weight" in sources:
            raise ConvertError(
                "WEIGHT_MISSING_LM_HEAD",
                "no lm_head.weight, tie_word_embeddings is true and the file has its own "
                "embedding: the head may be that or the target's; add lm_head.weight",
            )
        findings.warn(
            "WEIGHT_MISSING_LM_HEAD",
            "no lm_head.weight and a full vocabulary: lm_head <- target; SGLang does so only when "
            "draft_vocab_size is null, and else runs a random head",
        )
        return "target"
    reason = (
        f"a draft vocabulary of {sizes.draft_vocab_size} of {sizes.vocab_size}"
        if not full
        else f"a width of {sizes.hidden_size}, not the target's {sizes.target_hidden_size}"
    )
    raise ConvertError(
        "WEIGHT_MISSING_LM_HEAD",
        f"missing: {draft.matched.spelled('lm_head.weight')}; {reason} cannot use the target's",
    )


def _vocabulary(
    draft: SourceDraft, config: DraftConfig, options: Options, findings: Findings
) -> tuple[VocabMap, Path | None]:
    """The map, and the file beside the weights it was taken from if it was."""

    def read(name: str) -> np.ndarray | None:
        names = draft.matched.sources.get(name)
        return draft.source.read(names[0]) if names else None

    table, mask, kind, file = read("d2t"), read("t2d"), options.d2t_kind, None
    reduced = config.draft_vocab_size < config.vocab_size
    if table is None and reduced and "VOCAB_MAP_MISSING" not in findings.allowed:
        side = find_side_map(draft.config_file.parent, config.draft_vocab_size)
        if side is not None:
            table, file = side.table, side.file
            mask = side.mask if mask is None else mask
            kind = side.kind if kind == "auto" else kind
            findings.warn(
                "VOCAB_MAP_SIDE_FILE",
                f"the weights have no d2t: the vocabulary map is that of {file.name}, read as "
                f"{'offsets' if kind == 'offset' else 'target ids'} in the order of lm_head's rows",
            )
    vocab = resolve_map(
        table,
        draft_vocab_size=config.draft_vocab_size,
        vocab_size=config.vocab_size,
        findings=findings,
        mask=mask,
        kind=kind,
    )
    if not vocab.ascending:
        findings.note(
            "VOCAB_MAP_UNSORTED",
            "the vocabulary map is not ascending (a frequency order, as ModelOpt's): kept, it is "
            "the order of lm_head's rows",
        )
    return vocab, file

"""A draft of either form, read without asking: what only a user can know is shown as undecided."""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import numpy as np

from eagle3_jax.aux_ids import listed_ids
from eagle3_jax.checkpoint import MANIFEST, CheckpointError, manifest_config, read_manifest
from eagle3_jax.checkpoint import read_tensors as read_stored
from eagle3_jax.config import DraftConfig
from eagle3_jax.conversion import Options, Reading, read_draft
from eagle3_jax.findings import ConvertError, Finding, Findings
from eagle3_jax.manifest import conversion_manifest
from eagle3_jax.source_config import SourceConfig
from eagle3_jax.vocab import to_offsets

Severity = Literal["note", "warning", "error"]
ALLOWED: dict[str, Severity] = {
    "CONFIG_SIZE_DISAGREES": "error",
    "POS_SLIDING_WINDOW_UNCLEAR": "warning",
    "VOCAB_MAP_ALL_ZERO": "warning",
    "VOCAB_MAP_MISSING": "error",
}
"""Checks that stop a conversion and not an inspection, with their weight here."""


@dataclasses.dataclass(frozen=True)
class Line:
    """One thing to know: a stable code, how bad, what, and what to do."""

    code: str
    severity: Severity
    message: str
    fix: str = ""


@dataclasses.dataclass(frozen=True)
class Subject:
    """A draft under inspection.

    Attributes:
      kind: which form it has. manifest: as `draft.json` has it. targets: [W] target ids.
      lines: what was found while reading. names: stored tensors. read: one of them.
      embed: the stored name of its own embedding, if it has one.
    """

    kind: Literal["PyTorch draft", "converted draft"]
    config: DraftConfig
    manifest: dict[str, Any]
    targets: np.ndarray
    lines: tuple[Line, ...]
    names: tuple[str, ...]
    read: Callable[[str], np.ndarray]
    embed: str | None


def open_subject(path: Path, target: Path | None) -> Subject:
    """Reads a draft folder, a weight file, or a converted draft.

    Raises:
      ConvertError, FileError, CheckpointError: nothing can be made of it; the message says why.
    """
    if path.is_dir() and (path / MANIFEST).exists():
        return _converted(path)
    read, lines = _leniently(path, target)
    draft = read.draft
    manifest = conversion_manifest(draft, read.config, read.vocab, {}, Findings(), read.map_file)
    manifest |= {"target": read.beside} if read.beside else {}
    own = draft.matched.sources.get("embed.weight")
    return Subject(
        "PyTorch draft",
        read.config,
        manifest,
        read.vocab.targets,
        lines,
        tuple(draft.source.names()),
        draft.source.read,
        own[0] if own else None,
    )


def _converted(path: Path) -> Subject:
    manifest = read_manifest(path)
    config = manifest_config(manifest, path)
    records = manifest["tensors"]
    lacking = config.tensor_shapes().keys() - records.keys()
    if lacking:
        raise CheckpointError(f"{path / MANIFEST}: the draft has no tensor {min(lacking)!r}")
    _check_manifest(path / MANIFEST, manifest, config)
    found = [Finding(**item) for item in manifest.get("findings", [])]
    targets = read_stored(path, ["draft_to_target"], records)["draft_to_target"]
    return Subject(
        "converted draft",
        config,
        manifest,
        targets,
        tuple(_line(item) for item in found),
        tuple(records),
        lambda name: read_stored(path, [name], records)[name],
        "embed.weight" if config.embed == "draft" else None,
    )


def _check_manifest(file: Path, manifest: dict[str, Any], config: DraftConfig):
    """Raises `CheckpointError` unless every part an inspection needs has its shape."""
    for key in ("origins", "aux", "d2t", "rope"):
        if not isinstance(manifest.get(key), dict):
            raise CheckpointError(
                f"{file}: has no {key}: not written by convert.from_torch, nothing to inspect"
            )
    keys = {"code", "severity", "message"}
    ids, boundaries = manifest["aux"].get("ids"), config.aux_boundaries
    tensors = manifest.get("source_tensors", {}).values()
    checks = {
        "dialect": isinstance(manifest.get("dialect"), str),
        "findings": all(
            isinstance(item, dict) and item.keys() == keys for item in manifest.get("findings", [])
        ),
        "aux": ids is None or (isinstance(ids, list) and len(ids) == len(boundaries)),
        "source_tensors": all(isinstance(item, list) and len(item) == 2 for item in tensors),
    }
    for key, right in checks.items():
        if not right:
            raise CheckpointError(f"{file}: {key} is damaged")
    listed_ids(SourceConfig(manifest.get("source_config", {}), f"{file}: source_config"))


def _leniently(path: Path, target: Path | None) -> tuple[Reading, tuple[Line, ...]]:
    """Reads again with an answer for each question the file leaves open, which becomes a line."""
    options, lines = Options(target=target), []
    while True:
        findings = Findings(options.allow)
        try:
            read = read_draft(path, options, findings)
        except ConvertError as error:
            answer = _answer(error, options)
            if answer is None or answer[0] == options:
                raise error.about(path) from None
            options, line = answer
            if line is not None:
                lines.append(line)
        else:
            return read, (*lines, *(_line(item) for item in findings.items))


def _answer(error: ConvertError, options: Options) -> tuple[Options, Line | None] | None:
    """Options that get past this question, and the line that says it was open."""
    code, flags = error.code, options.flags
    replace = dataclasses.replace
    if code in ALLOWED:
        return replace(options, allow=(*options.allow, code)), None
    undecided: dict[str, tuple[Options, str, str]] = {
        "NORM_BEFORE_RESIDUAL": (
            replace(options, flags=replace(flags, norm_before_residual=True)),
            "shown with true, which vLLM takes for a missing key",
            "state norm_before_residual in config.json",
        ),
        "NORM_DOUBLE": (
            replace(options, flags=replace(flags, double_norm=False)),
            "shown with false, as served",
            "ask whoever trained it for the ModelOpt version",
        ),
        "NORM_OUTPUT_AMBIGUOUS": (
            replace(options, flags=replace(flags, feedback="post_norm")),
            "shown with post_norm, as SGLang and vLLM read it",
            "ask whoever trained it for the SpecForge version",
        ),
        "VOCAB_MAP_AMBIGUOUS": (
            replace(options, d2t_kind="offset"),
            "shown as offsets, as every PyTorch trainer writes them",
            "store t2d beside d2t",
        ),
        "AUX_CONVENTION_AMBIGUOUS": (
            replace(options, aux_convention="output"),
            "shown as outputs of blocks",
            "keep one list of layer ids",
        ),
        "WEIGHT_QUANTISED": (
            replace(options, dequantise=True),
            "shown multiplied by their scales",
            "convert with --dequantise",
        ),
    }
    if code == "CONFIG_MULTI_LAYER" and "--next-layer-norm" in str(error):
        changed = replace(options, flags=replace(flags, next_norm="input_layernorm"))
        undecided[code] = (changed, "shown with input_layernorm", "remove the norm not trained")
    if code == "VOCAB_MAP_ABSOLUTE":
        line = Line(
            code, "error", f"{error}; every engine reads offsets", "store target id - draft id"
        )
        return replace(options, d2t_kind="absolute"), line
    if code not in undecided:
        return None
    changed, shown, fix = undecided[code]
    return changed, Line(code, "warning", f"not decidable from the file: {error}: {shown}", fix)


def _line(item: Finding) -> Line:
    return Line(item.code, ALLOWED.get(item.code, item.severity), item.message)


def offsets(subject: Subject) -> np.ndarray:
    """The draft's map as d2t holds it, int64 [W]."""
    return to_offsets(subject.targets)

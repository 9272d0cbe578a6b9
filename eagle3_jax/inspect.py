"""One page on a draft checkpoint: what it is, where each value is from, what engines make of it."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from eagle3_jax.beside_target import read_target
from eagle3_jax.checkpoint import CheckpointError
from eagle3_jax.engine_rules import ENGINES
from eagle3_jax.export_ids import TargetShape
from eagle3_jax.files.shards import FileError, open_weights, read_json
from eagle3_jax.findings import ConvertError
from eagle3_jax.inspection.patch import Patch, make_patch
from eagle3_jax.inspection.serving import PATCHED, Served, serve
from eagle3_jax.inspection.sizes import draft_rows, size_rows, switch_rows, vocabulary_rows
from eagle3_jax.inspection.subject import Line, Subject, open_subject
from eagle3_jax.inspection.trained_rope import BASE, trained_rope
from eagle3_jax.inspection.weights import beside_target, tensor_table
from eagle3_jax.source_config import TargetFacts

UNUSABLE, WARNINGS, CLEAN = 2, 1, 0


def inspect_draft(
    path: Path, *, target: Path | None = None, patch: str | None = None
) -> dict[str, Any]:
    """Everything `eagle3 inspect` prints, as JSON values.

    Args:
      path: a draft folder, a weight file with config.json beside it, or a converted draft.
      target: the target's folder or config.json. patch: "sglang" or "vllm".

    Returns:
      `status` 0, 1 or 2 as the command exits; `error` when the draft is unusable, beside the
      tensors as far as they can be read.

    Raises:
      FileError, ConvertError: the path or the target cannot be read at all.
    """
    folder, facts = read_target(target)
    shape = _target_shape(facts)
    if not path.exists():
        raise ConvertError("FILE", f"{path}: no such file or folder")
    try:
        subject = open_subject(path, target)
        if subject.kind == "converted draft" and facts is not None:
            _check_pair(subject, facts)
    except (ConvertError, FileError, CheckpointError) as error:
        return _unusable(path, error)
    if shape.layers is None:
        beside = subject.manifest.get("target") or {}
        shape = dataclasses.replace(shape, layers=beside.get("num_hidden_layers"))
    return _Page(path, subject, folder, facts, shape).build(patch)


class _Page:
    def __init__(
        self,
        path: Path,
        subject: Subject,
        folder: Path | None,
        facts: TargetFacts | None,
        shape: TargetShape,
    ):
        self.path, self.subject, self.folder = path, subject, folder
        self.facts, self.shape = facts, shape
        self.source = subject.manifest.get("source_config") or {}
        self.tensors = subject.manifest.get("source_tensors") or {}
        self.d2t_kind = subject.manifest["d2t"].get("kind", "offset")

    def build(self, patch: str | None) -> dict[str, Any]:
        subject, manifest = self.subject, self.subject.manifest
        table, broken = tensor_table(subject.names, subject.read)
        beside, owner = beside_target(subject, self.folder, self.facts)
        same = beside.get("rows_different") == []
        compared = "rows_different" in beside
        kept = [one for one in subject.lines if not (compared and one.code == "WEIGHT_OWNER")]
        rope = trained_rope(subject.config, manifest["dialect"], self.source)
        vocabulary, text_note = vocabulary_rows(subject, self.folder or self.path)
        lines = [*kept, *broken, *owner, *text_note]
        if rope is not None and rope.sure:
            lines.append(Line("POS_THETA_UNTRUE", "warning", rope.why, rope.fix))
        served = self._served(same) if self.source and self.tensors else []
        made = None
        if patch is not None:
            if not served:
                raise ConvertError("USAGE", f"{self.path}: --patch needs a converted checkpoint")
            made = self._patch(patch, rope, same)
        counted = [*lines, *(one for s in served if _named(s, patch) for one in s.lines)]
        return {
            "path": str(self.path),
            "kind": subject.kind,
            "dialect": manifest["dialect"],
            "usable": True,
            "status": _status(counted),
            "sizes": size_rows(subject),
            "switches": switch_rows(subject),
            "aux": draft_rows(subject, served),
            "vocabulary": vocabulary | {"sizes": self._vocabulary_sizes(beside)},
            "rope": {
                "configured": manifest["rope"].get("configured"),
                "effective": manifest["rope"].get("effective"),
                "origins": {
                    part: manifest["origins"].get(f"rope.{part}") for part in ("theta", "kind")
                },
                "trained": None
                if rope is None
                else {"theta": BASE, "kind": "default", "sure": rope.sure, "why": rope.why},
            },
            "target": {**(manifest.get("target") or {}), **beside},
            "tensors": table,
            "ignored": manifest.get("ignored", {}),
            "findings": [dataclasses.asdict(one) for one in lines],
            "engines": {s.engine: [dataclasses.asdict(one) for one in s.lines] for s in served},
            "patch": None if made is None else _patch_json(made),
        }

    def _served(self, same: bool) -> list[Served]:
        return [
            serve(
                name,
                self.subject.config,
                self.source,
                self.tensors,
                d2t_kind=self.d2t_kind,
                target=self.shape,
                same_embedding=same,
            )
            for name in ENGINES
        ]

    def _patch(self, engine: str, rope: Any, same: bool) -> Patch:
        return make_patch(
            engine,
            self.subject.config,
            self.source,
            self.tensors,
            d2t_kind=self.d2t_kind,
            target=self.shape,
            rope=rope,
            same_embedding=same,
        )

    def _vocabulary_sizes(self, beside: Mapping[str, Any]) -> dict[str, int]:
        """Every length that claims to be the target's vocabulary."""
        shapes = {name.split(".")[-2:][0]: shape for name, (_, shape) in self.tensors.items()}
        found = {
            "t2d": shapes["t2d"][0] if "t2d" in shapes else None,
            "draft's config": self._stated("vocab_size"),
            "draft's embedding rows": shapes["embed_tokens"][0]
            if "embed_tokens" in shapes
            else None,
            "target's config": self.facts.vocab_size if self.facts else None,
            "target's embedding rows": beside.get("embed_rows"),
            "used": self.subject.config.vocab_size,
        }
        return {key: value for key, value in found.items() if value is not None}

    def _stated(self, key: str) -> Any:
        return (self.source.get("transformer_layer_config") or self.source).get(key)


def _named(served: Served, patch: str | None) -> bool:
    return patch is not None and served.engine == PATCHED[patch]


def _status(lines: list[Line]) -> int:
    kinds = {line.severity for line in lines}
    return UNUSABLE if "error" in kinds else WARNINGS if "warning" in kinds else CLEAN


def _patch_json(patch: Patch) -> dict[str, Any]:
    return {
        "engine": patch.engine,
        "config": patch.config,
        "problems": list(patch.problems),
        "notes": list(patch.notes),
        "left": [dataclasses.asdict(one) for one in patch.after.lines],
    }


def _target_shape(facts: TargetFacts | None) -> TargetShape:
    if facts is None:
        return TargetShape()
    names = read_json(facts.where).get("architectures")
    first = names[0] if isinstance(names, list) and names else None
    return TargetShape(facts.num_layers, first if isinstance(first, str) else None)


def _check_pair(subject: Subject, facts: TargetFacts):
    config = subject.config
    pairs = (
        ("target width", config.target_hidden_size, "hidden_size", facts.hidden_size),
        ("target vocabulary", config.vocab_size, "vocab_size", facts.vocab_size),
    )
    for what, ours, key, theirs in pairs:
        if theirs is not None and ours != theirs:
            raise ConvertError(
                "CONFIG_WRONG_PAIR",
                f"the draft expects {what} {ours} ({config.num_aux} states), {facts.where} has "
                f"{key} {theirs}",
            )


def _unusable(path: Path, error: ConvertError | FileError | CheckpointError) -> dict[str, Any]:
    """What can be said of a draft that nothing can run: the reason, and its tensors if any."""
    code = error.code if isinstance(error, ConvertError) else "FILE"
    code = "CHECKPOINT" if isinstance(error, CheckpointError) else code
    message = str(error)
    table: list[dict[str, Any]] = []
    try:
        source = open_weights(path)
        table = tensor_table(source.names(), source.read)[0]
    except (FileError, OSError):
        table = []
    fc = next((row["shape"] for row in table if row["name"].endswith("fc.weight")), [])
    if code == "ARCH_SINGLE_STATE" and len(fc) == 2:
        eagle1 = fc[1] == 2 * fc[0]
        kind = "EAGLE-1 style, embedding and state through fc" if eagle1 else "one state through fc"
        message += f": {kind}: not run here"
    return {
        "path": str(path),
        "usable": False,
        "status": UNUSABLE,
        "error": {"code": code, "message": message},
        "tensors": table,
    }

"""From a converted draft back to a PyTorch checkpoint, in the words of one framework."""

import dataclasses
import json
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from eagle3_jax.aux_ids import AUX_KEY
from eagle3_jax.beside_target import read_target
from eagle3_jax.checkpoint import manifest_config, read_manifest
from eagle3_jax.config import ConfigError, DraftConfig
from eagle3_jax.conversion import Conversion, Options, convert_draft
from eagle3_jax.draft_switches import Flags
from eagle3_jax.engines import run_as
from eagle3_jax.export_config import ConfigWriter
from eagle3_jax.export_ids import TargetShape, implied_depth
from eagle3_jax.export_rules import FORMS, Form
from eagle3_jax.export_tensors import Planned, plan_tensors, write_tensors
from eagle3_jax.files.shards import read_json
from eagle3_jax.files.whole import put
from eagle3_jax.findings import ConvertError, Finding, Findings

CONFIG, WEIGHTS = "config.json", "model.safetensors"
Dtype = Literal["keep", "float32", "bfloat16", "float16"]


@dataclasses.dataclass(frozen=True)
class Export:
    """A draft in one dialect's words, not written yet.

    Attributes:
      config: the draft as trained. config_json: what config.json will hold. tensors: what
        model.safetensors will. findings: what the reader of the file should know.
      options: how this project's converter must be called to read it back.
    """

    form: Form
    config: DraftConfig
    config_json: dict[str, Any]
    tensors: tuple[Planned, ...]
    findings: tuple[Finding, ...]
    options: Options
    layers: int | None

    def convert_flags(self) -> list[str]:
        """`options` as command-line flags of `convert.from_torch`."""
        words: list[str] = []
        for key, value in self.options.given().items():
            shown = value if isinstance(value, list | tuple) else [value]
            name = {"next_norm": "next-layer-norm"}.get(key, key.replace("_", "-"))
            words += [f"--{name}", *(str(v).lower() if v in (True, False) else v for v in shown)]
        return words


def plan_export(
    path: str | os.PathLike, dialect: str, *, dtype: Dtype = "keep", target: Path | None = None
) -> Export:
    """What `dialect`'s checkpoint of a converted draft is; nothing is written.

    Args:
      path: a folder of `convert.from_torch`. dtype: of floating-point tensors.
      target: the target's folder or config.json: layer ids mean different things by family.

    Raises:
      ConvertError: EXPORT_CANNOT with every switch, size or layer id the dialect cannot say.
      CheckpointError: not a converted draft.
    """
    if dialect not in FORMS:
        raise ConvertError("USAGE", f"unknown dialect {dialect!r}: known are {', '.join(FORMS)}")
    form, folder = FORMS[dialect], Path(path)
    manifest = read_manifest(folder)
    config = manifest_config(manifest, folder)
    shape = _target_shape(manifest, config, target)
    tensors, stored = plan_tensors(config, manifest, form, dtype)
    writer = ConfigWriter(form, config, manifest.get("source_config", {}), shape, stored)
    made = writer.build()
    problems = writer.problems
    if not problems:
        problems = engine_problems(form, config, made, tensors, shape, writer.findings)
    if problems:
        raise ConvertError(
            "EXPORT_CANNOT",
            f"{folder}: the {form.name} dialect cannot hold this draft: {'; '.join(problems)}",
        )
    options = _options(form, config, made, manifest, target)
    layers = shape.layers
    if form.ids == "none" and layers is None and not isinstance(config.aux_boundaries, str):
        layers = implied_depth(config.aux_boundaries)
    return Export(form, config, made, tensors, tuple(writer.findings.items), options, layers)


def write_export(
    path: str | os.PathLike, out: str | os.PathLike, export: Export, *, verify: bool, force: bool
):
    """Writes config.json and model.safetensors, all or nothing; the file's own name is last.

    Args:
      path: the converted draft. out: the folder to write. verify: read the result back first.
      force: replace an earlier export, a folder of these two files and nothing else.

    Raises:
      ConvertError: EXPORT_DIFFERS when what was written is not what was read; FILE.
    """
    path, place = Path(path), Path(out)
    check_destination(place, force)
    try:
        place.absolute().parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(
            dir=place.absolute().parent, prefix=".export.", suffix=".tmp"
        ) as temporary:
            made = Path(temporary) / "made"
            made.mkdir()
            text = json.dumps(export.config_json, indent=2, allow_nan=False)
            (made / CONFIG).write_text(text + "\n", encoding="utf-8")
            digests = write_tensors(made / WEIGHTS, path, export.tensors)
            if verify:
                _verify(made, export, digests)
            put(made, place)
    except OSError as error:
        raise ConvertError("FILE", f"{out}: cannot be written: {error.strerror}") from None


def check_destination(place: Path, force: bool):
    """Raises `ConvertError` unless `place` is free, empty, or (with `force`) an earlier export."""
    if place.is_symlink() or (place.exists() and not place.is_dir()):
        raise ConvertError("FILE", f"{place}: exists and is not a folder")
    names = sorted(entry.name for entry in place.iterdir()) if place.exists() else []
    if names and names != [CONFIG, WEIGHTS]:
        strange = next((name for name in names if name not in (CONFIG, WEIGHTS)), names[0])
        raise ConvertError(
            "FILE", f"{place}: exists and is no export (it holds {strange!r}): never overwritten"
        )
    if names and not force:
        raise ConvertError("FILE", f"{place}: exists: --force overwrites it")


def engine_problems(
    form: Form,
    config: DraftConfig,
    made: Mapping[str, Any],
    tensors: tuple[Planned, ...],
    shape: TargetShape,
    findings: Findings,
) -> list[str]:
    """Where the engine that the dialect is for would not run the draft as trained."""
    engine = form.engine or ("vllm" if form.name == "speculators" else None)
    if engine is None:
        return []
    names = [name for planned in tensors for name in planned.names]
    try:
        profile = run_as(
            engine,
            config,
            made,
            names,
            target_layers=shape.layers,
            target_architecture=shape.architecture,
        )
    except ConfigError as error:
        said = [str(error)]
    else:
        dynamic = config.rope.kind == "dynamic"
        different = differences(config, profile.config, shape.layers or _depth(config))
        said = [
            f"{line} ({engine})" for line in different if not (dynamic and line.startswith("rope"))
        ]
    if form.engine is None:
        for line in said:
            findings.warn("ENGINE", f"{engine} would not run this as trained: {line}")
        return []
    return said


def differences(trained: DraftConfig, other: DraftConfig, layers: int | None) -> list[str]:
    """`changed` as a line a field."""
    found = changed(trained, other, layers).items()
    return [f"{field} is {theirs}, trained with {ours}" for field, (ours, theirs) in found]


def changed(
    trained: DraftConfig, other: DraftConfig, layers: int | None
) -> dict[str, tuple[Any, Any]]:
    """Fields of two configs that mean something else, with both values.

    The default boundaries and their numbers for `layers` blocks mean the same, as do no windows and
    a window of None in each layer.
    """
    found = {}
    for field in dataclasses.fields(DraftConfig):
        ours, theirs = (_meaning(config, field.name, layers) for config in (trained, other))
        if ours != theirs:
            found[field.name] = (ours, theirs)
    return found


def _meaning(config: DraftConfig, field: str, layers: int | None) -> Any:
    value: Any = getattr(config, field)
    if field == "aux_boundaries" and isinstance(value, str) and layers is not None:
        return config.resolve(layers).aux_boundaries
    rope = config.rope
    if field == "rope" and not (rope.mscale and rope.mscale_all_dim) and config.latent is None:
        return dataclasses.replace(rope, mscale=None, mscale_all_dim=None)
    if field == "windows" and not any(value):
        return ()
    later = ("next_layers", "next_spare_norm")
    return None if field in later and config.num_layers == 1 else value


def _depth(config: DraftConfig) -> int | None:
    boundaries = config.aux_boundaries
    return None if isinstance(boundaries, str) else implied_depth(boundaries)


def _target_shape(
    manifest: Mapping[str, Any], config: DraftConfig, target: Path | None
) -> TargetShape:
    beside = manifest.get("target") or {}
    if target is None:
        return TargetShape(beside.get("num_hidden_layers"))
    _, facts = read_target(target)
    assert facts is not None
    if facts.hidden_size != config.target_hidden_size:
        raise ConvertError(
            "CONFIG_WRONG_PAIR",
            f"the draft expects target width {config.target_hidden_size}, {facts.where} has "
            f"hidden_size {facts.hidden_size}",
        )
    names = read_json(facts.where).get("architectures")
    first = names[0] if isinstance(names, list) and names else None
    return TargetShape(facts.num_layers, first if isinstance(first, str) else None)


def _options(
    form: Form,
    config: DraftConfig,
    made: Mapping[str, Any],
    manifest: Mapping[str, Any],
    target: Path | None,
) -> Options:
    """How to read the export back: what its tensors and keys do not show, said."""
    post = config.feedback == "post_norm"
    flags = Flags(
        feedback=config.feedback if post and form.reads_as != "speculators" else None,
        final_norm=None if config.final_norm else False,
        double_norm=config.double_norm if form.name == "modelopt" else None,
        next_norm=config.next_layers if config.next_spare_norm else None,  # type: ignore[arg-type]
    )
    reduced = config.draft_vocab_size < config.vocab_size
    first = manifest.get("d2t", {}).get("range") == [0, config.draft_vocab_size - 1]
    zero = reduced and first and bool(manifest.get("d2t", {}).get("sorted"))
    ids = made.get(AUX_KEY) or made.get("eagle_config", {}).get(AUX_KEY) or ()
    index = form.name != "speculators" and ids and tuple(ids) == config.aux_boundaries
    return Options(
        target=target,
        dialect="mla" if config.latent is not None else form.reads_as,
        aux_convention="index" if index else "auto",
        flags=flags,
        d2t_kind="offset",
        allow=("VOCAB_MAP_ALL_ZERO",) if zero else (),
    )


def _verify(made: Path, export: Export, digests: Mapping[str, str]):
    """Converts what was written and compares it with what it was written from."""
    try:
        back: Conversion = convert_draft(made, export.options)
    except ConvertError as error:
        text = str(error).replace(f"{made}: ", "").replace(f"{made}/", "")
        raise ConvertError("EXPORT_DIFFERS", f"the export does not convert back: {text}") from None
    wrong = differences(export.config, back.config, export.layers)
    records = {name: record["sha256"] for name, record in back.manifest["tensors"].items()}
    for name in sorted(records.keys() | digests.keys()):
        if records.get(name) != digests.get(name):
            wrong.append(f"tensor {name} has other values")
    if wrong:
        raise ConvertError("EXPORT_DIFFERS", f"the export read back: {'; '.join(wrong)}")

"""Canonical drafts on disk: an Orbax checkpoint of tensors beside a `draft.json` about them."""

import dataclasses
import json
import os
import shutil
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Protocol

import jax
import numpy as np

from eagle3_jax import memory
from eagle3_jax.canonical_tensors import describe, sha256_array
from eagle3_jax.config import ConfigError, DraftConfig, LatentSizes, RopeConfig, TargetConfig
from eagle3_jax.draft import Eagle3Draft
from eagle3_jax.engines import run_as
from eagle3_jax.files.shards import FileError, read_json
from eagle3_jax.files.whole import put, umask
from eagle3_jax.manifest import FORMAT, config_json, versions

MANIFEST = "draft.json"
WEIGHTS = "weights"
CHUNK = 64 * 2**20
"""Bytes of a tensor that are packed and unpacked at a time."""


class CheckpointError(ValueError):
    """A folder that is not a usable draft of ours: says which, found, expected."""


class HasTargetConfig(Protocol):
    """A loaded target, as far as a draft must fit it."""

    @property
    def config(self) -> TargetConfig: ...  # noqa: D102


def load_draft(
    path: str | os.PathLike,
    *,
    target: HasTargetConfig | None = None,
    dtype: str = "float32",
    as_engine: str | None = None,
) -> Eagle3Draft:
    """A draft written by `convert.from_torch` or `save_draft`.

    Args:
      path: the folder with draft.json and weights/.
      target: the target it will draft for; checks that they fit and settles the default boundaries.
      dtype: of weights and activations.
      as_engine: run it as this engine would ("sglang-0.5.23", "vllm", see `engine_rules`), not as
        it was trained.

    Raises:
      CheckpointError: not a draft folder, a newer format, damaged weights.
      ConfigError: the draft does not fit the target, or the engine cannot run it.
    """
    path = Path(path)
    if target is not None and not isinstance(getattr(target, "config", None), TargetConfig):
        raise ConfigError(f"target is a {type(target).__name__}, expected what load_target returns")
    manifest = read_manifest(path)
    config = manifest_config(manifest, path)
    layers = None if target is None else target.config.num_layers
    draft_attention = "ancestors"
    at_one: tuple[str, ...] = ()
    if as_engine is not None:
        profile = run_as(
            as_engine,
            config,
            manifest.get("source_config", {}),
            tuple(manifest.get("source_tensors", {})),
            d2t_kind=manifest.get("d2t", {}).get("kind", "offset"),
            target_layers=layers,
            target_architecture=None if target is None else target.config.architecture,
        )
        config, draft_attention = profile.config, profile.draft_attention
        at_one = profile.at_one
    if target is not None:
        config = fit(config, target.config)
    memory.check_weights(str(path), config.tensor_shapes().values(), dtype)
    shapes = config.tensor_shapes()
    tensors = read_tensors(path, [n for n in shapes if n not in at_one], manifest["tensors"])
    tensors |= {name: np.ones(shapes[name], np.float32) for name in at_one}
    return Eagle3Draft.from_tensors(
        config, tensors, dtype, engine=as_engine, draft_attention=draft_attention
    )


def fit(config: DraftConfig, target: TargetConfig) -> DraftConfig:
    """The draft's config with its boundaries settled for this target.

    Raises:
      ConfigError: another width or vocabulary, or boundaries the target does not have.
    """
    if config.target_hidden_size != target.hidden_size:
        raise ConfigError(
            f"the draft expects target width {config.target_hidden_size} ({config.num_aux} states)"
            f", the target has hidden_size {target.hidden_size}: they are not a pair"
        )
    if config.vocab_size != target.vocab_size:
        raise ConfigError(
            f"the draft is for a target vocabulary of {config.vocab_size}, the target has "
            f"{target.vocab_size} (embedding rows): they are not a pair"
        )
    return config.resolve(target.num_layers)


def save_draft(
    path: str | os.PathLike,
    config: DraftConfig,
    tensors: Mapping[str, np.ndarray],
    *,
    manifest: Mapping[str, Any] | None = None,
    force: bool = False,
) -> Path:
    """Writes a draft, all or nothing: a temporary folder beside `path`, then a rename.

    Args:
      tensors: by canonical name, `config.tensor_shapes()` and no other.
      manifest: what `conversion` found; the default describes only config and tensors.
      force: replace an existing draft of ours; nothing else is ever replaced.

    Raises:
      CheckpointError: wrong tensors, `path` exists and may not be replaced, or writing fails.
    """
    path = Path(path)
    shapes = config.tensor_shapes()
    found = {name: tensor.shape for name, tensor in tensors.items()}
    for name in sorted(shapes.keys() | found.keys()):
        if found.get(name) != shapes.get(name):
            raise CheckpointError(
                f"tensor {name!r} has shape {found.get(name)}, expected {shapes.get(name)}"
            )
    check_writable(path, force)
    if manifest is None:
        manifest = {
            "format": FORMAT,
            "config": config_json(config),
            "tensors": {name: describe(tensor) for name, tensor in tensors.items()},
            "versions": versions(),
        }
    place = path.absolute()
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        temporary = Path(tempfile.mkdtemp(dir=place.parent, prefix=".draft.", suffix=".tmp"))
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be written: {error.strerror}") from None
    try:
        temporary.chmod(0o777 & ~umask())
        _write((temporary / WEIGHTS).absolute(), tensors)
        text = json.dumps(manifest, indent=1, allow_nan=False)
        (temporary / MANIFEST).write_text(text + "\n", encoding="utf-8")
        put(temporary, place)
    except BaseException as error:
        shutil.rmtree(temporary, ignore_errors=True)
        if isinstance(error, Exception):  # tensorstore has its own for a full disk
            reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
            raise CheckpointError(f"{path}: cannot be written: {reason[:300]}") from error
        raise
    return path


def check_writable(path: Path, force: bool):
    """Raises `CheckpointError` unless `path` is free, empty, or (with `force`) a draft of ours."""
    if path.is_symlink() or (path.exists() and not path.is_dir()):
        raise CheckpointError(f"{path}: exists and is not a folder")
    if not path.exists():
        return
    names = sorted(entry.name for entry in path.iterdir())
    if not names:
        return
    strange = [name for name in names if name not in (MANIFEST, WEIGHTS)]
    if strange or MANIFEST not in names:
        what = strange[0] if strange else names[0]
        raise CheckpointError(
            f"{path}: exists and is not a draft written here (it holds {what!r}): never overwritten"
        )
    if not force:
        raise CheckpointError(f"{path}: exists: --force overwrites it")


def read_manifest(path: str | os.PathLike) -> dict[str, Any]:
    """`draft.json` of a draft folder.

    Raises:
      CheckpointError: no folder, not a draft of ours, damaged, or of a newer format.
    """
    path = Path(path)
    file = path / MANIFEST
    if not path.is_dir():
        raise CheckpointError(f"{path}: no such folder")
    if not file.exists():
        raise CheckpointError(
            f"{path}: no {MANIFEST}: not a converted draft; convert it with "
            f"python -m convert.from_torch {path} --out DIR"
        )
    try:
        manifest = read_json(file)
    except FileError as error:
        raise CheckpointError(str(error)) from None
    found = manifest.get("format")
    if not isinstance(found, int) or isinstance(found, bool) or found < 1:
        raise CheckpointError(f"{file}: format is {found!r}, expected {FORMAT}")
    if found > FORMAT:
        raise CheckpointError(
            f"{file}: format {found}, this version reads up to {FORMAT}: upgrade eagle3-jax"
        )
    optional = {key: manifest.get(key, {}) for key in ("source_config", "source_tensors", "d2t")}
    parts = {"config": manifest.get("config"), "tensors": manifest.get("tensors"), **optional}
    for key, part in parts.items():
        if not isinstance(part, dict):
            raise CheckpointError(f"{file}: {key} is not an object: damaged")
    if not all(isinstance(record, dict) for record in parts["tensors"].values()):
        raise CheckpointError(f"{file}: tensors is not an object of records: damaged")
    return manifest


def manifest_config(manifest: Mapping[str, Any], path: Path) -> DraftConfig:
    """The `DraftConfig` a manifest stores.

    Raises:
      CheckpointError: unknown or missing fields, or values that cannot be a draft's.
    """
    fields = dict(manifest["config"])
    try:
        rope = dict(fields["rope"])
        rope["mrope_section"] = tuple(rope.get("mrope_section", ()))
        fields["rope"] = RopeConfig(**rope)
        if isinstance(fields["aux_boundaries"], list):
            fields["aux_boundaries"] = tuple(fields["aux_boundaries"])
        fields["windows"] = tuple(window or None for window in fields.get("windows", ()))
        if fields.get("latent") is not None:
            fields["latent"] = LatentSizes(**fields["latent"])
        for field in dataclasses.fields(DraftConfig):
            value = fields.get(field.name, False)
            if field.type is bool and not isinstance(value, bool):
                raise TypeError(f"{field.name} is {value!r}, expected true or false")
        return DraftConfig(**fields)
    except (ConfigError, KeyError, TypeError) as error:
        raise CheckpointError(f"{path / MANIFEST}: config is damaged: {error}") from None


def _write(folder: Path, tensors: Mapping[str, np.ndarray]):
    """One Orbax checkpoint; little more than the largest tensor is in memory at a time.

    Orbax's default copies every array first, in case it changes before it is written, and holds an
    array as one chunk, which is read and unpacked whole.
    """
    ocp = _orbax()
    largest = max((tensor.nbytes for tensor in tensors.values()), default=0)
    kinds = ocp.type_handlers
    registry = kinds.create_type_handler_registry(
        (np.ndarray, kinds.NumpyHandler(deepcopy_host_arrays=False)),
        (jax.Array, kinds.ArrayHandler()),  # none here, and a warning without
    )
    handler = ocp.PyTreeCheckpointHandler(
        save_concurrent_gb=largest // 10**9 + 1, type_handler_registry=registry
    )
    tree = _nest(tensors)
    in_chunks = jax.tree.map(lambda _: ocp.SaveArgs(chunk_byte_size=CHUNK), tree)
    with ocp.Checkpointer(handler) as checkpointer:
        checkpointer.save(folder, args=ocp.args.PyTreeSave(tree, save_args=in_chunks))


def _orbax() -> Any:
    """Imported where drafts are read or written: a third of a second that `generate` can spare."""
    import orbax.checkpoint

    return orbax.checkpoint


def read_tensors(
    path: Path, names: Iterable[str], records: Mapping[str, Any]
) -> dict[str, np.ndarray]:
    """Some tensors of a draft folder, each checked against its digest in the manifest.

    Raises:
      CheckpointError: a tensor the manifest does not have, weights that are missing or damaged.
    """
    names = list(names)
    lacking = [name for name in names if name not in records]
    if lacking:
        raise CheckpointError(f"{path / MANIFEST}: the draft has no tensor {lacking[0]!r}")
    ocp, item = _orbax(), _nest(dict.fromkeys(names, 0))
    restore = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), item)
    folder = (path / WEIGHTS).absolute()
    if not folder.is_dir():
        raise CheckpointError(f"{folder}: no such folder: the draft is incomplete")
    try:
        with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
            tree = checkpointer.restore(
                folder,
                args=ocp.args.PyTreeRestore(item=item, restore_args=restore, partial_restore=True),
            )
    except Exception as error:  # orbax and tensorstore raise many kinds for a damaged folder
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise CheckpointError(f"{folder}: cannot be restored: {reason[:300]}") from error
    tensors = _flatten(tree)
    for name in names:
        found = sha256_array(tensors[name])
        if found != records[name].get("sha256"):
            raise CheckpointError(
                f"{folder}: tensor {name!r} has sha256 {found}, {MANIFEST} says "
                f"{records[name].get('sha256')}: damaged"
            )
    return tensors


def _nest(flat: Mapping[str, Any]) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for name, value in flat.items():
        *parents, leaf = name.split(".")
        node = tree
        for parent in parents:
            node = node.setdefault(parent, {})
        node[leaf] = value
    return tree


def _flatten(tree: Mapping[str, Any], prefix: str = "") -> dict[str, np.ndarray]:
    flat: dict[str, np.ndarray] = {}
    for key, value in tree.items():
        if isinstance(value, dict):
            flat |= _flatten(value, f"{prefix}{key}.")
        else:
            flat[prefix + key] = np.asarray(value)
    return flat

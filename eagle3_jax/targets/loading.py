"""From a Hugging Face folder to a target: config checked, every tensor used or passed over."""

import dataclasses
import os
import re
from collections.abc import Iterable
from pathlib import Path

from eagle3_jax import memory
from eagle3_jax.config import ConfigError
from eagle3_jax.files.shards import FileError, TensorSource, open_weights, read_json
from eagle3_jax.findings import ConvertError
from eagle3_jax.layers import Unfilled
from eagle3_jax.modules import Folder, build
from eagle3_jax.precision import precision
from eagle3_jax.source_config import SourceConfig
from eagle3_jax.targets.llama import LlamaTarget, Names, tensor_shapes
from eagle3_jax.targets.reading import find_text, read_target_config, read_windows
from eagle3_jax.targets.tensors import check_tensors, find_names


def load_target(path: str | os.PathLike, *, dtype: str = "float32") -> LlamaTarget:
    """Loads a target from config.json and safetensors (one file or shards).

    Llama, Mistral, Qwen2 and Qwen3 by `architectures`; the text part of a vision model by the
    `model_type` under `text_config`. `target.folder.notes` says what was passed over.

    Args:
      path: the folder.
      dtype: of weights and activations: float32, bfloat16, float16, or float64 with x64 on.

    Raises:
      ConfigError, FileError: an unsupported architecture, a config that disagrees with the weights,
        a missing, unknown or misshapen tensor; the message names file, key or tensor, found and
        expected. Everything is checked before the first tensor is read.
      NotEnoughMemoryError: the weights exceed what is free, with both numbers.
    """
    precision(dtype)
    folder = Path(path)
    if not folder.is_dir():
        raise FileError(f"{folder}: no such folder, expected one with config.json and weights")
    file = folder / "config.json"
    raw = read_json(file)
    try:
        text = find_text(raw, str(file))
        source, passed_over = _open(folder)
        config, notes = read_target_config(text)
        eos = eos_token_ids(folder, (text.top, text.config), config.vocab_size)
        names, more = find_names(source, folder, text.wrapped)
        check_tensors(config, text.family, names, source, folder)
        # Last, because a false number of layers has been found out by now.
        windows = read_windows(text, config.num_layers)
    except ConvertError as error:
        # The converter's readers; their hints name flags that exist only there.
        raise ConfigError(re.sub(r"[;:] --[a-z-]+ [a-z ]+$", "", str(error))) from None
    config = dataclasses.replace(config, eos_token_ids=eos, windows=windows)
    memory.check_weights(str(folder), tensor_shapes(config).values(), dtype)
    target = build(
        lambda: LlamaTarget(config, rngs=Unfilled(0)),
        lambda name: source.read(names.of(name)),
        _Renamed(source.names(), names),
        dtype,
    )
    target.folder = Folder(folder, (*notes, *more, *passed_over))
    return target


def _open(folder: Path) -> tuple[TensorSource, tuple[str, ...]]:
    """The folder's weights and notes; Mistral's copy of them under other names is passed over."""
    copies = sorted(path.name for path in folder.glob("consolidated*.safetensors"))
    for name in ("model.safetensors.index.json", "model.safetensors"):
        if copies and (folder / name).exists():
            note = f"{folder}: {name} was read; passed over: {', '.join(copies)}"
            return open_weights(folder / name), (note,)
    source = open_weights(folder)
    return source, source.notes


class _Renamed(dict):
    """Membership of our names among the checkpoint's."""

    def __init__(self, available: Iterable[str], names: Names):
        super().__init__()
        self._available = frozenset(available)
        self._names = names

    def __contains__(self, name: object) -> bool:
        return self._names.of(str(name)) in self._available


def eos_token_ids(
    folder: Path, configs: Iterable[SourceConfig], vocab_size: int
) -> tuple[int, ...]:
    """Stop ids: generation_config.json's when it has some, else those of the first config.

    Raises:
      ConvertError: something else than an id of the vocabulary, a list of them, or null.
    """
    generation = folder / "generation_config.json"
    places = list(configs)
    if generation.exists():
        places.insert(0, SourceConfig(read_json(generation), str(generation)))
    for place in places:
        field = place.top("eos_token_id")
        if field is None:
            continue
        ids = field.value if isinstance(field.value, list) else [field.value]
        if not all(type(i) is int and 0 <= i < vocab_size for i in ids):
            raise place.wrong(field, f"token ids in 0..{vocab_size - 1}")
        return tuple(ids)
    return ()

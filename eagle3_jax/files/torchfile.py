"""Pickled PyTorch weights, read weights-only: the one place that imports torch."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from eagle3_jax.files.source import FileError

TORCH_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt")


class TorchFile:
    """One `.bin`, `.pt`, `.pth` or `.ckpt` file that holds a flat dict of tensors.

    A training state (SpecForge's `training_state.pt`) holds that dict under a key of its own beside
    optimizer and counters: the one that names a draft's tensors is taken, with a note.

    `torch.load(weights_only=True)` runs no code of the file; storages stay on disk where the format
    allows it (`mmap`).

    Raises:
      FileError: torch is not installed, a file torch refuses, anything but name -> dense tensor.
    """

    def __init__(self, path: Path):
        self.path = path
        self.files = (path,)
        self._tensors, self.notes = _load(path)

    def names(self) -> Sequence[str]:  # noqa: D102
        return tuple(self._tensors)

    def shape(self, name: str) -> tuple[int, ...]:  # noqa: D102
        return tuple(self._tensor(name).shape)

    def dtype(self, name: str) -> str:  # noqa: D102
        return str(self._tensor(name).dtype).removeprefix("torch.")

    def where(self, name: str) -> str:  # noqa: D102
        return str(self.path)

    def read(self, name: str) -> np.ndarray:  # noqa: D102
        return to_numpy(self._tensor(name), f"{self.path}: tensor {name!r}")

    def _tensor(self, name: str) -> Any:
        if name not in self._tensors:
            raise FileError(f"{self.path}: has no tensor {name!r}")
        return self._tensors[name]


def load_dict(path: Path) -> dict[str, Any]:
    """A pickled dict by name, weights-only; its values may be anything that torch allows there.

    Raises:
      FileError: torch is not installed, a file torch refuses, no dict, or an empty one.
    """
    value = load_pickle(path)
    if not isinstance(value, dict) or not value:
        raise FileError(f"{path}: holds a {type(value).__name__}, expected a dict of tensors")
    return value


def load_pickle(path: Path) -> Any:
    """Whatever torch reads weights-only.

    Raises:
      FileError: torch is not installed, or a file torch refuses.
    """
    try:
        import torch  # pyright: ignore[reportMissingImports]
    except ImportError:
        raise FileError(
            f"{path}: reading it needs PyTorch: pip install 'eagle3-jax[torch]', or save the "
            "weights as .safetensors"
        ) from None
    try:
        with path.open("rb") as file:
            zipped = file.read(4) == b"PK\x03\x04"
        value = torch.load(path, map_location="cpu", weights_only=True, mmap=zipped)
    except OSError as error:
        raise FileError(f"{path}: cannot be read: {error.strerror}") from None
    except Exception as error:  # a damaged pickle makes torch raise nearly anything
        reason = str(error).strip().splitlines() or [type(error).__name__]
        raise FileError(f"{path}: torch cannot load it weights-only: {reason[0]}") from None
    return value


def to_numpy(tensor: Any, where: str) -> np.ndarray:
    """A dense torch tensor as a read-only array, bfloat16 as `ml_dtypes.bfloat16`.

    Raises:
      FileError: opened by `where`: no tensor, or a dtype NumPy cannot hold.
    """
    import torch  # pyright: ignore[reportMissingImports]

    if not isinstance(tensor, torch.Tensor) or tensor.layout is not torch.strided:
        raise FileError(f"{where} is a {type(tensor).__name__}, expected a dense tensor")
    tensor = tensor.detach().contiguous()
    dtype = str(tensor.dtype).removeprefix("torch.")
    if tensor.dtype is torch.bfloat16:
        array = tensor.view(torch.int16).numpy().view(ml_dtypes.bfloat16)
    elif dtype in ("float8_e4m3fn", "float8_e5m2"):
        array = tensor.view(torch.uint8).numpy().view(np.dtype(getattr(ml_dtypes, dtype)))
    elif dtype.startswith(("float8", "float4")):
        raise FileError(f"{where} is {dtype}, not readable")
    else:
        array = tensor.numpy()
    array.flags.writeable = False
    return array


DRAFT_KEY = re.compile(r"(^|\.)(fc\.weight|midlayer\..*|layers\.0\..*)$")


def _load(path: Path) -> tuple[dict[str, Any], tuple[str, ...]]:
    value = load_dict(path)
    import torch  # pyright: ignore[reportMissingImports]

    notes: tuple[str, ...] = ()
    states = {
        key: part
        for key, part in value.items()
        if isinstance(part, dict) and any(isinstance(k, str) and DRAFT_KEY.search(k) for k in part)
    }
    if states and not any(isinstance(key, str) and DRAFT_KEY.search(key) for key in value):
        if len(states) > 1:
            raise FileError(
                f"{path}: entries {', '.join(map(repr, states))} all hold a draft's tensors: "
                "expected one"
            )
        key, value = states.popitem()
        notes = (f"{path.name} is a training state: entry {key!r} holds the draft",)
    for name, tensor in value.items():
        if not isinstance(name, str) or not isinstance(tensor, torch.Tensor):
            keys = ", ".join(repr(key) for key in list(value)[:6])
            raise FileError(
                f"{path}: entry {name!r} is a {type(tensor).__name__}, expected tensors by name "
                f"(top-level keys: {keys})"
            )
        if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_meta:
            raise FileError(f"{path}: tensor {name!r} is not a plain dense tensor")
    return value, notes

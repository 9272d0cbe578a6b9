"""Folders of models: one on disk, or a Hub id downloaded through the hub extra."""

import re
from collections.abc import Sequence
from pathlib import Path

from eagle3_jax.files.source import FileError

HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
PATTERNS = ("*.json", "*.safetensors", "*.jinja", "weights/*")
"""Config, weights (those of a converted draft too) and tokenizer: all that is downloaded."""

DRAFT_PATTERNS = ("*.json", "*.safetensors", "*.bin", "*.npy", "*d2t*.pt", "*vocab_mapping*.pt")
"""Of a PyTorch draft: its config, its weights in either format, vocabulary maps beside them."""

TIMEOUT = 5.0
"""Seconds to wait for the Hub's first answer; a download itself may take longer."""


def local_path(path: Path, patterns: Sequence[str]) -> Path:
    """The path itself, or a snapshot of the Hub model it names when nothing is there.

    Raises:
      FileError: the path could be an id, and the Hub cannot give it.
    """
    if path.exists() or not HUB_ID.fullmatch(str(path)):
        return path
    return model_folder(str(path), patterns)


def model_folder(name: str, patterns: Sequence[str] = PATTERNS) -> Path:
    """The folder `name`, or, when there is none, a snapshot of the Hub model of that name.

    Without a connection a snapshot that is already on disk is used. `patterns`: the files wanted.

    Raises:
      FileError: no such folder; it names the Hub's reason when `name` could be an id.
    """
    path = Path(name)
    if path.is_dir():
        return path
    if path.exists() or not HUB_ID.fullmatch(name):
        raise FileError(f"{name}: {'not a folder' if path.exists() else 'no such folder'}")
    return _snapshot(name, list(patterns))


def _snapshot(name: str, patterns: list[str]) -> Path:
    try:
        import huggingface_hub
        from huggingface_hub.errors import HfHubHTTPError
    except ImportError:
        raise FileError(
            f"{name}: no such folder; as a Hub id it needs the huggingface_hub package: "
            "pip install 'eagle3-jax[hub]'"
        ) from None
    try:
        huggingface_hub.HfApi().model_info(name, timeout=TIMEOUT)
    except HfHubHTTPError as error:
        raise _failed(name, error) from None
    except Exception as error:  # the Hub's client changed its connection errors with its versions
        return _on_disk(name, patterns, error)
    try:
        return Path(
            huggingface_hub.snapshot_download(name, allow_patterns=patterns, etag_timeout=TIMEOUT)
        )
    except Exception as error:  # a connection lost on the way, a full disk, ...
        raise _failed(name, error) from None


def _on_disk(name: str, patterns: list[str], error: Exception) -> Path:
    import huggingface_hub

    try:
        return Path(
            huggingface_hub.snapshot_download(name, allow_patterns=patterns, local_files_only=True)
        )
    except (OSError, ValueError):
        raise _failed(name, error) from None


def _failed(name: str, error: Exception) -> FileError:
    reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
    response = getattr(error, "response", None)
    status = getattr(response, "status_code", None)
    if status in (401, 403, 404):
        reason = f"not on the Hub, or not open to you (HTTP {status})"
    return FileError(f"{name}: no such folder, and the Hub cannot give it: {reason[:200]}")

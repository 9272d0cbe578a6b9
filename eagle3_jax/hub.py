"""Folders of models: one on disk, or a Hub id downloaded through the hub extra."""

import re
from pathlib import Path

from eagle3_jax.files.source import FileError

HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
PATTERNS = ["*.json", "*.safetensors", "*.jinja", "weights/*"]
"""Config, weights (those of a converted draft too) and tokenizer: all that is downloaded."""

TIMEOUT = 5.0
"""Seconds to wait for the Hub's first answer; a download itself may take longer."""


def model_folder(name: str) -> Path:
    """The folder `name`, or, when there is none, a snapshot of the Hub model of that name.

    Without a connection a snapshot that is already on disk is used.

    Raises:
      FileError: no such folder; it names the Hub's reason when `name` could be an id.
    """
    path = Path(name)
    if path.is_dir():
        return path
    if path.exists() or not HUB_ID.fullmatch(name):
        raise FileError(f"{name}: {'not a folder' if path.exists() else 'no such folder'}")
    return _snapshot(name)


def _snapshot(name: str) -> Path:
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
        return _on_disk(name, error)
    try:
        return Path(
            huggingface_hub.snapshot_download(name, allow_patterns=PATTERNS, etag_timeout=TIMEOUT)
        )
    except Exception as error:  # a connection lost on the way, a full disk, ...
        raise _failed(name, error) from None


def _on_disk(name: str, error: Exception) -> Path:
    import huggingface_hub

    try:
        return Path(
            huggingface_hub.snapshot_download(name, allow_patterns=PATTERNS, local_files_only=True)
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

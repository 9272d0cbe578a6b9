"""The demo's pair: SmolLM2-135M-Instruct and the draft of demo/draft, converted once."""

import sys
from pathlib import Path

import harness

sys.path[:0] = [str(harness.ROOT), str(harness.ROOT / "demo")]
from model import cache_folder, ensure_model  # noqa: E402

import eagle3_jax as e3  # noqa: E402
from convert import from_torch  # noqa: E402


def folders() -> tuple[Path, Path]:
    """Of the target and of the converted draft."""
    folder = ensure_model()
    out = cache_folder() / "smollm2-draft"
    command = [str(harness.ROOT / "demo/draft"), "--target", str(folder), "--out", str(out)]
    if not (out / "draft.json").exists() and from_torch.main(command):
        sys.exit("the draft could not be converted")
    return folder, out


def models(dtype: str = "float32"):
    """The target's folder, the target, the draft."""
    folder, out = folders()
    target = e3.load_target(folder, dtype=dtype)
    return folder, target, e3.load_draft(out, target=target, dtype=dtype)

"""What the engines answered on the real pair, and the draft with its training embedding."""

import functools
import json
import struct
from pathlib import Path

import ml_dtypes
import numpy as np
from real_model import DEMO

DATA = Path(__file__).parent / "data/smollm2"


@functools.cache
def read(name: str) -> dict:
    return json.loads((DATA / f"{name}.json").read_text(encoding="utf-8"))


def greedy() -> list[dict]:
    return read("target_greedy")["results"]


def arrays(name: str) -> dict[str, np.ndarray]:
    with np.load(DATA / f"{name}.npz") as file:
        return dict(file)


def with_own_embedding(table: np.ndarray, out: Path) -> Path:
    """The demo's draft as it was trained: with a copy of the embedding, rounded to bf16."""
    out.mkdir()
    (out / "config.json").write_bytes((DEMO / "draft/config.json").read_bytes())
    embedding = table.astype(ml_dtypes.bfloat16)
    add_tensor(DEMO / "draft/model.safetensors", out / "model.safetensors", embedding)
    return out


def add_tensor(source: Path, out: Path, embedding: np.ndarray):
    """A copy of a safetensors file with `embed_tokens.weight` in BF16 at its end."""
    raw = source.read_bytes()
    (size,) = struct.unpack("<Q", raw[:8])
    header, data = json.loads(raw[8 : 8 + size]), raw[8 + size :]
    header["embed_tokens.weight"] = {
        "dtype": "BF16",
        "shape": list(embedding.shape),
        "data_offsets": [len(data), len(data) + embedding.nbytes],
    }
    text = json.dumps(header).encode()
    out.write_bytes(struct.pack("<Q", len(text)) + text + data + embedding.tobytes())

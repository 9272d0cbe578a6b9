"""Random drafts that a peer's own class has run after their export, and how we run them."""

import dataclasses
import hashlib
from pathlib import Path

import numpy as np

from convert import to_torch
from eagle3_jax.checkpoint import save_draft
from eagle3_jax.config import DraftConfig, RopeConfig

T, V, W = 14, 64, 24
PLAIN = DraftConfig(
    hidden_size=32,
    target_hidden_size=32,
    num_aux=3,
    intermediate_size=48,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    vocab_size=V,
    draft_vocab_size=W,
    rms_norm_eps=1e-5,
    rope=RopeConfig(5e4),
    aux_boundaries=(2, 4, 5),
)
YARN = RopeConfig(1e4, "yarn", 8.0, original_max_position_embeddings=8, beta_fast=4.0)
LLAMA3 = RopeConfig(1e4, "llama3", 8.0, 1.0, 4.0, 32)
CASES: dict[str, dict] = {
    "specforge_plain": {},
    "specforge_fc_norm": {"fc_norm": True},
    "specforge_wide": {"target_hidden_size": 40, "embed": "draft"},
    "specforge_linear": {"rope": RopeConfig(1e4, "linear", 4.0)},
    "specforge_llama3": {"rope": LLAMA3},
    "specforge_yarn": {"rope": YARN},
    "speculators_plain": {"embed": "draft"},
    "speculators_switches": {
        "embed": "draft",
        "norm_before_residual": True,
        "norm_before_fc": True,
        "feedback": "post_norm",
    },
    "speculators_fc_norm": {"embed": "draft", "fc_norm": True},
    "speculators_layers": {"embed": "draft", "num_layers": 2},
    "speculators_qk_norm": {"embed": "draft", "qk_norm": True},
    "speculators_biases": {
        "embed": "draft",
        "qkv_bias": True,
        "output_bias": True,
        "mlp_bias": True,
    },
    "speculators_llama3": {"embed": "draft", "rope": LLAMA3},
    "speculators_yarn": {"embed": "draft", "rope": YARN},
}
"""Name, the dialect in front -> what differs from `PLAIN`."""


def make(name: str) -> tuple[DraftConfig, dict[str, np.ndarray]]:
    """A case's config and its weights: norms away from one, a map in no order."""
    config = dataclasses.replace(PLAIN, **CASES[name])
    rng = np.random.default_rng([5, *name.encode()])
    tensors = {}
    for key, shape in config.tensor_shapes().items():
        values = rng.standard_normal(shape)
        if "norm" in key:
            values = 1 + 0.3 * values
        elif key != "embed.weight":
            values = values / np.sqrt(shape[-1])
        tensors[key] = values.astype(np.float32)
    tensors["draft_to_target"] = rng.permutation(V)[:W].astype(np.int32)
    return config, tensors


def inputs(config: DraftConfig) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Token ids [T], aux features [T, A * E], and the target's embedding [V, E]."""
    rng = np.random.default_rng(11)
    ids = rng.integers(0, V, T)
    aux = rng.standard_normal((T, config.num_aux * config.target_hidden_size))
    table = rng.standard_normal((V, config.target_hidden_size))
    return ids, aux.astype(np.float32), table.astype(np.float32)


def export(name: str, folder: Path) -> Path:
    """The case as a converted draft, exported for the framework its name begins with."""
    draft, out = folder / "draft", folder / "export"
    save_draft(draft, *make(name))
    dialect = name.split("_")[0]
    argv = [str(draft), "--dialect", dialect, "--out", str(out), "--verify"]
    assert to_torch.main(argv) == 0
    return out


def digest(out: Path) -> str:
    """Of both files of an export."""
    files = [(out / name).read_bytes() for name in ("config.json", "model.safetensors")]
    return hashlib.sha256(b"".join(files)).hexdigest()

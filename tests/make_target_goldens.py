"""Tiny targets of every family and what transformers computes with them, for machines without it.

    python tests/make_target_goldens.py          # needs torch and transformers

Writes tests/data/targets/FAMILY: the folder as transformers saves it, in float16, and record.npz.
Sequences and paths of the trees run alone, in float32, without a cache and without padding.
"""

import shutil
from pathlib import Path

import numpy as np
import torch_reference as ref
from tree_paths import path_to

OUT = Path(__file__).parent / "data/targets"
SMALL = {
    "vocab_size": 41,
    "hidden_size": 16,
    "intermediate_size": 20,
    "head_dim": 6,
    "num_hidden_layers": 3,
    "dtype": ref.torch.float16,
}
KINDS = ["sliding_attention", "full_attention", "sliding_attention"]
TARGETS: dict[str, dict] = {
    "llama": {"rope_parameters": ref.LLAMA3, "attention_bias": True, "mlp_bias": True},
    "mistral": {"family": "mistral", "sliding_window": 6},
    "qwen2": {
        "family": "qwen2",
        "head_dim": None,
        "use_sliding_window": True,
        "sliding_window": 5,
        "max_window_layers": 1,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 500.0,
            "factor": 4.0,
            "original_max_position_embeddings": 128,
        },
        "edit": ref.old_rope_keys,
    },
    "qwen3": {
        "family": "qwen3",
        "use_sliding_window": True,
        "sliding_window": 4,
        "layer_types": KINDS,
        "tie_word_embeddings": True,
    },
    "qwen3_vl": {
        "family": "qwen3_vl",
        "head_dim": 8,
        "rope_parameters": ref.MROPE | {"mrope_interleaved": True},
    },
}
LENGTHS = (20, 11)
NODES = 10
PROMPTS = (12, 3, 7)
NEW = 24


def make(name: str):
    """One folder; the greedy texts of its seed hold at least ten different tokens."""
    folder = OUT / name
    for seed in range(50):
        shutil.rmtree(folder, ignore_errors=True)
        settings = {k: v for k, v in (SMALL | TARGETS[name]).items() if v is not None}
        ref.save(folder, seed, **settings)
        model = ref.load(folder)
        rng = np.random.default_rng(seed)
        prompts = [rng.integers(0, SMALL["vocab_size"], n).tolist() for n in PROMPTS]
        greedy = [ref.greedy(model, prompt, NEW) for prompt in prompts]
        if len({token for tokens in greedy for token in tokens}) >= 10:
            break
    else:
        raise SystemExit(f"{name}: no seed of 50 says anything")
    record: dict[str, np.ndarray] = {"greedy": np.array(greedy, np.int32)}
    record |= {f"prompt.{i}": np.array(prompt, np.int32) for i, prompt in enumerate(prompts)}
    for b, length in enumerate(LENGTHS):
        sequence = rng.integers(0, SMALL["vocab_size"], length).tolist()
        nodes = rng.integers(0, SMALL["vocab_size"], NODES).tolist()
        parents = [-1, *(int(rng.integers(max(0, n - 3), n)) for n in range(1, NODES))]
        found = ref.run(model, sequence).values
        rows: dict[int | str, list] = {key: [None] * NODES for key in found}
        for node in range(NODES):
            path = path_to(parents, node)
            alone = ref.run(model, sequence + [nodes[n] for n in path]).values
            for key, value in alone.items():
                rows[key][node] = value[-1]
        integers = {"tokens": sequence, "nodes": nodes, "parents": parents}
        record |= {f"{key}.{b}": np.array(value, np.int32) for key, value in integers.items()}
        for key, value in found.items():
            whole = np.concatenate((value, np.array(rows[key])))
            record[f"{key}.{b}"] = whole.astype(np.float32)
    np.savez_compressed(folder / "record.npz", **record)


def main():
    for name in TARGETS:
        make(name)


if __name__ == "__main__":
    main()

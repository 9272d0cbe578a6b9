"""Recorded requests of the real SGLang."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np

from eagle3_jax.config import TreeConfig

FOLDER = Path(__file__).parent / "data/sglang"
TRACES = ("chain_s1", "chain_s3", "tree_s2_k2_d4", "tree_s3_k4_d8", "tree_s5_k8_d32")


@dataclasses.dataclass(frozen=True)
class Request:
    """One recorded request; tests/data/README.md lists the arrays."""

    name: str
    tree: TreeConfig
    prompt: list[int]
    max_new_tokens: int
    output_ids: list[int]
    meta_info: dict[str, Any]
    arrays: dict[str, np.ndarray]

    @property
    def num_rounds(self) -> int:
        return len(self.arrays["seq_len"])

    def at(self, name: str, index: int) -> np.ndarray:
        """An array that is kept for every round."""
        return self.arrays[name][index]

    def tensor(self, name: str, index: int) -> np.ndarray:
        """An array kept for `tensor_rounds` only."""
        where = np.flatnonzero(self.arrays["tensor_rounds"] == index)
        return self.arrays[name][where[0]]

    def has_tensors(self, index: int) -> bool:
        return index in self.arrays["tensor_rounds"]

    def candidates(self, what: str, index: int) -> np.ndarray:
        """`scores` or `tokens` of all candidates in SGLang's flat order."""
        levels = range(self.tree.num_steps)
        return np.concatenate([self.at(f"level{i}/{what}", index) for i in levels])

    @property
    def statistics(self) -> dict[str, Any]:
        """The spec_* numbers."""
        return {k: v for k, v in self.meta_info.items() if k.startswith("spec_")}


def load(folder: str, case: str) -> dict[str, Request]:
    """The requests of one engine run: single0..3 and, of a batch of four, batch0..3."""
    answers = json.loads((FOLDER / folder / f"{case}.json").read_text())
    sizes = answers["tree"]
    tree = TreeConfig(sizes["num_steps"], sizes["topk"], sizes["num_draft_tokens"])
    grouped: dict[str, dict[str, np.ndarray]] = {}
    with np.load(FOLDER / folder / f"{case}.npz") as file:
        for key in file.files:
            tag, name = key.split("/", 1)
            grouped.setdefault(tag, {})[name] = file[key]
    return {
        tag: Request(
            name=f"{case}.{tag}",
            tree=tree,
            prompt=arrays["prefill/prompt"].tolist(),
            max_new_tokens=answers["sampling_params"]["max_new_tokens"],
            output_ids=answers["results"][tag]["output_ids"],
            meta_info=answers["results"][tag]["meta_info"],
            arrays=arrays,
        )
        for tag, arrays in grouped.items()
    }

"""Frequencies as transformers computes them: the cases, and how tests/data/rope.json was made.

python tests/rope_goldens.py   # needs torch and transformers
"""

import json
from pathlib import Path
from typing import Any

FILE = Path(__file__).parent / "data/rope.json"
LENGTHS = (1, 64, 65, 100, 300)
"""Sequence lengths at which the frequencies of a dynamic rope are kept."""

YARN = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 64}
CASES: dict[str, tuple[int, dict[str, Any]]] = {
    "default": (16, {"rope_type": "default"}),
    "linear": (16, {"rope_type": "linear", "factor": 4.0}),
    "dynamic": (16, {"rope_type": "dynamic", "factor": 3.0}),
    "llama3": (
        16,
        {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    ),
    "yarn": (32, YARN),
    "yarn factor below 1": (32, YARN | {"factor": 0.5}),
    "yarn untruncated": (32, YARN | {"truncate": False}),
    "yarn betas": (32, YARN | {"beta_fast": 16.0, "beta_slow": 2.0}),
    "yarn attention_factor": (32, YARN | {"attention_factor": 1.3}),
    "yarn mscale": (32, YARN | {"mscale": 1.0, "mscale_all_dim": 0.707}),
    "kimi": (64, YARN | {"factor": 64.0, "mscale": 1.0, "mscale_all_dim": 1.0}),
    "yarn narrow": (4, YARN),
    "yarn small base": (32, YARN | {"rope_theta": 50.0}),
}
"""Name -> head_dim and rope_parameters; the model's length is 64."""


def transformers_rope(head_dim: int, parameters: dict[str, Any]) -> dict[str, Any]:
    """Frequencies (a dynamic rope's by length) and the factor on cos and sin."""
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    config = LlamaConfig(
        hidden_size=2 * head_dim,
        num_attention_heads=2,
        head_dim=head_dim,
        max_position_embeddings=64,
        rope_parameters={"rope_theta": 10000.0, **parameters},
    )
    kind = parameters["rope_type"]
    if kind == "default":
        from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

        return {"frequencies": LlamaRotaryEmbedding(config).inv_freq.tolist(), "amplitude": 1.0}
    function = ROPE_INIT_FUNCTIONS[kind]
    if kind == "dynamic":
        table = {str(n): function(config, None, seq_len=n)[0].tolist() for n in LENGTHS}
        return {"frequencies": table, "amplitude": 1.0}
    frequencies, amplitude = function(config, None)
    return {"frequencies": frequencies.tolist(), "amplitude": float(amplitude)}


def deepseek_sharpness(parameters: dict[str, Any]) -> float:
    """The factor transformers puts on DeepSeek's softmax scale."""
    from transformers.models.deepseek_v3.modeling_deepseek_v3 import yarn_apply_mscale

    return float(yarn_apply_mscale(parameters, 1.0))


def made() -> dict[str, Any]:
    """Everything in the file."""
    return {
        name: transformers_rope(*case) | {"sharpness": deepseek_sharpness(case[1])}
        for name, case in CASES.items()
    }


if __name__ == "__main__":
    FILE.write_text(json.dumps(made(), indent=1) + "\n")

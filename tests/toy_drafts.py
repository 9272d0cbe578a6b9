"""Small drafts on disk, built from one base by changing keys and tensors."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

D, E, A, F, N, K, H, V, W = 64, 64, 3, 96, 4, 2, 16, 256, 64

LAYER_SHAPES = {
    "self_attn.q_proj.weight": (N * H, 2 * D),
    "self_attn.k_proj.weight": (K * H, 2 * D),
    "self_attn.v_proj.weight": (K * H, 2 * D),
    "self_attn.o_proj.weight": (D, N * H),
    "mlp.gate_proj.weight": (F, D),
    "mlp.up_proj.weight": (F, D),
    "mlp.down_proj.weight": (D, F),
    "input_layernorm.weight": (D,),
    "hidden_norm.weight": (D,),
    "post_attention_layernorm.weight": (D,),
}
CANONICAL = {
    "fc.weight": "fc.weight",
    "norm.weight": "norm_final.weight",
    "lm_head.weight": "lm_head.weight",
    "midlayer.self_attn.q_proj.weight": "layers.0.attn.q.weight",
    "midlayer.self_attn.k_proj.weight": "layers.0.attn.k.weight",
    "midlayer.self_attn.v_proj.weight": "layers.0.attn.v.weight",
    "midlayer.self_attn.o_proj.weight": "layers.0.attn.o.weight",
    "midlayer.mlp.gate_proj.weight": "layers.0.mlp.gate.weight",
    "midlayer.mlp.up_proj.weight": "layers.0.mlp.up.weight",
    "midlayer.mlp.down_proj.weight": "layers.0.mlp.down.weight",
    "midlayer.input_layernorm.weight": "layers.0.norm_embed.weight",
    "midlayer.hidden_norm.weight": "layers.0.norm_hidden.weight",
    "midlayer.post_attention_layernorm.weight": "layers.0.norm_post.weight",
}

Tensors = dict[str, np.ndarray]


def normal(*shape: int, seed: int = 0) -> np.ndarray:
    """float32 values that differ by shape and seed."""
    return np.random.default_rng([seed, *shape]).standard_normal(shape).astype(np.float32)


def target_ids(seed: int = 1) -> np.ndarray:
    """W ascending target ids, int64."""
    return np.sort(np.random.default_rng(seed).choice(V, W, replace=False)).astype(np.int64)


def tensors() -> Tensors:
    """The base draft: `midlayer.*`, reduced vocabulary, offsets and mask."""
    made = {f"midlayer.{name}": normal(*shape, seed=7) for name, shape in LAYER_SHAPES.items()}
    made |= {
        "fc.weight": normal(D, A * E),
        "norm.weight": normal(D),
        "lm_head.weight": normal(W, D),
    }
    for i, name in enumerate(sorted(made)):
        made[name] = made[name] + np.float32(i)
    ids = target_ids()
    mask = np.zeros(V, np.bool_)
    mask[ids] = True
    return made | {"d2t": ids - np.arange(W), "t2d": mask}


def config() -> dict[str, Any]:
    """The base draft's config.json: aux ids are boundaries (2, 4, 5)."""
    return {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "hidden_size": D,
        "intermediate_size": F,
        "num_hidden_layers": 1,
        "num_attention_heads": N,
        "num_key_value_heads": K,
        "head_dim": H,
        "hidden_act": "silu",
        "vocab_size": V,
        "draft_vocab_size": W,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000,
        "max_position_embeddings": 2048,
        "tie_word_embeddings": False,
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 3, 4]},
    }


def speculators_config(**top: Any) -> dict[str, Any]:
    """The same draft as speculators writes it; `top` changes the top level, None removes."""
    layer = config()
    for key in ("eagle_config", "architectures", "draft_vocab_size"):
        del layer[key]
    made = {
        "architectures": ["Eagle3DraftModel"],
        "speculators_model_type": "eagle3",
        "draft_vocab_size": W,
        "eagle_aux_hidden_state_layer_ids": [2, 4, 5],
        "norm_before_residual": True,
        "transformer_layer_config": layer,
    }
    return {key: value for key, value in {**made, **top}.items() if value is not None}


def layers0(made: Mapping[str, np.ndarray]) -> Tensors:
    """The same tensors under `layers.0.`."""
    return {name.replace("midlayer.", "layers.0."): tensor for name, tensor in made.items()}


def full_vocabulary(made: Tensors) -> Tensors:
    """The draft with a head over the whole vocabulary, no d2t, no t2d."""
    kept = {name: tensor for name, tensor in made.items() if name not in ("d2t", "t2d")}
    return kept | {"lm_head.weight": normal(V, D)}


def write(
    folder: Path,
    change: Callable[[dict[str, Any], Tensors], Tensors | None] = lambda config, tensors: None,
    *,
    start: dict[str, Any] | None = None,
) -> Path:
    """Writes the base draft after `change(config, tensors)` edited both or returned new tensors."""
    made, raw = tensors(), config() if start is None else start
    made = change(raw, made) or made
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(raw))
    contiguous = {name: np.ascontiguousarray(tensor) for name, tensor in made.items()}
    save_file(contiguous, folder / "model.safetensors")
    return folder


def write_target(folder: Path, made: Tensors | None = None, **changes: Any) -> Path:
    """A target's config.json, with weights when given."""
    raw = {"hidden_size": E, "num_hidden_layers": 8, "vocab_size": V} | changes
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(raw))
    if made is not None:
        save_file(made, folder / "model.safetensors")
    return folder

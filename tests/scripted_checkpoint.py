"""The checkpoint of a scripted draft: as PyTorch stores it, and as the package names it."""

from typing import Any

import numpy as np
from scripted_draft import Sizes, Tensors, Truth

from eagle3_jax.config import DraftConfig, LatentSizes, RopeConfig

LAYER = {
    "input_layernorm": "norm_embed",
    "hidden_norm": "norm_hidden",
    "post_attention_layernorm": "norm_post",
    **{f"self_attn.{n}_proj": f"attn.{n}" for n in "qkvo"},
    **{f"mlp.{n}_proj": f"mlp.{n}" for n in ("gate", "up", "down")},
}
LATENT = {
    "q_a_proj": "q_a",
    "q_a_layernorm": "q_a_norm",
    "q_b_proj": "q_b",
    "kv_a_proj_with_mqa": "kv_a",
    "kv_a_layernorm": "kv_a_norm",
    "kv_b_proj": "kv_b",
    "o_proj": "o",
}


def draft_config(claim: Truth, sizes: Sizes) -> DraftConfig:
    """What the package's config of this wiring is; what it cannot say is left out."""
    s = claim.scaling or {}
    scaled = {k: v for k, v in s.items() if k != "rope_type"}
    if claim.sections is not None:
        scaled |= {"mrope_section": claim.sections, "mrope_interleaved": claim.interleaved}
    return DraftConfig(
        hidden_size=sizes.hidden,
        target_hidden_size=sizes.target_hidden,
        num_aux=len(claim.boundaries),
        intermediate_size=sizes.mlp,
        num_heads=sizes.heads,
        num_kv_heads=sizes.heads if claim.latent else sizes.kv_heads,
        head_dim=sizes.head_dim,
        vocab_size=sizes.vocab,
        draft_vocab_size=sizes.draft_vocab if claim.head == "draft" else sizes.vocab,
        rms_norm_eps=sizes.eps,
        rope=RopeConfig(theta=claim.theta, kind="llama3" if s else "default", **scaled),
        aux_boundaries=claim.boundaries,
        norm_before_residual=claim.norm_before_residual,
        norm_before_fc=claim.norm_before_fc,
        fc_norm=claim.fc_norm,
        feedback=claim.feedback,  # type: ignore[arg-type]
        final_norm=claim.final_norm,
        double_norm=claim.double_norm,
        fc_bias=claim.fc_bias,
        qkv_bias=claim.qkv_bias,
        output_bias=claim.output_bias,
        mlp_bias=claim.mlp_bias,
        embed=claim.embed,  # type: ignore[arg-type]
        head=claim.head,  # type: ignore[arg-type]
        num_layers=claim.layers,
        next_layers=claim.next_norm,  # type: ignore[arg-type]
        next_spare_norm=claim.layers > 1,
        latent=_latent(claim, sizes) if claim.latent else None,
    )


def _latent(claim: Truth, sizes: Sizes) -> LatentSizes:
    s = sizes
    interleaved = claim.rope_pairs == "interleaved"
    plain = s.head_dim - s.turning
    return LatentSizes(s.latent, plain, s.turning, s.value, s.latent, interleaved)


def torch_tensors(claim: Truth, w: Tensors) -> Tensors:
    optional = {
        "fc.bias": claim.fc_bias,
        "input_norm.weight": claim.norm_before_fc,
        "norm.weight": claim.final_norm,
        "lm_head.weight": claim.head == "draft",
        "embed_tokens.weight": claim.embed == "draft",
        "d2t": claim.table != "none" and claim.head == "draft",
        "t2d": claim.table != "none" and claim.head == "draft",
        **{f"midlayer.self_attn.{n}_proj.bias": claim.qkv_bias for n in "qkv"},
        "midlayer.self_attn.o_proj.bias": claim.output_bias,
        **{f"midlayer.mlp.{n}_proj.bias": claim.mlp_bias for n in ("gate", "up", "down")},
    }
    kept = {k: v for k, v in w.items() if optional.get(k, True)}
    kept = {k: v for k, v in kept.items() if claim.layers > 1 or not k.startswith("layers.1.")}
    latent = {k: v for k, v in kept.items() if k.startswith("latent.") and k.endswith(".weight")}
    kept = {k: v for k, v in kept.items() if not k.startswith("latent.")}
    if claim.latent:
        kept = {k: v for k, v in kept.items() if not k.startswith("midlayer.self_attn.")}
        kept |= {k.replace("latent.", "midlayer.", 1): v for k, v in latent.items()}
    if claim.layers > 1:
        kept = {k: v for k, v in kept.items() if not k.startswith("layers.") or "bias" not in k}
    return {k: v for k, v in kept.items() if claim.fc_norm or not k.startswith("fc_norm.")}


def canonical_tensors(claim: Truth, w: Tensors) -> Tensors:
    names = {"norm": "norm_final", "embed_tokens": "embed"}
    for stem, index in (("midlayer", 0), ("layers.1", 1)):
        names |= {f"{stem}.{ours}": f"layers.{index}.{name}" for ours, name in LAYER.items()}
    names |= {f"midlayer.self_attn.{n}": f"layers.0.attn.{name}" for n, name in LATENT.items()}
    made: Tensors = {}
    for name, tensor in torch_tensors(claim, w).items():
        if name in ("d2t", "t2d") or name.startswith("fc_norm."):
            continue
        module, part = name.rsplit(".", 1)
        made[f"{names.get(module, module)}.{part}"] = tensor
    if claim.fc_norm:
        count = len(claim.boundaries)
        made["fc_norm.weight"] = np.stack([w[f"fc_norm.{i}.weight"] for i in range(count)])
    rows = len(w["lm_head.weight"]) if claim.head == "draft" else len(w["t2d"])
    ids = np.arange(rows)
    if claim.head == "draft" and claim.table == "offset":
        ids = ids + w["d2t"]
    return made | {"draft_to_target": ids.astype(np.int32)}


def raw_config(claim: Truth, sizes: Sizes) -> dict[str, Any]:
    made: dict[str, Any] = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "hidden_size": sizes.hidden,
        "intermediate_size": sizes.mlp,
        "num_hidden_layers": 1,
        "num_attention_heads": sizes.heads,
        "num_key_value_heads": sizes.kv_heads,
        "head_dim": sizes.head_dim,
        "hidden_act": "silu",
        "vocab_size": sizes.vocab,
        "draft_vocab_size": sizes.draft_vocab if claim.head == "draft" else sizes.vocab,
        "rms_norm_eps": sizes.eps,
        "rope_theta": claim.theta,
        "rope_scaling": claim.scaling if claim.sections is None else _axes(claim),
        "max_position_embeddings": sizes.window,
        "tie_word_embeddings": False,
        "norm_before_residual": claim.norm_before_residual,
        "norm_before_fc": claim.norm_before_fc,
        "fc_norm": claim.fc_norm,
        "norm_output": claim.feedback == "post_norm",
        "eagle_config": {
            "eagle_aux_hidden_state_layer_ids": [
                sizes.layers if b == "final_norm" else b - 1 for b in claim.boundaries
            ]
        },
    }
    return made


def _axes(claim: Truth) -> dict[str, Any]:
    made = {"rope_type": "default", "mrope_section": list(claim.sections or ())}
    return made | ({"mrope_interleaved": True} if claim.interleaved else {})

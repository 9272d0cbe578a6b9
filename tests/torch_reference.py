"""Tiny random targets on disk and what transformers computes with them."""

import contextlib
import dataclasses
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from unittest import mock

import numpy as np
import torch
import transformers

transformers.utils.logging.disable_progress_bar()
torch.set_num_threads(1)  # the models are tiny: more threads only wait for each other

BASE = {
    "vocab_size": 89,
    "hidden_size": 32,
    "intermediate_size": 44,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
FAMILIES = {"llama": "Llama", "mistral": "Mistral", "qwen2": "Qwen2", "qwen3": "Qwen3"}
VISION: dict[str, tuple[str, dict]] = {
    "mistral3": (
        "Mistral3",
        {
            "vision_config": {
                "model_type": "pixtral",
                "hidden_size": 8,
                "intermediate_size": 8,
                "num_hidden_layers": 1,
                "num_attention_heads": 1,
                "image_size": 8,
                "patch_size": 4,
            },
            "tie_word_embeddings": False,
        },
    ),
    "qwen2_5_vl": (
        "Qwen2_5_VL",
        {
            "vision_config": {
                "depth": 1,
                "hidden_size": 8,
                "intermediate_size": 8,
                "num_heads": 1,
                "patch_size": 4,
            }
        },
    ),
    "qwen3_vl": (
        "Qwen3VL",
        {
            "vision_config": {
                "depth": 1,
                "hidden_size": 8,
                "intermediate_size": 8,
                "num_heads": 1,
                "patch_size": 4,
                "num_position_embeddings": 4,
                "deepstack_visual_indexes": [0],
            }
        },
    ),
}
"""Wrapper -> its classes' prefix, and what makes its vision part tiny."""

MROPE = {"rope_type": "default", "rope_theta": 500.0, "mrope_section": [2, 1, 1]}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


@dataclasses.dataclass(frozen=True)
class Captured:
    """One sequence: "logits" [T, V], every boundary 0..L and "final_norm" [T, D]."""

    values: dict[int | str, np.ndarray]


def save(
    folder: Path,
    seed: int,
    *,
    family: str = "llama",
    dtype: torch.dtype = torch.float32,
    max_shard_size: str = "1GB",
    edit: Callable[[dict], None] | None = None,
    **changes,
) -> Path:
    """Saves a model whose every parameter is drawn anew: norms around 1, biases not 0.

    `edit` changes config.json's keys in place after transformers wrote them.
    """
    if family in VISION:
        name, keys = VISION[family]
        width = {"out_hidden_size": (BASE | changes)["hidden_size"]}
        keys = keys | {"vision_config": keys["vision_config"] | width}
        text = BASE | changes | ({"model_type": "mistral"} if family == "mistral3" else {})
        config = getattr(transformers, f"{name}Config")(text_config=text, **keys)
        model = getattr(transformers, f"{name}ForConditionalGeneration")(config)
    else:
        name = FAMILIES[family]
        config = getattr(transformers, f"{name}Config")(**(BASE | changes))
        model = getattr(transformers, f"{name}ForCausalLM")(config)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            value = torch.randn(parameter.shape, generator=generator)
            if "norm" in name or (value.ndim == 1 and name.endswith("weight")):
                value = 1 + 0.3 * value
            elif name.endswith("bias") or "embed_tokens" in name:
                value = 0.3 * value
            else:
                value = value / parameter.shape[1] ** 0.5
            parameter.copy_(value)
    model.to(dtype).save_pretrained(folder, max_shard_size=max_shard_size)
    if edit is not None:
        path = folder / "config.json"
        raw = json.loads(path.read_text())
        edit(raw)
        path.write_text(json.dumps(raw))
    return folder


def old_rope_keys(raw: dict):
    """`rope_parameters` (transformers 5) as `rope_theta` and `rope_scaling` (transformers 4)."""
    rope = raw.pop("rope_parameters")
    raw["rope_theta"] = rope.pop("rope_theta")
    raw["rope_scaling"] = None if rope["rope_type"] == "default" else rope


def load(folder: Path, dtype: torch.dtype = torch.float32) -> transformers.PreTrainedModel:
    """The folder as transformers reads it; float64 only inside `float64()`."""
    wrapped = "text_config" in json.loads((folder / "config.json").read_text())
    kind = (
        transformers.AutoModelForImageTextToText if wrapped else transformers.AutoModelForCausalLM
    )
    model = kind.from_pretrained(folder, dtype=dtype, attn_implementation="eager")
    expected = torch.float64 if dtype == torch.float64 else torch.float32
    assert _decoder(model).rotary_emb.inv_freq.dtype == expected
    return model.eval()


def _decoder(model: transformers.PreTrainedModel):
    return getattr(model.model, "language_model", model.model)


class _Wider:
    """`torch` with float32 meaning float64."""

    float = float32 = torch.float64

    def __getattr__(self, name: str):
        return getattr(torch, name)


@contextlib.contextmanager
def float64():
    """transformers' models without their casts to float32 (norm, rotary embedding, softmax)."""
    with contextlib.ExitStack() as stack:
        for family in FAMILIES:
            place = f"transformers.models.{family}.modeling_{family}.torch"
            stack.enter_context(mock.patch(place, _Wider()))
        stack.enter_context(mock.patch("transformers.modeling_rope_utils.torch", _Wider()))
        stack.enter_context(mock.patch.object(torch.Tensor, "float", torch.Tensor.double))
        yield


def run(model: transformers.PreTrainedModel, tokens: Sequence[int]) -> Captured:
    """One forward pass over one sequence, without a cache.

    Boundaries come from hooks: the last of transformers' own `hidden_states` is after the norm.
    """
    found: dict[int | str, torch.Tensor] = {}
    decoder = _decoder(model)
    blocks = decoder.layers
    hooks = [
        blocks[0].register_forward_pre_hook(lambda _, args: found.update({0: args[0]})),
        decoder.norm.register_forward_hook(lambda *a: found.update(final_norm=a[2])),
    ]
    for index, block in enumerate(blocks, 1):
        hooks.append(block.register_forward_hook(lambda *a, i=index: found.update({i: a[2]})))
    try:
        with torch.no_grad():
            out = model(input_ids=torch.tensor([list(tokens)]), use_cache=False)
            found["logits"] = out.logits
    finally:
        for hook in hooks:
            hook.remove()
    return Captured({k: v[0].to(torch.float64).numpy() for k, v in found.items()})


def greedy(
    model: transformers.PreTrainedModel,
    prompt: Sequence[int],
    new: int,
    eos: Sequence[int] | None = (),
) -> list[int]:
    """transformers' own greedy `generate` on one prompt: the new tokens only.

    `eos` None leaves the choice to the model's generation_config.
    """
    stop = {} if eos is None else {"eos_token_id": list(eos) or None}
    ids = torch.tensor([list(prompt)])
    out = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        do_sample=False,
        max_new_tokens=new,
        pad_token_id=0,
        **stop,
    )
    return out[0, len(prompt) :].tolist()

"""Which architectures run as a target, and what each does that its config.json does not say."""

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal

PLAIN_BASE = 10000.0


@dataclasses.dataclass(frozen=True)
class Family:
    """One architecture, as transformers' modelling file of that name has it.

    Attributes:
      architecture: the class name in config.json.
      text_types: `model_type` of a text part with the same blocks -> its RoPE base where the file
        names none.
      wrappers: vision classes whose older files keep the text part's keys at the top level.
      qkv_bias, output_bias, mlp_bias: the config key that decides, or what holds whatever the file
        says.
      qk_norm: an RMSNorm over each query and key head before rotation.
      window: `all`: every layer has `sliding_window`; `chosen`: with `use_sliding_window`, the
        layers `layer_types` names, or those from `max_window_layers` on.
      defaults: what an absent key means; null means no value.
    """

    architecture: str
    text_types: Mapping[str, float]
    wrappers: tuple[str, ...] = ()
    qkv_bias: bool | str = False
    output_bias: bool | str = False
    mlp_bias: bool | str = False
    qk_norm: bool = False
    window: Literal["all", "chosen"] | None = None
    defaults: Mapping[str, Any] = dataclasses.field(default_factory=dict)


QWEN_DEFAULTS = {
    "num_key_value_heads": 32,
    "use_sliding_window": False,
    "sliding_window": 4096,
    "max_window_layers": 28,
}
FAMILIES = (
    Family(
        "LlamaForCausalLM",
        {"llama": PLAIN_BASE},
        qkv_bias="attention_bias",
        output_bias="attention_bias",
        mlp_bias="mlp_bias",
    ),
    Family(
        "MistralForCausalLM",
        {"mistral": PLAIN_BASE},
        window="all",
        defaults={"num_key_value_heads": 8, "sliding_window": 4096},
    ),
    Family(
        "Qwen2ForCausalLM",
        {"qwen2": PLAIN_BASE, "qwen2_vl_text": 1e6, "qwen2_5_vl_text": 1e6},
        wrappers=("Qwen2VLForConditionalGeneration", "Qwen2_5_VLForConditionalGeneration"),
        qkv_bias=True,
        window="chosen",
        defaults=QWEN_DEFAULTS,
    ),
    Family(
        "Qwen3ForCausalLM",
        {"qwen3": PLAIN_BASE, "qwen3_vl_text": 5e5},
        qkv_bias="attention_bias",
        output_bias="attention_bias",
        qk_norm=True,
        window="chosen",
        defaults=QWEN_DEFAULTS | {"head_dim": 128},
    ),
)
ARCHITECTURES = {family.architecture: family for family in FAMILIES}
TEXT_TYPES = {name: family for family in FAMILIES for name in family.text_types}
FLAT_WRAPPERS = {name: family for family in FAMILIES for name in family.wrappers}

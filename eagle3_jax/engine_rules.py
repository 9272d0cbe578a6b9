"""What each engine reads of a draft's checkpoint, and what it does instead, as data.

SGLang 0.5.23 was run (the recordings in the tests are its own); 0.5.10.post1 was read
(`models/llama_eagle3.py`, `deepseek_v2.py`, `gpt_oss.py`); vLLM's `llama_eagle3.py`, TensorRT-LLM's
`modeling_speculative.py` and SafeAILab/EAGLE cb7e084 were read.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Literal

FILE = ("*",)
"""In place of config keys: the tensors decide, as they do here."""


@dataclasses.dataclass(frozen=True)
class AuxRule:
    """Which boundaries a target captures for a list of layer ids.

    Attributes:
      places: where ids are read: "eagle_config", "top"; none: never.
      added: to each id, which makes it a boundary. default_added: to the default (2, L//2, L-3).
      unless_first: ids are boundaries already unless the first is this.
      depth_is_index: ids are boundaries already when the largest is the depth L.
      last: whether boundary L can be captured.
    """

    places: tuple[str, ...] = ("eagle_config",)
    added: int = 1
    default_added: int = 0
    unless_first: int | None = None
    depth_is_index: bool = False
    last: bool = False

    def captured(self, ids: Sequence[int], layers: int | None) -> tuple[int, ...]:
        """Boundaries for explicit ids: ascending and each once, whatever the list says."""
        added = self.added
        if self.unless_first is not None and ids[0] != self.unless_first:
            added = 0
        if self.depth_is_index and max(ids) == layers:
            added = 0
        found = {i + added for i in ids}
        if layers is not None:
            found = {b for b in found if b < layers or (self.last and b == layers)}
        return tuple(sorted(found))


DEEPSEEK = (
    "DeepseekV2ForCausalLM",
    "DeepseekV3ForCausalLM",
    "DeepseekV32ForCausalLM",
    "GlmMoeDsaForCausalLM",
    "KimiK25ForConditionalGeneration",
    "MistralLarge3ForCausalLM",
)


@dataclasses.dataclass(frozen=True)
class Engine:
    """One engine's reading of an EAGLE-3 checkpoint.

    Attributes:
      name: what `as_engine` takes. draft_attention: which slots a drafted node reads, see
        `speculate`.
      architectures: class names it takes in config.json, by attention; none for a kind: cannot run
        it. Empty: it does not look.
      speculators: whether it reads a speculators config.
      layer_stems: how the layers' names may begin; others are dropped without a word.
      unknown: what happens to tensors it has no place for.
      switches: field of `DraftConfig` -> config keys that turn it on, at the top level or in
        `eagle_config` unless they say where; no key: always off; `FILE`: as the tensors are.
      residual_default: `norm_before_residual` of a speculators draft without the key.
      next_norm: which norm layers after the first use; None: one layer only. wide_layers: whether
        `next_layer_regular: false` makes them read the embedding too.
      embedding: whose, where both have one as wide as the draft.
      aux: for most targets. families: for the others, by the target's architecture.
      states: how many it always takes; None: as many as the file says. single_state: whether it
        knows `use_aux_hidden_state: false`.
      scalings: kinds of RoPE it knows. dynamic: "static" raises the base once, for all positions.
      axes: whether it has multi-axis rope; "unscaled": of kind default, whatever the file says.
      yarn_reads_attention_factor: SGLang knows it under another name.
      scaled_base: the base it uses with scaled RoPE, whatever the file says.
      wants_vocab_key: dies without the key `draft_vocab_size`.
      width_decides: `fc` is skipped whenever aux features are as wide as the draft.
      latent_switches: as `switches`, of its class for latent attention.
    """

    name: str
    draft_attention: Literal["beam_slots", "ancestors"]
    architectures: Mapping[str, tuple[str, ...]]
    switches: Mapping[str, tuple[str, ...]]
    speculators: bool = False
    layer_stems: tuple[str, ...] = ("midlayer", "layers")
    skipped_prefixes: tuple[str, ...] = ("module.", "_orig_mod.", "draft_model.", "eagle_module.")
    unknown: Literal["dropped", "error"] = "dropped"
    residual_default: bool = False
    next_norm: str | None = None
    wide_layers: bool = False
    embedding: Literal["target", "own"] = "target"
    aux: AuxRule = AuxRule()
    families: Mapping[str, AuxRule] = dataclasses.field(default_factory=dict)
    states: int | None = None
    single_state: bool = True
    scalings: tuple[str, ...] = ("default", "linear", "dynamic", "llama3", "yarn")
    dynamic: Literal["static", "own position"] = "static"
    axes: Literal["none", "unscaled", "all"] = "all"
    yarn_reads_attention_factor: bool = True
    scaled_base: float | None = None
    wants_vocab_key: bool = False
    width_decides: bool = False
    latent_switches: Mapping[str, tuple[str, ...]] | None = None


OFF: Mapping[str, tuple[str, ...]] = {
    "norm_before_residual": (),
    "double_norm": (),
    "qkv_bias": (),
    "mlp_bias": (),
    "output_bias": (),
    "fc_bias": (),
    "fc_norm": (),
    "norm_before_fc": (),
    "feedback": (),
    "qk_norm": (),
    "windows": (),
}
SGLANG_510 = {**OFF, "output_bias": ("attention_bias", "bias"), "fc_bias": ("bias",)}
SGLANG_523 = {
    **SGLANG_510,
    "fc_norm": ("fc_norm", "use_aux_norm"),
    "norm_before_fc": ("norm_before_fc",),
    "feedback": ("norm_output",),
}
LLAMA = ("LlamaForCausalLMEagle3",)
LATENT = ("Eagle3DeepseekV2ForCausalLM",)

ENGINES = {
    engine.name: engine
    for engine in (
        Engine(
            "sglang-0.5.23",
            "beam_slots",
            {"gqa": LLAMA, "mla": LATENT},
            SGLANG_523,
            next_norm="hidden_norm",
            families={
                **dict.fromkeys(DEEPSEEK, AuxRule(unless_first=1)),
                "GptOssForCausalLM": AuxRule(depth_is_index=True, last=True),
                "Gemma3ForCausalLM": AuxRule(last=True),
                "MiniMaxM3SparseForConditionalGeneration": AuxRule(default_added=1),
            },
            axes="unscaled",
            yarn_reads_attention_factor=False,
            wants_vocab_key=True,
            width_decides=True,
            latent_switches={**SGLANG_523, "norm_before_fc": ()},
        ),
        Engine(
            "sglang-0.5.10",
            "beam_slots",
            {"gqa": LLAMA, "mla": ()},
            SGLANG_510,
            layer_stems=("midlayer",),
            families={"Gemma3ForCausalLM": AuxRule(last=True)},
            states=3,
            single_state=False,
            axes="unscaled",
            yarn_reads_attention_factor=False,
            wants_vocab_key=True,
            width_decides=True,
        ),
        Engine(
            "vllm",
            "ancestors",
            {},
            {
                **OFF,
                "norm_before_residual": ("norm_before_residual",),
                "qkv_bias": ("attention_bias",),
                "output_bias": ("attention_bias", "bias"),
                "mlp_bias": ("mlp_bias",),
                "fc_norm": ("fc_norm",),
                "norm_before_fc": ("norm_before_fc",),
                "feedback": ("norm_output",),
                "windows": FILE,
            },
            speculators=True,
            unknown="error",
            residual_default=True,
            next_norm="input_layernorm",
            embedding="own",
            aux=AuxRule(places=("top", "eagle_config"), added=0, last=True),
        ),
        Engine(
            "trt-llm",
            "ancestors",
            {},
            {
                **OFF,
                "qkv_bias": ("attention_bias",),
                "output_bias": ("attention_bias",),
                "mlp_bias": ("mlp_bias",),
                "fc_bias": ("bias",),
                "fc_norm": ("fc_norm",),
                "norm_before_fc": ("eagle_config.norm_before_fc",),
                "feedback": ("eagle_config.return_hidden_post_norm", "norm_output"),
            },
            next_norm="hidden_norm",
            wide_layers=True,
            aux=AuxRule(last=True),
        ),
        Engine(
            "official",
            "ancestors",
            {"mla": ()},
            OFF,
            layer_stems=("midlayer",),
            aux=AuxRule(places=()),
            states=3,
            single_state=False,
            scalings=("default", "linear", "dynamic"),
            dynamic="own position",
            axes="none",
            scaled_base=10000.0,
        ),
    )
}

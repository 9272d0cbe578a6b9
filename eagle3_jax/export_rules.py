"""What each framework's checkpoint can say of a draft, and where, as data.

Keys as the frameworks' own code writes and reads them: SafeAILab/EAGLE cb7e084, SpecForge a6b6b02
and 0.2.0, SGLang 0.5.23, speculators 0.9.0, ModelOpt 0.43 to 0.47, vLLM 0.33.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal

from eagle3_jax.config import DraftConfig

PLAIN: Mapping[str, Any] = {
    "norm_before_residual": False,
    "norm_before_fc": False,
    "fc_norm": False,
    "feedback": "pre_norm",
    "final_norm": True,
    "double_norm": False,
    "fc_bias": False,
    "qkv_bias": False,
    "output_bias": False,
    "mlp_bias": False,
    "qk_norm": False,
    "hidden_norm": True,
    "fuse": "fc",
    "embed": "target",
    "head": "draft",
    "latent": None,
}
"""Switches of `DraftConfig` in the draft that every dialect can hold."""

REASONS: Mapping[str, str] = {
    "norm_before_residual": "it always adds the state before its norm to the residual",
    "norm_before_fc": "it has no norm over all target states",
    "fc_norm": "it has no norm for each target state",
    "feedback": "it always feeds back the state before the final norm",
    "final_norm": "it always has a final norm before the head",
    "double_norm": "it norms the state once; convert with --double-norm false to keep what servers "
    "run",
    "fc_bias": "its fc has no bias",
    "qkv_bias": "its q, k and v have no bias of their own",
    "output_bias": "its o_proj has no bias of its own",
    "mlp_bias": "its MLP has no bias",
    "qk_norm": "its attention has no q/k norms",
    "hidden_norm": "it always has hidden_norm in the first layer",
    "fuse": "it always has target states and fc",
    "embed": "it takes the target's embedding (convert with --embed target if that is meant)",
    "head": "it needs an lm_head.weight of the draft's own",
    "latent": "it has no latent attention (MLA)",
    "windows": "its draft attention has no window",
    "num_layers": "it runs one layer",
    "next_layers": "its later layers read something else",
}


@dataclasses.dataclass(frozen=True)
class Form:
    """One dialect as it is written.

    Attributes:
      architectures: class names by attention; a kind that is absent cannot be held.
      stem: of the first layer's tensors; later layers are `layers.i.`.
      ids: where layer ids stand and what they mean: nowhere, `eagle_config` as outputs of blocks,
        or the top level as boundaries.
      keys: switch -> key that states it, "eagle_config." in front where it stands there; "" where
        the tensors alone say it. What is not here must be as in `PLAIN`.
      narrow_embed: an own embedding is read when the draft is not as wide as the target.
      next_layers: kinds of layers after the first that it runs. windows: whether it has them.
      scalings: kinds of RoPE. yarn_lacks: fields of yarn it does not read. axes: multi-axis rope:
        not at all, in blocks and without scaling, without scaling, or in any way.
      states: how many target states it always takes; None: as many as there are ids.
      mask: writes t2d beside d2t.
      engine: the profile whose reading of the file must be the draft as trained.
      reads_as: this project's dialect for the file.
    """

    name: str
    architectures: Mapping[str, str]
    keys: Mapping[str, str]
    stem: Literal["midlayer", "layers"] = "layers"
    ids: Literal["none", "eagle_config", "top"] = "eagle_config"
    narrow_embed: bool = True
    next_layers: tuple[str, ...] = ()
    windows: bool = False
    scalings: tuple[str, ...] = ("default", "linear", "dynamic", "llama3", "yarn")
    yarn_lacks: tuple[str, ...] = ()
    axes: Literal["none", "blocks", "unscaled", "all"] = "all"
    states: int | None = None
    mask: bool = True
    engine: str | None = None
    reads_as: str = "official"

    def lacks(self, field: str, config: DraftConfig) -> bool:
        """Whether the draft has something in this switch that the dialect cannot say."""
        if getattr(config, field) == PLAIN[field]:
            return False
        if field == "embed" and self.narrow_embed:
            return config.hidden_size == config.target_hidden_size and field not in self.keys
        return field not in self.keys


EAGLE3 = "LlamaForCausalLMEagle3"
LATENT = "Eagle3DeepseekV2ForCausalLM"

FORMS = {
    form.name: form
    for form in (
        Form(
            "official",
            {"gqa": "LlamaForCausalLM"},
            {},
            stem="midlayer",
            ids="none",
            scalings=("default", "linear", "dynamic"),
            axes="none",
            engine="official",
        ),
        Form(
            "specforge",
            {"gqa": EAGLE3},
            {"fc_norm": "fc_norm", "feedback": "norm_output", "final_norm": "norm_output"},
            stem="midlayer",
            yarn_lacks=("attention_factor", "truncate"),
            axes="blocks",
            states=3,
        ),
        Form(
            "sglang",
            {"gqa": EAGLE3, "mla": LATENT},
            {
                "norm_before_fc": "norm_before_fc",
                "fc_norm": "fc_norm",
                "feedback": "norm_output",
                "fc_bias": "bias",
                "output_bias": "attention_bias",
                "fuse": "eagle_config.use_aux_hidden_state",
                "head": "draft_vocab_size",
                "latent": "",
            },
            stem="midlayer",
            next_layers=("hidden_norm",),
            yarn_lacks=("attention_factor",),
            axes="unscaled",
            engine="sglang-0.5.23",
        ),
        Form(
            "speculators",
            {"gqa": "Eagle3DraftModel"},
            {
                "norm_before_residual": "norm_before_residual",
                "norm_before_fc": "norm_before_fc",
                "fc_norm": "fc_norm",
                "feedback": "norm_output",
                "qkv_bias": "attention_bias",
                "output_bias": "attention_bias",
                "mlp_bias": "mlp_bias",
                "qk_norm": "",
                "embed": "",
            },
            ids="top",
            next_layers=("input_layernorm",),
            windows=True,
            reads_as="speculators",
        ),
        Form(
            "modelopt",
            {"gqa": EAGLE3},
            {
                "norm_before_fc": "eagle_config.norm_before_fc",
                "double_norm": "",
                "qkv_bias": "attention_bias",
                "output_bias": "attention_bias",
                "mlp_bias": "mlp_bias",
                "hidden_norm": "",
                "fuse": "eagle_config.use_aux_hidden_state",
            },
            narrow_embed=False,
            next_layers=("input_layernorm", "wide"),
            mask=False,
            reads_as="modelopt",
        ),
        Form(
            "vllm",
            {"gqa": EAGLE3, "mla": LATENT},
            {
                "norm_before_residual": "norm_before_residual",
                "norm_before_fc": "norm_before_fc",
                "fc_norm": "fc_norm",
                "feedback": "norm_output",
                "qkv_bias": "attention_bias",
                "output_bias": "attention_bias",
                "mlp_bias": "mlp_bias",
                "fuse": "eagle_config.use_aux_hidden_state",
                "embed": "",
                "head": "",
                "latent": "",
            },
            ids="top",
            next_layers=("input_layernorm",),
            windows=True,
            engine="vllm",
        ),
    )
}

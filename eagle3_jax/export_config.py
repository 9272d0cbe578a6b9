"""A draft's config.json in another framework's words, and what those words cannot say."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from eagle3_jax.aux_ids import AUX_KEY
from eagle3_jax.config import DraftConfig
from eagle3_jax.export_ids import TargetShape, layer_ids
from eagle3_jax.export_rope import rope_keys
from eagle3_jax.export_rules import PLAIN, REASONS, Form
from eagle3_jax.findings import Findings
from eagle3_jax.source_config import SourceConfig

CARRIED = ("bos_token_id", "eos_token_id", "pad_token_id", "max_position_embeddings")
LATENT_TYPES = ("deepseek_v2", "deepseek_v3", "kimi_k2")


class ConfigWriter:
    """Builds one config.json; `problems` says what the dialect cannot hold, a line each."""

    def __init__(
        self,
        form: Form,
        config: DraftConfig,
        source: Mapping[str, Any],
        target: TargetShape,
        dtype: str,
    ):
        self.form, self.config, self.target, self.dtype = form, config, target, dtype
        self.source = SourceConfig(source, "config.json")
        self.problems: list[str] = []
        self.findings = Findings()
        self.eagle: dict[str, Any] = {}
        self.kind = "gqa" if config.latent is None else "mla"

    def build(self) -> dict[str, Any]:
        """The whole file; meaningless when `problems` is not empty."""
        self._check_switches()
        self._check_layers()
        layer = self._layer() | rope_keys(self.config.rope, self.form, self._cannot, self.findings)
        top = self._switches()
        ids = self._ids()
        made: dict[str, Any] = {"architectures": [self.form.architectures.get(self.kind, "")]}
        if self.form.name == "speculators":
            made |= self._speculators(layer, top, ids)
        else:
            made |= layer | top | ids
            made["dtype" if self.form.name == "specforge" else "torch_dtype"] = self.dtype
        if self.eagle:
            made["eagle_config"] = self.eagle
        return made

    def _cannot(self, field: str, value: Any, reason: str | None = None):
        said = "true" if value is True else "false" if value is False else value
        self.problems.append(f"{field} {said}: {reason or REASONS[field]}")

    def _check_switches(self):
        config, form = self.config, self.form
        for field in PLAIN:
            if form.lacks(field, config):
                value = getattr(config, field)
                self._cannot(field, "" if field == "latent" else value)
        if form.states is not None and config.num_aux != form.states:
            self._cannot("num_aux", config.num_aux, f"its fc takes {form.states} states")
        if form.name == "speculators" and config.hidden_size != config.target_hidden_size:
            self._cannot(
                "target_hidden_size",
                config.target_hidden_size,
                f"its fc takes states of the draft's width {config.hidden_size} (vllm's dialect "
                "holds it)",
            )
        if config.latent is not None and "latent" in form.keys:
            if not config.latent.interleaved:
                self._cannot("latent", "not interleaved", "it turns elements 2i and 2i + 1")
            if form.name == "sglang" and config.norm_before_fc:
                self._cannot("norm_before_fc", True, "its latent draft has no such norm")
        both = form.keys.get("qkv_bias") == "attention_bias"
        if both and config.qkv_bias and not config.output_bias:
            self._cannot("qkv_bias", True, "with attention_bias it gives o_proj a bias too")
        if both and config.output_bias and not config.qkv_bias and form.name != "vllm":
            self._cannot("output_bias", True, "with attention_bias it gives q, k and v a bias too")
        if form.name == "speculators" and config.qk_norm and config.mlp_bias:
            self._cannot("mlp_bias", True, "a layer with q/k norms (Qwen3) has none there")

    def _check_layers(self):
        config, form = self.config, self.form
        if config.num_layers > 1:
            if not form.next_layers or config.latent is not None:
                self._cannot("num_layers", config.num_layers)
            elif config.next_layers not in form.next_layers:
                self._cannot(
                    "next_layers", config.next_layers, f"it runs {' or '.join(form.next_layers)}"
                )
        if any(config.windows) and not form.windows:
            self._cannot("windows", list(config.windows))
        if len({window for window in config.windows if window}) > 1:
            self._cannot("windows", list(config.windows), "one sliding_window serves all layers")

    def _layer(self) -> dict[str, Any]:
        config, form = self.config, self.form
        latent = config.latent
        stated = self.source.layer("model_type")
        model = "qwen3" if config.qk_norm else "llama"
        if latent is not None:
            model = stated.value if stated and stated.value in LATENT_TYPES else "deepseek_v3"
        made: dict[str, Any] = {
            "model_type": model,
            "hidden_size": config.hidden_size,
            "intermediate_size": config.intermediate_size,
            "num_hidden_layers": config.num_layers,
            "num_attention_heads": config.num_heads,
            "num_key_value_heads": config.num_kv_heads,
            "head_dim": config.head_dim,
            "hidden_act": "silu",
            "rms_norm_eps": config.rms_norm_eps,
            "vocab_size": config.vocab_size,
            "tie_word_embeddings": False,
            "attention_bias": self._attention_bias(),
            "mlp_bias": config.mlp_bias,
        }
        if latent is not None:
            del made["head_dim"]
            made |= {"rope_interleave": True}
            sizes = dataclasses.asdict(latent)
            made |= {key: value for key, value in sizes.items() if key != "interleaved"}
        for key in CARRIED:
            field = self.source.layer(key)
            if field is not None:
                made[key] = field.value
        if any(config.windows):
            made["sliding_window"] = next(filter(None, config.windows))
            made["layer_types"] = [
                "sliding_attention" if window else "full_attention" for window in config.windows
            ]
            made["use_sliding_window"] = True
        if form.name != "speculators":
            made["draft_vocab_size"] = config.draft_vocab_size
        return made

    def _attention_bias(self) -> bool:
        if self.form.keys.get("qkv_bias"):
            return self.config.qkv_bias
        return self.config.output_bias and self.form.name != "vllm"

    def _switches(self) -> dict[str, Any]:
        """Switches at the top level; those of `eagle_config` go there."""
        config, form, made = self.config, self.form, {}
        for field, key in form.keys.items():
            value = getattr(config, field)
            if key in ("", "attention_bias", "mlp_bias", "draft_vocab_size"):
                continue
            stated: Any = value == "post_norm" if field == "feedback" else value
            stated = value == "fc" if field == "fuse" else stated
            plain = value == PLAIN[field]
            if plain and (form.name != "speculators" or field == "final_norm"):
                continue
            if key.startswith("eagle_config."):
                self.eagle[key.removeprefix("eagle_config.")] = stated
            else:
                made[key] = stated
        if config.hidden_size != config.target_hidden_size:
            made["target_hidden_size"] = config.target_hidden_size
        if form.name == "vllm" and config.output_bias and not config.qkv_bias:
            made["bias"] = True
        if form.name == "sglang" and config.head == "target":
            made["draft_vocab_size"] = None
        if form.name == "sglang" and config.fc_bias and not config.output_bias:
            self.findings.warn(
                "BIAS_DISAGREES",
                "bias is true for fc.bias: SGLang gives o_proj a bias too, which no tensor sets",
            )
        if form.name == "modelopt":
            self._modelopt()
        if form.name == "specforge" and made.get("norm_output") is True:
            self.findings.warn(
                "NORM_OUTPUT_AMBIGUOUS",
                "norm_output is true: SpecForge since 2026-09 (#879) feeds back the normed state; "
                "0.2.0 and before mean a norm before the head and feed back the un-normed one",
            )
        return made

    def _modelopt(self):
        keys: dict[str, Any] = {
            "use_aux_hidden_state": self.config.fuse == "fc",
            "use_input_layernorm_in_first_layer": True,
            "use_last_layernorm": True,
            "use_mtp_layernorm": False,
            "next_layer_regular": self.config.next_layers != "wide",
            "parallel_draft_step": 1,
        }
        self.eagle |= keys

    def _ids(self) -> dict[str, Any]:
        if self.config.fuse == "none":
            return {}
        boundaries = self.config.aux_boundaries
        ids, problem = layer_ids(self.form, boundaries, self.target, self.findings)
        if problem is not None:
            self._cannot("aux_boundaries", list(boundaries), problem)
        if ids is None:
            return {}
        if self.form.ids == "top":
            return {AUX_KEY: ids}
        self.eagle[AUX_KEY] = ids
        return {} if len(ids) == 3 else {"num_aux_hidden_states": len(ids)}

    def _speculators(
        self, layer: dict[str, Any], top: dict[str, Any], ids: dict[str, Any]
    ) -> dict[str, Any]:
        own = self.source.top("speculators_config")
        proposal = {
            "proposal_type": "greedy",
            "speculative_tokens": 3,
            "verifier_accept_k": 1,
            "accept_tolerance": 0.0,
        }
        architecture = self.target.architecture
        names = [architecture] if architecture else []
        default = {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [proposal],
            "verifier": {"architectures": names, "name_or_path": None},
        }
        if self.config.embed == "target":
            self.findings.warn(
                "WEIGHT_OWNER",
                "no embed_tokens.weight: vLLM takes the target's; speculators' trainer saves one",
            )
        return {
            "speculators_model_type": "eagle3",
            "speculators_version": "0.9.0",
            "speculators_config": own.value if own and isinstance(own.value, dict) else default,
            "draft_vocab_size": self.config.draft_vocab_size,
            "target_hidden_size": None,
            "embed_requires_grad": False,
            "tie_word_embeddings": False,
            **top,
            **ids,
            "dtype": self.dtype,
            "transformer_layer_config": layer,
        }

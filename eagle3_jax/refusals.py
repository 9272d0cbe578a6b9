"""Drafts that are no EAGLE-3 of the kinds known here: each refused by its own name."""

import dataclasses
import re
from collections.abc import Mapping

from eagle3_jax.dialects import LAYER, LAYER_NAMES
from eagle3_jax.findings import ConvertError
from eagle3_jax.quantised import FLOATS, SCALES, describe_quantised
from eagle3_jax.source_config import SourceConfig, shorten


@dataclasses.dataclass(frozen=True)
class OtherKind:
    """What else a draft may be, and what takes it."""

    code: str
    name: str
    runs: str


OTHER_KINDS = {
    "eagle": OtherKind(
        "ARCH_EAGLE1",
        "an EAGLE-1/2 draft (fc over embedding and state, the target's head)",
        "SafeAILab/EAGLE, SGLang (EAGLE) and vLLM (eagle) run it",
    ),
    "mlp_speculator": OtherKind("ARCH_MLP_SPECULATOR", "an MLP speculator", "vLLM runs it"),
    "peagle": OtherKind(
        "ARCH_PEAGLE", "a P-EAGLE draft (parallel, several layers)", "vLLM runs it"
    ),
    "dflash": OtherKind(
        "ARCH_DFLASH", "a DFlash draft (a block of tokens at once)", "SGLang (DFLASH) runs it"
    ),
    "dflash2": OtherKind("ARCH_DFLASH2", "a DFlash-2 draft", "speculators names its engines"),
    "dspark": OtherKind("ARCH_DSPARK", "a DSpark draft", "SGLang runs it"),
    "domino": OtherKind("ARCH_DOMINO", "a Domino draft", "SGLang runs it"),
    "xpress": OtherKind("ARCH_XPRESS", "an Xpress draft", "speculators names its engines"),
    "medusa": OtherKind(
        "ARCH_MEDUSA", "a draft with Medusa or parallel heads", "vLLM and TensorRT-LLM run Medusa"
    ),
    "mtp": OtherKind(
        "ARCH_MTP",
        "an MTP draft (a target's own next-token layer)",
        "SGLang and vLLM run it beside its target",
    ),
}
"""By `speculators_model_type`."""

ARCHITECTURES = {
    "peagle": "peagle",
    "dflash2": "dflash2",
    "dflash": "dflash",
    "dspark": "dspark",
    "domino": "domino",
    "xpress": "xpress",
    "medusa": "medusa",
}
"""Parts of architecture names; the first that fits decides."""

TENSOR_KINDS: tuple[tuple[re.Pattern[str], OtherKind], ...] = (
    (
        re.compile(r"\.lora_(A|B|embedding_A|embedding_B)\b|\.lora_magnitude_vector"),
        OtherKind("ARCH_ADAPTER", "a LoRA adapter", "merge it into its base draft (PEFT) first"),
    ),
    (re.compile(r"(^|\.)mask_hidden$"), OTHER_KINDS["peagle"]),
    (
        re.compile(
            r"(^|\.)(medusa_heads?\.|parallel_draft_heads\.)|^\d+\.\d+\.linear\.(weight|bias)$"
        ),
        OTHER_KINDS["medusa"],
    ),
    (re.compile(r"(^|\.)(enorm|hnorm|eh_proj)\."), OTHER_KINDS["mtp"]),
    (
        re.compile(r"\.(qkv_proj|gate_up_proj|Wqkv|W_pack)\."),
        OtherKind(
            "WEIGHT_FUSED",
            "a checkpoint with fused projections (q, k, v or gate, up in one tensor)",
            "split them into q_proj, k_proj, v_proj, gate_proj, up_proj",
        ),
    ),
)

STRUCTURE = {
    "use_input_layernorm_in_first_layer": True,
    "use_last_layernorm": True,
    "use_mtp_layernorm": False,
    "eh_proj_before_attn": False,
}
"""ModelOpt's structural flags, with the one value this draft has."""


def refuse_other_kinds(
    plain: Mapping[str, str],
    shapes: Mapping[str, tuple[int, ...]],
    dtypes: Mapping[str, str],
    config: SourceConfig,
):
    """Raises for every kind of draft that would run wrongly or not at all.

    Args:
      plain: name without prefix -> the file's name. shapes, dtypes: by plain name.

    Raises:
      ConvertError: ARCH_* with the kind's name, WEIGHT_QUANTISED, WEIGHT_FUSED.
    """
    _by_config(config)
    for pattern, kind in TENSOR_KINDS:
        hit = next((name for name in plain if pattern.search(name)), None)
        if hit is not None:
            raise ConvertError(
                kind.code,
                f"{kind.name}: not supported (tensor {plain[hit]!r}); {kind.runs}",
            )
    _quantised(plain, dtypes)
    _structure(config)
    _not_eagle3(plain, shapes, config)
    _variants(plain, config)


def _by_config(config: SourceConfig):
    stated = config.text(config.top("speculators_model_type"))
    if stated is not None and stated != "eagle3":
        kind = OTHER_KINDS.get(stated)
        what = kind.name if kind else "an unknown kind of draft"
        raise ConvertError(
            kind.code if kind else "ARCH_UNKNOWN_VARIANT",
            f"{config.where}: speculators_model_type {shorten(stated)}: this is {what}, expected "
            f"eagle3{f'; {kind.runs}' if kind else ''}",
        )
    for name in config.architectures:
        for part, key in ARCHITECTURES.items():
            if part in name.lower():
                kind = OTHER_KINDS[key]
                raise ConvertError(
                    kind.code,
                    f"{config.where}: architecture {shorten(name)}: this is {kind.name}, not "
                    f"supported; {kind.runs}",
                )
    if config.top("peft_type") is not None:
        kind = TENSOR_KINDS[0][1]
        raise ConvertError(kind.code, f"{config.where}: {kind.name}: not supported; {kind.runs}")


def _quantised(plain: Mapping[str, str], dtypes: Mapping[str, str]):
    for name, original in plain.items():
        if SCALES.search(name):
            raise ConvertError(
                "WEIGHT_QUANTISED",
                f"this draft is quantised ({original!r}): {describe_quantised(plain)}",
            )
    for name, dtype in dtypes.items():
        if name not in ("d2t", "t2d") and dtype not in FLOATS:
            raise ConvertError(
                "WEIGHT_QUANTISED",
                f"tensor {plain[name]!r} is {dtype}: expected float16, bfloat16, float32 or 64",
            )


def _structure(config: SourceConfig):
    for key, expected in STRUCTURE.items():
        for field in (config.eagle_config(key), config.top(key)):
            if field is not None and config.flag(field) != expected:
                raise ConvertError(
                    "ARCH_UNKNOWN_VARIANT",
                    f"{config.where}: {field.key} is {str(field.value).lower()}: a variant, not "
                    "supported",
                )
    steps = config.eagle_config("parallel_draft_step")
    if steps is not None and config.integer(steps) != 1:
        raise ConvertError(
            "ARCH_UNKNOWN_VARIANT",
            f"{config.where}: {steps.key} is {steps.value}: parallel drafting is not supported",
        )


def _not_eagle3(
    plain: Mapping[str, str], shapes: Mapping[str, tuple[int, ...]], config: SourceConfig
):
    """Without a `hidden_norm`: an EAGLE-1, a plain language model, or a draft of one state."""
    if any(name.endswith("hidden_norm.weight") for name in plain):
        return
    single = config.flag(config.anywhere("use_aux_hidden_state")) is False
    if single and any(LAYER.match(name) for name in plain):
        return
    if "fc.weight" not in plain:
        some = ", ".join(map(repr, list(plain.values())[:4])) or "no tensors"
        llama = "layers.0.self_attn.q_proj.weight" in plain and "embed_tokens.weight" in plain
        what = (
            "a plain language model, which any engine runs as a target or a standalone draft"
            if llama
            else "not an EAGLE-3 draft"
        )
        raise ConvertError(
            "ARCH_NOT_EAGLE3", f"no fc.weight and no hidden_norm: {what}; it has {some}"
        )
    shape = shapes["fc.weight"]
    if len(shape) == 2 and shape[1] == 2 * shape[0]:
        kind = OTHER_KINDS["eagle"]
        raise ConvertError(
            kind.code,
            f"{kind.name} or HASS, whose tensors are the same: not supported; fc.weight is "
            f"{list(shape)} and there is no hidden_norm; {kind.runs}",
        )


def _variants(plain: Mapping[str, str], config: SourceConfig):
    """A whole layer plus something in it that no layer here has, or another activation."""
    problems = []
    inner = {name: name[m.end() :] for name in plain if (m := LAYER.match(name))}
    if {"self_attn.o_proj.weight", "mlp.down_proj.weight"} <= set(inner.values()):
        strange = [
            name
            for name, rest in sorted(inner.items())
            if rest not in LAYER_NAMES
            and rest.startswith(("self_attn.", "mlp."))
            and "rotary_emb" not in rest
            and _beside_whole(rest, set(inner.values()))
        ]
        problems += [f"tensor {plain[name]!r}" for name in strange]
    act = config.layer("hidden_act") or config.layer("hidden_activation")
    if act is not None and config.text(act) not in ("silu", "swish"):
        problems.append(f"{act.key} {shorten(act.value)} (supported: silu)")
    problems += [f"{field.key} {shorten(field.value)}" for field in config.scalings()]
    model = config.layer("model_type") if config.nested else None
    if model is not None and (config.text(model) or "").startswith("gemma"):
        problems.append(f"{model.key} {shorten(model.value)} (its norms scale by 1 + weight)")
    if problems:
        raise ConvertError(
            "ARCH_UNKNOWN_VARIANT",
            f"this draft's layer is neither Llama's nor DeepSeek's: {'; '.join(problems)}",
        )


def _beside_whole(name: str, inner: set[str]) -> bool:
    """Whether the block of a strange tensor has all it needs without it: no mere misspelling."""
    if name.startswith("mlp."):
        return {f"mlp.{n}_proj.weight" for n in ("gate", "up", "down")} <= inner
    grouped = {f"self_attn.{n}_proj.weight" for n in "qkvo"} <= inner
    return grouped or {f"self_attn.{n}.weight" for n in ("kv_b_proj", "o_proj")} <= inner

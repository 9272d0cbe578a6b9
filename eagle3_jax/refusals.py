"""Drafts that are not a one-layer, Llama-shaped EAGLE-3: each refused by its own name."""

import re
from collections.abc import Mapping

from eagle3_jax.dialects import LAYER_NAMES, LAYER_PREFIXES
from eagle3_jax.findings import ConvertError, Findings
from eagle3_jax.source_config import SourceConfig, shorten

OTHER_KINDS = {
    "eagle": "an EAGLE-1/2 draft (fc over embedding and state, the target's head)",
    "mlp_speculator": "an MLP speculator",
    "peagle": "a P-EAGLE draft (parallel, several layers)",
    "dflash": "a DFlash draft",
    "dflash2": "a DFlash-2 draft",
    "dspark": "a DSpark draft",
    "domino": "a Domino draft",
    "xpress": "an Xpress draft",
    "medusa": "a Medusa draft",
    "mtp": "an MTP draft",
}
"""`speculators_model_type` (and parts of architecture names) of other drafts."""

ARCHITECTURES = {
    "peagledraftmodel": "peagle",
    "dflash": "dflash",
    "dspark": "dspark",
    "domino": "domino",
    "xpress": "xpress",
    "medusa": "medusa",
}

QUANTISED = re.compile(
    r"(weight_scale|weight_scale_inv|input_scale|_scale|weight_packed|weight_zero_point|"
    r"qweight|qzeros|scales|g_idx|SCB|quant_state\..*)$"
)

TENSOR_KINDS: tuple[tuple[re.Pattern[str], str, str], ...] = (
    (re.compile(r"(^|\.)mask_hidden$"), "ARCH_PEAGLE", OTHER_KINDS["peagle"]),
    (
        re.compile(
            r"(^|\.)(medusa_heads?\.|parallel_draft_heads\.)|^\d+\.\d+\.linear\.(weight|bias)$"
        ),
        "ARCH_MEDUSA",
        "a draft with Medusa or parallel heads",
    ),
    (re.compile(r"(^|\.)(enorm|hnorm|eh_proj)\."), "ARCH_MTP", OTHER_KINDS["mtp"]),
    (
        re.compile(r"\.(kv_a_proj_with_mqa|q_a_proj|kv_b_proj)\."),
        "ARCH_MLA",
        "an MLA draft (latent attention; DeepSeek, Kimi)",
    ),
    (
        re.compile(r"\.(qkv_proj|gate_up_proj|Wqkv|W_pack)\."),
        "WEIGHT_FUSED",
        "a checkpoint with fused projections (q, k, v or gate, up in one tensor)",
    ),
    (
        re.compile(r"\.(q_norm|k_norm)\."),
        "ARCH_QK_NORM",
        "a draft with q/k norms (speculators' qwen3 layer, DeepSpec)",
    ),
)

STRUCTURE = {
    "use_aux_hidden_state": True,
    "use_input_layernorm_in_first_layer": True,
    "use_last_layernorm": True,
    "use_mtp_layernorm": False,
    "eh_proj_before_attn": False,
}
"""ModelOpt's structural flags, with the one value this draft has."""

LAYER_INDEX = re.compile(r"^(?:midlayer|layers)\.([0-9]{1,4})\.")


def refuse_other_kinds(
    plain: Mapping[str, str],
    shapes: Mapping[str, tuple[int, ...]],
    dtypes: Mapping[str, str],
    config: SourceConfig,
    findings: Findings,
):
    """Raises for every kind of draft that would run wrongly or not at all.

    Args:
      plain: name without prefix -> the file's name. shapes, dtypes: by plain name.

    Raises:
      ConvertError: ARCH_* with the kind's name, WEIGHT_QUANTISED, WEIGHT_FUSED, CONFIG_MULTI_LAYER,
        POS_SLIDING_WINDOW.
    """
    _by_config(config)
    for pattern, code, kind in TENSOR_KINDS:
        hit = next((name for name in plain if pattern.search(name)), None)
        if hit is not None:
            raise ConvertError(code, f"{kind}: not supported (tensor {plain[hit]!r})")
    _quantised(plain, dtypes)
    _structure(config)
    _eagle1(plain, shapes)
    _layers(plain, config, findings)
    _variants(plain, config)
    _window(config, findings)


def _by_config(config: SourceConfig):
    stated = config.text(config.top("speculators_model_type"))
    if stated is not None and stated != "eagle3":
        kind = OTHER_KINDS.get(stated, "an unknown kind of draft")
        raise ConvertError(
            f"ARCH_{_code(stated)}" if stated in OTHER_KINDS else "ARCH_UNKNOWN_VARIANT",
            f"{config.where}: speculators_model_type {shorten(stated)}: this is {kind}, expected "
            "eagle3",
        )
    for name in config.architectures:
        for part, kind in ARCHITECTURES.items():
            if part in name.lower():
                raise ConvertError(
                    f"ARCH_{_code(kind)}",
                    f"{config.where}: architecture {shorten(name)}: this is {OTHER_KINDS[kind]}, "
                    "not supported",
                )


def _code(kind: str) -> str:
    return "EAGLE1" if kind == "eagle" else kind.upper()


def _quantised(plain: Mapping[str, str], dtypes: Mapping[str, str]):
    for name, original in plain.items():
        if QUANTISED.search(name):
            raise ConvertError(
                "WEIGHT_QUANTISED", f"this draft is quantised ({original!r}): dequantise it first"
            )
    for name, dtype in dtypes.items():
        floating = dtype in ("float16", "bfloat16", "float32", "float64")
        if name not in ("d2t", "t2d") and not floating:
            raise ConvertError(
                "WEIGHT_QUANTISED",
                f"tensor {plain[name]!r} is {dtype}: expected float16, bfloat16, float32 or 64",
            )


def _layers(plain: Mapping[str, str], config: SourceConfig, findings: Findings):
    found = {int(m[1]): plain[name] for name in plain if (m := LAYER_INDEX.match(name))}
    extra = [index for index in found if index > 0]
    if extra:
        raise ConvertError(
            "CONFIG_MULTI_LAYER",
            f"this draft has {max(extra) + 1} layers ({found[max(extra)]!r}), supported is 1",
        )
    stated = config.layer("num_hidden_layers")
    if stated is not None and config.integer(stated, 0) != 1:
        findings.warn(
            "CONFIG_LAYER_COUNT",
            f"{stated.key} is {stated.value}, the tensors have 1 layer: the tensors decide",
        )


def _structure(config: SourceConfig):
    for key, expected in STRUCTURE.items():
        for field in (config.eagle_config(key), config.top(key)):
            if field is not None and config.flag(field) != expected:
                single = (
                    "the last normed state instead of aux states" if "aux" in key else "a variant"
                )
                raise ConvertError(
                    "ARCH_SINGLE_STATE" if "aux" in key else "ARCH_UNKNOWN_VARIANT",
                    f"{config.where}: {field.key} is {str(field.value).lower()}: {single}, not "
                    "supported",
                )
    steps = config.eagle_config("parallel_draft_step")
    if steps is not None and config.integer(steps) != 1:
        raise ConvertError(
            "ARCH_UNKNOWN_VARIANT",
            f"{config.where}: {steps.key} is {steps.value}: parallel drafting is not supported",
        )


def _eagle1(plain: Mapping[str, str], shapes: Mapping[str, tuple[int, ...]]):
    if any(name.endswith("hidden_norm.weight") for name in plain):
        return
    if "fc.weight" not in plain:
        some = ", ".join(map(repr, list(plain.values())[:4])) or "no tensors"
        raise ConvertError(
            "ARCH_NOT_EAGLE3",
            f"no fc.weight and no hidden_norm: not an EAGLE-3 draft; it has {some}",
        )
    shape = shapes["fc.weight"]
    if len(shape) == 2 and shape[1] == 2 * shape[0]:
        raise ConvertError(
            "ARCH_EAGLE1",
            f"{OTHER_KINDS['eagle']} or HASS, whose tensors are the same: not supported; fc.weight "
            f"is {list(shape)} and there is no hidden_norm",
        )


def _variants(plain: Mapping[str, str], config: SourceConfig):
    """A whole layer plus something in it that no Llama layer has, or another activation."""
    problems = []
    for prefix in LAYER_PREFIXES:
        inner = {name.removeprefix(prefix) for name in plain if name.startswith(prefix)}
        weights = {name for name in LAYER_NAMES if name.endswith("weight")}
        if weights <= inner:
            strange = [
                name
                for name in sorted(inner - LAYER_NAMES.keys())
                if name.startswith(("self_attn.", "mlp.")) and "rotary_emb" not in name
            ]
            problems += [f"tensor {plain[prefix + name]!r}" for name in strange]
    act = config.layer("hidden_act") or config.layer("hidden_activation")
    if act is not None and config.text(act) not in ("silu", "swish"):
        problems.append(f"{act.key} {shorten(act.value)} (supported: silu)")
    problems += [f"{field.key} {shorten(field.value)}" for field in config.scalings()]
    model = config.layer("model_type") if config.nested else None
    if model is not None and (config.text(model) or "").startswith("gemma"):
        problems.append(f"{model.key} {shorten(model.value)} (its norms scale by 1 + weight)")
    if problems:
        raise ConvertError(
            "ARCH_UNKNOWN_VARIANT", f"this draft's layer is not Llama's: {'; '.join(problems)}"
        )


def _window(config: SourceConfig, findings: Findings):
    use = config.flag(config.layer("use_sliding_window"))
    types = config.layer("layer_types")
    kinds = types.value if types is not None else []
    if types is not None and (not isinstance(kinds, list) or not all(map(_is_text, kinds))):
        raise config.wrong(types, "a list of layer types")
    window = config.layer("sliding_window")
    other = [kind for kind in kinds if kind not in ("full_attention", "sliding_attention")]
    if other or ("sliding_attention" in kinds and use is not False):
        raise ConvertError(
            "POS_SLIDING_WINDOW",
            f"{config.where}: layer_types {shorten(kinds)}"
            f"{f', sliding_window {window.value}' if window else ''}: only full attention is "
            "supported",
        )
    if window is not None and not kinds and use is not False:
        findings.refuse(
            "POS_SLIDING_WINDOW_UNCLEAR",
            f"{config.where}: {window.key} is {shorten(window.value)}, and neither layer_types nor "
            "use_sliding_window says whether the draft uses it",
        )


def _is_text(value: object) -> bool:
    return isinstance(value, str)

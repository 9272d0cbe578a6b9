"""One page about a conversion, from its manifest alone."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from eagle3_jax.config import RopeConfig
from eagle3_jax.rope_config import stated_axes

SIZES = (
    ("hidden_size", "D"),
    ("target_hidden_size", "E"),
    ("num_aux", "A"),
    ("intermediate_size", "F"),
    ("num_heads", "N"),
    ("num_kv_heads", "K"),
    ("head_dim", "H"),
    ("num_layers", "L"),
    ("vocab_size", "V"),
    ("draft_vocab_size", "W"),
)
SWITCHES = (
    "norm_before_residual",
    "norm_before_fc",
    "fc_norm",
    "feedback",
    "final_norm",
    "double_norm",
    "fc_bias",
    "qkv_bias",
    "output_bias",
    "mlp_bias",
    "embed",
    "head",
    "hidden_norm",
    "qk_norm",
)
LAYER_FIELDS = ("next_layers", "windows", "latent")
"""Shown where they say something."""


def conversion_report(manifest: Mapping[str, Any], out: str) -> str:
    """Plain text: sizes, switches, boundaries, vocabulary, RoPE, ignored tensors, findings."""
    config, origins = manifest["config"], manifest["origins"]
    dtypes = sorted(
        {r["dtype"] for name, r in manifest["tensors"].items() if name != "draft_to_target"}
    )
    lines = [
        f"{out}: {manifest['dialect']} draft, {len(manifest['tensors'])} tensors, "
        f"{', '.join(dtypes)}",
        "",
        "sizes",
        *(f"  {name:<20} {letter} = {config[name]:<8} {origins[name]}" for name, letter in SIZES),
        "",
        "switches",
        *(f"  {name:<20} {_word(config[name]):<12} {origins[name]}" for name in SWITCHES),
        *(
            f"  {name:<20} {_plainly(config[name]):<12} {origins[name]}"
            for name in LAYER_FIELDS
            if name in origins and config.get(name)
        ),
        "",
        *_boundaries(manifest),
        "",
        *_vocabulary(manifest),
        "",
        *_rope(manifest),
        *_target(manifest),
    ]
    if manifest["ignored"]:
        lines += ["", "ignored tensors"]
        lines += [f"  {name}: {reason}" for name, reason in manifest["ignored"].items()]
    if manifest["findings"]:
        lines += ["", "findings"]
        lines += [f"  {f['severity']} [{f['code']}] {f['message']}" for f in manifest["findings"]]
    return "\n".join(lines) + "\n"


def _word(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _plainly(value: Any) -> str:
    if isinstance(value, dict):
        return " ".join(f"{key} {_word(item)}" for key, item in value.items())
    return " ".join(map(str, value)) if isinstance(value, list) else str(value)


def _boundaries(manifest: Mapping[str, Any]) -> list[str]:
    aux = manifest["aux"]
    lines = [f"target states ({manifest['origins']['aux_boundaries']})"]
    if isinstance(aux["boundaries"], str):
        return [*lines, f"  {aux['boundaries']}, settled when the target's depth L is known"]
    for slot, boundary in enumerate(aux["boundaries"]):
        read = (
            f"id {aux['ids'][slot]} ({aux['convention']})" if "ids" in aux else "no id in the file"
        )
        lines.append(f"  slot {slot}: {read} = boundary {boundary}, after block {boundary}")
    return lines


def _vocabulary(manifest: Mapping[str, Any]) -> list[str]:
    config, d2t = manifest["config"], manifest["d2t"]
    low, high = d2t["range"]
    order = "ascending" if d2t["sorted"] else "not ascending"
    rows = ", ".join(f"{i} {offset:+d} -> {target}" for i, offset, target in d2t["first"])
    more = ", ..." if config["draft_vocab_size"] > len(d2t["first"]) else ""
    return [
        f"vocabulary ({manifest['origins']['draft_to_target']})",
        f"  {config['draft_vocab_size']} of {config['vocab_size']} target ids "
        f"({d2t['coverage']:.1%}), {low}..{high}, {order}",
        f"  draft id, offset -> target id: {rows}{more}",
    ]


def _rope(manifest: Mapping[str, Any]) -> list[str]:
    rope, origins = manifest["rope"], manifest["origins"]
    effective = rope["effective"]
    stated = ", ".join(f"{key} {value}" for key, value in rope["configured"].items()) or "nothing"
    plain = dataclasses.asdict(RopeConfig())
    shown = {k: v for k, v in effective.items() if not k.startswith("mrope_")}
    scaling = {key: value for key, value in shown.items() if value != plain[key]}
    numbers = " ".join(f"{k} {v:g}" for k, v in scaling.items() if k not in ("theta", "kind"))
    axes = stated_axes(effective)
    return [
        f"rope: base {effective['theta']:g} ({origins['rope.theta']}), {effective['kind']} "
        f"({origins['rope.kind']}){', ' + numbers if effective['kind'] != 'default' else ''}"
        f"{', ' + axes if axes else ''}",
        f"  the file says: {stated}",
    ]


def _target(manifest: Mapping[str, Any]) -> list[str]:
    beside = manifest.get("target")
    if not beside:
        return []
    compared = beside.get("embed_compared")
    facts = ", ".join(f"{k} {v}" for k, v in beside.items() if k != "embed_compared")
    lines = ["", f"target: {facts}"]
    if compared:
        lines.append(
            f"  own embedding against the target's: max abs diff {compared['max_abs_diff']:.3g}, "
            f"{compared['rows_different']} of {compared['rows']} rows differ"
        )
    return lines

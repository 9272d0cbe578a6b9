"""A rope in another framework's words, and what those words cannot say."""

import dataclasses
from collections.abc import Callable
from typing import Any

from eagle3_jax.config import RopeConfig
from eagle3_jax.export_rules import Form
from eagle3_jax.findings import Findings
from eagle3_jax.rope_config import ALTERNATE, KINDS, LENGTH, axes_in_words

Cannot = Callable[[str, Any, str], None]


def rope_keys(rope: RopeConfig, form: Form, cannot: Cannot, findings: Findings) -> dict[str, Any]:
    """Keys of config.json; `cannot(field, value, reason)` is told what the dialect lacks."""
    if rope.kind not in form.scalings:
        cannot("rope", rope.kind, f"it knows {', '.join(form.scalings)}")
    plain = RopeConfig()
    for name in form.yarn_lacks if rope.kind == "yarn" else ():
        if getattr(rope, name) != getattr(plain, name):
            cannot(f"rope {name}", getattr(rope, name), "its yarn does not read it")
    _axes(rope, form, cannot)
    table = scaling_table(rope)
    if form.name == "speculators":
        return {"rope_parameters": {"rope_theta": rope.theta, **table}}
    made: dict[str, Any] = {"rope_theta": rope.theta}
    if rope.kind == "default" and not rope.mrope_section:
        return made
    if rope.mrope_section and form.name == "specforge":
        table["rope_type"] = "mrope"
    if rope.kind == "dynamic" and form.name in ("official", "specforge"):
        made["max_position_embeddings"] = rope.original_max_position_embeddings
    if form.name == "official":
        if rope.theta != 10000.0:
            cannot("rope theta", f"{rope.theta:g}", "scaled rope always has base 10000")
        made["rope_scaling"] = {"type": rope.kind, "factor": rope.factor}
        return made
    if form.name == "specforge" and rope.kind == "yarn":
        both = bool(rope.mscale and rope.mscale_all_dim)
        table |= {"beta_fast": rope.beta_fast, "beta_slow": rope.beta_slow}
        table["mscale"] = rope.mscale if both else 1.0
        table["mscale_all_dim"] = rope.mscale_all_dim if both else 0.0
    if rope.kind == "dynamic" and form.name in ("sglang", "vllm"):
        findings.warn(
            "POS_SCALING", f"{form.name} raises the base once, for positions of any length"
        )
    return made | {"rope_scaling": table}


def _axes(rope: RopeConfig, form: Form, cannot: Cannot):
    alternate = rope.mrope_interleaved or rope.mrope_interleaved_glm
    if not rope.mrope_section or form.axes == "all":
        return
    if form.axes == "none":
        cannot("rope", axes_in_words(rope), "its rope has one axis")
    elif rope.kind != "default":
        cannot("rope", rope.kind, "it runs multi-axis rope without scaling")
    elif form.axes == "blocks" and alternate:
        cannot("rope", axes_in_words(rope), "its multi-axis rope has blocks alone")


def scaling_table(rope: RopeConfig) -> dict[str, Any]:
    """A rope's kind, numbers and axes under transformers' keys, the base left out."""
    needed, optional = KINDS[rope.kind]
    numbers, plain = dataclasses.asdict(rope), dataclasses.asdict(RopeConfig())
    table: dict[str, Any] = {"rope_type": rope.kind}
    table |= {key: numbers[key] for key in needed}
    for key in optional:
        if key in numbers and (key == LENGTH or numbers[key] != plain[key]):
            table[key] = numbers[key]
    if rope.mrope_section:
        table["mrope_section"] = list(rope.mrope_section)
        table |= {key: True for key in ALTERNATE if numbers[key]}
    return table

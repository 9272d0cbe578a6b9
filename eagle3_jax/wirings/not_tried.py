"""Wirings that this draft's files or form leave no way to try."""

from eagle3_jax.wirings.material import Material
from eagle3_jax.wirings.wiring import Wiring


def not_tried(material: Material, base: Wiring) -> list[str]:
    """Each with the reason."""
    found = []
    later = [f"layers.{i}" for i, kind in enumerate(material.form.layers) if kind == "state"]
    if later and not material.has_both_norms:
        has = "norm_embed" if f"{later[0]}.norm_embed.weight" in material.tensors else "norm_hidden"
        names = {"norm_embed": "input_layernorm", "norm_hidden": "hidden_norm"}
        other = next(name for ours, name in names.items() if ours != has)
        found.append(
            f"later layers under {other}: the file has only {names[has]} there (vLLM and "
            "speculators apply input_layernorm, SGLang and TensorRT-LLM hidden_norm)"
        )
    if base.window == "as configured":
        found.append("windows layer by layer: one for all layers is tried")
    if material.pack.axes is None and base.rope.mrope_section:
        found.append("axes of the rope: the record has no positions on three axes")
    if material.pack.axes is not None and not base.rope.mrope_section:
        tried = material.config.attention().rotary_dim == 128
        others = " but Qwen-VL's" if tried else ""
        found.append(
            f"sections of a multi-axis rope{others}, GLM's alternation: the config has no "
            "mrope_section"
        )
    return found

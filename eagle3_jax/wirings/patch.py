"""What to write into a draft's config so that SGLang and vLLM run the wiring that was found."""

import dataclasses
import json
from typing import Any

from eagle3_jax.aux_ids import AUX_KEY
from eagle3_jax.config import RopeConfig
from eagle3_jax.export_rope import rope_keys, scaling_table
from eagle3_jax.export_rules import FORMS
from eagle3_jax.findings import Findings
from eagle3_jax.wirings.wiring import Wiring

SGLANG, VLLM = "sglang", "vllm"
ENGINE_NAMES = {SGLANG: "SGLang", VLLM: "vLLM"}


def patches(base: Wiring, best: Wiring, num_layers: int = 1) -> dict[str, dict[str, Any]]:
    """Engine -> `config` (keys to set) and `notes` (what no key can say), for what differs.

    `num_layers` is the draft's: windows are said layer by layer.

    SGLang 0.5.23 reads layer ids from `eagle_config` and means the output of layer k, boundary
    k + 1 (DeepSeek and Kimi targets: only when the first id is 1, else boundary k); vLLM reads the
    top-level list and means boundary k.
    """
    found: dict[str, dict[str, Any]] = {
        engine: {"config": {}, "notes": []} for engine in (SGLANG, VLLM)
    }
    changed = base.changes(best)
    if "boundaries" in changed:
        _boundaries(best, found)
    if "rope" in changed:
        for engine in found:
            _rope(engine, base.rope, best.rope, found[engine])
    if "window" in changed:
        kind = "full_attention" if best.window is None else "sliding_attention"
        found[VLLM]["config"] |= {"sliding_window": best.window, "layer_types": [kind] * num_layers}
        found[SGLANG]["notes"].append("SGLang's draft has no window")
    if "norm_before_residual" in changed:
        found[VLLM]["config"]["norm_before_residual"] = best.norm_before_residual
        found[SGLANG]["notes"].append(
            "SGLang 0.5.23 has no norm_before_residual: it always adds the state before the norm"
        )
    if "feedback" in changed:
        for engine in found:
            found[engine]["config"]["norm_output"] = best.feedback == "post_norm"
    if "fuse_norm" in changed:
        keys = {"norm_before_fc": best.fuse_norm == "concat"}
        keys["fc_norm"] = best.fuse_norm == "per_state"
        for engine in found:
            found[engine]["config"] |= keys
    if "vocab" in changed:
        text = f"write d2t anew as offsets (target id - row): {best.vocab} is the right reading"
        for engine in found:
            found[engine]["notes"].append(text)
    for what in ("embed", "head"):
        if what in changed:
            found[SGLANG]["notes"].append(_owner(what, getattr(best, what)))
    configured = {"boundaries", "rope", "window", "norm_before_residual", "feedback", "fuse_norm"}
    for name in changed.keys() - configured - {"vocab", "embed", "head"}:
        for engine in found:
            found[engine]["notes"].append(f"no config key sets {name}: it is code or data")
    return found


def overriding(best: Wiring) -> list[str]:
    """Engines that would not run this wiring whatever the config says."""
    found = []
    if best.embed == "draft":
        found.append(
            "SGLang 0.5.23 puts the target's embedding in the place of the draft's own, unless "
            "target_hidden_size is in the config and differs from hidden_size"
        )
    if best.norm_before_residual:
        found.append("SGLang 0.5.23 ignores norm_before_residual")
    if list(best.boundaries) != sorted(best.boundaries, key=_rank):
        found.append("SGLang and vLLM capture in ascending order: reorder fc's columns instead")
    return found


def show(patch: dict[str, Any]) -> str:
    """One engine's patch in a line."""
    parts = [json.dumps(patch["config"])] if patch["config"] else []
    return "; ".join((*parts, *patch["notes"]))


def _rank(boundary: Any) -> float:
    return float("inf") if boundary == "final_norm" else float(boundary)


def _boundaries(best: Wiring, found: dict[str, dict[str, Any]]):
    numbers = [b for b in best.boundaries if isinstance(b, int)]
    if len(numbers) < len(best.boundaries):
        for engine in found:
            found[engine]["notes"].append("no layer id names the state after the final norm")
        return
    found[VLLM]["config"][AUX_KEY] = numbers
    if min(numbers) == 0:
        found[SGLANG]["notes"].append("SGLang's ids cannot name boundary 0, the embeddings")
        return
    found[SGLANG]["config"]["eagle_config"] = {AUX_KEY: [b - 1 for b in numbers]}


def _rope(engine: str, old: RopeConfig, new: RopeConfig, found: dict[str, Any]):
    """The base, and `rope_scaling` when anything else of the rope differs; null for none."""
    found["config"]["rope_theta"] = new.theta
    if dataclasses.replace(old, theta=new.theta) == new:
        return
    plain = new == RopeConfig(new.theta)
    found["config"]["rope_scaling"] = None if plain else scaling_table(new)
    name, findings = ENGINE_NAMES[engine], Findings()

    def cannot(field: str, value: Any, reason: str):
        found["notes"].append(f"{name} cannot run {field} {value}: {reason}")

    rope_keys(new, FORMS[engine], cannot, findings)
    found["notes"] += [item.message for item in findings.items]


def _owner(what: str, owner: str) -> str:
    if what == "embed" and owner == "draft":
        return "SGLang 0.5.23 always takes the target's embedding: see the list of overrides"
    return (
        f"keep the {owner}'s {what} in the checkpoint"
        if owner == "draft"
        else (f"remove the draft's own {what} from the checkpoint")
    )

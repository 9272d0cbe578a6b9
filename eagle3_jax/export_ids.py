"""From boundaries to the layer ids that another framework's config.json needs."""

import dataclasses

from eagle3_jax.config import Boundary, ConfigError, default_boundaries
from eagle3_jax.engine_rules import DEEPSEEK, ENGINES, AuxRule
from eagle3_jax.export_rules import Form
from eagle3_jax.findings import Findings

SGLANG = ENGINES["sglang-0.5.23"]


@dataclasses.dataclass(frozen=True)
class TargetShape:
    """What layer ids mean depends on: the target's depth and family, None while unknown."""

    layers: int | None = None
    architecture: str | None = None


def layer_ids(
    form: Form, boundaries: tuple[Boundary, ...] | str, target: TargetShape, findings: Findings
) -> tuple[list[int] | None, str | None]:
    """The ids to write, None for none; or why the dialect cannot name these boundaries.

    Ids are found by the reader's own rule, so that for this target they capture what the draft was
    trained on (facts: DeepSeek's and gpt-oss's rules in SGLang differ from Llama's).
    """
    rule = _rule(form, target)
    if isinstance(boundaries, str):
        if not rule.default_added or target.layers is None:
            return None, None
        boundaries = default_boundaries(target.layers)
    numbers = tuple(b for b in boundaries if isinstance(b, int))
    if len(numbers) < len(boundaries):
        return None, "no layer id names final_norm"
    if form.ids == "none":
        return None, _default_problem(boundaries, target, findings)
    if list(numbers) != sorted(numbers):
        return None, "engines capture in ascending order, not in this"
    ids = _ids_for(rule, numbers, target.layers)
    if ids is None:
        return None, "no list of layer ids captures these"
    deepseek = SGLANG.families[DEEPSEEK[0]]
    unsure = form.name == "sglang" and target.architecture is None
    if unsure and deepseek.captured(ids, target.layers) != numbers:
        findings.warn(
            "AUX_CONVENTION_AMBIGUOUS",
            f"ids {ids} are outputs of blocks; SGLang reads them as boundaries for DeepSeek and "
            "Kimi targets unless the first is 1: --target T writes what T's family reads",
        )
    return ids, None


def implied_depth(boundaries: tuple[Boundary, ...]) -> int | None:
    """The depth of the one target whose default these boundaries are, if there is one."""
    last = boundaries[-1]
    depth = last + 3 if isinstance(last, int) else 0
    try:
        return depth if default_boundaries(depth) == tuple(boundaries) else None
    except ConfigError:
        return None


def _rule(form: Form, target: TargetShape) -> AuxRule:
    if form.ids == "top":
        return AuxRule(added=0, last=True)
    if form.name != "sglang":
        return AuxRule(last=True)
    return SGLANG.families.get(target.architecture or "", SGLANG.aux)


def _default_problem(
    boundaries: tuple[Boundary, ...], target: TargetShape, findings: Findings
) -> str | None:
    depth = target.layers or implied_depth(boundaries)
    try:
        fits = depth is not None and default_boundaries(depth) == boundaries
    except ConfigError:
        fits = False
    if not fits:
        return "it names no layers: always (2, L//2, L-3)"
    if target.layers is None:
        findings.warn(
            "AUX_FALLBACK_USED",
            f"boundaries {list(boundaries)} are the default of a target with {depth} blocks, and "
            "of no other: the file names no layers",
        )
    return None


def _ids_for(rule: AuxRule, boundaries: tuple[int, ...], layers: int | None) -> list[int] | None:
    for added in dict.fromkeys((rule.added, 0)):
        ids = [boundary - added for boundary in boundaries]
        if min(ids) >= 0 and rule.captured(ids, layers) == boundaries:
            return ids
    return None

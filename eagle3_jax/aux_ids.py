"""From a checkpoint's layer ids to boundaries: which list, which numbering, what they mean."""

import dataclasses
from collections.abc import Sequence
from typing import Literal

from eagle3_jax.config import DEFAULT_BOUNDARIES, Boundary, ConfigError, default_boundaries
from eagle3_jax.findings import ConvertError, Findings
from eagle3_jax.source_config import Field, SourceConfig, shorten

Convention = Literal["output", "index"]
"""`output`: id k names the output of block k, boundary k + 1 (SpecForge, ModelOpt, AngelSlim,
SGLang). `index`: id k is boundary k itself (speculators, vLLM)."""

AUX_KEY = "eagle_aux_hidden_state_layer_ids"
ANGELSLIM_KEY = "aux_hidden_states_layer_ids"
DEEPSPEC_KEY = "target_layer_ids"


@dataclasses.dataclass(frozen=True)
class AuxChoice:
    """Which states feed `fc`.

    Attributes:
      boundaries: in concatenation order, or `DEFAULT_BOUNDARIES` while the depth is unknown.
      origin: where they come from. ids, convention: as the file has them, None for the default.
    """

    boundaries: tuple[Boundary, ...] | str
    origin: str
    ids: tuple[int, ...] | None = None
    convention: Convention | None = None


def listed_ids(config: SourceConfig) -> list[Field]:
    """Every list of layer ids in the file: at most one per place."""
    fields = [
        config.eagle_config(AUX_KEY),
        config.top(AUX_KEY),
        config.top(ANGELSLIM_KEY),
        config.eagle_config(ANGELSLIM_KEY),
        config.top(DEEPSPEC_KEY),
    ]
    for field in filter(None, fields):
        valid = isinstance(field.value, list) and bool(field.value)
        if not valid or any(isinstance(i, bool) or not isinstance(i, int) for i in field.value):
            raise ConvertError(
                "AUX_IDS_INVALID",
                f"{config.where}: {field.key} is {shorten(field.value)}, expected a list of "
                "layer numbers",
            )
    return [field for field in fields if field]


def read_aux(
    config: SourceConfig,
    findings: Findings,
    *,
    dialect: str,
    num_aux: int,
    target_layers: int | None,
    convention: Literal["auto", "output", "index"] = "auto",
    single: bool = False,
) -> AuxChoice:
    """The boundaries of a draft whose `fc` takes `num_aux` states.

    `auto`: speculators and a top-level list use `index`; `eagle_config` uses `output`, unless its
    largest id is the target's depth (gpt-oss); AngelSlim and DeepSpec use `output`. `single`: a
    draft without aux states (ModelOpt) reads the target's last normed state.

    Raises:
      ConvertError: AUX_CONVENTION_AMBIGUOUS when two lists disagree; AUX_IDS_INVALID for a wrong
        count, duplicates, negative ids, or boundaries past the target's depth.
    """
    lists = listed_ids(config)
    if single:
        return AuxChoice(("final_norm",), "config:use_aux_hidden_state, the last normed state")
    if dialect == "speculators":
        lists.sort(key=lambda field: field.key != AUX_KEY)
    if not lists:
        return _default(config, findings, num_aux, target_layers)
    field, chosen, reason = _choose(config, findings, lists, dialect, target_layers, convention)
    ids = tuple(field.value)
    boundaries = translate(ids, chosen)
    _check(config, field, ids, boundaries, chosen, num_aux, target_layers)
    if list(boundaries) != sorted(boundaries):
        findings.warn(
            "AUX_IDS_UNSORTED",
            f"{field.key} {list(ids)} is not ascending: the states are concatenated in this order "
            "here; SGLang and vLLM capture in ascending order whatever the list says",
        )
    return AuxChoice(boundaries, f"{field.origin}, {reason}", ids, chosen)


def translate(ids: Sequence[int], convention: Convention) -> tuple[int, ...]:
    """Ids to boundaries."""
    return tuple(i + 1 if convention == "output" else i for i in ids)


def _choose(
    config: SourceConfig,
    findings: Findings,
    lists: list[Field],
    dialect: str,
    target_layers: int | None,
    convention: str,
) -> tuple[Field, Convention, str]:
    readings = [_auto(field, dialect, target_layers) for field in lists]
    if convention != "auto":
        flagged: Convention = "output" if convention == "output" else "index"
        fits = [f for f, (own, _) in zip(lists, readings, strict=True) if own == flagged] or lists
        if len({tuple(field.value) for field in fits}) > 1:
            raise _disagreement(config, lists)
        return fits[0], flagged, "flag --aux-convention"
    meanings = {
        translate(field.value, own) for field, (own, _) in zip(lists, readings, strict=True)
    }
    first, (own, reason) = lists[0], readings[0]
    if len(meanings) > 1 and len({tuple(field.value) for field in lists}) > 1:
        raise _disagreement(config, lists)
    lone = first.key == AUX_KEY and dialect != "speculators"
    if len(meanings) > 1 or lone:
        why = (
            f"{' and '.join(field.key for field in lists)} hold the same list"
            if len(lists) > 1
            else f"{first.key} stands at the top level, where only vLLM reads it"
        )
        findings.warn(
            "AUX_CONVENTION_AMBIGUOUS",
            f"{why}: {list(first.value)} read as {own}: boundaries "
            f"{list(translate(first.value, own))}; the other reading gives "
            f"{list(translate(first.value, 'index' if own == 'output' else 'output'))}; "
            "--aux-convention decides",
        )
    return first, own, reason


def _auto(field: Field, dialect: str, target_layers: int | None) -> tuple[Convention, str]:
    if field.key == AUX_KEY:
        rule = "speculators" if dialect == "speculators" else "vLLM's rule for a top-level list"
        return "index", f"default:{rule}"
    if field.key == f"eagle_config.{AUX_KEY}" and max(field.value) == target_layers:
        return "index", f"inferred: the largest id is the target's depth {target_layers}"
    if field.key == DEEPSPEC_KEY:
        return "output", "default:DeepSpec"
    return "output", "default:eagle_config" if "." in field.key else "default:AngelSlim"


def _disagreement(config: SourceConfig, lists: list[Field]) -> ConvertError:
    stated = ", ".join(f"{field.key} {field.value}" for field in lists)
    return ConvertError(
        "AUX_CONVENTION_AMBIGUOUS",
        f"{config.where}: the lists disagree: {stated}; --aux-convention output takes the one in "
        "eagle_config (id k = output of block k), --aux-convention index the top-level one (id k = "
        "boundary k)",
    )


def _check(
    config: SourceConfig,
    field: Field,
    ids: tuple[int, ...],
    boundaries: tuple[int, ...],
    convention: Convention,
    num_aux: int,
    target_layers: int | None,
):
    problem = None
    if len(ids) != num_aux:
        problem = f"{len(ids)} ids, but fc takes {num_aux} states"
    elif min(ids) < 0:
        problem = "a negative id"
    elif len(set(ids)) != len(ids):
        problem = "an id given twice"
    elif target_layers is not None and max(boundaries) > target_layers:
        problem = f"past the target's {target_layers} blocks"
    if problem:
        raise ConvertError(
            "AUX_IDS_INVALID",
            f"{config.where}: {field.key} {list(ids)} read as {convention} gives boundaries "
            f"{list(boundaries)}: {problem}",
        )


def _default(
    config: SourceConfig, findings: Findings, num_aux: int, target_layers: int | None
) -> AuxChoice:
    if num_aux != 3:
        raise ConvertError(
            "AUX_IDS_INVALID",
            f"{config.where}: fc takes {num_aux} states, the file names no layers, and the default "
            f"{DEFAULT_BOUNDARIES} names 3: add {AUX_KEY}",
        )
    boundaries: tuple[Boundary, ...] | str = DEFAULT_BOUNDARIES
    if target_layers is not None:
        try:
            boundaries = default_boundaries(target_layers)
        except ConfigError as error:
            raise ConvertError("AUX_IDS_INVALID", f"{config.where}: {error}") from None
    shown = boundaries if isinstance(boundaries, str) else list(boundaries)
    findings.warn(
        "AUX_FALLBACK_USED",
        f"the file names no aux layers: boundaries {shown}, the default of every public trainer "
        "and engine",
    )
    return AuxChoice(boundaries, f"default:{DEFAULT_BOUNDARIES}")

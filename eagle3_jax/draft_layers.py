"""What each layer of a draft is: how many, what later ones read, latent attention, windows."""

import dataclasses
from collections.abc import Mapping
from typing import Literal

from eagle3_jax.config import ConfigError, LatentSizes
from eagle3_jax.dialects import Matched
from eagle3_jax.findings import ConvertError, Findings
from eagle3_jax.source_config import Field, SourceConfig, shorten

Shapes = Mapping[str, tuple[int, ...]]
NextNorm = Literal["input_layernorm", "hidden_norm"]
NEXT_NORMS = {"input_layernorm": "norm_embed", "hidden_norm": "norm_hidden"}


@dataclasses.dataclass(frozen=True)
class Layers:
    """`DraftConfig`'s fields about layers and where each comes from."""

    fields: dict[str, object]
    origins: dict[str, str]


def read_layers(
    matched: Matched,
    shapes: Shapes,
    config: SourceConfig,
    findings: Findings,
    *,
    hidden_size: int,
    next_norm: NextNorm | None = None,
) -> Layers:
    """Layers counted in the tensors; shapes show what a later layer reads, its norms which norm.

    `next_norm`: the user's word where a later layer has both norms.

    Raises:
      ConvertError: CONFIG_MULTI_LAYER, POS_SLIDING_WINDOW, POS_SLIDING_WINDOW_UNCLEAR.
    """
    count = matched.num_layers
    fields: dict[str, object] = {"num_layers": count}
    origins = {"num_layers": "tensors"}
    stated = config.layer("num_hidden_layers")
    if stated is not None and config.integer(stated, 0) != count:
        findings.warn(
            "CONFIG_LAYER_COUNT",
            f"{stated.key} is {stated.value}, the tensors have {count} "
            f"layer{'s' if count > 1 else ''}: the tensors decide",
        )
    if count > 1:
        kind, spare, origin = _next_layers(matched, shapes, config, hidden_size, count, next_norm)
        fields |= {"next_layers": kind, "next_spare_norm": spare}
        origins |= {"next_layers": origin}
    windows, origins["windows"] = read_windows(config, findings, count)
    return Layers(fields | {"windows": windows}, origins)


def _next_layers(
    matched: Matched,
    shapes: Shapes,
    config: SourceConfig,
    D: int,
    count: int,
    next_norm: NextNorm | None,
) -> tuple[str, bool, str]:
    widths = {_input_width(matched, shapes, index) for index in range(1, count)}
    if len(widths) > 1 or not widths <= {D, 2 * D}:
        raise ConvertError(
            "CONFIG_MULTI_LAYER",
            f"layers after the first read {sorted(widths)} features, expected {D} (the state) or "
            f"{2 * D} (embedding and state) in all of them",
        )
    regular = config.eagle_config("next_layer_regular") or config.top("next_layer_regular")
    wide = widths == {2 * D}
    if regular is not None and config.flag(regular) == wide:
        raise ConvertError(
            "CONFIG_MULTI_LAYER",
            f"{config.where}: {regular.key} is {str(regular.value).lower()}, but layer 1 reads "
            f"{widths.pop()} features",
        )
    if wide:
        return "wide", False, f"tensor {matched.spelled('layers.1.attn.q.weight')}"
    sets = {
        frozenset(
            name
            for name, ours in NEXT_NORMS.items()
            if f"layers.{index}.{ours}.weight" in matched.sources
        )
        for index in range(1, count)
    }
    if len(sets) > 1 or sets == {frozenset()}:
        raise ConvertError(
            "CONFIG_MULTI_LAYER",
            "layers after the first need the same norm before attention: input_layernorm (vLLM, "
            "speculators) or hidden_norm (SGLang, TensorRT-LLM)",
        )
    norms = set(sets.pop())
    if next_norm is not None and next_norm not in norms:
        raise ConvertError(
            "CONFIG_MULTI_LAYER",
            f"--next-layer-norm {next_norm}: the file has only {', '.join(norms)} there",
        )
    if len(norms) == 1:
        name = norms.pop()
        return name, False, f"tensor {matched.spelled(f'layers.1.{NEXT_NORMS[name]}.weight')}"
    if next_norm is not None:
        return next_norm, True, "flag --next-layer-norm"
    raise ConvertError(
        "CONFIG_MULTI_LAYER",
        "layer 1 has both input_layernorm and hidden_norm, and no tensor shows which one it was "
        "trained with: vLLM and speculators apply input_layernorm, SGLang and TensorRT-LLM "
        "hidden_norm: give --next-layer-norm",
    )


def _input_width(matched: Matched, shapes: Shapes, index: int) -> int:
    for name in ("q", "kv_a"):
        shape = shapes.get(f"layers.{index}.attn.{name}.weight")
        if shape is not None:
            return shape[-1]
    raise ConvertError(
        "WEIGHT_MISSING", f"missing: {matched.spelled(f'layers.{index}.attn.q.weight')}"
    )


def read_windows(
    config: SourceConfig, findings: Findings, count: int
) -> tuple[tuple[int | None, ...], str]:
    """How many positions each layer sees, and where that stands; () when none has a window.

    `layer_types` names the layers, `sliding_window` the size, `use_sliding_window: false` switches
    it off; `use_sliding_window: true` alone means layers from `max_window_layers` on
    (transformers `Qwen2Config`).
    """
    use = config.layer("use_sliding_window")
    types, size = config.layer("layer_types"), config.layer("sliding_window")
    kinds = types.value if types is not None else []
    if types is not None and (
        not isinstance(kinds, list) or not all(isinstance(kind, str) for kind in kinds)
    ):
        raise config.wrong(types, "a list of layer types")
    other = [kind for kind in kinds if kind not in ("full_attention", "sliding_attention")]
    if other:
        raise ConvertError(
            "POS_SLIDING_WINDOW",
            f"{config.where}: layer_types {shorten(kinds)}: expected full_attention or "
            "sliding_attention",
        )
    if config.flag(use) is False:
        return (), f"{use.origin}" if use else ""
    if types is not None and kinds:
        return _by_types(config, types, size, count)
    if size is None:
        return (), "default: no window"
    if config.flag(use) is None:
        findings.refuse(
            "POS_SLIDING_WINDOW_UNCLEAR",
            f"{config.where}: {size.key} is {shorten(size.value)}, and neither layer_types nor "
            "use_sliding_window says whether the draft uses it",
        )
        return (), "flag --allow POS_SLIDING_WINDOW_UNCLEAR"
    window = config.integer(size)
    first = config.integer(config.layer("max_window_layers"), 0) or 0
    windows = tuple(window if index >= first else None for index in range(count))
    return (windows if any(windows) else ()), size.origin


def _by_types(
    config: SourceConfig, types: Field, size: Field | None, count: int
) -> tuple[tuple[int | None, ...], str]:
    kinds = types.value
    if len(kinds) < count:
        raise ConvertError(
            "POS_SLIDING_WINDOW",
            f"{config.where}: {types.key} names {len(kinds)} layers, the file has {count}",
        )
    if len(kinds) > count and len(set(kinds)) > 1:
        raise ConvertError(
            "POS_SLIDING_WINDOW",
            f"{config.where}: {types.key} names {len(kinds)} layers of two kinds, the file has "
            f"{count}: copied from the target? name the draft's own",
        )
    if "sliding_attention" not in kinds[:count]:
        return (), types.origin
    if size is None:
        raise ConvertError(
            "POS_SLIDING_WINDOW",
            f"{config.where}: {types.key} asks for sliding_attention, but there is no "
            "sliding_window",
        )
    window = config.integer(size)
    windows = tuple(window if kind == "sliding_attention" else None for kind in kinds[:count])
    return windows, f"{types.origin}, {size.origin}"


def read_latent(
    matched: Matched, shapes: Shapes, config: SourceConfig, findings: Findings, heads: int
) -> tuple[LatentSizes, str]:
    """Sizes of latent attention from its tensors, beside the config's; and their origin.

    Raises:
      ConvertError: WEIGHT_MISSING, WEIGHT_SHAPE, CONFIG_SIZE_DISAGREES.
    """
    attn = "layers.0.attn."
    names = ["kv_a", "kv_a_norm", "kv_b", "o"]
    names += ["q_a", "q_a_norm", "q_b"] if f"{attn}q_a.weight" in shapes else ["q"]
    missing = [f"{attn}{n}.weight" for n in names if f"{attn}{n}.weight" not in shapes]
    if missing:
        raise ConvertError("WEIGHT_MISSING", f"missing: {', '.join(map(matched.spelled, missing))}")
    rows = {name: shapes[f"{attn}{name}.weight"][0] for name in names}
    rank = rows["kv_a_norm"]
    rope = rows["kv_a"] - rank
    query = rows.get("q_b", rows.get("q", 0))
    value = shapes[f"{attn}o.weight"][1] // heads
    nope = rows["kv_b"] // heads - value
    consistent = (
        query == heads * (nope + rope)
        and rows["kv_b"] == heads * (nope + value)
        and shapes[f"{attn}o.weight"][1] == heads * value
    )
    try:
        if not consistent:
            raise ConfigError("they do not fit each other")
        interleaved = config.flag(config.layer("rope_interleave"))
        sizes = LatentSizes(rank, nope, rope, value, rows.get("q_a"), interleaved is not False)
    except ConfigError as error:
        raise ConvertError(
            "WEIGHT_SHAPE",
            f"latent attention of {heads} heads: {matched.spelled(f'{attn}kv_a.weight')} has "
            f"{rows['kv_a']} rows, its norm {rank}, kv_b_proj {rows['kv_b']}, the queries {query}, "
            f"o_proj {shapes[f'{attn}o.weight'][1]} columns: {error}",
        ) from None
    for key in ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"):
        stated = config.layer(key)
        if stated is not None and config.integer(stated) != getattr(sizes, key):
            findings.refuse(
                "CONFIG_SIZE_DISAGREES",
                f"{config.where}: {stated.key} is {stated.value}, the tensors say "
                f"{getattr(sizes, key)}",
            )
    return sizes, f"tensor {matched.spelled(f'{attn}kv_a.weight')} and those beside it"

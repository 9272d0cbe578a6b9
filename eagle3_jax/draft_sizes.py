"""Sizes of a draft from its tensors, with the config as a witness."""

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal

from eagle3_jax.aux_ids import listed_ids
from eagle3_jax.config import LatentSizes
from eagle3_jax.dialects import Matched
from eagle3_jax.draft_layers import read_latent
from eagle3_jax.findings import ConvertError, Findings
from eagle3_jax.source_config import Field, SourceConfig, TargetFacts

Shapes = Mapping[str, tuple[int, ...]]

REQUIRED = (
    *(f"layers.0.{norm}.weight" for norm in ("norm_embed", "norm_post")),
    "layers.0.attn.o.weight",
    *(f"layers.0.mlp.{name}.weight" for name in ("gate", "up", "down")),
)
WITH_AUX = ("fc.weight", "layers.0.norm_hidden.weight")
GROUPED = tuple(f"layers.0.attn.{name}.weight" for name in "qkv")


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Sizes of one draft under `DraftConfig`'s field names, each with its origin."""

    hidden_size: int
    target_hidden_size: int
    num_aux: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    draft_vocab_size: int
    origins: dict[str, str]
    fuse: Literal["fc", "none"] = "fc"
    latent: LatentSizes | None = None

    def fields(self) -> dict[str, Any]:
        """Without the origins."""
        return {
            field.name: getattr(self, field.name)
            for field in dataclasses.fields(self)
            if field.name != "origins"
        }


def read_sizes(
    matched: Matched,
    shapes: Shapes,
    config: SourceConfig,
    target: TargetFacts | None,
    findings: Findings,
) -> Sizes:
    """Sizes from shapes by canonical name (`d2t`, `t2d` too); `fc_norm.weight` is not needed.

    Raises:
      ConvertError: WEIGHT_MISSING, WEIGHT_SHAPE, CONFIG_HEAD_DIM, CONFIG_SIZE_DISAGREES,
        CONFIG_WRONG_PAIR, CONFIG_MISSING, VOCAB_SIZE_DISAGREES.
    """
    single, latent = _kind(matched, shapes, config)
    shown = "layers.0.norm_post.weight" if single else "fc.weight"
    D = shapes[shown][0]
    F = shapes["layers.0.mlp.gate.weight"][0]
    origins = {
        "hidden_size": f"tensor {matched.spelled(shown)}",
        "intermediate_size": f"tensor {matched.spelled('layers.0.mlp.gate.weight')}",
    }
    llama4 = config.text(config.layer("model_type")) == "llama4_text"
    mlp = config.layer("intermediate_size_mlp") if llama4 else None
    witnesses = (
        ("hidden_size", D, config.layer("hidden_size")),
        ("intermediate_size", F, mlp or config.layer("intermediate_size")),
    )
    for key, size, stated in witnesses:
        if config.integer(stated) not in (None, size):
            assert stated is not None
            findings.refuse(
                "CONFIG_SIZE_DISAGREES",
                f"{config.where}: {stated.key} is {stated.value}, but {origins[key]} says {size}",
            )
    stated = config.layer("num_attention_heads")
    N = config.integer(stated)
    if N is None or stated is None:
        raise ConvertError(
            "CONFIG_MISSING", f"{config.where}: no num_attention_heads, no tensor shows it"
        )
    origins["num_heads"] = stated.origin
    sizes = None
    if latent:
        sizes, origins["latent"] = read_latent(matched, shapes, config, findings, N)
        K, H = N, sizes.qk_nope_head_dim + sizes.qk_rope_head_dim
        origins |= {"num_kv_heads": "latent: one key serves all", "head_dim": origins["latent"]}
    else:
        K, H = _heads(matched, shapes, config, N, origins)
    if single:
        E, A = _single_state(config, target, D, origins)
    else:
        E, A = _states(config, target, shapes["fc.weight"][1], origins)
    V = _vocab(matched, shapes, config, target, findings, origins)
    W = _draft_vocab(matched, shapes, config, V, findings, origins)
    fuse = "none" if single else "fc"
    return Sizes(D, E, A, F, N, K, H, V, W, origins, fuse, sizes)


def _kind(matched: Matched, shapes: Shapes, config: SourceConfig) -> tuple[bool, bool]:
    """Whether it reads one state only, and whether its attention is latent; all needed is there."""
    aux = config.anywhere("use_aux_hidden_state")
    single = config.flag(aux) is False
    latent = "layers.0.attn.kv_a.weight" in shapes
    required = (*(() if single else WITH_AUX), *REQUIRED, *(() if latent else GROUPED))
    missing = [matched.spelled(name) for name in required if name not in shapes]
    if missing:
        raise ConvertError("WEIGHT_MISSING", f"missing: {', '.join(missing)}")
    if single and "fc.weight" in shapes:
        assert aux is not None
        raise ConvertError(
            "ARCH_SINGLE_STATE",
            f"{config.where}: {aux.key} is false, but the file has {matched.spelled('fc.weight')}",
        )
    for name, shape in shapes.items():
        dims = 2 if name.endswith("weight") and "norm" not in name else 1
        if len(shape) != dims or 0 in shape:
            raise ConvertError(
                "WEIGHT_SHAPE",
                f"tensor {matched.spelled(name)!r} has shape {list(shape)}, expected {dims} "
                "dimensions, none of them 0",
            )
    return single, latent


def _single_state(
    config: SourceConfig, target: TargetFacts | None, D: int, origins: dict[str, str]
) -> tuple[int, int]:
    """A draft without aux states: the target's last normed state, as wide as the draft."""
    width = config.anywhere("target_hidden_size")
    for E, where in (
        (config.integer(width), f"{config.where} says target_hidden_size"),
        (target.hidden_size if target else None, f"{target.where if target else ''} has width"),
    ):
        if E not in (None, D):
            raise ConvertError(
                "CONFIG_WRONG_PAIR",
                f"a draft without fc takes states of its own width {D}, but {where} {E}",
            )
    stated = config.anywhere("use_aux_hidden_state")
    assert stated is not None
    origins |= {"num_aux": stated.origin, "target_hidden_size": origins["hidden_size"]}
    return D, 1


def _heads(
    matched: Matched, shapes: Shapes, config: SourceConfig, N: int, origins: dict[str, str]
) -> tuple[int, int]:
    rows = {name: shapes[f"layers.0.attn.{name}.weight"][0] for name in "qkv"}
    kv, dim = config.layer("num_key_value_heads"), config.layer("head_dim")
    K = config.integer(kv) or N
    H = config.integer(dim) or rows["q"] // N
    origins["num_kv_heads"] = kv.origin if kv else "default: num_attention_heads"
    origins["head_dim"] = dim.origin if dim else "inferred: q rows / num_attention_heads"
    for name, heads in (("q", N), ("k", K), ("v", K)):
        if rows[name] != heads * H:
            raise ConvertError(
                "CONFIG_HEAD_DIM",
                f"tensor {matched.spelled(f'layers.0.attn.{name}.weight')!r} has {rows[name]} "
                f"rows, but {config.where} gives {heads} heads of {H} "
                f"({'head_dim' if dim else 'q rows / num_attention_heads'}) = {heads * H}",
            )
    if N % K or H % 2:
        raise ConvertError(
            "CONFIG_HEAD_DIM",
            f"{config.where}: {N} query heads, {K} key/value heads of {H}: expected whole groups "
            "and an even head_dim",
        )
    return K, H


def _states(
    config: SourceConfig, target: TargetFacts | None, fc_in: int, origins: dict[str, str]
) -> tuple[int, int]:
    """Width and number of the target states `fc` takes."""
    lists = listed_ids(config)
    key = config.anywhere("num_aux_hidden_states")
    count, count_origin = config.integer(key), key.origin if key else ""
    if lists and count is not None and count != len(lists[0].value):
        raise ConvertError(
            "AUX_IDS_INVALID",
            f"{config.where}: {count_origin.removeprefix('config:')} is {count}, but "
            f"{lists[0].key} has {len(lists[0].value)} ids",
        )
    if lists and count is None:
        count, count_origin = len(lists[0].value), f"{lists[0].origin} (number of ids)"
    width = config.anywhere("target_hidden_size")
    E = config.integer(width)
    if E is not None and target is not None and target.hidden_size != E:
        raise ConvertError(
            "CONFIG_WRONG_PAIR",
            f"{config.where} says target_hidden_size {E}, but {target.where} has hidden_size "
            f"{target.hidden_size}: the draft is for another target",
        )
    origin = width.origin if width else f"inferred: fc.in / {count or 3}"
    if E is None and target is not None:
        E, origin = target.hidden_size, f"target:hidden_size of {target.where}"
    if E is None:
        E = fc_in // (count or 3)
    A = fc_in // max(E, 1)
    expected = count or (A if width else 3)
    if fc_in != A * E or expected != A or A == 0:
        whose = target.where if target is not None else config.where
        raise ConvertError(
            "CONFIG_WRONG_PAIR",
            f"the draft's fc takes {fc_in} features: it expects target width {fc_in / expected:g} "
            f"({expected} states{f', {count_origin}' if count else ''}), but {whose} leads to "
            f"width {E}; states are never projected or padded",
        )
    origins["target_hidden_size"] = origin
    origins["num_aux"] = count_origin or "inferred: fc.in / target_hidden_size"
    return E, A


def _vocab(
    matched: Matched,
    shapes: Shapes,
    config: SourceConfig,
    target: TargetFacts | None,
    findings: Findings,
    origins: dict[str, str],
) -> int:
    """V: t2d, else config.json, else the target's config, else the embedding's rows."""
    stated = config.layer("vocab_size")
    in_config = config.integer(stated)
    rows = shapes["embed.weight"][0] if "embed.weight" in shapes else None
    in_target = target.vocab_size if target else None
    witnesses = (
        (shapes["t2d"][0] if "t2d" in shapes else None, f"tensor {matched.spelled('t2d')}"),
        (in_config, stated.origin if stated else ""),
        (in_target, f"target:vocab_size of {target.where}" if target else ""),
        (rows, f"tensor {matched.spelled('embed.weight')}"),
    )
    V, origin = next(((n, o) for n, o in witnesses if n is not None), (0, ""))
    if not V:
        raise ConvertError(
            "CONFIG_MISSING", f"{config.where}: no vocab_size, t2d or embedding says it: --target"
        )
    if in_config is not None and in_config != V:
        findings.warn(
            "VOCAB_SIZE_DISAGREES",
            f"{config.where}: vocab_size is {in_config}, {origin} has {V}: the tensor decides",
        )
    if in_target is not None and in_target != V:
        assert target is not None
        raise ConvertError(
            "CONFIG_WRONG_PAIR",
            f"the draft's target vocabulary is {V} ({origin}), but {target.where} has vocab_size "
            f"{in_target}",
        )
    if rows is not None and rows < V:
        raise ConvertError(
            "VOCAB_SIZE_DISAGREES",
            f"tensor {matched.spelled('embed.weight')!r} has {rows} rows, but {origin} says {V}",
        )
    if rows is not None and rows > V:
        findings.warn(
            "VOCAB_SIZE_DISAGREES",
            f"tensor {matched.spelled('embed.weight')!r} has {rows} rows, {origin} says {V}: the "
            f"last {rows - V} are padding and left out",
        )
    origins["vocab_size"] = origin
    return V


def _draft_vocab(
    matched: Matched,
    shapes: Shapes,
    config: SourceConfig,
    V: int,
    findings: Findings,
    origins: dict[str, str],
) -> int:
    """W: lm_head's rows, else d2t, else config.json, else the full vocabulary."""
    stated: Field | None = config.anywhere("draft_vocab_size")
    in_config = config.integer(stated)
    witnesses = (
        (shapes["lm_head.weight"][0] if "lm_head.weight" in shapes else None, "lm_head.weight"),
        (shapes["d2t"][0] if "d2t" in shapes else None, "d2t"),
        (in_config, stated.origin if stated else ""),
    )
    W, origin = next(((n, o) for n, o in witnesses if n is not None), (V, "vocab_size"))
    if origin in shapes:
        origin = f"tensor {matched.spelled(origin)}"
    if in_config is not None and in_config != W:
        findings.warn(
            "VOCAB_SIZE_DISAGREES",
            f"{config.where}: draft_vocab_size is {in_config}, {origin} has {W}: the tensor "
            "decides",
        )
    if W > V:
        raise ConvertError(
            "VOCAB_SIZE_DISAGREES",
            f"the draft vocabulary is {W} ({origin}), larger than the target's {V} "
            f"({origins['vocab_size']})",
        )
    origins["draft_vocab_size"] = origin
    return W

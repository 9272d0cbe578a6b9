"""The wirings worth trying, in the order that reports of real faults suggest."""

import dataclasses
import itertools
from collections.abc import Iterator
from typing import Any

from eagle3_jax.config import Boundary, ConfigError, RopeConfig, default_boundaries
from eagle3_jax.rope import axes as rope_axes
from eagle3_jax.rope_config import ALTERNATE
from eagle3_jax.wirings.material import Material
from eagle3_jax.wirings.wiring import Wiring

THETAS = (1e4, 1e5, 5e5, 1e6)
LLAMA3 = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
SHIFTS = (1, -1, 2, -2)
MAX_TUPLES = 20000
QWEN_VL = (((16, 24, 24), False), ((24, 20, 20), True))
"""Sections of Qwen2-VL's and Qwen3-VL's heads of 128, and whether they alternate."""


def singles(
    material: Material,
    base: Wiring,
    *,
    num_layers: int | None = None,
    target_rope: RopeConfig | None = None,
) -> list[Wiring]:
    """Every wiring that differs from `base` in one respect, most often met first."""
    found: list[Wiring] = []
    options = itertools.chain(
        (("boundaries", b) for b in _boundaries(material, base, num_layers)),
        (("vocab", name) for name in material.maps),
        (("embed", owner) for owner in material.owns("embed")),
        (("head", owner) for owner in material.owns("head")),
        _switches(material),
        _layers(material),
        (("rope", rope) for rope in _ropes(material, base.rope, target_rope)),
        _positions(material),
        _alignment(material),
        (("rows", name) for name in material.orders if name != "shuffled"),
        _spaces(material),
    )
    for name, value in options:
        made = dataclasses.replace(base, **{name: value})
        if made != base and made not in found:
            found.append(made)
    return found


def tuples(material: Material, count: int) -> tuple[list[tuple[Boundary, ...]], bool]:
    """All choices of `count` boundaries, in every order if that is not too many.

    Returns the choices and whether they come in every order.
    """
    have = material.boundaries
    ordered = 1
    for i in range(count):
        ordered *= max(len(have) - i, 0)
    if ordered <= MAX_TUPLES // 4:
        return list(itertools.permutations(have, count)), True
    rising = sorted(have, key=_depth)
    if len(rising) ** count <= MAX_TUPLES * 6 * count:
        return list(itertools.combinations(rising, count)), False
    return [], False


def neighbours(material: Material, base: Wiring, reach: int | None = None) -> list[Wiring]:
    """`base` with one slot changed to any other boundary, or to one at most `reach` places off."""
    found = []
    for slot, old in enumerate(base.boundaries):
        for place, other in enumerate(material.boundaries):
            near = reach is None or abs(place - material.index(old)) <= reach
            if near and other not in base.boundaries:
                chosen = (*base.boundaries[:slot], other, *base.boundaries[slot + 1 :])
                found.append(dataclasses.replace(base, boundaries=chosen))
    return found


def orders(base: Wiring) -> list[Wiring]:
    """`base` with its boundaries in every other order."""
    return [
        dataclasses.replace(base, boundaries=chosen)
        for chosen in itertools.permutations(base.boundaries)
        if chosen != base.boundaries
    ]


def _depth(boundary: Boundary) -> float:
    return float("inf") if boundary == "final_norm" else float(boundary)


def _boundaries(
    material: Material, base: Wiring, num_layers: int | None
) -> Iterator[tuple[Boundary, ...]]:
    have = set(material.boundaries)
    numbers = [b for b in base.boundaries if isinstance(b, int)]
    if len(numbers) == len(base.boundaries):
        for step in SHIFTS:
            shifted = tuple(b + step for b in numbers)
            if set(shifted) <= have:
                yield shifted
    if num_layers is not None and len(base.boundaries) == 3:
        try:
            default = default_boundaries(num_layers)
        except ConfigError:
            default = ()
        if default and set(default) <= have:
            yield default
    last = base.boundaries[-1]
    top = max((b for b in have if isinstance(b, int)), default=None)
    other: Boundary | None = "final_norm" if last == top else top if last == "final_norm" else None
    if other is not None and other in have:
        yield (*base.boundaries[:-1], other)
    if len(base.boundaries) <= 4:
        yield from itertools.permutations(base.boundaries)


def _switches(material: Material) -> Iterator[tuple[str, Any]]:
    yield from (("norm_before_residual", value) for value in (True, False))
    if material.config.fuse == "fc":
        yield from (("fuse_norm", value) for value in ("concat", "per_state", "none"))
    yield from (("double_norm", value) for value in (True, False))
    yield from (("feedback", value) for value in ("post_norm", "pre_norm"))
    yield from (("final_norm", value) for value in (True, False))
    yield from (("residual", value) for value in ("embedding", "state"))
    yield from (("gate_up", value) for value in ("swapped", "in place"))


def _layers(material: Material) -> Iterator[tuple[str, Any]]:
    """Of a draft with several: whether all run, whose state is fed back, the later ones' norm."""
    if material.config.num_layers == 1:
        return
    yield from (("fed_from", value) for value in ("first", "last"))
    yield from (("layers", value) for value in ("first alone", "all"))
    if material.has_both_norms:
        yield from (("next_norm", value) for value in ("hidden_norm", "input_layernorm"))


def _ropes(material: Material, base: RopeConfig, target: RopeConfig | None) -> Iterator[RopeConfig]:
    axes = {name: getattr(base, name) for name in ("mrope_section", *ALTERNATE)}
    if target is not None:  # text does not tell axes apart: they stay as configured
        told = material.pack.axes is not None
        yield target if told else dataclasses.replace(target.one_axis, **axes)
    for theta in THETAS:
        yield dataclasses.replace(base, theta=theta)
    yield RopeConfig(theta=base.theta, **axes)
    if base.kind == "default":
        yield RopeConfig(theta=base.theta, kind="llama3", **LLAMA3, **axes)
    if base.mscale_all_dim:
        yield dataclasses.replace(base, mscale=None, mscale_all_dim=None)
    if material.pack.axes is None:
        return
    yield base.one_axis
    half = material.config.attention().rotary_dim // 2
    for sections, alternate in ((base.mrope_section, True), (base.mrope_section, False), *QWEN_VL):
        if sum(sections) == half:
            yield dataclasses.replace(
                base.one_axis, mrope_section=sections, mrope_interleaved=alternate
            )
    if sum(base.mrope_section) == half:
        plain = dataclasses.replace(base.one_axis, mrope_section=base.mrope_section)
        turns = dataclasses.replace(plain, mrope_interleaved=True)
        glm = dataclasses.replace(plain, mrope_interleaved_glm=True)
        if (rope_axes(glm, 2 * half) != rope_axes(turns, 2 * half)).any():
            yield glm


def _positions(material: Material) -> Iterator[tuple[str, Any]]:
    longest = int(material.pack.position.max()) + 1
    yield from (("pairs", value) for value in ("interleaved", "halves"))
    powers = [1 << i for i in range(4, 17) if 1 << i < longest]
    yield "window", None
    yield from (("window", n) for n in powers)
    yield "clamp", None
    yield from (("clamp", n - 1) for n in powers)


def _alignment(material: Material) -> Iterator[tuple[str, Any]]:
    yield from (("token_shift", n) for n in (1, 0))
    known = material.row_shift
    yield from (("row_shift", n) for n in (0, 1, -1) if known is None or n == known)
    yield from (("first", value) for value in ("kept", "zeroed", "dropped"))
    longest = int(material.pack.prompt.max())
    yield "chunk", None
    yield from (("chunk", n) for n in (8, 16, 32, 64, 128, 256, 512, 1024, 2048) if n <= longest)
    yield from (("prefix", value) for value in ("present", "missing"))


def _spaces(material: Material) -> Iterator[tuple[str, Any]]:
    if material.rotation is not None:
        yield from (("space", v) for v in ("rotated", "rotated back", "as recorded"))

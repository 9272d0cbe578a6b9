"""A wiring: everything about how a draft is fed and read that can be wrong, as one value."""

import dataclasses
from typing import Any, Literal

from eagle3_jax.config import Boundary, DraftConfig, RopeConfig
from eagle3_jax.rope_config import axes_in_words

FuseNorm = Literal["none", "concat", "per_state"]
Owner = Literal["draft", "target"]


@dataclasses.dataclass(frozen=True)
class Wiring:
    """How tokens and target states reach a draft, and how its output is read.

    Attributes:
      boundaries: what each slot of `fc` gets, in slot order.
      vocab: name of the map from draft rows to target ids (`wirings.maps`).
      embed, head: whose.
      fuse_norm: the norm before `fc`: none, one over all features, one per state.
      norm_before_residual, double_norm, final_norm, feedback: as in `DraftConfig`.
      residual: what the attention's result is added to; engines and trainers use the state.
      next_norm: what later layers that read the state alone norm it with. layers: whether the later
        ones run at all. fed_from: whose state is fed back.
      rope, pairs, window, clamp: rotary embedding; which elements of a head turn together; how many
        positions a row sees ("as configured": each layer its own); the largest position, after
        which all are the same.
      token_shift: state p goes with token p + token_shift.
      row_shift: slot t reads row t + row_shift of the record, for records whose rows are late.
      first: the pair of position 0: kept, its embedding zeroed, or absent.
      chunk: prompt chunks of this size whose last row has the wrong token.
      prefix: whether the draft saw the prompt.
      rows: order of the record's rows (`wirings.pack`).
      space: what was done to the states (`"as recorded"`, `"rotated"`, `"rotated back"`).
      gate_up: whether the two matrices of the MLP stand in each other's place.
    """

    boundaries: tuple[Boundary, ...]
    vocab: str = "checkpoint"
    embed: Owner = "target"
    head: Owner = "draft"
    fuse_norm: FuseNorm = "none"
    norm_before_residual: bool = False
    double_norm: bool = False
    final_norm: bool = True
    feedback: Literal["pre_norm", "post_norm"] = "pre_norm"
    residual: Literal["state", "embedding"] = "state"
    next_norm: Literal["input_layernorm", "hidden_norm"] = "input_layernorm"
    layers: Literal["all", "first alone"] = "all"
    fed_from: Literal["last", "first"] = "last"
    rope: RopeConfig = dataclasses.field(default_factory=RopeConfig)
    pairs: Literal["halves", "interleaved"] = "halves"
    window: int | Literal["as configured"] | None = None
    clamp: int | None = None
    token_shift: int = 1
    row_shift: int = 0
    first: Literal["kept", "zeroed", "dropped"] = "kept"
    chunk: int | None = None
    prefix: Literal["present", "missing"] = "present"
    rows: str = "in order"
    space: str = "as recorded"
    gate_up: Literal["in place", "swapped"] = "in place"

    def changes(self, other: "Wiring") -> dict[str, tuple[Any, Any]]:
        """Field -> (value here, value in `other`), for the fields that differ."""
        pairs = {
            f.name: (getattr(self, f.name), getattr(other, f.name))
            for f in dataclasses.fields(self)
        }
        return {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}

    def describe(self, base: "Wiring") -> str:
        """What differs from `base`, in words; "as configured" when nothing does."""
        parts = [describe_change(name, old, new) for name, (old, new) in base.changes(self).items()]
        return ", ".join(parts) or "as configured"


def configured(config: DraftConfig, boundaries: tuple[Boundary, ...]) -> Wiring:
    """The wiring a draft's config states, with its boundaries settled."""
    fuse_norm: FuseNorm = "none"
    if config.norm_before_fc:
        fuse_norm = "concat"
    elif config.fc_norm:
        fuse_norm = "per_state"
    return Wiring(
        boundaries=boundaries,
        embed=config.embed,
        head=config.head,
        fuse_norm=fuse_norm,
        norm_before_residual=config.norm_before_residual,
        double_norm=config.double_norm,
        final_norm=config.final_norm,
        feedback=config.feedback,
        next_norm="hidden_norm" if config.next_layers == "hidden_norm" else "input_layernorm",
        rope=config.rope,
        pairs="interleaved" if config.latent and config.latent.interleaved else "halves",
        window=_window(config),
    )


def _window(config: DraftConfig) -> int | Literal["as configured"] | None:
    windows = set(config.windows)
    return "as configured" if len(windows) > 1 else next(iter(windows), None)


def joint_shift(old: tuple[Boundary, ...], new: tuple[Boundary, ...]) -> int | None:
    """By how much all boundaries moved together, None when they did not."""
    steps = set()
    for a, b in zip(old, new, strict=True):
        if not isinstance(a, int) or not isinstance(b, int):
            return None
        steps.add(b - a)
    return steps.pop() if len(steps) == 1 else None


def describe_change(name: str, old: Any, new: Any) -> str:
    """One difference between two wirings in words."""
    if name == "boundaries":
        shown = f"boundaries {show_boundaries(new)} for {show_boundaries(old)}"
        step = joint_shift(old, new)
        if step:
            return f"{shown} (shift {step:+d})"
        return f"{shown} (order)" if sorted(map(str, old)) == sorted(map(str, new)) else shown
    if name == "rope":
        if old.one_axis == new.one_axis:
            return f"rope with {axes_in_words(new)}" if new.mrope_section else "rope of one axis"
        if dataclasses.replace(old, theta=new.theta) == new:
            return f"rope theta {new.theta:g} for {old.theta:g}"
        scaling = "no scaling" if new.kind == "default" else f"{new.kind} scaling"
        return f"rope theta {new.theta:g}, {scaling}"
    if name in ("embed", "head"):
        what = "embedding" if name == "embed" else "head"
        return f"own {what}" if new == "draft" else f"the target's {what}"
    if name == "clamp":
        return "positions not clamped" if new is None else f"positions clamped at {new}"
    if name == "chunk":
        return f"wrong token at the borders of chunks of {new}" if new else "no chunk borders"
    if name == "row_shift":
        return (
            f"states {abs(new)} row {'early' if new < 0 else 'late'}" if new else "rows as stored"
        )
    return (
        _WORDS[name].format(new=str(new).replace("_", "-"))
        if name in _WORDS
        else _switch(name, new)
    )


_WORDS = {
    "vocab": "vocabulary map: {new}",
    "feedback": "fed-back state {new}",
    "residual": "residual taken from the {new}",
    "pairs": "rotary pairs {new}",
    "window": "window={new}",
    "layers": "layers: {new}",
    "fed_from": "the {new} layer's state fed back",
    "token_shift": "state p with token p+{new}",
    "first": "position 0 {new}",
    "prefix": "prompt {new} in the draft's cache",
    "rows": "rows {new}",
    "space": "states {new}",
    "gate_up": "gate and up {new}",
}


def _switch(name: str, new: Any) -> str:
    if name == "fuse_norm":
        return {
            "none": "no norm before fc",
            "concat": "norm over concat before fc",
            "per_state": "a norm per state before fc",
        }[new]
    if name == "next_norm":
        return f"later layers under {new}"
    if name == "norm_before_residual":
        return f"norm_before_residual={str(new).lower()}"
    if name == "double_norm":
        return "norm_embed before norm_hidden" if new else "norm_hidden alone"
    return "final norm before the head" if new else "no final norm"


def show_boundaries(boundaries: tuple[Boundary, ...]) -> str:
    """As a tuple, names without quotes."""
    return "(" + ", ".join(map(str, boundaries)) + ")"

"""An EAGLE-3 draft's sizes and switches, and the boundaries that feed it."""

import dataclasses
from typing import Literal

from eagle3_jax.attention_config import (
    AttentionConfig,
    ConfigError,
    LatentAttentionConfig,
    LatentSizes,
    RopeConfig,
    check_positive,
)

Boundary = int | Literal["final_norm"]
"""A capture point: `k` is the residual stream after k blocks (0 = embeddings, L = before the final
norm); `"final_norm"` is the last state after the target's final norm."""

DEFAULT_BOUNDARIES = "default(2, L//2, L-3)"
"""Stored while the target's depth L is unknown; every public trainer and engine agrees on it."""

NEXT_LAYERS = ("input_layernorm", "hidden_norm", "wide")


@dataclasses.dataclass(frozen=True)
class DraftConfig:
    """An EAGLE-3 draft as it was trained: sizes from tensors, switches from dialect or flags.

    Forward (EAGLE-3 paper, section 3; SafeAILab/EAGLE `cnets.py`): `g = fc(aux)` for target
    states, the draft's own state afterwards; `x = [norm_embed(e); norm_hidden(g)]`;
    `a = residual + attention(x)`; `out = a + mlp(norm_post(a))`;
    `logits = lm_head(norm_final(out))`.

    Attributes:
      num_aux: A, the number of target states `fc` takes.
      aux_boundaries: A boundaries in concatenation order, or `DEFAULT_BOUNDARIES`.
      norm_before_residual: the residual is `norm_hidden(g)` instead of `g` (speculators).
      norm_before_fc: one RMSNorm over all A*E aux features (tensor `input_norm`).
      fc_norm: one RMSNorm per aux state (tensors `fc_norm.i`, EAGLE-3.1).
      feedback: the state given to the next step: `out` or `norm_final(out)`.
      final_norm: whether `norm_final` stands before the head.
      double_norm: `norm_hidden(norm_embed(g))`, what ModelOpt >= 0.41 trains.
      embed: whose token embedding is used. head: whose output head.
      fuse: `"none"` hands the aux features on as they are, which needs A * E == D: SGLang does so
        whenever the widths are equal, whatever the draft was trained with.
      hidden_norm: the first layer norms the state; ModelOpt's drafts without aux states do not.
      next_layers: what layers from 1 on read: the state under their `input_layernorm` (vLLM,
        speculators) or their `hidden_norm` (SGLang, TensorRT-LLM), or embedding and state side by
        side as the first layer does (`"wide"`, DeepSpec).
      next_spare_norm: those layers also have the other norm; kept for the engine that reads it.
      qk_norm: see `AttentionConfig`. windows: positions each layer sees, None for all before it; an
        empty tuple: no layer has a window.
      latent: multi-head latent attention; `num_kv_heads` is then `num_heads`, and `head_dim` the
        width of a query.
    """

    hidden_size: int
    target_hidden_size: int
    num_aux: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    draft_vocab_size: int
    rms_norm_eps: float = 1e-6
    rope: RopeConfig = dataclasses.field(default_factory=RopeConfig)
    aux_boundaries: tuple[Boundary, ...] | str = DEFAULT_BOUNDARIES
    norm_before_residual: bool = False
    norm_before_fc: bool = False
    fc_norm: bool = False
    feedback: Literal["pre_norm", "post_norm"] = "pre_norm"
    final_norm: bool = True
    double_norm: bool = False
    fc_bias: bool = False
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    embed: Literal["draft", "target"] = "target"
    head: Literal["draft", "target"] = "draft"
    num_layers: int = 1
    fuse: Literal["fc", "none"] = "fc"
    hidden_norm: bool = True
    next_layers: Literal["input_layernorm", "hidden_norm", "wide"] = "input_layernorm"
    next_spare_norm: bool = False
    qk_norm: bool = False
    windows: tuple[int | None, ...] = ()
    latent: LatentSizes | None = None

    def __post_init__(self):
        check_positive(
            self,
            "hidden_size",
            "target_hidden_size",
            "num_aux",
            "intermediate_size",
            "num_heads",
            "num_kv_heads",
            "head_dim",
            "vocab_size",
            "draft_vocab_size",
            "num_layers",
        )
        if self.next_layers not in NEXT_LAYERS:
            raise ConfigError(
                f"next_layers is {self.next_layers!r}, expected one of {', '.join(NEXT_LAYERS)}"
            )
        if self.windows and len(self.windows) != self.num_layers:
            raise ConfigError(f"{len(self.windows)} windows for {self.num_layers} layers")
        if self.draft_vocab_size > self.vocab_size:
            raise ConfigError(
                f"draft_vocab_size {self.draft_vocab_size} exceeds vocab_size {self.vocab_size}"
            )
        if self.norm_before_fc and self.fc_norm:
            raise ConfigError("norm_before_fc and fc_norm exclude each other")
        if self.fuse not in ("fc", "none"):
            raise ConfigError(f"fuse is {self.fuse!r}, expected fc or none")
        if self.fuse == "none" and self.num_aux * self.target_hidden_size != self.hidden_size:
            raise ConfigError(
                f"fuse none needs {self.num_aux} states of {self.target_hidden_size} to be the "
                f"draft's width {self.hidden_size}"
            )
        if self.feedback not in ("pre_norm", "post_norm"):
            raise ConfigError(f"feedback is {self.feedback!r}, expected pre_norm or post_norm")
        if self.feedback == "post_norm" and not self.final_norm:
            raise ConfigError("feedback post_norm needs final_norm")
        for name in ("embed", "head"):
            if getattr(self, name) not in ("draft", "target"):
                raise ConfigError(
                    f"{name} is {getattr(self, name)!r}, expected 'draft' or 'target'"
                )
        if self.head == "target" and self.draft_vocab_size != self.vocab_size:
            raise ConfigError(
                f"the target's head has {self.vocab_size} rows, the draft vocabulary "
                f"{self.draft_vocab_size}: a draft without lm_head must have the full vocabulary"
            )
        for name in ("embed", "head"):
            if getattr(self, name) == "target" and self.hidden_size != self.target_hidden_size:
                raise ConfigError(
                    f"the draft's width {self.hidden_size} differs from the target's "
                    f"{self.target_hidden_size}: it cannot use the target's {name}"
                )
        if isinstance(self.aux_boundaries, str):
            if self.aux_boundaries != DEFAULT_BOUNDARIES:
                raise ConfigError(f"unknown aux_boundaries {self.aux_boundaries!r}")
            if self.num_aux != 3:
                raise ConfigError(f"{DEFAULT_BOUNDARIES} names 3 states, fc takes {self.num_aux}")
        else:
            check_boundaries(self.aux_boundaries, self.num_aux)
        if self.latent is not None:
            self._check_latent(self.latent)
        for index in range(self.num_layers):
            self.rope.check_sections(self.attention(index).rotary_dim)

    def _check_latent(self, sizes: LatentSizes):
        width = sizes.qk_nope_head_dim + sizes.qk_rope_head_dim
        if (self.num_kv_heads, self.head_dim) != (self.num_heads, width):
            raise ConfigError(
                f"latent attention of {self.num_heads} heads of {width} was given num_kv_heads "
                f"{self.num_kv_heads} and head_dim {self.head_dim}"
            )
        if self.qkv_bias or self.output_bias or self.qk_norm:
            raise ConfigError("latent attention has no biases and no q/k norms of its own here")

    def is_wide(self, layer: int) -> bool:
        """Whether a layer reads embedding and state side by side."""
        return layer == 0 or self.next_layers == "wide"

    def attention(self, layer: int = 0) -> AttentionConfig | LatentAttentionConfig:
        """The sizes of one layer's attention."""
        width = (2 if self.is_wide(layer) else 1) * self.hidden_size
        window = self.windows[layer] if self.windows else None
        if self.latent is not None:
            return LatentAttentionConfig(
                width,
                self.hidden_size,
                self.num_heads,
                self.latent,
                self.rms_norm_eps,
                self.rope.latent_sharpness,
                window,
            )
        return AttentionConfig(
            width,
            self.hidden_size,
            self.num_heads,
            self.num_kv_heads,
            self.head_dim,
            self.qkv_bias,
            self.output_bias,
            self.qk_norm,
            self.rms_norm_eps,
            window,
        )

    def layer_norms(self, layer: int) -> tuple[str, ...]:
        """Canonical names of the norms before a layer's attention.

        `norm_embed` is the checkpoint's `input_layernorm`, `norm_hidden` its `hidden_norm`: in a
        later layer that reads the state alone either may be the one in use.
        """
        if layer == 0:
            return ("norm_embed", "norm_hidden") if self.hidden_norm else ("norm_embed",)
        if self.next_layers == "wide" or self.next_spare_norm:
            return ("norm_embed", "norm_hidden")
        return ("norm_embed" if self.next_layers == "input_layernorm" else "norm_hidden",)

    @property
    def cache_width(self) -> int:
        """Values one slot of one layer's cache holds."""
        return sum(heads * width for heads, width in self.attention().cache_shapes)

    def tensor_shapes(self) -> dict[str, tuple[int, ...]]:
        """Canonical name -> shape of every tensor this draft owns; linear weights are [out, in].

        `draft_to_target` is int32, everything else floating point. It is the direct map
        (SGLang's `hot_token_id`), always present: the identity for a full vocabulary.
        """
        D, E, A, F = (
            self.hidden_size,
            self.target_hidden_size,
            self.num_aux,
            self.intermediate_size,
        )
        mlp = {"gate": (F, D), "up": (F, D), "down": (D, F)}
        shapes: dict[str, tuple[int, ...]] = {}
        if self.fuse == "fc":
            shapes["fc.weight"] = (D, A * E)
            if self.fc_bias:
                shapes["fc.bias"] = (D,)
            if self.norm_before_fc:
                shapes["input_norm.weight"] = (A * E,)
            if self.fc_norm:
                shapes["fc_norm.weight"] = (A, E)
        for index in range(self.num_layers):
            layer = f"layers.{index}"
            for name in (*self.layer_norms(index), "norm_post"):
                shapes[f"{layer}.{name}.weight"] = (D,)
            attention = self.attention(index).tensor_shapes()
            shapes |= {f"{layer}.attn.{name}": shape for name, shape in attention.items()}
            for name, shape in mlp.items():
                shapes[f"{layer}.mlp.{name}.weight"] = shape
                if self.mlp_bias:
                    shapes[f"{layer}.mlp.{name}.bias"] = shape[:1]
        if self.final_norm:
            shapes["norm_final.weight"] = (D,)
        if self.head == "draft":
            shapes["lm_head.weight"] = (self.draft_vocab_size, D)
        if self.embed == "draft":
            shapes["embed.weight"] = (self.vocab_size, D)
        shapes["draft_to_target"] = (self.draft_vocab_size,)
        return shapes

    def resolve(self, target_layers: int) -> "DraftConfig":
        """The same draft with its boundaries as numbers for a target of `target_layers` blocks."""
        if isinstance(self.aux_boundaries, str):
            boundaries = default_boundaries(target_layers)
        else:
            boundaries = self.aux_boundaries
        check_boundaries(boundaries, self.num_aux, target_layers)
        return dataclasses.replace(self, aux_boundaries=boundaries)


def default_boundaries(target_layers: int) -> tuple[Boundary, ...]:
    """(2, L//2, L-3), the rule of SafeAILab/EAGLE `modeling_llama_kv.py`, SGLang and vLLM."""
    boundaries = (2, target_layers // 2, target_layers - 3)
    if len(set(boundaries)) < 3 or min(boundaries) < 0 or list(boundaries) != sorted(boundaries):
        raise ConfigError(
            f"the default boundaries of a target with {target_layers} blocks would be "
            f"{boundaries}: name the three boundaries in the draft's config"
        )
    return boundaries


def check_boundaries(boundaries: tuple, num_aux: int, target_layers: int | None = None):
    """Raises `ConfigError` for a wrong count, duplicates, or boundaries outside [0, L]."""
    if len(boundaries) != num_aux:
        raise ConfigError(f"{len(boundaries)} aux boundaries {boundaries}, but fc takes {num_aux}")
    for boundary in boundaries:
        if boundary == "final_norm":
            continue
        if not isinstance(boundary, int) or isinstance(boundary, bool) or boundary < 0:
            raise ConfigError(f"aux boundary {boundary!r} is not a number of blocks (0, 1, ...)")
        if target_layers is not None and boundary > target_layers:
            raise ConfigError(
                f"aux boundary {boundary} lies outside the target's 0..{target_layers}"
            )
    if len(set(boundaries)) != len(boundaries):
        raise ConfigError(f"aux boundaries {boundaries} repeat a boundary")

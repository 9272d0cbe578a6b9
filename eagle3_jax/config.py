"""What a draft, a target and a tree are: frozen values, checked once when built."""

import dataclasses
import operator
from typing import Any, Literal

Boundary = int | Literal["final_norm"]
"""A capture point: `k` is the residual stream after k blocks (0 = embeddings, L = before the final
norm); `"final_norm"` is the last state after the target's final norm."""

DEFAULT_BOUNDARIES = "default(2, L//2, L-3)"
"""Stored while the target's depth L is unknown; every public trainer and engine agrees on it."""

DTYPES = ("float32", "bfloat16", "float16", "float64")


class ConfigError(ValueError):
    """A configuration that cannot be right: says what, found, expected."""


@dataclasses.dataclass(frozen=True)
class RopeConfig:
    """Rotary embedding over the two halves of a head (the "neox" pairing).

    `kind="llama3"` rescales low frequencies as Llama 3.1 does
    (transformers `modeling_rope_utils._compute_llama3_parameters`).
    """

    theta: float = 10000.0
    kind: Literal["default", "llama3"] = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 1.0
    original_max_position_embeddings: int = 0

    def __post_init__(self):
        if self.kind not in ("default", "llama3"):
            raise ConfigError(f"rope kind {self.kind!r} is not supported: default or llama3")
        if not self.theta > 0:
            raise ConfigError(f"rope_theta is {self.theta}, expected a positive number")
        if self.kind == "llama3":
            if self.original_max_position_embeddings <= 0 or self.factor <= 0:
                raise ConfigError(
                    "llama3 rope needs factor and original_max_position_embeddings above 0, found "
                    f"{self.factor} and {self.original_max_position_embeddings}"
                )
            if not self.high_freq_factor > self.low_freq_factor > 0:
                raise ConfigError(
                    "llama3 rope needs high_freq_factor > low_freq_factor > 0, found "
                    f"{self.high_freq_factor} and {self.low_freq_factor}"
                )


@dataclasses.dataclass(frozen=True)
class AttentionConfig:
    """Sizes of grouped-query attention; the input may be wider than the model (2D in a draft)."""

    input_size: int
    output_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    qkv_bias: bool = False
    output_bias: bool = False

    def __post_init__(self):
        if self.num_heads % self.num_kv_heads:
            raise ConfigError(
                f"num_heads is {self.num_heads}, not a multiple of num_kv_heads {self.num_kv_heads}"
            )
        if self.head_dim % 2:
            raise ConfigError(f"head_dim is {self.head_dim}, rotary embedding needs an even number")


def whole_number(value: Any, what: str) -> int:
    """A whole number of any integer type, NumPy's too, as an int.

    Raises:
      ConfigError: anything else; True and False are no numbers here.
    """
    try:
        if isinstance(value, bool):
            raise TypeError
        return operator.index(value)
    except TypeError:
        raise ConfigError(f"{what} is {value!r}, expected a positive integer") from None


def _positive(config: Any, *names: str):
    for name in names:
        value = getattr(config, name)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ConfigError(
                f"{type(config).__name__}.{name} is {value!r}, expected a positive integer"
            )


@dataclasses.dataclass(frozen=True)
class TargetConfig:
    """A decoder-only target, sizes as its tensors have them."""

    architecture: str
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    rms_norm_eps: float
    rope: RopeConfig
    max_position_embeddings: int
    tie_word_embeddings: bool = False
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    eos_token_ids: tuple[int, ...] = ()
    bos_token_id: int | None = None

    def __post_init__(self):
        _positive(
            self,
            "hidden_size",
            "intermediate_size",
            "num_layers",
            "num_heads",
            "num_kv_heads",
            "head_dim",
            "vocab_size",
            "max_position_embeddings",
        )
        self.attention  # noqa: B018  (validates the head counts)

    @property
    def attention(self) -> AttentionConfig:
        """The sizes of each block's attention."""
        return AttentionConfig(
            self.hidden_size,
            self.hidden_size,
            self.num_heads,
            self.num_kv_heads,
            self.head_dim,
            self.qkv_bias,
            self.output_bias,
        )


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
    rope: RopeConfig = RopeConfig()
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

    def __post_init__(self):
        _positive(
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
        )
        if self.num_layers != 1:
            raise ConfigError(f"a draft of {self.num_layers} layers is not supported: expected 1")
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
        self.attention  # noqa: B018  (validates the head counts)

    @property
    def attention(self) -> AttentionConfig:
        """The sizes of the draft layer's attention: embedding and state side by side go in."""
        return AttentionConfig(
            2 * self.hidden_size,
            self.hidden_size,
            self.num_heads,
            self.num_kv_heads,
            self.head_dim,
            self.qkv_bias,
            self.output_bias,
        )

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
        rows = {
            "q": (self.num_heads * self.head_dim, 2 * D),
            "k": (self.num_kv_heads * self.head_dim, 2 * D),
            "v": (self.num_kv_heads * self.head_dim, 2 * D),
            "o": (D, self.num_heads * self.head_dim),
        }
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
        for name in ("norm_embed", "norm_hidden", "norm_post"):
            shapes[f"layers.0.{name}.weight"] = (D,)
        for name, shape in rows.items():
            shapes[f"layers.0.attn.{name}.weight"] = shape
            if self.output_bias if name == "o" else self.qkv_bias:
                shapes[f"layers.0.attn.{name}.bias"] = shape[:1]
        for name, shape in mlp.items():
            shapes[f"layers.0.mlp.{name}.weight"] = shape
            if self.mlp_bias:
                shapes[f"layers.0.mlp.{name}.bias"] = shape[:1]
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


@dataclasses.dataclass(frozen=True, init=False)
class TreeConfig:
    """SGLang's triple. `topk=1` is a chain. `num_draft_tokens` counts the root (the bonus token).

    Args:
      num_steps: drafted levels; a round needs num_steps - 1 draft forwards.
      topk: branches kept per level.
      num_draft_tokens: nodes verified, root included; None means num_steps + 1 for a chain.

    Raises:
      ConfigError: a chain with another node count, or more nodes than the tree can hold.
    """

    num_steps: int
    topk: int
    num_draft_tokens: int

    def __init__(self, num_steps: int, topk: int = 1, num_draft_tokens: int | None = None):
        num_steps = whole_number(num_steps, "TreeConfig.num_steps")
        if num_draft_tokens is None:
            if topk != 1:
                raise ConfigError(f"num_draft_tokens is required for a tree (topk={topk})")
            num_draft_tokens = num_steps + 1
        given = {"num_steps": num_steps, "topk": topk, "num_draft_tokens": num_draft_tokens}
        for name, value in given.items():
            object.__setattr__(self, name, whole_number(value, f"TreeConfig.{name}"))
        _positive(self, "num_steps", "topk", "num_draft_tokens")
        if topk == 1 and num_draft_tokens != num_steps + 1:
            raise ConfigError(
                f"a chain of num_steps={num_steps} has num_draft_tokens={num_steps + 1}, "
                f"found {num_draft_tokens}"
            )
        if num_draft_tokens < 2:
            raise ConfigError("num_draft_tokens=1 drafts nothing: expected at least 2")
        if num_draft_tokens - 1 > self.num_candidates:
            raise ConfigError(
                f"num_draft_tokens={num_draft_tokens} asks for {num_draft_tokens - 1} drafted "
                f"nodes, but num_steps={num_steps}, topk={topk} makes {self.num_candidates}"
            )

    @property
    def num_candidates(self) -> int:
        """Nodes the draft proposes before the best num_draft_tokens - 1 are selected."""
        return self.topk + (self.num_steps - 1) * self.topk * self.topk

    @property
    def window(self) -> int:
        """Cache slots past the committed ones that a round may write (draft or target)."""
        return max(self.num_draft_tokens, self.topk * (self.num_steps - 1), self.num_steps + 1)

    def __str__(self) -> str:
        return f"{self.num_steps}/{self.topk}/{self.num_draft_tokens}"

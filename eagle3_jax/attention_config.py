"""How a layer attends: rotary embedding, grouped-query or latent attention, sizes checked once."""

import dataclasses
import math
from typing import Any, Literal

ROPE_KINDS = ("default", "linear", "dynamic", "llama3", "yarn")


class ConfigError(ValueError):
    """A configuration that cannot be right: says what, found, expected."""


def check_positive(config: Any, *names: str):
    """Raises `ConfigError` unless every named field is an integer above 0."""
    for name in names:
        value = getattr(config, name)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ConfigError(
                f"{type(config).__name__}.{name} is {value!r}, expected a positive integer"
            )


@dataclasses.dataclass(frozen=True)
class RopeConfig:
    """Rotary embedding, named and parametrised as transformers' `modeling_rope_utils` does.

    Attributes:
      kind: `linear` divides positions by `factor`; `dynamic` raises the base for positions past
        `original_max_position_embeddings`; `llama3` rescales low frequencies; `yarn` blends both.
      original_max_position_embeddings: the length before scaling; 0 where the kind has none.
      beta_fast, beta_slow, truncate: where yarn blends.
      attention_factor: on yarn's cos and sin; None: from `factor`, or `mscale` and
        `mscale_all_dim` (DeepSeek, Kimi).
      mrope_section: multi-axis rope (Qwen-VL): pairs of elements that turn by time, height and
        width; () for one axis. mrope_interleaved: the axes alternate (Qwen3-VL), else each has a
        block (Qwen2-VL). mrope_interleaved_glm: alternate until an axis is used up (GLM-4V).
    """

    theta: float = 10000.0
    kind: Literal["default", "linear", "dynamic", "llama3", "yarn"] = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 1.0
    original_max_position_embeddings: int = 0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    mrope_section: tuple[int, ...] = ()
    mrope_interleaved: bool = False
    mrope_interleaved_glm: bool = False

    def __post_init__(self):
        if self.kind not in ROPE_KINDS:
            raise ConfigError(
                f"rope kind {self.kind!r} is not supported: expected one of {', '.join(ROPE_KINDS)}"
            )
        if not self.theta > 0:
            raise ConfigError(f"rope_theta is {self.theta}, expected a positive number")
        if self.kind != "default" and not self.factor > 0:
            raise ConfigError(f"{self.kind} rope needs a factor above 0, found {self.factor}")
        if self.kind in ("dynamic", "llama3", "yarn") and (
            self.original_max_position_embeddings <= 0
        ):
            raise ConfigError(
                f"{self.kind} rope needs original_max_position_embeddings above 0, found "
                f"{self.original_max_position_embeddings}"
            )
        if self.kind == "dynamic" and self.factor < 1:
            raise ConfigError(f"dynamic rope needs a factor of at least 1, found {self.factor}")
        if self.kind == "llama3" and not self.high_freq_factor > self.low_freq_factor > 0:
            raise ConfigError(
                "llama3 rope needs high_freq_factor > low_freq_factor > 0, found "
                f"{self.high_freq_factor} and {self.low_freq_factor}"
            )
        if self.kind == "yarn" and not (self.beta_fast > self.beta_slow > 0 and self.theta > 1):
            raise ConfigError(
                "yarn rope needs beta_fast > beta_slow > 0 and a base above 1, found "
                f"{self.beta_fast}, {self.beta_slow} and {self.theta}"
            )
        self._check_axes()

    def _check_axes(self):
        sections, alternate = self.mrope_section, self.mrope_interleaved
        whole = isinstance(sections, tuple) and all(type(n) is int and n >= 0 for n in sections)
        if not whole or (sections and (len(sections) != 3 or not sum(sections))):
            raise ConfigError(
                f"mrope_section is {sections!r}, expected three sizes: time, height, width"
            )
        if (alternate or self.mrope_interleaved_glm) and not sections:
            raise ConfigError("multi-axis rope that alternates needs mrope_section")

    def check_sections(self, rotary_dim: int):
        """Raises `ConfigError` unless the axes share all pairs of a head's rotary elements."""
        if self.mrope_section and 2 * sum(self.mrope_section) != rotary_dim:
            raise ConfigError(
                f"mrope_section {list(self.mrope_section)} has {sum(self.mrope_section)} pairs, "
                f"expected {rotary_dim // 2}: half of the {rotary_dim} elements that turn"
            )

    @property
    def one_axis(self) -> "RopeConfig":
        """The same without axes: what text runs under."""
        return dataclasses.replace(
            self, mrope_section=(), mrope_interleaved=False, mrope_interleaved_glm=False
        )

    @property
    def amplitude(self) -> float:
        """The factor on cos and sin (transformers `_compute_yarn_parameters`)."""
        if self.kind != "yarn":
            return 1.0
        if self.attention_factor is not None:
            return self.attention_factor
        if self.mscale and self.mscale_all_dim:
            return _mscale(self.factor, self.mscale) / _mscale(self.factor, self.mscale_all_dim)
        return _mscale(self.factor, 1.0)

    @property
    def latent_sharpness(self) -> float:
        """The factor on the softmax scale of latent attention (DeepSeek's `mscale` squared)."""
        if self.kind == "default" or not self.mscale_all_dim:
            return 1.0
        return _mscale(self.factor, self.mscale_all_dim) ** 2


def _mscale(factor: float, weight: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0


Shape = tuple[int, int]


@dataclasses.dataclass(frozen=True)
class AttentionConfig:
    """Sizes of grouped-query attention; the input may be wider than the model (2D in a draft).

    Attributes:
      qk_norm: an RMSNorm over each query and key head before rotation (Qwen3).
      window: positions a row sees, itself included; None: all before it.
    """

    input_size: int
    output_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    qkv_bias: bool = False
    output_bias: bool = False
    qk_norm: bool = False
    norm_eps: float = 1e-6
    window: int | None = None

    def __post_init__(self):
        if self.num_heads % self.num_kv_heads:
            raise ConfigError(
                f"num_heads is {self.num_heads}, not a multiple of num_kv_heads {self.num_kv_heads}"
            )
        if self.head_dim % 2:
            raise ConfigError(f"head_dim is {self.head_dim}, rotary embedding needs an even number")
        if self.window is not None:
            check_positive(self, "window")

    @property
    def rotary_dim(self) -> int:
        """How many elements of a head turn."""
        return self.head_dim

    @property
    def cache_shapes(self) -> tuple[Shape, Shape]:
        """Heads and width of one slot's keys and values."""
        return (self.num_kv_heads, self.head_dim), (self.num_kv_heads, self.head_dim)

    def tensor_shapes(self) -> dict[str, tuple[int, ...]]:
        """Name -> shape; linear weights are [out, in]."""
        N, K, H = self.num_heads, self.num_kv_heads, self.head_dim
        linear = {
            "q": (N * H, self.input_size),
            "k": (K * H, self.input_size),
            "v": (K * H, self.input_size),
            "o": (self.output_size, N * H),
        }
        shapes: dict[str, tuple[int, ...]] = {}
        for name, shape in linear.items():
            shapes[f"{name}.weight"] = shape
            if self.output_bias if name == "o" else self.qkv_bias:
                shapes[f"{name}.bias"] = shape[:1]
        if self.qk_norm:
            shapes |= {"q_norm.weight": (H,), "k_norm.weight": (H,)}
        return shapes


@dataclasses.dataclass(frozen=True)
class LatentSizes:
    """Multi-head latent attention (DeepSeek, Kimi) under its config keys.

    Attributes:
      q_lora_rank: None: queries come straight from the input.
      interleaved: elements 2i and 2i + 1 of the rotary part turn together (`rope_interleave`).
    """

    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    q_lora_rank: int | None = None
    interleaved: bool = True

    def __post_init__(self):
        check_positive(self, "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
        if self.q_lora_rank is not None:
            check_positive(self, "q_lora_rank")
        if self.qk_rope_head_dim % 2:
            raise ConfigError(
                f"qk_rope_head_dim is {self.qk_rope_head_dim}, rotary embedding needs an even "
                "number"
            )


@dataclasses.dataclass(frozen=True)
class LatentAttentionConfig:
    """Latent attention of one layer; `sharpness` is a factor on the softmax scale."""

    input_size: int
    output_size: int
    num_heads: int
    sizes: LatentSizes
    norm_eps: float = 1e-6
    sharpness: float = 1.0
    window: int | None = None

    @property
    def rotary_dim(self) -> int:
        """How many elements of a head turn."""
        return self.sizes.qk_rope_head_dim

    @property
    def cache_shapes(self) -> tuple[Shape, Shape]:
        """One shared key a slot, the latent first; values are a part of it."""
        return (1, self.sizes.kv_lora_rank + self.sizes.qk_rope_head_dim), (1, 0)

    def tensor_shapes(self) -> dict[str, tuple[int, ...]]:
        """Name -> shape; linear weights are [out, in]."""
        s, N = self.sizes, self.num_heads
        query = N * (s.qk_nope_head_dim + s.qk_rope_head_dim)
        shapes: dict[str, tuple[int, ...]] = {}
        if s.q_lora_rank is None:
            shapes["q.weight"] = (query, self.input_size)
        else:
            shapes["q_a.weight"] = (s.q_lora_rank, self.input_size)
            shapes["q_a_norm.weight"] = (s.q_lora_rank,)
            shapes["q_b.weight"] = (query, s.q_lora_rank)
        shapes["kv_a.weight"] = (s.kv_lora_rank + s.qk_rope_head_dim, self.input_size)
        shapes["kv_a_norm.weight"] = (s.kv_lora_rank,)
        shapes["kv_b.weight"] = (N * (s.qk_nope_head_dim + s.v_head_dim), s.kv_lora_rank)
        shapes["o.weight"] = (self.output_size, N * s.v_head_dim)
        return shapes

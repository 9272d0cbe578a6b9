"""What a draft, a target and a tree are: frozen values, checked once when built."""

import dataclasses
import operator
from typing import Any

from eagle3_jax.attention_config import (
    AttentionConfig,
    ConfigError,
    LatentAttentionConfig,
    LatentSizes,
    RopeConfig,
    check_positive,
)
from eagle3_jax.draft_config import (
    DEFAULT_BOUNDARIES,
    Boundary,
    DraftConfig,
    check_boundaries,
    default_boundaries,
)
from eagle3_jax.sampling_config import AcceptRule, SamplingConfig
from eagle3_jax.source_config import shorten

__all__ = [
    "DEFAULT_BOUNDARIES",
    "DTYPES",
    "AcceptRule",
    "AttentionConfig",
    "Boundary",
    "ConfigError",
    "DraftConfig",
    "LatentAttentionConfig",
    "LatentSizes",
    "RopeConfig",
    "SamplingConfig",
    "TargetConfig",
    "TreeConfig",
    "check_boundaries",
    "default_boundaries",
    "whole_number",
]

DTYPES = ("float32", "bfloat16", "float16", "float64")


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
        raise ConfigError(f"{what} is {shorten(value)}, expected a positive integer") from None


@dataclasses.dataclass(frozen=True)
class TargetConfig:
    """A decoder-only target, sizes as its tensors have them.

    Attributes:
      architecture: the class config.json names, a vision wrapper's too.
      qk_norm: see `AttentionConfig`. windows: positions each layer sees, None for all before it; an
        empty tuple where no layer has a window.
    """

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
    qk_norm: bool = False
    windows: tuple[int | None, ...] = ()

    def __post_init__(self):
        check_positive(
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
        if self.windows and len(self.windows) != self.num_layers:
            raise ConfigError(f"{len(self.windows)} windows for {self.num_layers} layers")
        for layer in range(max(len(self.windows), 1)):
            self.attention(layer)  # validates head counts and window

    @property
    def cache_width(self) -> int:
        """Values one slot of one layer's cache holds."""
        return 2 * self.num_kv_heads * self.head_dim

    def attention(self, layer: int = 0) -> AttentionConfig:
        """The sizes of one block's attention; only the window differs from block to block."""
        return AttentionConfig(
            self.hidden_size,
            self.hidden_size,
            self.num_heads,
            self.num_kv_heads,
            self.head_dim,
            self.qkv_bias,
            self.output_bias,
            self.qk_norm,
            self.rms_norm_eps,
            self.windows[layer] if self.windows else None,
        )


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
        check_positive(self, "num_steps", "topk", "num_draft_tokens")
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

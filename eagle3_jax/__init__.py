"""EAGLE-3 speculative decoding in JAX: an independent second opinion on PyTorch drafts."""

from eagle3_jax.checkpoint import load_draft
from eagle3_jax.config import (
    AcceptRule,
    ConfigError,
    DraftConfig,
    RopeConfig,
    SamplingConfig,
    TargetConfig,
    TreeConfig,
)
from eagle3_jax.draft import Eagle3Draft
from eagle3_jax.generation import generate, rounds, speculate
from eagle3_jax.run import Generation
from eagle3_jax.targets import load_target
from eagle3_jax.trace import Round, Trace
from eagle3_jax.version import __version__

__all__ = [
    "AcceptRule",
    "ConfigError",
    "DraftConfig",
    "Eagle3Draft",
    "Generation",
    "RopeConfig",
    "Round",
    "SamplingConfig",
    "TargetConfig",
    "Trace",
    "TreeConfig",
    "__version__",
    "generate",
    "load_draft",
    "load_target",
    "rounds",
    "speculate",
]

"""Targets: one file a family behind one protocol, found by `architectures` in config.json."""

from eagle3_jax.targets.base import Target
from eagle3_jax.targets.loading import load_target

__all__ = ["Target", "load_target"]

"""Importable and nothing else: the wheels on PyPI do not load beside a CPU build of torch."""

from torchvision import io, transforms

__version__ = "0.28.0"
__all__ = ["io", "transforms"]

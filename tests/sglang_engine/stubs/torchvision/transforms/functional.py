from torchvision.io import _missing
from torchvision.transforms.modes import InterpolationMode

__all__ = ["InterpolationMode"]


def __getattr__(name):
    if name.startswith("__"):
        raise AttributeError(name)
    return _missing

from torchvision.transforms import _Missing
from torchvision.transforms.modes import InterpolationMode
from torchvision.transforms.v2 import functional

__all__ = ["InterpolationMode", "functional"]


def __getattr__(name):
    if name.startswith("__"):
        raise AttributeError(name)
    return _Missing

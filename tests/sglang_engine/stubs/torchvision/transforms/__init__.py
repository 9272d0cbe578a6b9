from torchvision.transforms import functional
from torchvision.transforms.modes import InterpolationMode

__all__ = ["InterpolationMode", "functional"]


class _Missing:
    def __init__(self, *_args, **_kwargs):
        raise NotImplementedError("a stand-in for imports only")


def __getattr__(name):
    if name.startswith("__"):
        raise AttributeError(name)
    return _Missing

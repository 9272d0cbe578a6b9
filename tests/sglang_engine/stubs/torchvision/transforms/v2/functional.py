from torchvision.transforms.functional import __getattr__
from torchvision.transforms.modes import InterpolationMode

__all__ = ["InterpolationMode", "__getattr__"]

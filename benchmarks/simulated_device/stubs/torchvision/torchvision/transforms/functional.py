"""torchvision.transforms.functional: any name resolves, every call refuses."""

from torchvision._absent import absent_from
from torchvision.transforms import InterpolationMode

__all__ = ["InterpolationMode"]

__getattr__ = absent_from("torchvision.transforms.functional")

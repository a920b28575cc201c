"""torchvision.transforms.v2, reduced to its functional module."""

from torchvision.transforms.v2 import functional

__all__ = ["functional"]

"""Import-only stand-in for torchvision: the names that a text-only server imports, none of the behaviour."""

from torchvision import io, transforms

__version__ = "0.28.0+stub"
__all__ = ["io", "transforms"]

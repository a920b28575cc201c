"""torchvision.transforms.v2.functional: any name resolves, every call refuses."""

from collections.abc import Callable
from typing import NoReturn

from torchvision._absent import absent
from torchvision.transforms import InterpolationMode

__all__ = ["InterpolationMode"]


def __getattr__(name: str) -> Callable[..., NoReturn]:
    if name.startswith("__"):
        raise AttributeError(name)
    return absent(f"transforms.v2.functional.{name}")

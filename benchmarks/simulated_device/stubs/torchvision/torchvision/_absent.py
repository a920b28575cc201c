"""What every function of the stand-in does when it is called."""

from collections.abc import Callable
from typing import NoReturn


def absent(name: str) -> Callable[..., NoReturn]:
    """Return a callable that refuses, naming the torchvision function *name* that was wanted."""

    def refuse(*_args: object, **_kwargs: object) -> NoReturn:
        raise NotImplementedError(
            f"torchvision.{name} was called, but this environment holds an import-only stand-in for torchvision; "
            "install the real package to process images or video"
        )

    return refuse

"""What every function of a stand-in does when it is called; torchvision's distribution takes it in too."""

from collections.abc import Callable
from typing import NoReturn


def absent_from(module: str) -> Callable[[str], Callable[..., NoReturn]]:
    """The ``__getattr__`` of *module*: every name is a callable that refuses, naming what was wanted."""

    def named(name: str) -> Callable[..., NoReturn]:
        if name.startswith("__"):
            raise AttributeError(name)

        def refuse(*_args: object, **_kwargs: object) -> NoReturn:
            raise NotImplementedError(
                f"{module}.{name} was called, but this environment holds an import-only stand-in; "
                "install the real package to process images, video or recorded audio"
            )

        return refuse

    return named

"""torchaudio.functional: any name resolves, every call refuses."""

from collections.abc import Callable
from typing import NoReturn


def __getattr__(name: str) -> Callable[..., NoReturn]:
    if name.startswith("__"):
        raise AttributeError(name)

    def refuse(*_args: object, **_kwargs: object) -> NoReturn:
        raise NotImplementedError(
            f"torchaudio.functional.{name} was called, but this environment holds an import-only stand-in for "
            "torchaudio; install the real package to process recorded audio"
        )

    return refuse

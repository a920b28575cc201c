"""A function of upstream with other objects behind some of its global names. None of its source is copied."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import FunctionType
from typing import Any


class WithOtherGlobals:
    """A function with the code object of an upstream function.

    Args:
        upstream: Upstream's function.
        others: The objects behind the global names that differ.

    Attributes:
        function: The function, with the parameters of upstream's.
    """

    def __init__(self, upstream: Any, others: Mapping[str, Any]) -> None:
        self._upstream = upstream
        self._names = dict(upstream.__globals__)
        names = {**self._names, **others}
        made = FunctionType(upstream.__code__, names, upstream.__name__, upstream.__defaults__, upstream.__closure__)
        made.__kwdefaults__ = upstream.__kwdefaults__
        self.function: Callable[..., Any] = made

    def is_of(self, upstream: Any) -> bool:
        """Whether it was made from this function, and the globals of that function's module have not changed since."""
        return upstream is self._upstream and upstream.__globals__ == self._names

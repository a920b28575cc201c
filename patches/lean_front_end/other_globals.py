"""Upstream's own function with other objects behind some of its global names: no line of it is copied."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import FunctionType
from typing import Any


class WithOtherGlobals:
    """A function of upstream's code object.

    Args:
        upstream: Upstream's function.
        others: What stands behind its global names, of those that differ.

    Attributes:
        function: Called as upstream's.
    """

    def __init__(self, upstream: Any, others: Mapping[str, Any]) -> None:
        self._upstream = upstream
        self._names = dict(upstream.__globals__)
        names = {**self._names, **others}
        made = FunctionType(upstream.__code__, names, upstream.__name__, upstream.__defaults__, upstream.__closure__)
        made.__kwdefaults__ = upstream.__kwdefaults__
        self.function: Callable[..., Any] = made

    def is_of(self, upstream: Any) -> bool:
        """Whether it is of this function and does what that would: its module has the same globals as before."""
        return upstream is self._upstream and upstream.__globals__ == self._names

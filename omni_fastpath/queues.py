"""Override a method of an upstream queue, and put it back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def override(queue: Any, name: str, function: Callable[..., Any]) -> Callable[[], None]:
    """Override a method of one queue by an attribute of that object. Other queues of its class are not changed.

    asyncio and janus document ``_put`` and ``_get`` as methods to override.

    Returns:
        A function that puts back the method that was there. If the method was overridden again since, it does nothing.
        Then *function* stays in use, so it must be able to.
    """
    before = vars(queue).get(name)
    setattr(queue, name, function)

    def put_back() -> None:
        if vars(queue).get(name) is not function:
            return
        if before is None:
            delattr(queue, name)
        else:
            setattr(queue, name, before)

    return put_back

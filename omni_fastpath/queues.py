"""Queues of vLLM-Omni in which patches take part."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def override(queue: Any, name: str, function: Callable[..., Any]) -> Callable[[], None]:
    """Override a method of one queue. asyncio and janus document ``_put`` and ``_get`` as the ones to override.

    Returns:
        What puts back the method that was there. If it was overridden again since, that does nothing, so *function*
        must be able to stay.
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

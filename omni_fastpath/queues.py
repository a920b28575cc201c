"""Queues of vLLM-Omni in which patches take part."""

from __future__ import annotations

from collections.abc import Callable, Sized
from typing import Any
from weakref import WeakKeyDictionary

KEPT: WeakKeyDictionary[Any, Sized] = WeakKeyDictionary()
"""By janus queue, the messages that a patch has taken out of it and not yet handed to their requests."""


def length(queue: Any) -> int:
    """The number of messages in a janus queue, with those that a patch keeps. Any thread may call it."""
    return int(queue.sync_q.qsize()) + len(KEPT.get(queue, ()))


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

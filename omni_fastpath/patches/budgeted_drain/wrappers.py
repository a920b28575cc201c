"""The wrappers of ``budgeted_drain``: for both loops, and for the attach of a replica at run time."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

from omni_fastpath.ledger import state_of

from .drain import Drain

_patch = state_of("budgeted_drain")


def wrapped_loop(wrapped: Callable[..., Awaitable[None]], instance: Any, args: Any, kwargs: Any) -> Awaitable[None]:
    """Run this patch's loop in place of either upstream loop."""
    return Drain(instance, _patch).run(partial(wrapped, *args, **kwargs))


def wrapped_add_client(wrapped: Callable[..., int], _instance: Any, args: Any, kwargs: Any) -> int:
    """Attach as upstream does, then notify the loops of the new replica, because one of them serves its pool."""
    replica_id = wrapped(*args, **kwargs)
    for loop in Drain.running:
        loop.attached()
    return replica_id

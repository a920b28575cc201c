"""The slots of ``budgeted_drain``: both loops, and the attach of a replica at run time."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from omni_fastpath.declare import State
from omni_fastpath.ledger import logger, runtime

from .drain import DrainLoop

_runtime = runtime("budgeted_drain")


def wrapped_loop(wrapped: Callable[..., Awaitable[None]], instance: Any, args: Any, kwargs: Any) -> Awaitable[None]:
    """Run our loop in place of upstream's, the poll loop or the event-driven one; upstream's, if ours cannot start."""
    try:
        loop = DrainLoop(instance, _runtime)
    except Exception as error:
        logger.exception("omni-fastpath: the drain cannot start; upstream's loop runs")
        _runtime.report(State.FAILED, f"it could not start, upstream's loop runs: {error!r}")
        return wrapped(*args, **kwargs)
    return loop.run()


def wrapped_add_client(wrapped: Callable[..., int], instance: Any, args: Any, kwargs: Any) -> int:
    """Attach as upstream does, then let the loop that serves this pool look at the new replica."""
    replica_id = wrapped(*args, **kwargs)
    for loop in DrainLoop.running:
        loop.attached(instance)
    return replica_id

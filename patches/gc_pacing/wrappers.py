"""The slots of ``gc_pacing``: upstream's freeze says that the server serves, a request's end who serves it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any
from weakref import WeakSet

from omni_fastpath.declare import State
from omni_fastpath.ledger import logger, runtime

from .pacing import LOOK_S, Pacing, live, operators_own

_runtime = runtime("gc_pacing")

_front_ends: WeakSet[Any] = WeakSet()
"""Those that have ended a request since."""

_running: list[Pacing] = []
"""The one of this process's server, while there is one."""


def wrapped_freeze_gc_heap(wrapped: Callable[[], None], _instance: Any, args: Any, kwargs: Any) -> None:
    """Upstream's, at the end of an API server's start, on its event loop; then it is paced."""
    wrapped(*args, **kwargs)
    try:
        _begin()
    except Exception as error:
        taken_off()
        logger.exception("omni-fastpath: gc_pacing: beginning failed")
        _runtime.report(State.FAILED, f"beginning failed: {error!r}; Python collects as ever")


def _begin() -> None:
    taken_off()
    obstacle = operators_own()
    if obstacle is not None:
        _runtime.report(State.NOT_APPLICABLE, f"{obstacle}: what the operator sets counts")
        return
    loop = asyncio.get_running_loop()
    pacing = Pacing(_runtime, lambda: live(_front_ends))
    pacing.begin()
    _running.append(pacing)
    loop.call_later(LOOK_S, pacing.look_on, loop)


def wrapped_log_summary_and_cleanup(wrapped: Callable[..., None], instance: Any, args: Any, kwargs: Any) -> None:
    """Upstream's, at each request's end: from the first on its front end is known."""
    wrapped(*args, **kwargs)
    if not _running:
        return
    try:
        _front_ends.add(instance)
    except Exception as error:  # one that has no hash or no weak reference; upstream's end of a request is done
        taken_off()
        _runtime.report(State.FAILED, f"a front end cannot be kept: {error!r}; Python collects as ever")


def taken_off() -> None:
    """Python's own thresholds again; the timer finds that it is over."""
    while _running:
        _running.pop().end()
    _front_ends.clear()

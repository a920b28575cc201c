"""The slots of ``gc_pacing``: upstream's freeze says that the server serves, a request's end who serves it."""

from __future__ import annotations

import asyncio
import gc
import sys
from collections.abc import Callable
from time import monotonic
from typing import Any
from weakref import WeakSet

from omni_fastpath.declare import State
from omni_fastpath.ledger import logger, runtime

LOOK_S = 1.0
"""How often the live requests are looked at, seconds. Few at a second's end are few as often as they are in between."""

_BACKSTOP = 10_000
"""Collections of the middle generation after which Python makes a full one by itself: half an hour under load."""

PYTHONS_OWN = (2000, 10, 10) if sys.version_info >= (3, 13) else (700, 10, 10)
"""The thresholds with which Python starts."""

_runtime = runtime("gc_pacing")

_front_ends: WeakSet[Any] = WeakSet()
"""Those that have ended a request since the server began to serve."""

_running: list[Pacing] = []
"""The one of this process's server, while there is one."""


class Pacing:
    """Decides about the full collections of this process, on one event loop; Python makes none meanwhile.

    Made when the heap of the start has just been collected and frozen.
    """

    def __init__(self) -> None:
        self._theirs = gc.get_threshold()
        self._last_s = monotonic()
        gc.set_threshold(*self._theirs[:2], _BACKSTOP)
        self._ours = gc.get_threshold()

    def end(self) -> None:
        """Give Python its thresholds back, unless an operator has set others."""
        if gc.get_threshold() == self._ours:
            gc.set_threshold(*self._theirs)

    def look_on(self, loop: asyncio.AbstractEventLoop) -> None:
        """Look now and every second, while it is this process's; an exception of ours is the end."""
        if self in _running:
            _guard("deciding about a collection failed", self.look)
            loop.call_later(LOOK_S, self.look_on, loop)

    def look(self) -> None:
        """Collect if it is time."""
        setting = operators_setting(self._ours)
        if setting is not None:
            taken_off()
            _runtime.report(State.NOT_APPLICABLE, f"{setting} since: what the operator sets counts")
        elif gc.get_count()[2] <= self._theirs[2]:
            return  # not due by Python's own count either
        elif live() <= _runtime.options.few:
            self._collect()
            _runtime.counters["quiet"] += 1
        elif monotonic() - self._last_s >= _runtime.options.at_most_s:
            self._collect()
            _runtime.counters["late"] += 1

    def _collect(self) -> None:
        gc.collect()
        self._last_s = monotonic()


def operators_setting(expected: tuple[int, int, int]) -> str | None:
    """What an operator has set about the collector, in words; None with these thresholds and nothing else set."""
    if not gc.isenabled():
        return "gc.disable() was called"
    if gc.get_debug():
        return "gc.set_debug() was called"
    if gc.get_threshold() != expected:
        return f"gc.set_threshold{gc.get_threshold()} was called"
    return None


def live() -> int:
    """Requests and duplex sessions of this process; while no front end is known yet, any number may be live."""
    if not _front_ends:
        return sys.maxsize
    return sum(len(each.request_states) + len(getattr(each, "sessions", ())) for each in _front_ends)


def wrapped_freeze_gc_heap(wrapped: Callable[[], None], _instance: Any, args: Any, kwargs: Any) -> None:
    """Upstream's, at the end of an API server's start, on its event loop; then it is paced."""
    wrapped(*args, **kwargs)
    _guard("beginning failed", _begin)


def _begin() -> None:
    taken_off()
    setting = operators_setting(PYTHONS_OWN)
    if setting is not None:
        _runtime.report(State.NOT_APPLICABLE, f"{setting}: what the operator sets counts")
        return
    loop = asyncio.get_running_loop()
    _running.append(Pacing())
    loop.call_later(LOOK_S, _running[0].look_on, loop)


def wrapped_log_summary_and_cleanup(wrapped: Callable[..., None], instance: Any, args: Any, kwargs: Any) -> None:
    """Upstream's, at each request's end: from the first on its front end is known."""
    wrapped(*args, **kwargs)
    if _running:
        _guard("a front end cannot be kept", _front_ends.add, instance)


def _guard(what: str, step: Callable[..., None], *args: Any) -> None:
    """Take a step; an exception of ours is logged as ``what`` and gives Python its thresholds back."""
    try:
        step(*args)
    except Exception as error:
        taken_off()
        logger.exception("omni-fastpath: gc_pacing: %s", what)
        _runtime.report(State.FAILED, f"{what}: {error!r}; Python collects as ever")


def taken_off() -> None:
    """Python's own thresholds again; the timer finds that it is over."""
    while _running:
        _running.pop().end()
    _front_ends.clear()

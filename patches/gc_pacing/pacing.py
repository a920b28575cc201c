"""When the oldest generation is collected: thresholds that keep Python from it, and a look every second."""

from __future__ import annotations

import asyncio
import gc
import sys
from collections.abc import Callable
from time import monotonic, perf_counter
from typing import Any

from omni_fastpath.declare import State
from omni_fastpath.ledger import PatchRuntime, logger

LOOK_S = 1.0
"""How often the live requests are looked at, seconds. Few at a second's end are few as often as they are in between."""

_BACKSTOP = 10_000
"""Collections of the middle generation after which Python makes a full one by itself: half an hour under load."""

_SHARE = 1000
"""A collection while few are live comes no sooner than so many times its last pause after it: where a large heap was
not frozen, somebody waits for a thousandth of the time at most."""

PYTHONS_OWN = (2000, 10, 10) if sys.version_info >= (3, 13) else (700, 10, 10)
"""The thresholds of a process in which nobody has set any."""


def operators_own() -> str | None:
    """What somebody else has set about the collector, in words; None when everything is as Python begins."""
    if not gc.isenabled():
        return "gc.disable() was called"
    if gc.get_debug():
        return "gc.set_debug() was called"
    if gc.get_threshold() != PYTHONS_OWN:
        return f"gc.set_threshold{gc.get_threshold()} was called"
    return None


class Pacing:
    """Decides about the full collections of this process, on one event loop.

    Args:
        runtime: The patch's.
        live: Counts the requests and sessions that are served now.
        clock: Seconds.
    """

    def __init__(self, runtime: PatchRuntime, live: Callable[[], int], clock: Callable[[], float] = monotonic) -> None:
        self._runtime, self._options, self._live, self._clock = runtime, runtime.options, live, clock
        self._theirs = self._ours = gc.get_threshold()
        self._is_on = False
        self._is_frozen = not self._options.freeze
        self._last_s = self._not_before_s = clock()
        self._blocks = sys.getallocatedblocks()

    def begin(self) -> None:
        """Put Python's full collections off; called when the heap of the start has just been collected and frozen."""
        gc.set_threshold(*self._theirs[:2], _BACKSTOP)
        self._ours, self._is_on = gc.get_threshold(), True

    def end(self) -> None:
        """Give Python its thresholds back, unless somebody has set others; what is frozen stays so."""
        if self._is_on and gc.get_threshold() == self._ours:
            gc.set_threshold(*self._theirs)
        self._is_on = False

    def look_on(self, loop: asyncio.AbstractEventLoop) -> None:
        """Look now and every second, until the end; an exception of ours is the end."""
        if not self._is_on:
            return
        try:
            self.look()
        except Exception as error:
            self.end()
            logger.exception("omni-fastpath: gc_pacing: deciding about a collection failed")
            self._runtime.report(State.FAILED, f"deciding about a collection failed: {error!r}; Python does it again")
            return
        loop.call_later(LOOK_S, self.look_on, loop)

    def look(self) -> None:
        """Collect if it is time."""
        if gc.get_threshold() != self._ours or not gc.isenabled() or gc.get_debug():
            self.end()
            self._runtime.report(State.NOT_APPLICABLE, "somebody has set the collector since; theirs counts")
            return
        if gc.get_count()[2] <= self._theirs[2]:
            return  # not due by Python's own count either
        live, now_s = self._live(), self._clock()
        if live <= self._options.few and now_s >= self._not_before_s:
            self._collect(nobody=live == 0)
            self._runtime.counters["quiet"] += 1
        elif self._can_wait_no_longer(now_s):
            self._collect(nobody=False)
            self._runtime.counters["late"] += 1

    def _can_wait_no_longer(self, now_s: float) -> bool:
        if now_s - self._last_s >= self._options.at_most_s:
            return True
        more = sys.getallocatedblocks() - self._blocks
        return bool(more >= self._options.at_most_objects)

    def _collect(self, *, nobody: bool) -> None:
        began_s = perf_counter()
        gc.collect()
        pause_s = perf_counter() - began_s
        if nobody and not self._is_frozen:
            self._is_frozen = True
            self._runtime.counters["frozen"] = len(gc.get_objects())
            gc.freeze()
        self._last_s = self._clock()
        self._not_before_s = self._last_s + _SHARE * pause_s
        self._blocks = sys.getallocatedblocks()


def live(front_ends: Any) -> int:
    """Requests and duplex sessions of these front ends; while none is known yet, any number may be live."""
    if not front_ends:
        return sys.maxsize
    return sum(len(each.request_states) + len(getattr(each, "sessions", ())) for each in front_ends)

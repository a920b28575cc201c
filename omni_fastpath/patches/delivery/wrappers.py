"""The wrappers of ``delivery``, and ``Arrivals``, one object for each janus queue that the front end takes from."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

from omni_fastpath.guard import AwaitedCall
from omni_fastpath.ledger import state_of
from omni_fastpath.queues import override

LIVENESS_INTERVAL_S = 0.25
"""How often a silent orchestrator is checked in poll mode."""

BATCH = 256
"""Most messages between two turns of the event loop. In poll mode upstream takes all that is queued before a handler
answers; in event-driven mode the thread that waits for each message gives turns."""

_ATTRIBUTE = "_omni_fastpath_arrivals"
_patch = state_of("delivery")
_guard = _patch.guard("waking the front end")


class Arrivals:
    """The front end's waits for one queue: its event loop wakes when another thread puts something, and has turns.

    Args:
        queue: A janus queue. Its ``_put`` is overridden.
    """

    def __init__(self, queue: Any) -> None:
        self._is_empty, self._put = queue.sync_q.empty, queue._put
        self._waiter: asyncio.Future[None] | None = None
        self._left = BATCH  # messages until the next turn
        override(queue, "_put", self._put_and_wake)
        setattr(queue, _ATTRIBUTE, self)

    @classmethod
    def of(cls, queue: Any) -> Arrivals:
        """The one of this queue, which the first call makes."""
        found: Arrivals | None = vars(queue).get(_ATTRIBUTE)
        return cls(queue) if found is None else found

    async def next(self, seconds: float) -> None:
        """Wait until something is queued, *seconds* at most. If much was queued already, give the event loop a turn."""
        self._left -= 1
        if self._left <= 0:
            self._left = BATCH
            await asyncio.sleep(0)
        if not self._is_empty():
            return
        self._left = BATCH
        _patch.counters["waits"] += 1
        self._waiter = waiter = asyncio.get_running_loop().create_future()
        if self._is_empty():  # else a message arrived just before
            timer = waiter.get_loop().call_later(seconds, _resolve, waiter)
            await waiter  # if it is cancelled, the timer finds the waiter done
            timer.cancel()

    def _put_and_wake(self, item: Any) -> None:
        """Put as janus does, then wake the waiter, on any thread, under the queue's lock.

        The item is put before the waiter is read, and ``next`` sets the waiter before it looks for an item. So one of
        both sees the other. The producer pays for a wake-up across threads only while the front end waits.
        """
        self._put(item)
        with _guard, contextlib.suppress(RuntimeError):  # the front end's thread has closed its loop
            waiter, self._waiter = self._waiter, None
            if waiter is not None:
                waiter.get_loop().call_soon_threadsafe(_resolve, waiter)


def _resolve(waiter: asyncio.Future[None]) -> None:
    if not waiter.done():
        waiter.set_result(None)


async def wrapped_try(wrapped: AwaitedCall, engine: Any, _args: Any, _kwargs: Any) -> Any:
    """Poll mode: upstream takes a message, or checks that the orchestrator lives, but first this waits for one.

    Raises:
        RuntimeError: From upstream, when the orchestrator died.
    """
    await Arrivals.of(engine.output_queue).next(LIVENESS_INTERVAL_S)
    return await wrapped()


async def wrapped_take(wrapped: AwaitedCall, engine: Any, args: Any, kwargs: Any) -> Any:
    """Event-driven mode: the next message, for which this waits as long as upstream's thread would.

    Raises:
        RuntimeError: From upstream, when the orchestrator died.
    """
    queue = engine.output_queue
    await Arrivals.of(queue).next(kwargs.get("timeout", args[0] if args else 1.0))
    if queue.sync_q.empty():
        return await wrapped(timeout=0)  # which checks that the orchestrator lives
    return queue.sync_q.get_nowait()

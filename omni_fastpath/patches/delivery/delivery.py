"""One object for each janus queue between an orchestrator and its front end: waiting, turns, pauses and the order."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable
from time import monotonic
from typing import Any
from weakref import WeakSet

import janus

from omni_fastpath import queues, threads
from omni_fastpath.declare import State
from omni_fastpath.hooks import HOOKS
from omni_fastpath.ledger import Entry

from .deadlines import Deadlines
from .incoming import ON_THEIR_WAY, Pause
from .queued_messages import QueuedMessages

LIVENESS_INTERVAL_S = 0.25
"""How often a silent orchestrator is checked. Upstream's event-driven drain does it once per second. In poll mode users
learn of an orchestrator's death at once, and four wakes per second cost nothing."""

BATCH = 8
"""Messages between two turns of the event loop, and messages that 0.32's front end gets at a time. A turn costs some
50 µs if the orchestrator waits for the interpreter lock, and a turn after each message cost a fifth of the throughput.
"""

DELIVERIES: WeakSet[Delivery] = WeakSet()
"""All that are in use."""

_ATTRIBUTE = "_omni_fastpath_delivery"


class Delivery:
    """The messages of one janus queue. All methods but ``leave`` are called on the front end's event loop.

    Args:
        queue: The queue.
        entry: The patch.
        wakes: Whether a put wakes the front end. Else upstream does that.
    """

    def __init__(self, queue: Any, entry: Entry, *, wakes: bool) -> None:
        self.pause = Pause()
        self._by_deadline = entry.options.by_deadline
        self._queue, self._entry, self._counters = queue, entry, entry.counters
        self._messages = QueuedMessages(Deadlines(HOOKS.observer("deadline"), monotonic), entry.counters)
        self._waiter: asyncio.Future[bool] | None = None
        self._error: Exception | None = None  # of a wake-up
        self._left = BATCH  # messages until the next turn of the event loop
        self._lock = threading.RLock()  # while messages are moved; the queue's own lock may be taken inside of it only
        self._put = queue._put
        self._put_back = queues.override(queue, "_put", self._put_and_wake) if wakes else lambda: None
        queues.KEPT[queue] = self._messages.queued
        setattr(queue, _ATTRIBUTE, self)
        DELIVERIES.add(self)
        threads.note(threads.FRONT_END)

    @classmethod
    def of(cls, queue: Any, entry: Entry, *, wakes: bool) -> Delivery | None:
        """The one of this queue, which the first call makes. None if it is an embedder's and not a janus queue."""
        if not isinstance(queue, janus.Queue):
            return None
        found: Delivery | None = vars(queue).get(_ATTRIBUTE)
        return cls(queue, entry, wakes=wakes) if found is None else found

    async def next(self, upstreams: Callable[[], Awaitable[Any]]) -> Any:
        """The next message. None only after a while without one, when upstream has checked that the orchestrator lives.

        If it is cancelled, nothing was taken.

        Args:
            upstreams: Upstream's next message, or None after that check. It does not wait.

        Raises:
            RuntimeError: From upstream, when the orchestrator died.
        """
        if ON_THEIR_WAY:
            await self.pause.before_output()
        if self._left == 0:  # upstream's drain suspends only when the queue is empty
            await asyncio.sleep(0)
            self._left = BATCH
        self._left -= 1
        if self._is_empty():
            self._waiter = waiter = asyncio.get_running_loop().create_future()
            if self._is_empty():  # else a message arrived just before
                timer = waiter.get_loop().call_later(LIVENESS_INTERVAL_S, _resolve, waiter, False)
                arrived = await waiter  # if it is cancelled, the timer finds the waiter done
                timer.cancel()
                self._left = BATCH
                self._counters["woken"] += arrived
        if self._error is not None:
            raise self._error
        # One statement, so that no line is between a message that was taken and the caller.
        return found[0] if (found := self.take(1, self._queue.sync_q.get_nowait)) else await upstreams()

    def _is_empty(self) -> bool:
        return not self._messages.queued and self._queue.sync_q.empty()

    def _put_and_wake(self, item: Any) -> None:
        """Put as janus does, then wake the waiter, on any thread. The queue's lock is held, so it finds the message.

        The producer pays for a cross-thread wake-up only while the front end waits.
        """
        self._put(item)
        try:
            waiter, self._waiter = self._waiter, None
            if waiter is not None and not waiter.get_loop().is_closed():
                waiter.get_loop().call_soon_threadsafe(_resolve, waiter, True)
        except Exception as error:
            self._error = error  # for the front end, because it may want the queue's lock while it has this one's

    def take(self, count: int, get: Callable[[], Any]) -> list[Any]:
        """Take up to *count* messages by deadline. If it raises, it has taken none.

        Args:
            count: As many as are wanted.
            get: Takes one from the queue.

        Returns:
            The messages. Empty if nothing is queued, or if upstream takes them in their order.
        """
        with self._lock:
            if self._entry.state is not State.APPLIED:
                self.leave()  # now, if another thread is about to, so that upstream finds the earliest first
                return []
            if not self._by_deadline:
                self._counters["messages"] += min(count, self._queue.sync_q.qsize())
                return []
            self._messages.collect(get, self._queue.sync_q.empty)
            return self._messages.take(min(count, BATCH))

    def leave(self) -> None:
        """Return the messages to the queue in order of arrival, in front of what was put there since. On any thread."""
        with self._lock:
            self._put_back()
            self._queue._queue.extendleft(reversed(self._messages.queued.values()))
            self._messages.queued.clear()
            vars(self._queue).pop(_ATTRIBUTE, None)


def _resolve(waiter: asyncio.Future[bool], arrived: bool) -> None:
    if not waiter.done():
        waiter.set_result(arrived)

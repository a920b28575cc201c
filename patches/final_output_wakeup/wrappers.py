"""The slots of ``final_output_wakeup``: an empty look at the orchestrator's queue waits for the next message.

Upstream's drain does not suspend while messages wait: it hands one after the other to its request's queue, and the
other tasks of that event loop get a turn only when none is left. ``EventLoopTurns`` gives them one after each batch.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from time import thread_time_ns
from typing import Any
from weakref import WeakSet

import janus

from omni_fastpath.ledger import runtime

_runtime = runtime("final_output_wakeup")
_counters = _runtime.counters
_guard = _runtime.guard("waking the front end")

_LIVENESS_INTERVAL_S = 0.25
"""How often a silent orchestrator is looked at. Upstream's event-driven drain does it once a second; in poll mode users
are told of an orchestrator's death at once, and eight wakes a second (each look is followed by upstream's own
millisecond) cost nothing."""

_TURN_AFTER_NS = 1_000_000
"""Work of the front end's thread for one batch: what it costs to hand the messages over and to make what users get of
them. A turn costs some 50 µs where the orchestrator waits for the interpreter's lock: after each message it cost a
fifth of the throughput, after a millisecond none that could be measured."""

_LARGEST_BATCH = 16
"""Messages of a batch at most, if they cost nothing."""

_queues: WeakSet[Any] = WeakSet()
"""The janus queues that have a ``WakeOnPut`` in front of their put."""


class EventLoopTurns:
    """Counts what one drain takes from its queue, and gives the event loop a turn after each batch.

    A batch is as many messages as make ``_TURN_AFTER_NS`` of work, by what those of the batch before cost. What a
    message costs comes after it was taken, in the turn: only a look at the thread's processor time at each turn tells.
    Other work of the loop counts too, for that one batch.

    Attributes:
        left: Messages until the next turn.
    """

    __slots__ = ("_batch", "_since_ns", "left")

    def __init__(self) -> None:
        self.left = self._batch = _LARGEST_BATCH
        self._since_ns: int | None = None

    def rested(self) -> None:
        """The drain has waited, in which the loop had its turns."""
        self.left, self._since_ns = self._batch, None

    async def before_a_message(self) -> None:
        """Count the message that is taken next; a batch after the last turn, give a turn first.

        The tasks that were handed messages run in that turn.
        """
        if self.left > 0:
            self.left -= 1
            return
        await asyncio.sleep(0)
        now_ns = thread_time_ns()
        if self._since_ns is not None:
            spent_ns = max(now_ns - self._since_ns, 1)
            self._batch = min(max(self._batch * _TURN_AFTER_NS // spent_ns, 1), _LARGEST_BATCH)
        self.left, self._since_ns = self._batch - 1, now_ns
        _counters["turns"] += 1


class WakeOnPut:
    """Stands in front of one janus queue's ``_put`` and wakes one waiter on another thread's event loop.

    The producer pays for a cross-thread wake-up only while the front end waits. It wakes after the item is in and under
    the queue's lock, so a waiter that is woken finds it. ``_put`` is janus's documented override point.

    Attributes:
        turns: Of the event loop on which the queue is drained.
    """

    def __init__(self, put: Callable[[Any], None]) -> None:
        self.turns = EventLoopTurns()
        self._put = put
        self._waiter: asyncio.Future[bool] | None = None

    @classmethod
    def of(cls, queue: Any) -> WakeOnPut:
        """The one in front of this queue's put; the first call puts it there."""
        ours = vars(queue).get("_put")
        if not isinstance(ours, cls):
            ours = cls(queue._put)
            queue._put = ours
            _queues.add(queue)
        return ours

    def __call__(self, item: Any) -> None:
        """Put as janus does, then wake the waiter."""
        self._put(item)
        with _guard:
            waiter, self._waiter = self._waiter, None
            if waiter is not None:
                with contextlib.suppress(RuntimeError):  # the front end's loop is closed
                    waiter.get_loop().call_soon_threadsafe(_resolve, waiter, True)

    def arm(self) -> asyncio.Future[bool]:
        """A future that becomes True at the next put. Look into the queue once more after arming."""
        self._waiter = waiter = asyncio.get_running_loop().create_future()
        return waiter

    async def arrival(self, waiter: asyncio.Future[bool]) -> None:
        """Wait for the next put, or for ``_LIVENESS_INTERVAL_S``."""
        timer = waiter.get_loop().call_later(_LIVENESS_INTERVAL_S, _resolve, waiter, False)
        try:
            arrived = await waiter
        finally:
            timer.cancel()
        self.turns.rested()
        _counters["woken" if arrived else "liveness_checks"] += 1


def _resolve(waiter: asyncio.Future[bool], arrived: bool) -> None:
    if not waiter.done():
        waiter.set_result(arrived)


async def wrapped_try_get_output_async(
    wrapped: Callable[[], Awaitable[Any]], instance: Any, _args: Any, _kwargs: Any
) -> Any:
    """The next message; None only after a while without one, and after upstream has checked the orchestrator.

    Every message is returned by a call of upstream's: an exception of this patch, or a cancellation, can lose none.

    Raises:
        RuntimeError: Upstream's, when the orchestrator died.
    """
    if not isinstance(instance.output_queue, janus.Queue):  # an embedder's engine or a test's may have another queue
        return await wrapped()
    on_put = WakeOnPut.of(instance.output_queue)
    await on_put.turns.before_a_message()
    message = await wrapped()
    if message is None:
        waiter = on_put.arm()
        message = await wrapped()  # a message may have arrived just before the arming
        if message is None:
            await on_put.arrival(waiter)
            message = await wrapped()
    return message


async def wrapped_get_output_blocking_async(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    """Upstream's event-driven drain, without its thread: the same wait as in poll mode.

    Returns:
        The next message; None after a while without one, sooner than upstream's timeout.

    Raises:
        RuntimeError: Upstream's, when the orchestrator died.
    """
    timeout = args[0] if args else kwargs.get("timeout", 1.0)
    waits_here = timeout >= _LIVENESS_INTERVAL_S and isinstance(instance.output_queue, janus.Queue)
    if not waits_here:
        return await wrapped(*args, **kwargs)
    try:
        return await instance.try_get_output_async()
    except Exception:  # the queue is closed, or the orchestrator died: upstream reports it as it does in this mode
        return await wrapped(*args, **kwargs)


def taken_off() -> None:
    """Give the queues their own put back; who waits now is woken by the timer."""
    for queue in list(_queues):
        if isinstance(vars(queue).get("_put"), WakeOnPut):
            del vars(queue)["_put"]
    _queues.clear()

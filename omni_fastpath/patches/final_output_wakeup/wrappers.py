"""The wrappers of ``final_output_wakeup``: when the orchestrator's queue is empty, they wait for the next message.

Upstream's drain does not suspend while messages are queued. It hands one after the other to its request, and the other
tasks of the event loop run only when the queue is empty. ``WakeOnPut`` lets them run after each batch.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any
from weakref import WeakSet

import janus

from omni_fastpath import threads
from omni_fastpath.ledger import AwaitedCall, raised_by_us, runtime

_runtime = runtime("final_output_wakeup")
_counters = _runtime.counters
_guard = _runtime.guard("waking the front end")

_LIVENESS_INTERVAL_S = 0.25
"""How often a silent orchestrator is checked. Upstream's event-driven drain does it once per second. In poll mode users
learn of an orchestrator's death at once, and four wakes per second cost nothing."""

BATCH = 8
"""Messages between two turns of the event loop. A turn costs some 50 µs if the orchestrator waits for the interpreter
lock. A turn after each message cost a fifth of the throughput."""

_queues: WeakSet[Any] = WeakSet()
"""The janus queues that have a ``WakeOnPut``."""


class WakeOnPut:
    """Replaces ``_put`` of one janus queue, and wakes one waiter on another thread's event loop.

    The producer pays for a cross-thread wake-up only while the front end waits. The waiter is woken when the message is
    in the queue and the queue's lock is still held, so it finds the message. janus documents ``_put`` as the method to
    override.

    Attributes:
        left: Messages until the next turn of the event loop on which the queue is drained.
    """

    def __init__(self, put: Callable[[Any], None]) -> None:
        self.left = BATCH
        self._put = put
        self._waiter: asyncio.Future[bool] | None = None

    @classmethod
    def of(cls, queue: Any) -> WakeOnPut:
        """The one of this queue. The first call puts it there."""
        ours = vars(queue).get("_put")
        if not isinstance(ours, cls):
            threads.note(threads.FRONT_END)
            ours = cls(queue._put)
            queue._put = ours
            _queues.add(queue)
        return ours

    def __call__(self, item: Any) -> None:
        """Put as janus does, then wake the waiter."""
        self._put(item)
        with _guard:
            waiter, self._waiter = self._waiter, None
            if waiter is not None and not waiter.get_loop().is_closed():
                waiter.get_loop().call_soon_threadsafe(_resolve, waiter, True)

    async def before_a_message(self) -> None:
        """Count the message that is taken next. After each batch, let the event loop run what the batch has woken."""
        if self.left == 0:
            await asyncio.sleep(0)
            self.left = BATCH
            _counters["turns"] += 1
        self.left -= 1

    def arm(self) -> asyncio.Future[bool]:
        """A future that becomes True at the next put. Check the queue once more after arming."""
        self._waiter = waiter = asyncio.get_running_loop().create_future()
        return waiter

    async def arrival(self, waiter: asyncio.Future[bool]) -> None:
        """Wait for the next put, or for ``_LIVENESS_INTERVAL_S``."""
        timer = waiter.get_loop().call_later(_LIVENESS_INTERVAL_S, _resolve, waiter, False)
        arrived = await waiter  # if it is cancelled, the timer finds the waiter done
        timer.cancel()
        self.left = BATCH
        _counters["woken" if arrived else "liveness_checks"] += 1


def _resolve(waiter: asyncio.Future[bool], arrived: bool) -> None:
    if not waiter.done():
        waiter.set_result(arrived)


async def wrapped_try_get_output_async(wrapped: AwaitedCall, instance: Any, _args: Any, _kwargs: Any) -> Any:
    """The next message. None only after a while without one, when upstream has checked that the orchestrator lives.

    Every message is the result of upstream's function, so neither a cancellation nor an exception can lose one.

    Raises:
        RuntimeError: From upstream, when the orchestrator died.
    """
    if not isinstance(instance.output_queue, janus.Queue):  # an embedder's engine or a test's may have another queue
        return await wrapped()
    on_put = WakeOnPut.of(instance.output_queue)
    await on_put.before_a_message()
    message = await wrapped()
    if message is None:
        waiter = on_put.arm()
        message = await wrapped()  # a message may have arrived just before the arming
        if message is None:
            await on_put.arrival(waiter)
            message = await wrapped()
    return message


async def wrapped_get_output_blocking_async(wrapped: AwaitedCall, instance: Any, args: Any, kwargs: Any) -> Any:
    """Upstream's event-driven drain without its thread. It waits as in poll mode.

    Returns:
        The next message, or None after a while without one, which may be before upstream's timeout.

    Raises:
        RuntimeError: From upstream, when the orchestrator died.
    """
    if not isinstance(instance.output_queue, janus.Queue):
        return await wrapped(*args, **kwargs)
    try:
        return await instance.try_get_output_async()
    except Exception as error:
        if raised_by_us(error):
            raise
        # The queue is closed, or the orchestrator died. Upstream reports it as it does in this mode.
        return await wrapped(*args, **kwargs)


def taken_off() -> None:
    """Restore ``_put`` of the queues. A drain that waits now is woken by its timer."""
    for queue in list(_queues):
        if isinstance(vars(queue).get("_put"), WakeOnPut):
            del vars(queue)["_put"]
    _queues.clear()

"""The wrappers of ``delivery``, and ``Delivery``, one object for each janus queue between orchestrator and front end.

The wrapped functions are those with which upstream's front end takes a message, here called its takers. They run on the
front end's event loop. ``Delivery`` waits, gives the event loop turns, pauses, and gives the queue its order.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from math import inf
from time import monotonic
from typing import Any

import janus

from omni_fastpath import threads
from omni_fastpath.declare import State
from omni_fastpath.guard import AwaitedCall
from omni_fastpath.hooks import HOOKS
from omni_fastpath.ledger import state_of
from omni_fastpath.queues import override

from .incoming import ON_THEIR_WAY, Pause
from .order import Deadlines, QueuedMessages

LIVENESS_INTERVAL_S = 0.25
"""How often a silent orchestrator is checked. Upstream's event-driven taker does it once per second. In poll mode users
learn of an orchestrator's death at once, and four wakes per second cost nothing."""

BATCH = 8
"""Messages between two turns of the event loop. A turn costs some 50 µs if the orchestrator waits for the interpreter
lock, and a turn after each message cost a fifth of the throughput."""

_ATTRIBUTE = "_omni_fastpath_delivery"
_patch = state_of("delivery")


class Delivery:
    """The messages of one janus queue. What janus calls runs under the queue's lock, all else on the front end's loop.

    Args:
        queue: The queue. Three of its methods are overridden, those that janus documents for other orders.

    Attributes:
        messages: What arrived.
        pause: How long outputs wait for requests.
    """

    def __init__(self, queue: Any) -> None:
        ordered = Deadlines(HOOKS.observer("deadline"), monotonic).of if _patch.options.by_deadline else _as_arrived
        self.messages = QueuedMessages(queue._queue, ordered, _patch.counters)
        self.pause, self._queue = Pause(), queue
        self._waiter: asyncio.Future[bool] | None = None
        self._left = BATCH  # messages until the next turn of the event loop
        self._put, self._get = queue._put, queue._get
        self._put_back: list[Callable[[], None]] = []  # before `_take` may be called
        for name, function in (("_qsize", self.messages.__len__), ("_get", self._take), ("_put", self._put_and_wake)):
            self._put_back.append(override(queue, name, function))
        setattr(queue, _ATTRIBUTE, self)
        threads.note(threads.FRONT_END)

    @classmethod
    def of(cls, queue: Any) -> Delivery | None:
        """The one of this queue, which the first call makes. None if it is an embedder's and not a janus queue."""
        if not isinstance(queue, janus.Queue):
            return None
        found: Delivery | None = vars(queue).get(_ATTRIBUTE)
        return cls(queue) if found is None else found

    async def arrival(self) -> None:
        """Wait until a message may be taken, or for a while. If it is cancelled, nothing was taken."""
        if ON_THEIR_WAY:
            await self.pause.before_output()
        if self._left == 0:  # upstream's taker suspends only when the queue is empty
            await asyncio.sleep(0)
            self._left = BATCH
        self._left -= 1
        is_empty = self._queue.sync_q.empty
        if is_empty():
            self._waiter = waiter = asyncio.get_running_loop().create_future()
            if is_empty():  # else a message arrived just before
                timer = waiter.get_loop().call_later(LIVENESS_INTERVAL_S, _resolve, waiter, False)
                arrived = await waiter  # if it is cancelled, the timer finds the waiter done
                timer.cancel()
                self._left = BATCH
                _patch.counters["woken"] += arrived
        self.messages.collect()  # and not under the queue's lock, for which the orchestrator would wait

    # ---- Called by janus ----

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
            _patch.fail("waking the front end", error)

    def _take(self) -> Any:
        """Take the message that is due first.

        If the patch is off or has failed, put all messages and the queue's own methods back, and take as janus does.
        The state is read at each take, so nothing is overtaken any more after a failure on another thread.
        """
        try:
            if _patch.state is State.APPLIED:
                return self.messages.take()
        except Exception as error:
            _patch.fail("choosing a message", error)
        self.messages.give_back()
        for put_back in self._put_back:
            put_back()
        vars(self._queue).pop(_ATTRIBUTE, None)
        return self._get()


def _as_arrived(_message: Any) -> tuple[None, float]:
    """Without ``by_deadline``: nothing overtakes a message."""
    return None, inf


def _resolve(waiter: asyncio.Future[bool], arrived: bool) -> None:
    if not waiter.done():
        waiter.set_result(arrived)


# ---- The takers ----


async def wrapped_next(wrapped: AwaitedCall, instance: Any, args: Any, kwargs: Any) -> Any:
    """The next message in either mode, without a thread. None after a while without one, if the orchestrator lives.

    Raises:
        RuntimeError: From upstream, when the orchestrator died.
    """
    delivery = Delivery.of(instance.output_queue)
    if delivery is not None:
        await delivery.arrival()
        if not instance.output_queue.sync_q.empty():
            return instance.output_queue.sync_q.get_nowait()
        if instance.is_alive():
            return None
    return await wrapped(*args, **kwargs)


def step_aside() -> None:
    """Let nothing wait for requests. A queue returns its messages when the next one is taken."""
    ON_THEIR_WAY.clear()

"""The wrappers of ``deadline_order``: queued messages are taken all at once, and delivered by deadline."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from time import monotonic
from typing import Any
from weakref import WeakKeyDictionary

import janus

from omni_fastpath import threads, way_out
from omni_fastpath.hooks import HOOKS
from omni_fastpath.ledger import runtime

from .deadlines import Deadlines
from .queued_messages import QueuedMessages

BATCH = 8
"""Messages that 0.32's front end gets at a time. A message that arrives meanwhile waits for all of them."""

_runtime = runtime("deadline_order")
_counters = _runtime.counters
_guard = _runtime.guard("ordering messages by deadline")

_queued: WeakKeyDictionary[Any, QueuedMessages] = WeakKeyDictionary()
"""By the janus queue from which they are taken."""

way_out.KEPT.append(lambda: sum(len(queued.messages) for queued in list(_queued.values())))


def _queued_of(engine: Any) -> QueuedMessages | None:
    """The queued messages of an engine's front end. None if its queue is not a janus queue but an embedder's own."""
    queue = engine.output_queue
    if not isinstance(queue, janus.Queue):
        return None
    found = _queued.get(queue)
    if found is None and not _runtime.has_failed:
        threads.note(threads.FRONT_END)
        found = _queued[queue] = QueuedMessages(Deadlines(HOOKS.observer("deadline"), monotonic), _counters)
    return found


def _next(queued: QueuedMessages, get: Callable[[], Any], is_empty: Callable[[], bool]) -> Any:
    """Collect the messages from ``get``, and take the next one. None if nothing is queued, or after an error."""
    if not _runtime.has_failed:
        with _guard:
            queued.collect(get, is_empty)
            _counters["messages"] += bool(queued.messages)
            _counters["most_queued"] = max(_counters["most_queued"], len(queued.messages))
            return queued.take()
    return None


def _next_of(engine: Any, queued: QueuedMessages | None) -> Any:
    """The same for an engine whose messages are taken one by one."""
    if queued is None:
        return None
    queue = engine.output_queue.sync_q
    return _next(queued, queue.get_nowait, queue.empty)


async def wrapped_try_get_output_async(
    wrapped: Callable[[], Awaitable[Any]], instance: Any, _args: Any, _kwargs: Any
) -> Any:
    """The next message, or upstream's result if nothing is queued.

    Raises:
        RuntimeError: From upstream, when the orchestrator died.
    """
    message = _next_of(instance, _queued_of(instance))
    return await wrapped() if message is None else message


async def wrapped_get_output_blocking_async(
    wrapped: Callable[..., Awaitable[Any]], instance: Any, args: Any, kwargs: Any
) -> Any:
    """Do the same in event-driven mode. If nothing is queued, upstream waits for a single message.

    Raises:
        RuntimeError: From upstream, when the orchestrator died.
    """
    queued = _queued_of(instance)
    message = _next_of(instance, queued)
    if message is None:
        message = await wrapped(*args, **kwargs)
        if queued is not None and message is not None:
            queued.deadlines.of(message)
    return message


def wrapped_drain_output_messages(
    wrapped: Callable[..., list[Any]], instance: Any, args: Any, kwargs: Any
) -> list[Any]:
    """A batch of the next messages, or upstream's result if nothing is queued."""
    queued = _queued_of(instance)
    found: list[Any] = []
    while queued is not None and len(found) < BATCH:
        message = _next(queued, lambda: wrapped(1)[0], instance.output_queue.sync_q.empty)
        if message is None:
            break
        found.append(message)
    return found or wrapped(*args, **kwargs)


def taken_off() -> None:
    """Return the queued messages to upstream's queues in order of arrival, in front of what was put there since."""
    for queue, queued in list(_queued.items()):
        queue._queue.extendleft(reversed(queued.messages.values()))
        queued.messages.clear()
    _queued.clear()

"""The wrappers of ``delivery``: upstream's drains of the orchestrator's messages, on the front end's event loop."""

from __future__ import annotations

import inspect
from typing import Any

from omni_fastpath.connection import follow
from omni_fastpath.guard import AwaitedCall, Call, raised_by_us
from omni_fastpath.ledger import runtime

from .delivery import DELIVERIES, Delivery
from .incoming import ON_THEIR_WAY, begin

_runtime = runtime("delivery")
follow(_runtime, begin)


async def wrapped_try_get_output_async(wrapped: AwaitedCall, instance: Any, _args: Any, _kwargs: Any) -> Any:
    """The next message, or None after a while without one.

    Raises:
        RuntimeError: From upstream, when the orchestrator died.
    """
    delivery = Delivery.of(instance.output_queue, _runtime, wakes=True)
    return await (wrapped() if delivery is None else delivery.next(wrapped))


async def wrapped_get_output_blocking_async(wrapped: AwaitedCall, instance: Any, args: Any, kwargs: Any) -> Any:
    """The same in event-driven mode, without upstream's thread. None may come before upstream's timeout.

    Raises:
        RuntimeError: From upstream, when the orchestrator died.
    """
    delivery = Delivery.of(instance.output_queue, _runtime, wakes=True)
    if delivery is None:
        return await wrapped(*args, **kwargs)

    async def upstreams() -> Any:
        try:
            # Upstream's function of the other mode looks without a thread. Nothing calls it in this mode.
            return await inspect.unwrap(type(instance).try_get_output_async)(instance)
        except Exception as error:
            if raised_by_us(error):
                raise
            # The queue is closed, or the orchestrator died. Upstream reports it as it does in this mode.
            return await wrapped(*args, **kwargs)

    return await delivery.next(upstreams)


async def wrapped_get_outputs_async(wrapped: AwaitedCall, instance: Any, args: Any, kwargs: Any) -> Any:
    """0.32's drain, which wakes by itself, after a pause for requests."""
    delivery = Delivery.of(instance.output_queue, _runtime, wakes=False)
    if delivery is not None and ON_THEIR_WAY:
        await delivery.pause.before_output()
    return await wrapped(*args, **kwargs)


def wrapped_drain_output_messages(wrapped: Call, instance: Any, args: Any, kwargs: Any) -> list[Any]:
    """A batch of the next messages for 0.32's drain, or upstream's result if nothing is queued."""
    delivery = Delivery.of(instance.output_queue, _runtime, wakes=False)
    count, one = args[0] if args else kwargs["max_messages"], lambda: wrapped.function(1)[0]
    # One statement, so that no line is between messages that were taken and the caller.
    return (delivery.take(count, one) if delivery is not None else []) or wrapped(*args, **kwargs)


def taken_off() -> None:
    """Give the messages back, and let nothing wait for requests."""
    for delivery in list(DELIVERIES):
        delivery.leave()
    DELIVERIES.clear()
    ON_THEIR_WAY.clear()

"""The wrapper of ``delivery``."""

from __future__ import annotations

import asyncio
from typing import Any

from omni_fastpath.guard import AwaitedCall
from omni_fastpath.ledger import state_of

TICK_S = 0.001
"""Upstream's interval in poll mode."""

_counters = state_of("delivery").counters


async def wrapped_take(wrapped: AwaitedCall, engine: Any, args: Any, kwargs: Any) -> Any:
    """The next message, which is taken in the line that returns it. None after a tick, if the orchestrator lives.

    Raises:
        RuntimeError: From upstream, when the orchestrator died.
    """
    queue = engine.output_queue.sync_q
    if queue.empty():
        await asyncio.sleep(TICK_S)
    if not queue.empty():
        _counters["messages"] += 1
        return queue.get_nowait()
    return None if engine.is_alive() else await wrapped(*args, **kwargs)

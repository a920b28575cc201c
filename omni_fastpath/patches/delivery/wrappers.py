"""The wrapper of ``delivery``."""

from __future__ import annotations

import asyncio
import time
from typing import Any

from omni_fastpath.guard import AwaitedCall
from omni_fastpath.ledger import state_of

TICK_S = 0.001
"""Upstream's interval in poll mode."""
TIMEOUT_S = 1.0
"""Upstream's default."""

_counters = state_of("delivery").counters


async def wrapped_take(wrapped: AwaitedCall, engine: Any, args: Any, kwargs: Any) -> Any:
    """The next message, which is taken in the line that returns it. None after ``timeout``, if the orchestrator lives.

    Raises:
        RuntimeError: From upstream, when the orchestrator died.
    """
    queue = engine.output_queue.sync_q
    until = time.monotonic() + (args[0] if args else kwargs.get("timeout", TIMEOUT_S))
    while queue.empty() and engine.is_alive() and time.monotonic() < until:  # noqa: ASYNC110 - that needs a thread
        await asyncio.sleep(TICK_S)
    if not queue.empty():
        _counters["messages"] += 1
        return queue.get_nowait()
    return None if engine.is_alive() else await wrapped(*args, **kwargs)

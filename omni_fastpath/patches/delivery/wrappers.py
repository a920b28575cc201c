"""The wrapper of ``delivery``."""

from __future__ import annotations

from typing import Any

from omni_fastpath.guard import AwaitedCall
from omni_fastpath.ledger import state_of

_counters = state_of("delivery").counters


async def wrapped_take(wrapped: AwaitedCall, engine: Any, args: Any, kwargs: Any) -> Any:
    """A queued message, which is taken in the line that returns it. If there is none, upstream waits for one."""
    queue = engine.output_queue.sync_q
    if queue.empty():
        return await wrapped(*args, **kwargs)
    _counters["messages"] += 1
    return queue.get_nowait()

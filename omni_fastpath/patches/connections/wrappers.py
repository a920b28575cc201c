"""The wrappers of ``connections``. What follows a connection is in ``omni_fastpath.connection``."""

from __future__ import annotations

from typing import Any

from omni_fastpath.connection import Connection, current, lost
from omni_fastpath.guard import AwaitedCall
from omni_fastpath.ledger import state_of

_patch = state_of("connections")
_counters = _patch.counters


async def wrapped_app(wrapped: AwaitedCall, app: Any, args: Any, kwargs: Any) -> None:
    """Run the application. If it is vLLM-Omni's, the connection is followed."""
    if not hasattr(getattr(app, "state", None), "openai_serving_models"):  # another one in the same process
        await wrapped(*args, **kwargs)
        return
    _counters["followed"] += 1
    connection = Connection(app, *args, **kwargs)
    try:
        await wrapped(connection.scope, connection.receive, connection.send)
    finally:
        connection.end()


async def wrapped_add_request_async(wrapped: AwaitedCall, _instance: Any, args: Any, kwargs: Any) -> None:
    """Hand a request, which upstream has just recorded in ``request_states``, to the orchestrator."""
    connection = current()
    if connection is not None:
        connection.submitting(args[0] if args else kwargs["request_id"])
    await wrapped(*args, **kwargs)


def step_aside() -> None:
    """After a failure let the patches that require this one step aside. They are uninstalled before this one."""
    if _patch.has_failed:
        lost(_patch.patch.name, RuntimeError(_patch.reason))

"""The slots of ``requests_first``: where a request's way in begins and ends, and the drains that wait for it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextvars import ContextVar
from typing import Any

from omni_fastpath import way_in
from omni_fastpath.ledger import runtime

from .hold import Hold

ROUTES = (
    "/completions",
    "/completions/batch",
    "/responses",
    "/messages",
    "/audio/speech",
    "/audio/speech/batch",
    "/audio/generate",
    "/audio/transcriptions",
    "/audio/translations",
)
"""Ends of the paths whose requests count. What waits long for its first output anyway, images and videos, does not."""

_LONGEST_WAY_S = 0.25
"""After which a request counts no more: it waits for a client that sends slowly, a file from elsewhere or a paused
engine, and not for this event loop."""

_runtime = runtime("requests_first")
_counters = _runtime.counters
_ending = _runtime.guard("ending a request's way in")

class Journey:
    """One request's way in.

    Attributes:
        submitted: Id under which the orchestrator has, or had, something of it.
    """

    __slots__ = ("submitted",)

    def __init__(self) -> None:
        self.submitted = ""

    def end(self) -> None:
        """It counts no more, here and for the orchestrator."""
        with _ending:
            _on_their_way.discard(self)
            way_in.SUBMITTED.discard(self.submitted)


_on_their_way: set[Journey] = set()
"""Those that no orchestrator has anything of yet, of this process's event loops."""

_journey: ContextVar[Journey | None] = ContextVar("requests_first", default=None)
"""The one that the running task works for, or one that has ended: uvicorn may start a connection's next request in the
context of the last one."""

_hold = Hold(_on_their_way, _counters)


async def wrapped_app(wrapped: Callable[..., Awaitable[None]], _instance: Any, args: Any, kwargs: Any) -> None:
    """Upstream's application; a request for generation is on its way from here on."""
    scope = args[0] if args else kwargs["scope"]
    counts = scope["type"] == "http" and scope["method"] == "POST" and scope["path"].endswith(ROUTES)
    if not counts or _journey.get() in _on_their_way:  # an application inside of another has the request already
        return await wrapped(*args, **kwargs)
    journey = Journey()
    timer = asyncio.get_running_loop().call_later(_LONGEST_WAY_S, journey.end)
    _journey.set(journey)
    _counters["requests"] += 1
    _on_their_way.add(journey)
    try:
        await wrapped(*args, **kwargs)
    finally:
        journey.end()
        timer.cancel()


async def wrapped_add_request_async(
    wrapped: Callable[..., Awaitable[None]], _instance: Any, args: Any, kwargs: Any
) -> None:
    """Upstream's submission to the orchestrator, with which the way in of the front end ends."""
    _counters["submitted"] += 1
    journey = _journey.get()
    if journey is None or journey not in _on_their_way:  # it counts no more, or this is not its first submission
        return await wrapped(*args, **kwargs)
    journey.submitted = args[0] if args else kwargs["request_id"]
    way_in.SUBMITTED.add(journey.submitted)
    try:
        await wrapped(*args, **kwargs)
    except BaseException:
        journey.end()
        raise
    finally:
        _on_their_way.discard(journey)


async def wrapped_handle_add_request(
    wrapped: Callable[..., Awaitable[None]], _instance: Any, args: Any, kwargs: Any
) -> None:
    """Upstream's handling in the orchestrator's thread, with which the way in ends."""
    try:
        await wrapped(*args, **kwargs)
    finally:
        way_in.SUBMITTED.discard((args[0] if args else kwargs["msg"]).request_id)


async def wrapped_drain(wrapped: Callable[..., Awaitable[Any]], _instance: Any, args: Any, kwargs: Any) -> Any:
    """A drain of the orchestrator's outputs, after a wait for requests; who is cancelled in it loses none."""
    await _hold.before_output()
    return await wrapped(*args, **kwargs)


def taken_off() -> None:
    """No request is on its way any more, so that no output waits."""
    _on_their_way.clear()
    way_in.SUBMITTED.clear()

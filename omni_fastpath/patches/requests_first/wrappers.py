"""The wrappers of ``requests_first``: where a request's way in begins and ends, and the drains that wait for it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextvars import ContextVar
from typing import Any

from omni_fastpath import way_in
from omni_fastpath.ledger import AwaitedCall, runtime

from .pause import Pause

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
"""Ends of the paths whose requests count. Images and videos do not, because their first output takes long anyway."""

_LONGEST_WAY_S = 0.25
"""A request that takes longer than this stops counting, because it waits for a remote file or a paused engine and not
for this event loop."""

_runtime = runtime("requests_first")
_counters = _runtime.counters
_guard = _runtime.guard("following a request's way in")


class Journey:
    """One request's way in.

    Attributes:
        submitted: The id under which it was handed to the orchestrator, or empty.
    """

    __slots__ = ("_timer", "submitted")

    def __init__(self) -> None:
        self.submitted = ""
        self._timer: asyncio.TimerHandle | None = None

    def from_body(self, receive: Callable[[], Awaitable[Any]]) -> Callable[[], Awaitable[Any]]:
        """A *receive* that counts the request from the end of its body on."""

        async def received() -> Any:
            message = await receive()
            with _guard:
                if message["type"] == "http.request" and not message.get("more_body") and self._timer is None:
                    self._timer = asyncio.get_running_loop().call_later(_LONGEST_WAY_S, self.end)
                    _counters["requests"] += 1
                    _on_their_way.add(self)
            return message

        return received

    def end(self) -> None:
        """Stop counting it, here and in the orchestrator."""
        with _guard:
            if self._timer is not None:
                self._timer.cancel()
            _on_their_way.discard(self)
            way_in.NOT_AT_A_STAGE.discard(self.submitted)


_on_their_way: set[Journey] = set()
"""The requests that have not been handed to an orchestrator yet."""

_journey: ContextVar[Journey | None] = ContextVar("requests_first", default=None)
"""The journey of the running task, or one that has ended, because uvicorn may start the next request of a connection in
the context of the last one."""

_pause = Pause(_on_their_way, _counters)


async def wrapped_app(wrapped: AwaitedCall, app: Any, args: Any, kwargs: Any) -> Any:
    """Run the application. A request for generation is on its way once its body is complete."""
    scope, receive, send = way_in.connection(*args, **kwargs)
    is_post = scope["type"] == "http" and scope["method"] == "POST"
    if not (is_post and scope["path"].endswith(ROUTES) and way_in.is_api_server(app)):
        return await wrapped(*args, **kwargs)
    journey = Journey()
    _journey.set(journey)
    try:
        await wrapped(scope, journey.from_body(receive), send)
    finally:
        journey.end()


async def wrapped_add_request_async(wrapped: AwaitedCall, _instance: Any, args: Any, kwargs: Any) -> Any:
    """Submit a request to the orchestrator, which ends the front end's part of the way in."""
    _counters["submitted"] += 1
    journey = _journey.get()
    if journey is None or journey not in _on_their_way:  # it has stopped counting, or was submitted before
        return await wrapped(*args, **kwargs)
    journey.submitted = args[0] if args else kwargs["request_id"]
    way_in.NOT_AT_A_STAGE.add(journey.submitted)
    try:
        await wrapped(*args, **kwargs)
    except BaseException:
        journey.end()
        raise
    finally:
        _on_their_way.discard(journey)


async def wrapped_handle_add_request(wrapped: AwaitedCall, _instance: Any, args: Any, kwargs: Any) -> None:
    """Handle a request in the orchestrator's thread, which ends the way in."""
    try:
        await wrapped(*args, **kwargs)
    finally:
        way_in.NOT_AT_A_STAGE.discard((args[0] if args else kwargs["msg"]).request_id)


async def wrapped_drain(wrapped: AwaitedCall, _instance: Any, args: Any, kwargs: Any) -> Any:
    """Drain the orchestrator's outputs after a pause for requests. If cancelled in the pause, it has taken nothing."""
    await _pause.before_output()
    return await wrapped(*args, **kwargs)


def taken_off() -> None:
    """Stop counting all requests, so that no output waits."""
    _on_their_way.clear()
    way_in.NOT_AT_A_STAGE.clear()

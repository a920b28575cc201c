"""The wrappers of ``admission_limit``: where a request is checked, reaches the engine and ends, and the refusals."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextvars import ContextVar
from typing import Any

from vllm.exceptions import QueueOverflowError

from omni_fastpath import way_in
from omni_fastpath.declare import State
from omni_fastpath.ledger import AwaitedCall, Call, runtime, warn_once

from .places import Places, Ticket

_runtime = runtime("admission_limit")
_places = Places(_runtime.counters)
_answering, _freeing = _runtime.guard("adding Retry-After"), _runtime.guard("freeing places")

_ticket: ContextVar[Ticket | None] = ContextVar("admission_limit", default=None)
"""The ticket of the running task's connection, or of one that has ended, because uvicorn may start the next request of
a connection in the context of the last one. None for a request that did not arrive over HTTP, which is admitted."""


def _admits(wanted: int) -> bool:
    """Take places for the connection of the running task. False if there are too few."""
    ticket = _ticket.get()
    return ticket is None or _places.take(ticket, wanted)


# ---- The limit ----


def _open(state: Any) -> None:
    """Apply the limit of the application that is served, from its state, once.

    Whichever copy of upstream's module made the application: the module may run as ``__main__``, or a program may have
    its functions. The first call is ASGI's ``lifespan``, before any request.
    """
    if _places.of is state:
        return
    _places.of, args = state, getattr(state, "args", None)
    limit, servers = getattr(args, "max_num_queued_reqs", None), getattr(state, "api_server_count", 1)
    if getattr(args, "max_num_queued_tokens", None) is not None:
        warn_once("--max-num-queued-tokens has no effect, because vLLM-Omni accepts it but does not count tokens")
    if limit is None:
        _runtime.report(State.NOT_APPLICABLE, "the server was started without --max-num-queued-reqs")
        return
    if servers > 1:
        warn_once(
            f"--max-num-queued-reqs {limit}: each of the {servers} API servers counts its own requests, "
            f"so that together they admit up to {servers * limit}"
        )
    _places.open(limit, state.engine_client.request_states)


# ---- A connection ----


async def wrapped_app(wrapped: AwaitedCall, app: Any, args: Any, kwargs: Any) -> Any:
    """Run the application. When its client has left, and at its end, the places of the connection are freed."""
    scope, receive, send = way_in.connection(*args, **kwargs)
    is_socket = scope["type"] == "websocket"
    counts = is_socket or (scope["type"] == "http" and scope["method"] == "POST")
    if is_upstreams := way_in.is_api_server(app):
        _open(app.state)
    if _places.limit is None or not counts or not is_upstreams:
        return await wrapped(*args, **kwargs)
    ticket = Ticket(is_socket=is_socket)
    _ticket.set(ticket)
    try:
        await _serve(wrapped, ticket, scope, receive, send)
    finally:
        _places.give_back(ticket)


async def _serve(app: Callable[..., Awaitable[None]], ticket: Ticket, scope: Any, receive: Any, send: Any) -> None:
    async def heard() -> Any:
        message = await receive()
        with _freeing:
            if message["type"].endswith(".disconnect"):  # upstream's own end may be many turns of the loop away
                _places.give_back(ticket)
        return message

    async def answer(message: Any) -> None:
        with _answering:
            after_s = ticket.retry_after_s
            if after_s and message["type"] == "http.response.start" and message["status"] == 503:
                header = (b"retry-after", b"%d" % after_s)
                message = {**message, "headers": [*message.get("headers", ()), header]}
        await send(message)

    await app(scope, heard, answer)


async def wrapped_add_request_async(wrapped: AwaitedCall, _instance: Any, args: Any, kwargs: Any) -> Any:
    """Submit a request that upstream has just recorded in ``request_states`` to the orchestrator."""
    ticket = _ticket.get()
    if ticket is not None:
        _places.hand_over(ticket, args[0] if args else kwargs["request_id"])
    await wrapped(*args, **kwargs)


# ---- The checks ----


def wrapped_check_admission(wrapped: Call, _instance: Any, args: Any, kwargs: Any) -> None:
    """Check a request for completions, responses, messages and transcriptions. Upstream's method is empty."""
    if not _admits(args[0] if args else kwargs.get("n", 1)):
        raise wrapped.meant(QueueOverflowError())
    wrapped(*args, **kwargs)


def _checked(places: Callable[[Any], int]) -> Callable[..., Awaitable[Any]]:
    """A wrapper of a handler whose first argument is a request that takes *places* places."""

    async def wrapper(wrapped: AwaitedCall, instance: Any, args: Any, kwargs: Any) -> Any:
        if not _admits(places(args[0] if args else next(iter(kwargs.values())))):
            return instance.create_error_response(QueueOverflowError())
        return await wrapped(*args, **kwargs)

    return wrapper


wrapped_chat = _checked(lambda request: request.n or 1)
wrapped_chat_batch = _checked(lambda request: len(request.messages))
wrapped_speech = _checked(lambda _request: 1)
wrapped_speech_batch = _checked(lambda request: len(request.items))


async def wrapped_sentence(wrapped: AwaitedCall, _instance: Any, args: Any, kwargs: Any) -> Any:
    """Check a sentence over a web socket before it is prepared. An HTTP request was checked earlier."""
    if not _admits(1):
        raise wrapped.meant(QueueOverflowError())
    return await wrapped(*args, **kwargs)


def taken_off() -> None:
    """Admit every request from now on."""
    _places.of = None
    _places.open(None)

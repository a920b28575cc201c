"""The slots of ``admission_limit``: where a request asks, hands its place over and gives it back, and the refusals."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextvars import ContextVar
from typing import Any

from starlette.websockets import WebSocketDisconnect
from vllm.exceptions import QueueOverflowError

from omni_fastpath.declare import State
from omni_fastpath.ledger import Call, runtime, warn_once

from .places import Places, Ticket

_RETRY_AFTER = (b"retry-after", b"1")
"""Seconds: a place is free when any of the requests under way has ended."""

_TRY_AGAIN_LATER = 1013
"""Why a web socket is closed, of IANA's list."""

_runtime = runtime("admission_limit")
_places = Places(_runtime.counters)
_answering = _runtime.guard("telling when to come back")

_ticket: ContextVar[Ticket | None] = ContextVar("admission_limit", default=None)
"""Of the connection that the running task works for, or of one that has ended: uvicorn may start a connection's next
request in the context of the last one. None for what nobody asked for over HTTP, which is let through."""


def _admits(wanted: int) -> bool:
    """Take so many places for the running task's connection; whether there are as many."""
    ticket = _ticket.get()
    return ticket is None or _places.take(ticket, wanted)


# ---- The limit ----


async def wrapped_init_app_state(
    wrapped: Callable[..., Awaitable[None]], _instance: Any, args: Any, kwargs: Any
) -> None:
    """Upstream's, once in each API server, when its engine is there: from here on the limit counts."""
    await wrapped(*args, **kwargs)
    _open(*args, **kwargs)


def _open(engine_client: Any, state: Any, args: Any) -> None:
    limit, servers = getattr(args, "max_num_queued_reqs", None), getattr(state, "api_server_count", 1)
    if getattr(args, "max_num_queued_tokens", None) is not None:
        warn_once("--max-num-queued-tokens limits nothing: vLLM-Omni takes it, and nobody counts tokens")
    if limit is None:
        _runtime.report(State.NOT_APPLICABLE, "the server was started without --max-num-queued-reqs")
        return
    if servers > 1:
        warn_once(
            f"--max-num-queued-reqs {limit}: each of the {servers} API servers counts for itself, "
            f"together they admit up to {servers * limit}"
        )
    _places.open(limit, engine_client.request_states)


# ---- A connection ----


async def wrapped_app(wrapped: Callable[..., Awaitable[None]], _instance: Any, args: Any, kwargs: Any) -> None:
    """Upstream's application; what a connection has at its end is free."""
    scope = args[0] if args else kwargs["scope"]
    is_socket = scope["type"] == "websocket"
    if _places.limit is None or not (is_socket or (scope["type"] == "http" and scope["method"] == "POST")):
        return await wrapped(*args, **kwargs)
    ticket = Ticket(is_socket=is_socket)
    _ticket.set(ticket)
    try:
        await _serve(wrapped, ticket, *args, **kwargs)
    finally:
        _places.give_back(ticket)


async def _serve(app: Callable[..., Awaitable[None]], ticket: Ticket, scope: Any, receive: Any, send: Any) -> None:
    async def answer(message: Any) -> None:
        with _answering:
            if ticket.may_come_back and message["type"] == "http.response.start" and message["status"] == 503:
                message = {**message, "headers": [*message.get("headers", ()), _RETRY_AFTER]}
        await send(message)

    await app(scope, receive, answer)


async def wrapped_add_request_async(
    wrapped: Callable[..., Awaitable[None]], _instance: Any, args: Any, kwargs: Any
) -> None:
    """Upstream's submission to the orchestrator, of a request that it has entered in its books in the same step."""
    ticket = _ticket.get()
    if ticket is not None:
        _places.hand_over(ticket, args[0] if args else kwargs["request_id"])
    await wrapped(*args, **kwargs)


# ---- Who asks ----


def wrapped_check_admission(wrapped: Call, _instance: Any, args: Any, kwargs: Any) -> None:
    """Upstream's empty question, which completions, responses, messages and transcriptions ask."""
    if not _admits(args[0] if args else kwargs.get("n", 1)):
        raise wrapped.meant(QueueOverflowError())
    wrapped(*args, **kwargs)


def _asking(places: Callable[[Any], int]) -> Callable[..., Awaitable[Any]]:
    """A wrapper of a handler whose first argument is a request for so many *places*."""

    async def wrapper(wrapped: Callable[..., Awaitable[Any]], instance: Any, args: Any, kwargs: Any) -> Any:
        if not _admits(places(args[0] if args else next(iter(kwargs.values())))):
            return instance.create_error_response(QueueOverflowError())
        return await wrapped(*args, **kwargs)

    return wrapper


wrapped_chat = _asking(lambda request: request.n or 1)
wrapped_chat_batch = _asking(lambda request: len(request.messages))
wrapped_speech = _asking(lambda _request: 1)
wrapped_speech_batch = _asking(lambda request: len(request.items))


async def wrapped_sentence(wrapped: Call, _instance: Any, args: Any, kwargs: Any) -> Any:
    """Upstream's preparation of speech: over HTTP it has been asked; for a sentence over a web socket it is here."""
    if not _admits(1):
        raise wrapped.meant(QueueOverflowError())
    return await wrapped(*args, **kwargs)


async def wrapped_start_generation(
    wrapped: Callable[..., Awaitable[None]], instance: Any, args: Any, kwargs: Any
) -> None:
    """Upstream's beginning of an utterance on a realtime connection, which a refusal closes."""
    running = instance.generation_task
    if (running is None or running.done()) and not _admits(1):  # where one is running upstream ignores it
        await instance.send_error(str(QueueOverflowError()), "service_unavailable")
        await instance.websocket.close(_TRY_AGAIN_LATER)
        instance.websocket.receive_text = _closed
    else:
        await wrapped(*args, **kwargs)


async def _closed() -> str:
    """What upstream's loop finds next on a connection that we closed; without it, it logs a traceback.

    Raises:
        WebSocketDisconnect: At once.
    """
    raise WebSocketDisconnect(_TRY_AGAIN_LATER)


def taken_off() -> None:
    """Nobody is asked any more."""
    _places.open(None)

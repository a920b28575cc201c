"""The wrappers of ``admission_limit``: where a request is checked, reaches the engine and ends, and the refusals."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from vllm.exceptions import QueueOverflowError

from omni_fastpath.connection import Connection, Follower, follow, follower
from omni_fastpath.declare import State
from omni_fastpath.guard import AwaitedCall, Call
from omni_fastpath.ledger import state_of, warn_once

from .places import Places, Ticket

_patch = state_of("admission_limit")
_places = Places(_patch.counters)
_answering, _freeing = _patch.guard("adding Retry-After"), _patch.guard("freeing places")


def _admits(wanted: int) -> bool:
    """Take places for the connection of the running task. False if there are too few."""
    client = follower(_patch.patch.name)
    return client is None or _places.take(client.ticket, wanted)


# ---- The limit ----


def _open(state: Any) -> None:
    """Apply the limit of the application that is served, from its state, once.

    Whichever copy of upstream's module made the application: the module may run as ``__main__``, or a program may have
    its functions. The first call is ASGI's ``lifespan``, before any request.
    """
    if _places.of is state:
        return
    _places.of, args = state, getattr(state, "args", None)
    limit = getattr(args, "max_num_queued_reqs", None)
    if getattr(args, "max_num_queued_tokens", None) is not None:
        warn_once("--max-num-queued-tokens has no effect, because vLLM-Omni accepts it but does not count tokens")
    if limit is None:
        _patch.report(State.NOT_APPLICABLE, "the server was started without --max-num-queued-reqs")
    else:
        _patch.report(State.APPLIED, "")
    _places.open(limit, () if limit is None else state.engine_client.request_states)


# ---- A connection ----


class Client(Follower):
    """A connection with a ticket. When its client has left, and at its end, its places are freed."""

    def __init__(self, connection: Connection) -> None:
        self.ticket = Ticket(is_socket=connection.scope["type"] == "websocket")
        self._receive, self._send = connection.receive, connection.send
        connection.receive, connection.send = self._heard, self._answer

    async def _heard(self) -> Any:
        message = await self._receive()
        with _freeing:
            if message["type"].endswith(".disconnect"):  # upstream's own end may be many turns of the loop away
                _places.give_back(self.ticket)
        return message

    async def _answer(self, message: Any) -> None:
        with _answering:
            after_s = self.ticket.retry_after_s
            if after_s and message["type"] == "http.response.start" and message["status"] == 503:
                header = (b"retry-after", b"%d" % after_s)
                message = {**message, "headers": [*message.get("headers", ()), header]}
        await self._send(message)

    def submitting(self, request_id: str) -> None:
        """The engine counts a request now."""
        _places.hand_over(self.ticket, request_id)

    def ended(self) -> None:
        """Free its places."""
        _places.give_back(self.ticket)


def _begin(connection: Connection) -> Client | None:
    _open(connection.app.state)
    counts = connection.is_post or connection.scope["type"] == "websocket"
    return Client(connection) if counts and _places.limit is not None else None


follow(_patch, _begin)


# ---- The checks ----


def wrapped_check_admission(wrapped: Call, _instance: Any, args: Any, kwargs: Any) -> None:
    """Check a request for completions, responses, messages and transcriptions. Upstream's method is empty."""
    if not _admits(args[0] if args else kwargs.get("n", 1)):
        raise wrapped.on_purpose(QueueOverflowError())
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
        raise wrapped.on_purpose(QueueOverflowError())
    return await wrapped(*args, **kwargs)


def step_aside() -> None:
    """Admit every request from now on."""
    _places.of = None
    _places.open(None)

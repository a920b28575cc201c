"""A call of vLLM-Omni's application, as the patches see it that follow requests.

One patch wraps where a request enters the application and where it is handed to the orchestrator. It calls what other
patches registered with ``follow``, and those wrap neither. A patch that registers requires that one.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator
from contextvars import ContextVar
from typing import Any

from omni_fastpath.declare import State
from omni_fastpath.ledger import PatchState

_WHAT = "following a connection"


class Follower:
    """What a patch does with one connection. An exception of a method makes that patch step aside, and nothing else."""

    def submitting(self, request_id: str) -> None:
        """Called when a request of the connection is about to be handed to the orchestrator."""

    def ended(self) -> None:
        """Called once, when the application has returned, raised or been cancelled."""


class Connection:
    """One call of the application: an HTTP request, a web socket, or its lifespan.

    Attributes:
        app: The application.
        scope: Its ASGI scope.
        receive: What the application gets. A follower may replace it, as it may ``send``.
        send: The same.
        servers: The ``receive`` of the server.
    """

    __slots__ = ("_followers", "app", "receive", "scope", "send", "servers")

    def __init__(
        self, app: Any, scope: Any, receive: Callable[[], Awaitable[Any]], send: Callable[[Any], Awaitable[None]]
    ) -> None:
        self.app, self.scope, self.receive, self.send, self.servers = app, scope, receive, send, receive
        self._followers: dict[str, tuple[PatchState, Follower]] = {}
        for entry, begin in _serving():
            with entry.guard(_WHAT):
                if (follower := begin(self)) is not None:
                    self._followers[entry.patch.name] = entry, follower
        _current.set(self)

    @property
    def is_post(self) -> bool:
        """Whether it is an HTTP request with a body."""
        return bool(self.scope["type"] == "http" and self.scope["method"] == "POST")

    def submitting(self, request_id: str) -> None:
        """Tell the followers that a request is about to be handed to the orchestrator."""
        for entry, follower in self._followers.values():
            with entry.guard(_WHAT):
                follower.submitting(request_id)

    def end(self) -> None:
        """Tell the followers that the application has ended."""
        for entry, follower in self._followers.values():
            with entry.guard(_WHAT):
                follower.ended()

    def follower(self, name: str) -> Any:
        """What a patch does with this connection, or None."""
        return self._followers.get(name, (None, None))[1]


Begin = Callable[[Connection], Follower | None]

_follows: dict[str, tuple[PatchState, Begin]] = {}
_current: ContextVar[Connection | None] = ContextVar("omni_fastpath_connection", default=None)


def follow(entry: PatchState, begin: Begin) -> None:
    """Call *begin* at the start of each connection, while the patch serves. None means that it does not follow it."""
    _follows[entry.patch.name] = entry, begin


def current() -> Connection | None:
    """The connection of the running task. None for a request that did not arrive over HTTP.

    It may have ended, because uvicorn may start the next request of a connection in the context of the last one.
    """
    return _current.get()


def follower(name: str) -> Any:
    """What a patch does with the connection of the running task, or None."""
    connection = _current.get()
    return None if connection is None else connection.follower(name)


def _serving() -> Iterator[tuple[PatchState, Begin]]:
    """The registered patches that are installed. One that found no use in this server may find one in the next."""
    return (each for each in _follows.values() if each[0].state in (State.APPLIED, State.NOT_APPLICABLE))


def lost(name: str, error: Exception) -> None:
    """Let the patches that require *name*, which tells them of each connection, step aside.

    Nothing tells them any more when a connection ends.
    """
    for entry, _ in list(_serving()):
        if name in entry.patch.requires:
            entry.fail(_WHAT, error)

"""Gives a client's reader its next message, at once if one is in the socket, otherwise as soon as one arrives.

vLLM's reader awaits ``recv_multipart`` of its socket for each message. For each call ``zmq.asyncio`` makes a future, a
callback and several checks of the socket's state. The socket gets a ``recv_multipart`` that does less.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import zmq.asyncio
from vllm.v1.engine.core_client import DPAsyncMPClient
from zmq.constants import EVENTS, FD, NOBLOCK, POLLIN
from zmq.error import ZMQError
from zmq.sugar.socket import Socket

from omni_fastpath.declare import State
from omni_fastpath.ledger import runtime

_runtime = runtime("lean_processing")
_counters = _runtime.counters
_leaving = _runtime.guard("leaving a socket")

Frames = list[Any]
"""The parts of one message, ``zmq.Frame`` each."""

IN_ONE_GO = 64
"""Messages that a reader takes before the rest of the event loop gets a turn. Upstream's has no limit."""


class _Arrival(asyncio.Future[None]):
    """Is done when something has changed at the socket. Upstream cancels it when it closes the socket."""

    def __init__(self, loop: asyncio.AbstractEventLoop, leave: Callable[[], None]) -> None:
        super().__init__(loop=loop)
        self._leave = leave

    def cancel(self, msg: Any = None) -> bool:
        """Cancel it, and release the socket's descriptor before another socket can get the same one."""
        self._leave()
        return super().cancel(msg)


class SocketReader:
    """Takes the messages of one socket for upstream's reader, on the reader's event loop.

    The descriptor of a ZMQ socket reports once that something has changed, and reading the socket's events resets that.
    So the events are read before each wait and after it. A message is taken by the statement that returns it, so
    neither an exception nor a cancellation can lose one.

    Args:
        socket: Upstream's ``zmq.asyncio.Socket``.
    """

    __slots__ = ("_arrival", "_descriptor", "_get", "_is_upstreams", "_left", "_loop", "_take", "_upstreams")

    def __init__(self, socket: Any) -> None:
        self._upstreams: Callable[..., Awaitable[Frames]] = socket.recv_multipart
        shadow: Any = Socket.shadow(socket)
        self._get: Callable[[int], int] = shadow.get
        self._take: Callable[..., Frames] = shadow.recv_multipart
        self._descriptor = self._get(FD)
        self._left = 0
        self._loop: asyncio.AbstractEventLoop | None = None
        self._arrival: _Arrival | None = None
        self._is_upstreams = False

    async def recv_multipart(self, flags: int = 0, copy: bool = True, track: bool = False) -> Frames:
        """The next message, as from ``zmq.asyncio``. Calls with other arguments than the reader's are left to pyzmq."""
        try:
            while not (self._is_upstreams or flags or copy or track or _runtime.has_failed):
                if self._left and self._get(EVENTS) & POLLIN:
                    self._left -= 1
                    _counters["messages"] += 1
                    return self._take(NOBLOCK, False)
                await self._next_arrival()
        except ZMQError:  # pyzmq reports the problem of the socket
            pass
        except Exception as error:
            _runtime.fail("waiting for a message", error)
        self._is_upstreams = True  # from here on pyzmq reads, with its own callback at the descriptor
        self.leave()
        return await self._upstreams(flags, copy, track)

    def leave(self, _task: object = None) -> None:
        """Remove the patch's callback from the socket's descriptor."""
        with _leaving:
            loop, self._loop = self._loop, None
            if loop is not None:
                loop.remove_reader(self._descriptor)

    def _next_arrival(self) -> _Arrival:
        loop = self._loop
        if loop is None:
            loop = self._loop = asyncio.get_running_loop()
            loop.add_reader(self._descriptor, self._wake)
        if not self._left:  # messages may be there that the descriptor no longer reports
            loop.call_soon(self._wake)
        self._left = IN_ONE_GO
        self._arrival = arrival = _Arrival(loop, self.leave)
        return arrival

    def _wake(self) -> None:
        """Let the reader check its socket. Called when something has changed there."""
        arrival = self._arrival
        if arrival is not None and not arrival.done():
            arrival.set_result(None)


def attached(client: Any) -> SocketReader | None:
    """The reader that takes a client's messages from now on, or None if its socket is left to pyzmq.

    Args:
        client: vLLM's client, whose reader has not started.
    """
    socket = client.resources.output_socket
    if isinstance(client, DPAsyncMPClient) or hasattr(type(client), "process_engine_outputs"):
        _runtime.report(State.APPLIED, "all but a socket, which pyzmq reads because its client has data parallelism")
        return None
    if type(socket) is not zmq.asyncio.Socket or "recv_multipart" in vars(socket):
        _runtime.report(State.APPLIED, "all but a socket, which is not vLLM's own")
        return None
    reader = SocketReader(socket)
    vars(socket)["recv_multipart"] = reader.recv_multipart
    return reader

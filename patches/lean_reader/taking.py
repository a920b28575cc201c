"""How a client's reader gets the next message: at once when one stands in the socket, else as soon as one does."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Generator
from typing import Any

from zmq.constants import EVENTS, FD, NOBLOCK, POLLIN
from zmq.error import ZMQError
from zmq.sugar.socket import Socket

from omni_fastpath.ledger import runtime

from .aside import step_aside

_runtime = runtime("lean_reader")
_counters = _runtime.counters

Frames = list[Any]
"""The parts of one message, ``zmq.Frame`` each."""


class _Taken:
    """A message that stood there: awaiting it never suspends."""

    __slots__ = ("_frames",)

    def __init__(self, frames: Frames) -> None:
        self._frames = frames

    def __await__(self) -> Generator[Any, None, Frames]:
        yield from ()
        return self._frames


class _Waiter(asyncio.Future[Frames]):
    """A message that is not there yet. Its cancellation ends the reader's task; the socket closes with it."""

    def __init__(self, loop: asyncio.AbstractEventLoop, leave: Callable[[], None]) -> None:
        super().__init__(loop=loop)
        self._leave = leave

    def cancel(self, msg: Any = None) -> bool:
        """Cancel it, and forget the socket's descriptor before somebody else gets the same one."""
        self._leave()
        return super().cancel(msg)


class Taker:
    """Takes the messages of one socket for upstream's reader, on the reader's event loop.

    The descriptor of a ZMQ socket says that something has changed, once, and any look at the socket takes that back. So
    the socket is always looked at before a wait, and after it.

    Args:
        socket: Upstream's ``zmq.asyncio.Socket``.
        limit: Messages in one go.
    """

    __slots__ = ("_descriptor", "_is_upstreams", "_left", "_limit", "_loop", "_socket", "_upstreams", "_waiter")

    def __init__(self, socket: Any, limit: int) -> None:
        self._upstreams: Callable[..., Awaitable[Frames]] = socket.recv_multipart
        self._socket: Any = Socket.shadow(socket)
        self._descriptor: int = self._socket.get(FD)
        self._limit, self._left = limit, 0
        self._loop: asyncio.AbstractEventLoop | None = None
        self._waiter: _Waiter | None = None
        self._is_upstreams = False

    def recv_multipart(self, flags: int = 0, copy: bool = True, track: bool = False) -> Awaitable[Frames]:
        """The next message, as ``zmq.asyncio`` gives it; any other call than upstream's reader's is pyzmq's."""
        if self._is_upstreams or flags or copy or track or _runtime.has_failed:
            return self._pyzmqs(flags, copy, track)
        socket = self._socket
        try:
            if self._left and socket.get(EVENTS) & POLLIN:
                self._left -= 1
                taken = _Taken(socket.recv_multipart(NOBLOCK, False))
                _counters["messages"] += 1
                _counters["at_once"] += 1
                return taken
            return self._wait()
        except ZMQError:  # pyzmq says what is wrong with it
            return self._pyzmqs(flags, copy, track)
        except Exception as error:
            step_aside("waiting for a message", error)
            return self._pyzmqs(flags, copy, track)

    def leave(self, _task: object = None) -> None:
        """The event loop need not look at the socket any more."""
        loop, self._loop = self._loop, None
        if loop is not None:
            loop.remove_reader(self._descriptor)

    def _pyzmqs(self, flags: int, copy: bool, track: bool) -> Awaitable[Frames]:
        """As without us, for good: pyzmq believes that its own callback stands at the descriptor, and so it must."""
        self.leave()
        self._is_upstreams = True
        return self._upstreams(flags, copy, track)

    def _wait(self) -> _Waiter:
        loop = self._loop
        if loop is None:
            loop = asyncio.get_running_loop()
            loop.add_reader(self._descriptor, self._look)
            self._loop = loop
        if not self._left:  # more may stand there, of which the descriptor said nothing or has said it already
            loop.call_soon(self._look)
        self._left = self._limit
        self._waiter = waiter = _Waiter(loop, self.leave)
        return waiter

    def _look(self) -> None:
        """Something has changed at the socket, or it is time to look."""
        waiter = self._waiter
        if waiter is None or waiter.done():  # the reader is at work, and looks itself before it waits
            return
        socket = self._socket
        try:
            if not socket.get(EVENTS) & POLLIN:
                return
            frames = socket.recv_multipart(NOBLOCK, False)
        except Exception as error:  # as pyzmq's callback: the reader gets it
            waiter.set_exception(error)
            return
        waiter.set_result(frames)
        _counters["messages"] += 1

"""How a client's reader gets its next message: at once when one stands in the socket, else as soon as one does.

vLLM's reader awaits ``recv_multipart`` of its socket for each message. ``zmq.asyncio`` makes a future, a callback and
several looks at the socket's state of each call; the socket gets a ``recv_multipart`` that makes less.
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
"""Messages that a reader takes before everything else on the event loop gets a turn; upstream's has no limit."""


class _Awaited(asyncio.Future[Frames]):
    """A message that is not there yet. Cancelling it ends the reader's task, and upstream closes the socket then."""

    def __init__(self, loop: asyncio.AbstractEventLoop, leave: Callable[[], None]) -> None:
        super().__init__(loop=loop)
        self._leave = leave

    def cancel(self, msg: Any = None) -> bool:
        """Cancel it, and forget the socket's descriptor before another socket can get the same one."""
        with _leaving:
            self._leave()
        return super().cancel(msg)


class SocketReader:
    """Takes the messages of one socket for upstream's reader, on the reader's event loop.

    The descriptor of a ZMQ socket says once that something has changed, and any look at the socket takes that back. So
    the socket is looked at before each wait, and after it.

    Args:
        socket: Upstream's ``zmq.asyncio.Socket``.
    """

    __slots__ = ("_awaited", "_descriptor", "_is_upstreams", "_left", "_loop", "_relay", "_socket", "_upstreams")

    def __init__(self, socket: Any) -> None:
        self._upstreams: Callable[..., Awaitable[Frames]] = socket.recv_multipart
        self._socket: Any = Socket.shadow(socket)
        self._descriptor: int = self._socket.get(FD)
        self._left = 0
        self._loop: asyncio.AbstractEventLoop | None = None
        self._awaited: _Awaited | None = None
        self._relay: asyncio.Task[None] | None = None
        self._is_upstreams = False

    def recv_multipart(self, flags: int = 0, copy: bool = True, track: bool = False) -> Awaitable[Frames]:
        """The next message, as ``zmq.asyncio`` gives it; a call that is not upstream's reader's is pyzmq's."""
        try:
            if not (self._is_upstreams or flags or copy or track or _runtime.has_failed):
                loop, socket = self._loop, self._socket
                if loop is None or not self._left or not socket.get(EVENTS) & POLLIN:
                    return self._wait()
                self._left -= 1
                _counters["messages"] += 1
                _counters["at_once"] += 1
                taken = loop.create_future()  # awaiting it never suspends, so that no cancellation loses the message
                taken.set_result(socket.recv_multipart(NOBLOCK, False))
                return taken
            return self._pyzmqs(flags, copy, track)
        except ZMQError:  # pyzmq says what is wrong with the socket
            return self._pyzmqs(flags, copy, track)
        except Exception as error:
            _runtime.fail("waiting for a message", error)
            given: asyncio.Future[Frames] | None = locals().get("taken")
            return given if given is not None and given.done() else self._pyzmqs(flags, copy, track)

    def leave(self, _task: object = None) -> None:
        """Take our callback off the socket's descriptor."""
        with _leaving:
            loop, self._loop = self._loop, None
            if loop is not None:
                loop.remove_reader(self._descriptor)

    def _pyzmqs(self, flags: int, copy: bool, track: bool) -> Awaitable[Frames]:
        """From here on pyzmq reads, whose own callback has to stand at the descriptor."""
        self._is_upstreams, self._awaited = True, None
        self.leave()
        return self._upstreams(flags, copy, track)

    def _wait(self) -> _Awaited:
        loop = self._loop
        if loop is None:
            loop = asyncio.get_running_loop()
            loop.add_reader(self._descriptor, self._look)
            self._loop = loop
        if not self._left:  # messages may stand there that the descriptor no longer tells of
            loop.call_soon(self._look)
        self._left = IN_ONE_GO
        self._awaited = awaited = _Awaited(loop, self.leave)
        return awaited

    def _look(self) -> None:
        """Give the reader a message if one is there; called when something has changed at the socket."""
        try:
            awaited, socket = self._awaited, self._socket
            if awaited is None or awaited.done():  # the reader is at work, and looks itself before it waits
                if _runtime.has_failed:
                    self.leave()
            elif socket.get(EVENTS) & POLLIN:
                _counters["messages"] += 1
                awaited.set_result(socket.recv_multipart(NOBLOCK, False))
        except ZMQError as error:  # the reader gets it, as from pyzmq's callback
            self._awaited.set_exception(error)  # type: ignore[union-attr]
        except Exception as error:
            _runtime.fail("taking a message", error)
            left, self._awaited = self._awaited, None  # from here on no look takes a message
            if left is not None and not left.done():
                self._relay = left.get_loop().create_task(self._from_pyzmq(left))

    async def _from_pyzmq(self, awaited: _Awaited) -> None:
        """Let pyzmq give what the reader awaits from us."""
        try:
            frames = await self._pyzmqs(0, False, False)
        except Exception as error:
            awaited.set_exception(error)
        else:
            awaited.set_result(frames)


def attached(client: Any) -> SocketReader | None:
    """What takes a client's messages from now on; None for a client whose socket is left to pyzmq.

    Args:
        client: vLLM's, whose reader has not started.
    """
    socket = client.resources.output_socket
    if isinstance(client, DPAsyncMPClient) or hasattr(type(client), "process_engine_outputs"):
        _runtime.report(State.APPLIED, "all but a socket: its client has data parallelism, and pyzmq reads it")
        return None
    if type(socket) is not zmq.asyncio.Socket or "recv_multipart" in vars(socket):
        _runtime.report(State.APPLIED, "all but a socket: it is not vLLM's own, and is left alone")
        return None
    reader = SocketReader(socket)
    vars(socket)["recv_multipart"] = reader.recv_multipart
    return reader

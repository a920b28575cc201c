"""The process of all light engines of a server: ``python -m omni_simulated_device.light.host DESCRIPTOR``.

The descriptor is one end of a socket pair with the server. Each message on it is an engine (`sender.Spec`) and carries
a descriptor of a pair of the engine's own: when the server closes that, or writes its end of file, the engine ends and
closes it in turn; when the server's end of the first one is gone, everything ends. An error of an engine is written
into its pair before that is closed.

Two threads: what comes in (handshakes, requests, ends) and the clock, which sends.
"""

from __future__ import annotations

import contextlib
import gc
import heapq
import importlib
import itertools
import logging
import os
import signal
import socket
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

import msgspec

from omni_simulated_device.light import behaviour
from omni_simulated_device.light.engine import Engine
from omni_simulated_device.light.fastpath import Published
from omni_simulated_device.light.sender import Sender, Spec
from omni_simulated_device.light.stream import Streams
from omni_simulated_device.light.wire import Decoder

zmq: Any = importlib.import_module("zmq")  # its stubs lack what it makes at run time

logger = logging.getLogger("omni_simulated_device.light")

ADD, ABORT, UTILITY = b"\x00", b"\x01", b"\x03"
"""vLLM's ``EngineCoreRequestType``."""

RECEIVE_BYTES = 1 << 20
LONG_WAIT_S = 3600.0
CLOSE_S = 5.0
NICE = -10

LAST_WORDS = "%s: %d steps, %.0f us of work each, late by %.2f ms (half of them), %.2f ms (99 of 100), %.2f ms at most"
"""What an engine logs at its end, and after SIGUSR1: a benchmark must know whether its instrument kept time."""

UTILITIES: dict[str, Any] = {
    "get_supported_tasks": ["generate"],
    "is_sleeping": False,
    "is_scheduler_paused": False,
    "reset_prefix_cache": True,
    "reset_mm_cache": None,
    "reset_encoder_cache": None,
    "list_loras": [],
    "profile": None,
}
"""What an engine without anything behind it can answer; every other call fails, and says so."""

Task = Callable[[float], None]


class Clock:
    """Calls functions at their time, in one thread; others hand it work."""

    def __init__(self) -> None:
        self._due: list[tuple[float, int, Task]] = []
        self._count = itertools.count()
        self._work: deque[Task] = deque()
        self._bell = threading.Event()
        self._stopped = False

    def later(self, due: float, task: Task) -> None:
        """Call *task* with *due* at that time (``time.monotonic``); only from the clock's own thread."""
        heapq.heappush(self._due, (due, next(self._count), task))

    def soon(self, task: Task) -> None:
        """Call *task* with the time, as soon as possible; from any thread."""
        self._work.append(task)
        self._bell.set()

    def stop(self) -> None:
        """End `run`, from any thread."""
        self._stopped = True
        self._bell.set()

    def run(self) -> None:
        """Until it is stopped."""
        due = self._due
        while not self._stopped:
            while self._work:
                self._work.popleft()(time.monotonic())
            while due and due[0][0] <= time.monotonic():
                at, _, task = heapq.heappop(due)
                task(at)
            if not self._work:
                self._bell.wait(max(0.0, due[0][0] - time.monotonic()) if due else LONG_WAIT_S)
            self._bell.clear()


class Connection:
    """One engine's way to the server, in the thread of what comes in."""

    def __init__(self, spec: Spec, pair: socket.socket, context: Any) -> None:
        self.spec, self.pair = spec, pair
        self.decoder = Decoder(spec.request)
        self.engine: tuple[Engine, Sender] | None = None
        self.inputs: list[Any] = []
        self.handshake: Any = self._dealer(context, spec.handshake)
        self.handshake.send(self._status("HELLO"))

    @staticmethod
    def _status(status: str) -> bytes:
        return msgspec.msgpack.encode({"status": status, "local": True, "headless": False})

    def _dealer(self, context: Any, address: str) -> Any:
        made = context.socket(zmq.DEALER)
        made.setsockopt(zmq.IDENTITY, self.spec.identity)
        made.setsockopt(zmq.LINGER, 5000)
        made.setsockopt(zmq.RCVHWM, 0)
        made.connect(address)
        return made

    def open(self, context: Any) -> list[str]:
        """The server has said where its sockets are: connect, and be ready; the result is where outputs go."""
        addresses = msgspec.msgpack.decode(self.handshake.recv())["addresses"]
        for address in addresses["inputs"]:
            made = self._dealer(context, address)
            made.send(self.spec.ready)
            self.inputs.append(made)
        self.handshake.send(self._status("READY"))
        outputs: list[str] = addresses["outputs"]
        return outputs

    def close(self) -> None:
        """Close everything of this side but the pair."""
        for made in (*self.inputs, self.handshake):
            made.close()


class Host:
    """All engines of a server."""

    def __init__(self, control: socket.socket) -> None:
        self._control = control
        self._context = zmq.Context()
        self._clock = Clock()
        self._streams = Streams()
        self._poller = zmq.Poller()
        self._by_socket: dict[Any, Connection] = {}
        self._published = Published()

    def run(self) -> None:
        """Until the server's end of the control socket is gone."""
        thread = threading.Thread(target=self._receive, name="light-engines-input", daemon=True)
        thread.start()
        self._clock.run()
        thread.join(CLOSE_S)
        self._context.destroy(linger=0)

    def report(self, *_signal: object) -> None:
        """Let each engine say how late it was since it last did; in the clock's thread."""
        for connection in {id(each): each for each in list(self._by_socket.values())}.values():
            if connection.engine is not None:
                engine, sender = connection.engine
                report(connection.spec.name, engine, sender)
                sender.late_s.clear()
        logger.info("all engines have said how late they were")

    def _receive(self) -> None:
        self._poller.register(self._control.fileno(), zmq.POLLIN)
        try:
            while True:
                for found, _ in self._poller.poll():
                    if found == self._control.fileno():
                        if not self._new_engine():
                            return
                    elif found in self._by_socket:
                        self._serve(found, self._by_socket[found])
        finally:
            self._clock.stop()

    def _new_engine(self) -> bool:
        """Take an engine from the server; False when the server is gone."""
        data, descriptors, _, _ = socket.recv_fds(self._control, RECEIVE_BYTES, 1)
        if not data:
            return False
        pair = socket.socket(fileno=descriptors[0])
        try:
            spec = msgspec.msgpack.decode(data, type=Spec)
            if spec.fastpath is not None:
                self._published.add(spec.fastpath)
            connection = Connection(spec, pair, self._context)
        except Exception as error:
            logger.exception("a light engine cannot begin")
            self._say(pair, error)
            return True
        self._watch(pair.fileno(), connection)
        self._watch(connection.handshake, connection)
        return True

    def _watch(self, found: Any, connection: Connection) -> None:
        self._by_socket[found] = connection
        self._poller.register(found, zmq.POLLIN)

    @staticmethod
    def _say(pair: socket.socket, error: Exception | None) -> None:
        """Close an engine's pair, with what went wrong."""
        if error is not None:
            with contextlib.suppress(OSError):
                pair.send(f"{type(error).__name__}: {error}".encode()[:4000])
        pair.close()

    def _serve(self, found: Any, connection: Connection) -> None:
        try:
            if found == connection.pair.fileno():
                self._end(connection, None)
            elif found is connection.handshake:
                outputs = connection.open(self._context)
                self._clock.soon(lambda _now: self._start(connection, outputs))
                for made in connection.inputs:
                    self._watch(made, connection)
                self._poller.unregister(connection.handshake)
            else:
                self._take(found, connection)
        except Exception as error:
            logger.exception("light engine %s ends", connection.spec.name)
            self._end(connection, error)

    def _start(self, connection: Connection, outputs: list[str]) -> None:
        spec = connection.spec
        made = behaviour.build(spec.behaviour, self._published.kept_back)
        sender = Sender(spec, outputs, self._context, samples_tokens=made.samples_tokens)
        engine = Engine(spec.stage, made, spec.slots, spec.budget, self._streams, self._clock.later, sender)
        connection.engine = engine, sender

    def _take(self, found: Any, connection: Connection) -> None:
        """One message of a client."""
        kind, *frames = found.recv_multipart()
        if kind == ADD:
            request = connection.decoder.request(frames[0])
            self._soon(connection, lambda engine, _sender, now: engine.add(request, now))
        elif kind == ABORT:
            names = connection.decoder.plain(frames[0])
            self._soon(connection, lambda engine, _sender, _now: engine.abort(names))
        elif kind == UTILITY:
            client, call, method, _arguments = connection.decoder.plain(frames[0])
            failure = None if method in UTILITIES else f"Call to {method} method failed: light engines have none"
            result = UTILITIES.get(method)
            self._soon(connection, lambda _engine, sender, _now: sender.answer_utility(client, call, failure, result))

    def _soon(self, connection: Connection, task: Callable[[Engine, Sender, float], None]) -> None:
        """Let an engine do something in the clock's thread, if it has not ended by then."""

        def run(now: float) -> None:
            if connection.engine is not None:
                task(*connection.engine, now)

        self._clock.soon(run)

    def _end(self, connection: Connection, error: Exception | None) -> None:
        """End one engine; its siblings go on."""
        for found in [each for each, owner in self._by_socket.items() if owner is connection]:
            del self._by_socket[found]
            if found in self._poller:
                self._poller.unregister(found)
        connection.close()

        def close(_now: float) -> None:
            if connection.engine is not None:
                engine, sender = connection.engine
                engine.abort()
                sender.close()
                report(connection.spec.name, engine, sender)
                connection.engine = None
            self._say(connection.pair, error)

        self._clock.soon(close)


def report(name: str, engine: Engine, sender: Sender) -> None:
    """Log an engine's last words."""
    late = sorted(sender.late_s)
    if late:
        logger.info(
            LAST_WORDS,
            name,
            engine.steps,
            engine.busy_s / engine.steps * 1e6,
            late[len(late) // 2] * 1e3,
            late[int(len(late) * 0.99)] * 1e3,
            late[-1] * 1e3,
        )


def main() -> None:
    """Serve the control socket that the command line names."""
    logging.basicConfig(level=logging.INFO, format="(LightEngines pid=%(process)d) %(levelname)s %(message)s")
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # typed into a terminal, it is for the server, which ends this
    with contextlib.suppress(OSError):
        # What it stands for runs on processors of its own. Only root may; a report says how late it was. At real-time
        # priority it runs as soon as a step is due, and a container may allow only the first.
        os.nice(NICE)
        os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(1))
    control = socket.socket(fileno=int(sys.argv[1]))
    gc.collect()
    gc.freeze()
    logger.info("ready")
    host = Host(control)
    signal.signal(signal.SIGUSR1, host.report)
    host.run()


if __name__ == "__main__":
    main()

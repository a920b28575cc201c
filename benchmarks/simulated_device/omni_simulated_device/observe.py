"""What holds up the event loops of a server, and its garbage collections; off unless asked.

``OMNI_SIMULATED_OBSERVE`` names a folder. Each process of the server that loads this package then has a socket
``PID.sock`` there; a connection is answered with what was seen since the last one, as JSON, and that is forgotten::

    {"loops": {"MainThread": {"callbacks": 812, "longest_wall_ms": 9.1, "longest": [...]}, ...},
     "collections": {"count": 1, "longest_ms": 41.0, "total_ms": 41.0}}

``longest`` has up to `KEPT` callbacks, the longest first: ``cpu_ms`` (their thread's own time), ``wall_ms``, ``name``,
and ``collected_ms``, what collections of the oldest generation took of it. ``collections`` are those of the oldest
generation. A callback is what an event loop runs between two looks at its sockets, a step of a task for the most part.

asyncio's own loop is seen in ``Handle._run``. uvloop, on which ``vllm serve`` runs its front end, has that in C: there
`call_soon`, `call_soon_threadsafe` and `call_later` are, through which tasks, futures and timers come. What libuv calls
by itself (bytes of a socket given to the HTTP parser) is not seen.

It costs one reading of the thread's clock and two of the wall clock a callback; `python -m benchmarks.server` says what
that comes to. This module imports nothing but the standard library.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import heapq
import json
import os
import socket
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from omni_simulated_device import OBSERVE_VARIABLE

KEPT = 5
OVER_MS = (1, 5, 10, 25, 50, 100)
_SLOW_NS = 1_000_000
"""Below this of wall time a callback is counted and no more."""
_OLDEST = 2

_wall = time.perf_counter_ns
_cpu = time.thread_time_ns


class Loop:
    """What was seen of one thread's event loop since it was last asked.

    Attributes:
        thread: Its name in Python.
        callbacks: How many.
        wall_ns: The longest by the wall clock.
        over: How many took longer than each of `OVER_MS`, thread time.
        longest: A heap of thread time, order, wall time, time in collections (nanoseconds), and name.
    """

    __slots__ = ("callbacks", "longest", "over", "thread", "wall_ns")

    def __init__(self, thread: str) -> None:
        self.thread = thread
        self.callbacks = self.wall_ns = 0
        self.over = dict.fromkeys(OVER_MS, 0)
        self.longest: list[tuple[int, int, int, int, str]] = []

    def slow(self, cpu_ns: int, wall_ns: int, collected_ns: int, callback: Any) -> None:
        """A callback that took a while."""
        self.wall_ns = max(self.wall_ns, wall_ns)
        for least in OVER_MS:
            if cpu_ns > least * 1_000_000:
                self.over[least] += 1
        if len(self.longest) < KEPT or cpu_ns > self.longest[0][0]:
            entry = (cpu_ns, self.callbacks, wall_ns, collected_ns, describe(callback))
            (heapq.heappush if len(self.longest) < KEPT else heapq.heappushpop)(self.longest, entry)

    def plain(self) -> dict[str, Any]:
        """As JSON data."""
        return {
            "callbacks": self.callbacks,
            "longest_wall_ms": self.wall_ns / 1e6,
            "over_ms": {str(least): count for least, count in self.over.items()},
            "longest": [
                {"cpu_ms": cpu / 1e6, "wall_ms": wall / 1e6, "collected_ms": collected / 1e6, "name": name}
                for cpu, _, wall, collected, name in sorted(self.longest, reverse=True)
            ],
        }


class Collections:
    """Collections of the oldest generation since they were last asked for; a `gc` callback."""

    def __init__(self) -> None:
        self._began_ns = 0
        self.pauses_ns: list[int] = []
        self.total_ns = 0

    def __call__(self, phase: str, info: dict[str, int]) -> None:
        """What `gc` calls before and after."""
        if info["generation"] < _OLDEST:
            return
        if phase == "start":
            self._began_ns = _wall()
            return
        paused = _wall() - self._began_ns
        self.pauses_ns.append(paused)
        self.total_ns += paused

    def take(self) -> dict[str, float]:
        """As JSON data, and begin anew."""
        pauses, self.pauses_ns = self.pauses_ns, []
        longest, total = max(pauses, default=0), sum(pauses)
        return {"count": len(pauses), "longest_ms": longest / 1e6, "total_ms": total / 1e6}


COLLECTIONS = Collections()
_loops: dict[int, Loop] = {}


def _loop() -> Loop:
    here = threading.get_ident()
    found = _loops.get(here)
    if found is None:
        found = _loops[here] = Loop(threading.current_thread().name)
    return found


def timed(callback: Callable[..., Any], *args: Any) -> Any:
    """Call *callback*, and keep what it took if that was long."""
    loop = _loops.get(threading.get_ident()) or _loop()
    collected = COLLECTIONS.total_ns
    cpu, wall = _cpu(), _wall()
    try:
        return callback(*args)
    finally:
        loop.callbacks += 1
        took = _wall() - wall
        if took >= _SLOW_NS:
            loop.slow(_cpu() - cpu, took, COLLECTIONS.total_ns - collected, callback)


def describe(callback: Any) -> str:
    """What a callback runs: of a task its coroutine, and what that awaits now, innermost last."""
    task = getattr(callback, "__self__", None)
    if not isinstance(task, asyncio.Task):
        return str(getattr(callback, "__qualname__", None) or repr(callback))
    awaited: Any = task.get_coro()
    names: list[str] = []
    while awaited is not None and len(names) < 50:
        name = getattr(awaited, "__qualname__", None)
        if name is not None:
            names.append(name)
        awaited = getattr(awaited, "cr_await", None) or getattr(awaited, "ag_await", None)
    said = [] if task.get_name().startswith("Task-") else [task.get_name()]  # anyio names a task after its function
    return " > ".join([*said, *names[:1], *(names[-1:] if len(names) > 1 else [])]) or repr(task.get_coro())


def take() -> dict[str, Any]:
    """What was seen since the last time, and begin anew."""
    seen = {}
    for ident, loop in list(_loops.items()):
        fresh = Loop(loop.thread)
        _loops[ident] = fresh
        seen[loop.thread] = loop.plain()
    return {"loops": seen, "collections": COLLECTIONS.take()}


def install(folder: Path) -> None:
    """Look at this process's event loops and collections from now on, and answer on ``folder/PID.sock``.

    Raises:
        OSError: The socket cannot be made.
    """
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(folder / f"{os.getpid()}.sock"))
    listener.listen()
    threading.Thread(target=_answer, args=(listener,), name="observer", daemon=True).start()
    gc.callbacks.append(COLLECTIONS)
    _wrap_asyncio()
    with contextlib.suppress(ImportError):
        _wrap_uvloop()


def _answer(listener: socket.socket) -> None:
    while True:
        connection, _ = listener.accept()
        with connection, contextlib.suppress(OSError):
            connection.sendall(json.dumps(take()).encode())


def _wrap_asyncio() -> None:
    run = asyncio.Handle._run

    def _run(self: Any) -> None:
        loop = _loops.get(threading.get_ident()) or _loop()
        collected = COLLECTIONS.total_ns
        cpu, wall = _cpu(), _wall()
        run(self)  # raises nothing but what ends the loop
        loop.callbacks += 1
        took = _wall() - wall
        if took >= _SLOW_NS:
            loop.slow(_cpu() - cpu, took, COLLECTIONS.total_ns - collected, self._callback)

    asyncio.Handle._run = _run  # type: ignore[method-assign]


def _wrap_uvloop() -> None:
    import uvloop  # the server's, which it imports anyway

    soon, safe, later = uvloop.Loop.call_soon, uvloop.Loop.call_soon_threadsafe, uvloop.Loop.call_later

    def call_soon(self: Any, callback: Any, *args: Any, context: Any = None) -> Any:
        return soon(self, timed, callback, *args, context=context)

    def call_soon_threadsafe(self: Any, callback: Any, *args: Any, context: Any = None) -> Any:
        return safe(self, timed, callback, *args, context=context)

    def call_later(self: Any, delay: float, callback: Any, *args: Any, context: Any = None) -> Any:
        return later(self, delay, timed, callback, *args, context=context)

    uvloop.Loop.call_soon = call_soon
    uvloop.Loop.call_soon_threadsafe = call_soon_threadsafe
    uvloop.Loop.call_later = call_later


def arm() -> None:
    """Do what the variable says; may be called many times. An error is printed: vLLM swallows what a plugin raises."""
    global _armed  # noqa: PLW0603 - one process, one arming
    folder = os.environ.get(OBSERVE_VARIABLE)
    if not folder or _armed:
        return
    _armed = True
    try:
        install(Path(folder))
    except OSError as error:
        print(f"{OBSERVE_VARIABLE}: {error}", file=sys.stderr, flush=True)


_armed = False

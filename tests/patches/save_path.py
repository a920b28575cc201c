"""What tests of the save path share: the patch switched on with values, and a gate in front of a connector."""

from __future__ import annotations

import itertools
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

PATIENCE_S = 30.0
"""A guard, never something that a test measures."""

_numbers = itertools.count()


def until(condition: Callable[[], Any], what: str = "what is waited for") -> None:
    """Wait for another thread."""
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, f"{what} did not happen"
        time.sleep(0.0005)


def unique(stem: str) -> str:
    """An external request id that nobody else has in shared memory."""
    return f"sq-{os.getpid()}-{next(_numbers)}-{stem}"


def entry() -> Any:
    """The patch's entry in the ledger, also where nothing is installed."""
    from omni_fastpath.ledger import LEDGER
    from omni_fastpath.patches.save_queue_cap import PATCH

    return LEDGER.entry(PATCH)


@contextmanager
def patched(**values: Any) -> Iterator[dict[str, int]]:
    """``save_queue_cap`` installed with these values and taken off afterwards; its counters."""
    from omni_fastpath import config
    from omni_fastpath.declare import Process, State
    from omni_fastpath.install import apply, uninstall
    from omni_fastpath.patches import PATCHES

    apply(config.resolve([], {"OMNI_FASTPATH_SAVE_QUEUE_CAP": "1"}, PATCHES), Process.STAGE)
    ours = entry()
    assert ours.state is State.APPLIED, ours.reason
    before, ours.options = ours.options, ours.patch.options(**values)
    try:
        yield ours.counters
    finally:
        ours.options = before
        for patch in reversed(PATCHES):
            uninstall(patch)


class Gate:
    """In front of a connector's ``put``: stops chosen streams, fails chosen chunks, notes who sends."""

    def __init__(self, connector: Any) -> None:
        self._put = connector.put
        connector.put = self.put
        self._shut: dict[str, threading.Event] = {}
        self._lock = threading.Lock()
        self.fails: dict[str, BaseException | None] = {}
        """Next ``put`` of a stream: raise this, or report failure for None."""
        self.inside: dict[str, str] = {}
        """Stream: name of the thread that sends a chunk of it."""
        self.overlaps: list[str] = []
        """Streams of which two threads sent at a time."""
        self.order: list[str] = []
        """Streams of the chunks put, in the order in which their puts began."""

    def shut(self, *streams: str) -> None:
        """Stop the sends of these streams inside ``put``."""
        for stream in streams:
            self._shut[stream] = threading.Event()

    def is_shut(self, stream: str) -> bool:
        """Whether this stream's sends are stopped."""
        return stream in self._shut

    def open(self, *streams: str) -> None:
        """Let them go on; all of them if none is named."""
        for stream in streams or tuple(self._shut):
            self._shut.pop(stream).set()

    def put(self, from_stage: str, to_stage: str, put_key: str, data: Any) -> Any:
        """Upstream's ``put`` behind the gate."""
        stream = put_key.rsplit("_", 2)[0]
        with self._lock:
            if stream in self.inside:
                self.overlaps.append(stream)
            self.inside[stream] = threading.current_thread().name
            self.order.append(stream)
        try:
            gate = self._shut.get(stream)
            if gate is not None:
                assert gate.wait(PATIENCE_S)
            if stream in self.fails:
                error = self.fails.pop(stream)
                if error is not None:
                    raise error
                return False, 0, None
            return self._put(from_stage, to_stage, put_key, data)
        finally:
            with self._lock:
                self.inside.pop(stream, None)


def slow_down(connector: Any, seconds: float) -> None:
    """Each ``put`` takes that much longer."""
    put = connector.put

    def slow(*args: Any, **kwargs: Any) -> Any:
        time.sleep(seconds)
        return put(*args, **kwargs)

    connector.put = slow

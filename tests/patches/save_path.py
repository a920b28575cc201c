"""What tests of the save path share: the patch switched on with values, and a gate in front of a connector."""

from __future__ import annotations

import itertools
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from omni_fastpath.declare import Process
from omni_fastpath.ledger import LEDGER
from tests.patches.drive import only

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
    return LEDGER.named("save_queue_cap")


@contextmanager
def patched(**values: Any) -> Iterator[dict[str, int]]:
    """``save_queue_cap`` installed with these values and taken off afterwards; its counters, from nothing."""
    with only("save_queue_cap", process=Process.STAGE, **values) as found:
        yield found.counters


class Gate:
    """In front of a connector's ``put``: stops chosen streams, and notes whose chunks are put."""

    def __init__(self, connector: Any) -> None:
        self._put = connector.put
        connector.put = self.put
        self._shut: dict[str, threading.Event] = {}
        self.inside: str | None = None
        """Stream of the chunk that is being put: one thread sends."""
        self.order: list[str] = []
        """Streams of the chunks put, in the order in which their puts began."""

    def shut(self, *streams: str) -> None:
        """Stop the sends of these streams inside ``put``."""
        for stream in streams:
            self._shut[stream] = threading.Event()

    def open(self, *streams: str) -> None:
        """Let them go on; all of them if none is named."""
        for stream in streams or tuple(self._shut):
            self._shut.pop(stream).set()

    def put(self, from_stage: str, to_stage: str, put_key: str, data: Any) -> Any:
        """Upstream's ``put`` behind the gate."""
        stream = self.inside = put_key.rsplit("_", 2)[0]
        self.order.append(stream)
        gate = self._shut.get(stream)
        try:
            assert gate is None or gate.wait(PATIENCE_S)
            return self._put(from_stage, to_stage, put_key, data)
        finally:
            self.inside = None

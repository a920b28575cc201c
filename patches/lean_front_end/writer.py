"""Where a request's log records go: to a thread that writes them, or into one line per interval."""

from __future__ import annotations

import atexit
import contextvars
import logging
import statistics
import threading
import time
from collections.abc import Callable, Sequence
from queue import SimpleQueue
from typing import Any

from omni_fastpath.ledger import logger

MOST_WAITING = 256
"""Requests whose records wait. A request of 2,000 steps keeps some 400 kB of latencies alive until its text is made."""

_AT_EXIT_S = 1.0
"""How long a process that ends waits for what is not written yet."""

_Item = tuple[contextvars.Context, Sequence[logging.LogRecord]]


class Writer:
    """Writes log records on a thread of its own, in the order in which they came.

    Each is written in the context in which it was made, so that a handler that adds a trace's id finds it. The thread
    is started with the first record, and does not keep the process from ending.

    Args:
        handle: Writes one record.
    """

    def __init__(self, handle: Callable[[logging.LogRecord], None]) -> None:
        self._handle = handle
        self._lane: _Lane | None = None
        self._dropped = self._told = 0

    @property
    def idle(self) -> bool:
        """Whether everything that was taken is written."""
        lane = self._lane
        return lane is None or lane.done == lane.put

    def put(self, records: Sequence[logging.LogRecord]) -> bool:
        """Take one request's records; False when too many wait, and these are dropped, which the log will say."""
        lane = self._lane
        if lane is None or not lane.thread.is_alive():
            lane = self._start()
        if lane.waiting.qsize() >= MOST_WAITING:
            self._dropped += 1
            return False
        lane.put += 1
        lane.waiting.put((contextvars.copy_context(), records))
        return True

    def close(self) -> None:
        """Write what waits, for a second at the most, and end; what could not be written is said in one line.

        A handler that does not come back is not waited for: then nobody could say it either.
        """
        atexit.unregister(self.close)
        lane, self._lane = self._lane, None
        if lane is None:
            return
        lane.waiting.put(None)
        lane.thread.join(_AT_EXIT_S)
        if lane.thread.is_alive():
            self._dropped += max(lane.waiting.qsize() - 1, 0)
            lane.ends = True
            lane.thread.join(_AT_EXIT_S / 2)

    def _start(self) -> _Lane:
        if self._lane is None:
            atexit.register(self.close)
        lane = self._lane = _Lane()
        lane.thread = threading.Thread(target=self._run, args=(lane,), name="omni-fastpath-log", daemon=True)
        lane.thread.start()
        return lane

    def _run(self, lane: _Lane) -> None:
        while not lane.ends and (item := lane.waiting.get()) is not None:
            context, records = item
            for record in records:
                try:
                    context.run(self._handle, record)
                except Exception:
                    logger.exception("omni-fastpath: lean_front_end: a log record could not be written")
            self._tell()
            lane.done += 1
        self._tell()

    def _tell(self) -> None:
        dropped = self._dropped
        if dropped > self._told:
            logger.warning(
                "omni-fastpath: lean_front_end: the log cannot keep up: the summaries of %d requests were dropped",
                dropped - self._told,
            )
            self._told = dropped


class _Lane:
    """What one thread of a ``Writer`` has to do.

    Attributes:
        waiting: Requests' records; None: end.
        put: How many it was given.
        done: How many of them are written.
        ends: It takes no further one.
    """

    thread: threading.Thread

    def __init__(self) -> None:
        self.waiting: SimpleQueue[_Item | None] = SimpleQueue()
        self.put = self.done = 0
        self.ends = False


class Tally:
    """Counts requests that ended, and says once per interval how many and how long they took.

    The interval begins with the first end after a silence: an idle server says nothing.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._timer: threading.Timer | None = None
        self._since = 0.0
        self._totals_ms: list[float] = []
        self._tokens = 0
        self._others = 0

    def add(self, summary: dict[str, Any] | None, interval_s: float) -> None:
        """One call of upstream's ``build_and_log_summary``, by what it returned; None if it raised."""
        ended = (summary or {}).get("e2e_table") or ()
        with self._lock:
            for row in ended:
                self._totals_ms.append(row["e2e_total_ms"])
                self._tokens += row["e2e_total_tokens"]
            if not ended:
                self._others += 1
            if self._timer is None:
                self._since = time.monotonic()
                self._timer = threading.Timer(interval_s, self.tell)
                self._timer.daemon = True
                self._timer.start()
                atexit.register(self.tell)

    def tell(self) -> None:
        """Say it now, if anything ended."""
        with self._lock:
            timer, self._timer = self._timer, None
            if timer is None:
                return
            timer.cancel()
            atexit.unregister(self.tell)
            totals_s, self._totals_ms = [total / 1000 for total in self._totals_ms], []
            tokens, self._tokens = self._tokens, 0
            others, self._others = self._others, 0
            seconds = time.monotonic() - self._since
        took = (
            f", {len(totals_s)} of them completely, in {min(totals_s):.2f} to {max(totals_s):.2f} s "
            f"(median {statistics.median(totals_s):.2f} s), {tokens:,} tokens"
            if totals_s
            else ", none of them completely"
        )
        logger.info("omni-fastpath: %d requests ended in %.1f s%s", len(totals_s) + others, seconds, took)

"""Upstream's save thread in a test's hand: one thread runs at a time, and the same schedule is the same run.

It stops inside ``put``, where its loop waits for more, at a lock that the other thread has, and at a chosen
line of the patch. The test's thread, which is the scheduler's, lets it go on from there.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from typing import Any, NamedTuple

from tests.patches.lines import Line, tracer

PATIENCE_S = 60.0
"""A guard, never something that a test measures."""


class Cut(NamedTuple):
    """At this line of the patch the other thread has so many turns."""

    line: int
    turns: int


def at_line(number: int, action: Callable[[], None]) -> Callable[..., Any]:
    """For ``sys.settrace``: act at the line of this number among those of the patch that a thread reaches."""
    left = number

    def at(_line: Line) -> None:
        nonlocal left
        left -= 1
        if left == 0:
            action()

    return tracer("save_queue_cap", at)


class SaveThread:
    """Upstream's loop in its thread, which goes on when it is told to.

    Attributes:
        parked: Where it is: "start", "put", "wait", "lock", "line" or "ended".
        trace: For ``sys.settrace``, from where it goes on next.
    """

    def __init__(self) -> None:
        self.parked = "start"
        self.trace: Callable[..., Any] | None = None
        self._is_free = False
        self._error: BaseException | None = None
        self._go, self._back = threading.Semaphore(0), threading.Semaphore(0)

    def run(self, loop: Callable[[], None]) -> None:
        """What the thread runs."""
        self._go.acquire()
        try:
            loop()
        except BaseException as error:
            self._error = error
        self.parked = "ended"
        self._back.release()

    def park(self, where: str) -> None:
        """In the thread: stop here until the test lets it go on."""
        if not self._is_free:
            self.parked = where
            self._back.release()
            self._go.acquire()
            sys.settrace(self.trace)

    def resume(self) -> None:
        """In the test: let it go on to where it stops next.

        Raises:
            AssertionError: It has ended, or neither ends nor stops.
        """
        assert self.parked != "ended", f"the save thread has ended: {self._error!r}"
        self.parked = "running"
        self._go.release()
        assert self._back.acquire(timeout=PATIENCE_S), "the save thread neither sends nor waits"

    def free(self) -> None:
        """In the test, at its end: let it go on and stop no more."""
        self._is_free, self.trace = True, None
        self._go.release()


class Lock:
    """In place of a lock of both threads; a thread that waits for it lets the other one run."""

    def __init__(self, thread: SaveThread) -> None:
        self._thread, self._test = thread, threading.get_ident()
        self._holder: int | None = None

    def __enter__(self) -> None:
        here, turns = threading.get_ident(), 0
        while self._holder is not None:
            turns += 1
            assert self._holder != here, "taken twice"
            assert turns < 100 or self._thread.parked == "running", "both threads wait for each other"
            if here == self._test:
                self._thread.resume()
            else:
                self._thread.park("lock")
        self._holder = here

    def __exit__(self, *_: object) -> None:
        self._holder = None


class Condition(Lock):
    """In place of the condition that upstream's loop waits for.

    Attributes:
        is_notified: Since it began to wait.
        rounds: Of the loop since it last waited or sent something.
    """

    is_notified = False
    rounds = 0

    def __enter__(self) -> None:
        if threading.get_ident() != self._test:
            self.rounds += 1
            if self.rounds > 3:
                raise SystemExit("a busy loop")
        super().__enter__()

    def wait(self, timeout: float) -> None:
        """Stop, without the lock."""
        self._holder, self.is_notified, self.rounds = None, False, 0
        self._thread.park("wait")
        super().__enter__()

    def notify(self, _count: int = 1) -> None:
        """Let the waiting thread run on."""
        self.is_notified = True

    notify_all = notify

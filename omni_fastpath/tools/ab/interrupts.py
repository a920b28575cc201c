"""Ctrl-C, SIGTERM and a closed terminal. They end the measurement after the processes that it has started."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator
from types import FrameType

INTERRUPTED = "interrupted"
"""The word for a series that ``Interrupted`` ended."""

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Interrupted(SystemExit):
    """SIGINT, SIGTERM or SIGHUP. It is a ``SystemExit``, because an event loop does not catch that."""


class Interrupts:
    """Counts the signals while a series runs. They take effect at the next ``check``, or immediately in ``at_once``.

    Attributes:
        count: The number of signals.
    """

    def __init__(self) -> None:
        self.count = 0
        self._at_once = False

    @contextlib.contextmanager
    def caught(self) -> Iterator[None]:
        """Handle the signals inside this context."""
        # SIGINT too, because Python leaves it ignored if a shell started this in the background. An ignored SIGHUP
        # stays ignored, because it is intended (nohup).
        meant = {signal.SIGHUP} if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN else set()
        before = {number: signal.signal(number, self._received) for number in SIGNALS if number not in meant}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def check(self) -> None:
        """Raise ``Interrupted`` after a signal. Loops that wait call this."""
        if self.count:
            raise Interrupted(130)

    @contextlib.contextmanager
    def at_once(self) -> Iterator[None]:
        """Let a signal interrupt the code inside this context immediately."""
        self._at_once = True
        try:
            self.check()
            yield
        finally:
            self._at_once = False

    def _received(self, _number: int, _frame: FrameType | None) -> None:
        self.count += 1
        if self._at_once:
            raise Interrupted(130)

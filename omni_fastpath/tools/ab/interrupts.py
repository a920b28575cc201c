"""Ctrl-C, SIGTERM and a closed terminal: the measurement ends, what it started ends first."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator
from types import FrameType

INTERRUPTED = "interrupted"
"""What a report says of a series that ``Interrupted`` ended."""

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Interrupted(SystemExit):
    """SIGINT, SIGTERM or SIGHUP. A ``SystemExit``, because an event loop hands on that and no other exception."""


class Interrupts:
    """The signals of this process while a series runs: counted, and heard at the next ``check`` or in ``at_once``.

    Attributes:
        count: How many came.
    """

    def __init__(self) -> None:
        self.count = 0
        self._at_once = False

    @contextlib.contextmanager
    def caught(self) -> Iterator[None]:
        """Take the signals over, and give them back at the end."""
        # SIGINT too: where a shell started this in the background, Python leaves it ignored. An ignored SIGHUP was
        # meant (nohup): the measurement goes on when that terminal closes.
        meant = {signal.SIGHUP} if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN else set()
        before = {number: signal.signal(number, self._came) for number in SIGNALS if number not in meant}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def check(self) -> None:
        """Raise ``Interrupted`` if a signal came; what waits in steps calls this between them."""
        if self.count:
            raise Interrupted(130)

    @contextlib.contextmanager
    def at_once(self) -> Iterator[None]:
        """A part without steps, which a signal interrupts wherever it is."""
        self._at_once = True
        try:
            self.check()
            yield
        finally:
            self._at_once = False

    def _came(self, _number: int, _frame: FrameType | None) -> None:
        self.count += 1
        if self._at_once:
            raise Interrupted(130)

"""Ctrl-C, SIGTERM and a closed terminal: the measurement ends, what it started ends first."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Callable, Iterator
from types import FrameType

from omni_fastpath.tools.ab.errors import Interrupted

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Interrupts:
    """The signals of this process, while a series runs; they raise ``Interrupted``, and never in ``held``.

    Attributes:
        hurry: One came while they were held: whoever waits there need not wait for politeness any more.
    """

    def __init__(self) -> None:
        self.hurry = False
        self._held = 0
        self._ends: list[Callable[[], None]] = []

    @contextlib.contextmanager
    def caught(self) -> Iterator[None]:
        """As long as this lasts."""
        # SIGINT too: where a shell started this in the background, Python leaves it ignored. An ignored SIGHUP was
        # meant (nohup): whoever closes that terminal wants the measurement to go on.
        meant = {signal.SIGHUP} if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN else set()
        before = {number: signal.signal(number, self._came) for number in SIGNALS if number not in meant}
        try:
            yield
        finally:
            self._held += 1
            for end in self._ends:
                end()
            for number, handler in before.items():
                signal.signal(number, handler)
            self._held -= 1

    def at_end(self, end: Callable[[], None]) -> None:
        """Call this too when all is over: what came between two lines of Python may have left something running."""
        self._ends.append(end)

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """A part that must not end halfway; what came meanwhile is raised at its end."""
        self._held += 1
        try:
            yield
        finally:
            self._held -= 1
        if self.hurry and not self._held:
            self.hurry = False
            raise Interrupted(130)

    def _came(self, number: int, _frame: FrameType | None) -> None:
        if not self._held:
            raise Interrupted(128 + number)
        self.hurry = True

"""What a run is doing, a line for each phase, with elapsed times and the time left, and what is told meanwhile."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator

from rich.console import Console
from rich.control import Control
from rich.segment import ControlType

_LINE_OVER = Control(ControlType.CARRIAGE_RETURN, (ControlType.ERASE_IN_LINE, 2))
"""Nothing, but on a terminal."""


class Phases:
    """Named phases of a run, one after another, ``total`` of them."""

    def __init__(self, console: Console, total: int) -> None:
        self._console = console
        self._begun = time.monotonic()
        self._total = total
        self._done = 0

    @property
    def elapsed_s(self) -> float:
        """Since the run began, seconds."""
        return time.monotonic() - self._begun

    @property
    def left_s(self) -> float:
        """Until the run is over, seconds, at the pace so far."""
        return self.elapsed_s / self._done * (self._total - self._done)

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[Callable[[str], None]]:
        """One phase; its time and the time left are printed when it is over, or that it did not come to its end.

        Yields:
            What may be told how far it is, as often as one likes; not every word is printed.
        """
        begun = self._told = time.monotonic()
        self._say(f"   ... {name}")
        how = "failed"
        try:
            yield self._tell
            how = "  done"
        finally:
            self._done += 1
            self._say(f"{how} {name}: {time.monotonic() - begun:.1f} s; about {self.left_s / 60:.1f} min left")

    def _tell(self, text: str) -> None:
        """Each second on a terminal, where the next line is written over it; in a log a line a minute."""
        if text and time.monotonic() >= self._told + (1.0 if self._console.is_interactive else 60.0):
            self._told = time.monotonic()
            self._print(f"       {text}", end="" if self._console.is_interactive else "\n")

    def _say(self, text: str) -> None:
        self._print(text, end="\n")

    def _print(self, text: str, *, end: str) -> None:
        """A line; without its end it is cut to the width of the terminal, and the next one is written over it."""
        line = f"[{self.elapsed_s:5.0f} s] {text}"
        with contextlib.suppress(OSError):  # what cannot be said ends nothing that is measured
            self._console.control(_LINE_OVER)
            self._console.print(line, end=end, markup=False, highlight=False, soft_wrap=bool(end), no_wrap=True)

"""The phases of a run, a line for the beginning and the end of each, with elapsed time and time left."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator

from rich.console import Console


class Phases:
    """Named phases of a run, one after another, ``total`` of them."""

    def __init__(self, console: Console, total: int) -> None:
        self._console = console
        self._begun = time.monotonic()
        self._total = total
        self._done = 0

    @property
    def elapsed_s(self) -> float:
        """Seconds since the run began."""
        return time.monotonic() - self._begun

    @property
    def left_s(self) -> float:
        """Seconds until the run ends, if the remaining phases take as long as those so far."""
        return self.elapsed_s / self._done * (self._total - self._done)

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Run one phase. At its end its duration and the time left are printed, or that it failed."""
        begun = time.monotonic()
        self._say(f"   ... {name}")
        how = "failed"
        try:
            yield
            how = "  done"
        finally:
            self._done += 1
            self._say(f"{how} {name}: {time.monotonic() - begun:.1f} s; about {self.left_s / 60:.1f} min left")

    def _say(self, text: str) -> None:
        with contextlib.suppress(OSError):  # a closed terminal does not end a measurement
            line = f"[{self.elapsed_s:5.0f} s] {text}"
            self._console.print(line, markup=False, highlight=False, soft_wrap=True)

"""What a run is doing, a line for each phase, with elapsed times and the time left."""

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
        """Since the run began, seconds."""
        return time.monotonic() - self._begun

    @property
    def left_s(self) -> float:
        """Until the run is over, seconds, at the pace so far."""
        return self.elapsed_s / self._done * (self._total - self._done)

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """One phase; its time and the time left are printed when it is over, or that it did not come to its end."""
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
        with contextlib.suppress(OSError):  # what cannot be said ends nothing that is measured
            self._console.print(f"[{self.elapsed_s:5.0f} s] {text}", markup=False, highlight=False, soft_wrap=True)

"""What a run is doing, with elapsed times: a live line on a terminal, plain lines elsewhere."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn


class Phases:
    """Named phases of a run, one after another."""

    def __init__(self, console: Console, total: int) -> None:
        self._console = console
        self._total = total
        self._begun = time.monotonic()
        self._done = 0
        self._live: Progress | None = None

    @property
    def elapsed_s(self) -> float:
        """Since the run began, seconds."""
        return time.monotonic() - self._begun

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """The whole run."""
        if not self._console.is_terminal:
            yield
            return
        columns = (
            SpinnerColumn(),
            TextColumn("{task.description}"),
            BarColumn(bar_width=20),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
        )
        with Progress(*columns, console=self._console, transient=True) as live:
            self._task = live.add_task("", total=self._total)
            self._live = live
            try:
                yield
            finally:
                self._live = None

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """One phase; its time is printed when it is over, and how it failed when it does."""
        begun = time.monotonic()
        if self._live is not None:
            self._live.update(self._task, description=escape(name), completed=self._done)
        else:
            self._say("   ...", name)
        try:
            yield
        except BaseException as error:
            how = "interrupted" if isinstance(error, (KeyboardInterrupt, SystemExit)) else "failed"
            self._say("failed", f"{name}: {how} after {time.monotonic() - begun:.1f} s")
            raise
        self._done += 1
        self._say("  done", f"{name}: {time.monotonic() - begun:.1f} s")

    def _say(self, mark: str, text: str) -> None:
        self._console.print(f"[{self.elapsed_s:5.0f} s] {mark} {text}", markup=False, highlight=False, soft_wrap=True)

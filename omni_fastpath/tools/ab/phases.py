"""What a run is doing, with elapsed times and the time left: rich's progress on a terminal, plain lines elsewhere."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn


class Phases:
    """Named phases of a run, one after another, ``total`` of them."""

    def __init__(self, console: Console, total: int) -> None:
        self._console = console
        self._begun = time.monotonic()
        remaining = TimeRemainingColumn(compact=True)
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), remaining)
        self._live = Progress(*columns, console=console, transient=True, speed_estimate_period=3600)
        self._task = self._live.add_task("", total=total)

    @property
    def elapsed_s(self) -> float:
        """Since the run began, seconds."""
        return time.monotonic() - self._begun

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """The whole run."""
        with self._live if self._console.is_terminal else contextlib.nullcontext():
            yield

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """One phase; its time is printed when it is over, and how it failed when it does."""
        begun = time.monotonic()
        self._live.update(self._task, description=escape(name))
        if not self._console.is_terminal:
            self._say("   ...", name)
        try:
            yield
        except BaseException as error:
            how = "interrupted" if isinstance(error, (KeyboardInterrupt, SystemExit)) else "failed"
            self._say("failed", f"{name}: {how} after {time.monotonic() - begun:.1f} s")
            raise
        self._live.advance(self._task)
        task = self._live.tasks[0]
        left = self.elapsed_s / task.completed * ((task.total or 0) - task.completed)
        self._say("  done", f"{name}: {time.monotonic() - begun:.1f} s; about {left / 60:.1f} min left")

    def _say(self, mark: str, text: str) -> None:
        line = f"[{self.elapsed_s:5.0f} s] {mark} {text}"
        with contextlib.suppress(OSError):  # what cannot be said ends nothing that is measured
            self._console.print(line, markup=False, highlight=False, soft_wrap=True)

"""What a run is doing, with elapsed times and the time left: a live line on a terminal, plain lines elsewhere."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator

from rich.console import Console
from rich.markup import escape
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    SpinnerColumn,
    Task,
    TextColumn,
    TimeElapsedColumn,
)
from rich.text import Text


class Phases:
    """Named phases of a run, one after another."""

    def __init__(self, console: Console, total: int) -> None:
        self._console = console
        self._total = total
        self._begun = time.monotonic()
        self._done = 0
        self._turns: list[float] = []
        self._turns_left = 0
        self._turn_begun: float | None = None
        self._live: Progress | None = None

    @property
    def elapsed_s(self) -> float:
        """Since the run began, seconds."""
        return time.monotonic() - self._begun

    @property
    def left(self) -> str:
        """How long the rest of the turns will take, by the mean of those that are over; empty until one is."""
        if not self._turns or not self._turns_left:
            return ""
        under_way = time.monotonic() - self._turn_begun if self._turn_begun is not None else 0.0
        mean = sum(self._turns) / len(self._turns)
        seconds = max(0.0, mean - under_way) + mean * (self._turns_left - 1)
        return f"about {seconds / 60:.0f} min left" if seconds > 90 else f"about {seconds:.0f} s left"

    @contextlib.contextmanager
    def turn(self, place: int, turns: int) -> Iterator[None]:
        """One of so many that are alike, the first is 1: they tell how long the rest takes."""
        self._turns_left, self._turn_begun = turns - place + 1, time.monotonic()
        yield
        self._turns.append(time.monotonic() - self._turn_begun)
        self._turns_left, self._turn_begun = turns - place, None

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
            _Left(self),
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
        left = f"; {self.left}" if self.left else ""
        self._say("  done", f"{name}: {time.monotonic() - begun:.1f} s{left}")

    def _say(self, mark: str, text: str) -> None:
        line = f"[{self.elapsed_s:5.0f} s] {mark} {text}"
        with contextlib.suppress(OSError):  # what cannot be said ends nothing that is measured
            self._console.print(line, markup=False, highlight=False, soft_wrap=True)


class _Left(ProgressColumn):
    """The time left, in words."""

    def __init__(self, phases: Phases) -> None:
        self._phases = phases
        super().__init__()

    def render(self, task: Task) -> Text:  # noqa: ARG002 - rich's parameter
        """What stands there now."""
        return Text(self._phases.left)

"""How far the demo is and how long it still takes: a bar on a terminal, lines elsewhere."""

from __future__ import annotations

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from omni_fastpath.tools.ab.phases import Phases


class Progress(Phases):
    """Starts of servers, one after another, which take about equally long.

    Args:
        console: Where it is shown.
        starts: How many.
        start_s: What one is expected to take, seconds, for as long as none is over.
    """

    def __init__(self, console: Console, starts: int, start_s: float) -> None:
        super().__init__(console, starts)
        self._start_s = start_s
        self._over = 0
        self._over_s = 0.0
        self._said = ""
        # Once a second: the load's client is in this process.
        self.live = Live(console=console, get_renderable=self._shown, transient=True, refresh_per_second=1)

    def start_is_over(self) -> None:
        """One start has been measured."""
        self._over += 1
        self._over_s = self.elapsed_s

    @property
    def left_s(self) -> float:
        """About: starts take as long as those that are over, and nothing beside them takes any time."""
        start_s = self._over_s / self._over if self._over else self._start_s
        return max(0.0, self._over_s + start_s * (self._total - self._over) - self.elapsed_s)

    def _say(self, text: str) -> None:
        self._said = text.strip()
        if not self._console.is_terminal:
            super()._say(text)

    def _shown(self) -> Group:
        left_s, line = self.left_s, Table.grid(padding=(0, 1))
        bar = ProgressBar(total=self.elapsed_s + left_s, completed=self.elapsed_s, width=40)
        line.add_row(bar, f"about {left_s / 60:.1f} min left")
        return Group(Text(self._said, no_wrap=True, overflow="ellipsis"), line)

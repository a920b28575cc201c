"""An exception of ours at a line of ``budgeted_drain`` that was chosen."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, NamedTuple

from omni_fastpath.patches import budgeted_drain

_CATCH_FOR_THEMSELVES = {
    *("wrapped_loop", "wrapped_add_client", "DrainLoop.run", "DrainLoop._arrived"),
    *("Dispatcher.finish", "Dispatcher._take_waiting", "Dispatcher._evict", "Membership.close"),
    "QueuedReplica.watch.<locals>.put_and_notify",
}
"""What handles an exception, and the calls of upstream's that nothing of ours is around; what they call is not exempt,
but where it runs after an exception."""
_AFTERWARDS = {"Dispatcher.finish", "Dispatcher._take_waiting", "Dispatcher._evict", "Membership.close"}
_BEFORE = {
    *("DrainLoop.__init__", "Dispatcher.__init__", "Membership.__init__", "Order.__init__", "Wakeup.__init__"),
    *("HeldEnds.__init__", "Stage.__init__", "floor_of", "gauge_of", "_never"),
}
"""What makes a loop: where that fails, upstream's serves from the beginning."""
_EXEMPT = _CATCH_FOR_THEMSELVES | _BEFORE


class Line(NamedTuple):
    """A line of code: where it is, and in which function."""

    file: str
    number: int
    function: str


class BrokenError(Exception):
    """What is raised."""


def _codes(code: CodeType) -> Iterator[CodeType]:
    yield code
    for each in code.co_consts:
        if isinstance(each, CodeType):
            yield from _codes(each)


def lines() -> list[Line]:
    """All lines that a loop runs, but those that catch for themselves."""
    found: dict[Line, None] = {}
    for path in sorted(Path(budgeted_drain.__file__).parent.glob("*.py")):
        if path.stem in ("__init__", "seams"):
            continue
        file = str(path)
        for code in _codes(compile(path.read_text(encoding="utf-8"), file, "exec")):
            if code.co_flags & inspect.CO_OPTIMIZED and code.co_qualname not in _EXEMPT:
                numbers = {number for _, _, number in code.co_lines() if number not in (None, code.co_firstlineno)}
                found |= dict.fromkeys(Line(file, number or 0, code.co_qualname) for number in sorted(numbers))
    return list(found)


# The innermost frame says whose an exception is, and that is this function's.
_module: dict[str, Any] = {"__name__": "omni_fastpath.patches.budgeted_drain.broken", "BrokenError": BrokenError}
exec("def fail(line): raise BrokenError(line)", _module)  # noqa: S102


class Break:
    """Raises once, when any of these lines is reached, together for the so-manieth time.

    Attributes:
        at: The line at which it has raised.
        reached: Those of the lines that were reached.
    """

    def __init__(self, lines: Sequence[Line], times: float) -> None:
        self.at: Line | None = None
        self.reached: dict[Line, None] = {}
        self._lines = {(line.file, line.function, line.number): line for line in lines}
        self._functions = {(line.file, line.function) for line in lines}
        self._left = times

    @contextmanager
    def armed(self) -> Iterator[None]:
        """It may raise inside."""
        before = sys.gettrace()
        if self.at is None:
            sys.settrace(self._trace)
        try:
            yield
        finally:
            sys.settrace(before)

    def _trace(self, frame: FrameType, _event: str, _arg: Any) -> Callable[..., Any] | None:
        is_there = (frame.f_code.co_filename, frame.f_code.co_qualname) in self._functions
        return self._local if is_there and self.at is None else None

    def _local(self, frame: FrameType, event: str, _arg: Any) -> Callable[..., Any]:
        line = self._lines.get((frame.f_code.co_filename, frame.f_code.co_qualname, frame.f_lineno))
        if event == "line" and line is not None and self.at is None and not _is_afterwards(frame):
            self._left -= 1
            self.reached[line] = None
            if not self._left:
                self.at = line
                _module["fail"](line)
        return self._local


def _is_afterwards(frame: FrameType | None) -> bool:
    while frame is not None:
        if frame.f_code.co_qualname in _AFTERWARDS:
            return True
        frame = frame.f_back
    return False

"""The lines of a patch, and an exception at one of them, by ``sys.settrace``.

A line is left out where the patch cannot fail: the head of a ``try`` or ``with``, which the exception table does not
cover, the head of an ``except``, which only compares types, and what is outside of them in a function that upstream
calls past any slot (`ENTRIES`), where it only passes a call on.
"""

from __future__ import annotations

import ast
import inspect
import sys
import threading
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from types import CodeType, FrameType, FunctionType
from typing import Any

ENTRIES = frozenset(
    {
        "LeanState.make_request_output",
        "LeanProcessor._update_stats_from_output",
        "Arrivals._put_and_wake",
        "._resolve",
        "Records.setdefault",
        "Records.pop",
        "Samples.append",
        "TextCompletion.cumulative_token_ids",
        "._to_debug",
        "Client._answer",
        "Client._heard",
        "Followed._observed_send",
        "_override.observed",
        "SaveQueue.popleft",
        "SaveQueue.__bool__",
        "SaveQueue.__len__",
        "join.put_and_notify",
    }
)
"""Functions that upstream, or a library, calls past any slot; each with what it is defined in."""

WHOLE = frozenset({".wrapped_loop", ".wrapped_add_client", "Drain.run", "Drain._arrived"})
"""Functions that are left out with their ``try`` and ``with``: the drain notices their exceptions when it wakes."""

UNBROKEN = frozenset({"wrapped_loop", "Drain._hand_over", "Replica.leave"})
"""What begins before a patch serves, or runs after an exception: not broken, and neither is what they call."""

Line = tuple[str, int]
"""File and number."""


class InjectedError(Exception):
    """What is raised."""


def _raises() -> None:
    raise InjectedError


fail = FunctionType(_raises.__code__, {**globals(), "__name__": "omni_fastpath.patches.injected"})
"""Raises an exception that counts as the patch's, because its innermost frame is in this package."""


@cache
def left_out(file: str) -> frozenset[int]:
    """The numbers of the lines of a file that do not count."""
    found: set[int] = set()

    def look(node: ast.AST, within: str) -> None:
        name = getattr(node, "name", "")
        if f"{within}.{name}" in ENTRIES:
            found.update(range(node.lineno, node.end_lineno + 1))  # type: ignore[attr-defined]
        for child in ast.iter_child_nodes(node):
            look(child, name or within)
        if isinstance(node, (ast.Try, ast.With, ast.AsyncWith)):
            covered = node.body[-1].end_lineno or 0
            found.difference_update(range(node.body[0].lineno, covered + 1))
            found.update(range(node.lineno, node.body[0].lineno))
            for handler in getattr(node, "handlers", ()):
                found.update(range(handler.lineno, handler.body[0].lineno))
            for inner in node.body:
                look(inner, "")  # the heads in it, again
        if f"{within}.{name}" in WHOLE:
            found.update(range(node.lineno, node.end_lineno + 1))  # type: ignore[attr-defined]

    look(ast.parse(Path(file).read_text()), "")
    return frozenset(found)


def lines_of(patch: str) -> list[Line]:
    """Every line of the functions of a patch, but for those that are left out."""
    from omni_fastpath import patches

    found: set[Line] = set()
    for path in (Path(patches.__file__).parent / patch).glob("*.py"):
        codes = [compile(path.read_text(encoding="utf-8"), str(path), "exec")]
        for code in codes:
            codes += [each for each in code.co_consts if isinstance(each, CodeType)]
            if code.co_flags & inspect.CO_OPTIMIZED:
                numbers = {number for _, _, number in code.co_lines()} - {None, code.co_firstlineno}
                found |= {(str(path), number) for number in numbers - left_out(str(path)) if number is not None}
    return sorted(found)


def tracer(patch: str, at: Callable[[Line], None]) -> Callable[..., Any]:
    """For ``sys.settrace``: told of each line of a patch that a thread reaches."""
    folder = f"/patches/{patch}/"

    def local(frame: FrameType, event: str, _arg: Any) -> Any:
        line = frame.f_code.co_filename, frame.f_lineno
        if event == "line" and line[1] not in left_out(line[0]):
            at(line)
        return local

    return lambda frame, _event, _arg: local if folder in frame.f_code.co_filename else None


@contextmanager
def traced(patch: str, at: Callable[[Line], None]) -> Iterator[None]:
    """Meanwhile, in this thread and in those that begin."""
    before, trace = sys.gettrace(), tracer(patch, at)
    threading.settrace(trace)
    sys.settrace(trace)
    try:
        yield
    finally:
        sys.settrace(before)
        threading.settrace(None)


class FailsAt:
    """Raises once, when any of some lines is reached for the given time.

    Attributes:
        at: The line at which it has raised.
        reached: Those of the lines that were reached.
    """

    def __init__(self, lines: Collection[Line], times: float) -> None:
        self.at: Line | None = None
        self.reached: dict[Line, None] = {}
        self._lines, self._left = frozenset(lines), times

    def __call__(self, line: Line) -> None:
        """A thread has reached it."""
        if self.at is None and line in self._lines and not _is_unbroken():
            self.reached[line] = None
            self._left -= 1
            if not self._left:
                self.at = line
                fail()


def _is_unbroken() -> bool:
    frame: FrameType | None = sys._getframe()
    while frame is not None and frame.f_code.co_qualname not in UNBROKEN:
        frame = frame.f_back
    return frame is not None

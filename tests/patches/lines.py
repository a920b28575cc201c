"""The lines of a patch, and an exception of ours at one of them, by ``sys.settrace``.

A line is left out where the patch cannot fail: the head of a ``try`` or ``with``, which the exception table does not
cover, the head of an ``except``, which only compares types, and what is outside of them in a function that upstream
calls past any slot (`ENTRIES`), where it only passes a call on.
"""

from __future__ import annotations

import ast
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from types import FrameType, FunctionType
from typing import Any

ENTRIES = frozenset(
    {
        ".get_output_nowait",
        "LeanState.make_request_output",
        "LeanProcessor._update_stats_from_output",
        "Records.setdefault",
        "Records.pop",
        "Samples.append",
        "TextCompletion.cumulative_token_ids",
        "SocketReader.recv_multipart",
        "SocketReader._wake",
        "_Arrival.cancel",
        "Event.model_dump_json",
        "._to_debug",
        "_serve.answer",
        "Journey.end",
        "WakeOnPut.__call__",
        "._resolve",
        "_observed_send.observed",
        "_override.observed",
        "SaveQueue.popleft",
        "SaveQueue.__bool__",
        "SaveQueue.__len__",
    }
)
"""Functions that upstream, or a library, calls past any slot; each with what it is defined in."""

Line = tuple[str, int]
"""File and number."""


def _raises() -> None:
    raise RuntimeError("injected")


fail = FunctionType(_raises.__code__, {**globals(), "__name__": "omni_fastpath.patches.injected"})
"""Raises an exception that is ours, because its innermost frame is."""


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

    look(ast.parse(Path(file).read_text()), "")
    return frozenset(found)


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
    """Raises once, at the so many-th time that a line is reached."""

    def __init__(self, line: Line, time: int) -> None:
        self.has_raised = False
        self._line, self._left = line, time

    def __call__(self, line: Line) -> None:
        """A thread has reached it."""
        if line == self._line:
            self._left -= 1
            if self._left == 0:
                self.has_raised = True
                fail()

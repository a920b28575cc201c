"""An exception at one line of our own code, of those at which it must do no harm."""

from __future__ import annotations

import ast
import inspect
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType, ModuleType
from typing import Any

_CALLED_BY_UPSTREAM = {"popleft", "__bool__", "__len__"}
"""Of the queue, as each ``wrapped_`` function. Only what is inside their ``try`` can be expected to be caught."""


@dataclass
class Fault:
    """What was injected, if it came to it. Nothing is injected once it is over."""

    fired: str | None = None
    is_over: bool = False


@contextmanager
def injected(plan: tuple[float, int] | None, modules: Sequence[ModuleType]) -> Iterator[Fault]:
    """Let one line raise once.

    Args:
        plan: Which line, as a share of all there are, and at which of its hits; None: none raises.
        modules: Whose lines.
    """
    fault = Fault()
    if plan is None:
        yield fault
        return
    lines = [(str(module.__file__), line) for module in modules for line in _lines(module)]
    file, line = lines[int(plan[0] * len(lines))]
    hits = 0

    def local(frame: FrameType, event: str, _arg: Any) -> Any:
        nonlocal hits
        if event == "line" and frame.f_lineno == line and fault.fired is None and not fault.is_over:
            hits += 1
            if hits == plan[1]:
                fault.fired = f"hit {hits} of {file}:{line} ({frame.f_code.co_name})"
                raise RuntimeError("injected by the fleet")
        return local

    def trace(frame: FrameType, _event: str, _arg: Any) -> Callable[..., Any] | None:
        return local if frame.f_code.co_filename == file and fault.fired is None else None

    before = sys.gettrace()
    sys.settrace(trace)
    threading.settrace(trace)
    try:
        yield fault
    finally:
        fault.is_over = True
        sys.settrace(before)
        threading.settrace(before)


def _lines(module: ModuleType) -> Iterator[int]:
    """The first lines of a module's statements at which an exception must do no harm.

    A function that catches every exception for itself may be left at the lines before and after.
    """
    for function in ast.walk(ast.parse(inspect.getsource(module))):
        if not isinstance(function, ast.FunctionDef):
            continue
        tries = [each for each in ast.walk(function) if isinstance(each, ast.Try)]
        after_another = _spans(handler for each in tries for handler in each.handlers)
        caught = _spans(line for each in tries if any(map(_catches_all, each.handlers)) for line in each.body)
        only_caught = function.name.startswith("wrapped_") or function.name in _CALLED_BY_UPSTREAM or caught
        for statement in ast.walk(function):
            if not isinstance(statement, ast.stmt) or isinstance(statement, (ast.FunctionDef, ast.Try)):
                continue
            if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant):
                continue  # a docstring
            if statement.lineno not in after_another and (statement.lineno in caught or not only_caught):
                yield statement.lineno


def _spans(nodes: Iterator[Any]) -> set[int]:
    return {line for node in nodes for line in range(node.lineno, node.end_lineno + 1)}


def _catches_all(handler: ast.ExceptHandler) -> bool:
    return handler.type is None or getattr(handler.type, "id", "") in {"Exception", "BaseException"}

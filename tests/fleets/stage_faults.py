"""An exception anywhere in our own code: at the start of one call of one function, or at one line."""

from __future__ import annotations

import ast
import builtins
import functools
import inspect
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import CodeType, FrameType, FunctionType, ModuleType
from typing import Any

WORDS = "injected by the fleet"

_OUTERMOST = {"popleft", "__bool__", "__len__"}
"""Of the queue: what upstream calls. Only what is inside their `try` can be expected to be caught."""
_NOT_OURS_TO_CATCH = {"__post_init__", "__repr__", "__eq__", "__hash__"}


class Fault:
    """What was injected, if it came to it."""

    def __init__(self) -> None:
        self.fired: str | None = None
        self._judge: int | None = None

    @contextmanager
    def spared(self) -> Iterator[None]:
        """Calls of this thread are the judge's: nothing in a stage made them, and nothing goes wrong in them."""
        self._judge = threading.get_ident()
        try:
            yield
        finally:
            self._judge = None

    def is_spared(self) -> bool:
        """Whether the judge is calling."""
        return self._judge == threading.get_ident()


@contextmanager
def injected(plan: dict[str, Any] | None, modules: list[ModuleType]) -> Iterator[Fault]:
    """Let one thing go wrong in these modules.

    Args:
        plan: "mode" ("call" or "line"), "where" (a share of what there is), "number" (at which time), "error" (what is
            raised); None: nothing goes wrong.
        modules: Whose code it is.
    """
    fault = Fault()
    if plan is None:
        yield fault
        return
    mode = _at_a_call if plan["mode"] == "call" else _at_a_line
    with mode(plan, modules, fault):
        yield fault


def _functions(modules: list[ModuleType]) -> Iterator[tuple[Any, str, FunctionType, bool]]:
    """Every function: its owner, its name there, itself, and whether upstream calls it."""
    for module in sorted(modules, key=lambda each: each.__name__):
        for name, value in sorted(vars(module).items()):
            if inspect.isfunction(value) and value.__module__ == module.__name__ and name not in _NOT_OURS_TO_CATCH:
                yield module, name, value, name.startswith("wrapped_")
            elif inspect.isclass(value) and value.__module__ == module.__name__:
                is_queue = "popleft" in vars(value)
                for inner, member in sorted(vars(value).items()):
                    function = member.fget if isinstance(member, property) else member
                    if not inspect.isfunction(function) or inner in _NOT_OURS_TO_CATCH:
                        continue
                    if function.__code__.co_filename.startswith("<"):  # what dataclasses make
                        continue
                    yield value, inner, function, is_queue and inner in _OUTERMOST


def _error(plan: dict[str, Any]) -> Exception:
    error: Exception = getattr(builtins, plan["error"])(WORDS)
    return error


@contextmanager
def _at_a_call(plan: dict[str, Any], modules: list[ModuleType], fault: Fault) -> Iterator[None]:
    found = [each for each in _functions(modules) if not each[3]]
    owner, name, function, _ = found[int(plan["where"] * len(found))]
    calls, lock = 0, threading.Lock()

    @functools.wraps(function)
    def failing(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        if fault.is_spared():
            return function(*args, **kwargs)
        with lock:
            calls += 1
            now = calls == plan["number"]
        if now:
            fault.fired = f"{plan['error']} at call {calls} of {function.__module__}.{function.__qualname__}"
            raise _error(plan)
        return function(*args, **kwargs)

    undo: list[tuple[Any, str, Any]] = []
    raw = vars(owner)[name]
    _replace(owner, name, property(failing) if isinstance(raw, property) else failing, undo)
    if isinstance(owner, ModuleType):
        for module in modules:  # who has imported it
            for alias, value in list(vars(module).items()):
                if value is function:
                    _replace(module, alias, failing, undo)
    try:
        yield
    finally:
        for place, alias, value in reversed(undo):
            setattr(place, alias, value)


def _replace(owner: Any, name: str, value: Any, undo: list[tuple[Any, str, Any]]) -> None:
    undo.append((owner, name, vars(owner)[name]))
    setattr(owner, name, value)


def _caught_lines(module: ModuleType) -> set[int]:
    """Lines inside a `try` that catches every exception."""
    found: set[int] = set()
    for node in ast.walk(ast.parse(inspect.getsource(module))):
        if isinstance(node, ast.Try) and any(_catches_all(handler) for handler in node.handlers):
            for each in node.body:
                found |= set(range(each.lineno, (each.end_lineno or each.lineno) + 1))
    return found


def _handler_lines(module: ModuleType) -> set[int]:
    """Lines that run only after another exception."""
    found: set[int] = set()
    for node in ast.walk(ast.parse(inspect.getsource(module))):
        if isinstance(node, ast.ExceptHandler):
            found |= set(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return found


def _catches_all(handler: ast.ExceptHandler) -> bool:
    kinds = handler.type.elts if isinstance(handler.type, ast.Tuple) else [handler.type]
    return any(kind is None or getattr(kind, "id", "") in {"Exception", "BaseException"} for kind in kinds)


@contextmanager
def _at_a_line(plan: dict[str, Any], modules: list[ModuleType], fault: Fault) -> Iterator[None]:
    lines: list[tuple[CodeType, int, str]] = []
    for owner, _name, function, is_outermost in _functions(modules):
        module = sys.modules[function.__module__]
        del owner
        caught, handlers = _caught_lines(module), _handler_lines(module)
        # One that catches for itself may be left at the lines before and after: they are the machinery of catching.
        only_caught = is_outermost or bool(caught & _lines_of(function.__code__))
        lines += [
            (function.__code__, line, f"{function.__module__}:{line} ({function.__qualname__})")
            for line in sorted(_lines_of(function.__code__) - handlers)
            if not only_caught or line in caught
        ]
    if not lines or sys.gettrace() is not None:  # somebody measures coverage: not with us
        yield
        return
    code, line, words = lines[int(plan["where"] * len(lines))]
    number, hits = 1 + plan["number"] // 4, 0

    def local(frame: FrameType, event: str, _arg: Any) -> Any:
        nonlocal hits
        if event == "line" and frame.f_lineno == line and fault.fired is None and not fault.is_spared():
            hits += 1
            if hits == number:
                fault.fired = f"{plan['error']} at hit {hits} of {words}"
                raise _error(plan)
        return local

    def trace(frame: FrameType, _event: str, _arg: Any) -> Callable[..., Any] | None:
        return local if frame.f_code is code and fault.fired is None else None

    sys.settrace(trace)
    threading.settrace(trace)
    try:
        yield
    finally:
        sys.settrace(None)
        threading.settrace(None)


def _lines_of(code: CodeType) -> set[int]:
    return {line for _, _, line in code.co_lines() if line is not None and line != code.co_firstlineno}

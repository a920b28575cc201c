"""An exception in a patch of a server, at a line that is reached by chance. A file says in which patch and when.

``sitecustomize`` in the server's ``PYTHONPATH`` (see `injected.plugin`) calls `install` in each of its processes,
before any patch is imported. Each statement of a patch is then compiled with a call before it, but for what
`tests.patches.lines` leaves out. Only the standard library is imported: every Python that the server starts runs this.
"""

from __future__ import annotations

import ast
import builtins
import os
import sys
import threading
import time
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any

from tests.patches.lines import left_out

VARIABLE = "TEST_BREAKS"
"""Names the file, in which a patch's name and a number are: so many statements of it later it breaks."""

SITECUSTOMIZE = "from tests.trust import broken\n\nbroken.install()\n"

_LOOK_S = 0.01
_REACHED = "__omni_fastpath_reached__"
_armed: dict[str, Any] = {"patch": "", "left": 0}


def _reached(patch: str, line: int) -> None:
    """Before each statement of a patch."""
    if _armed["patch"] == patch:
        _armed["left"] -= 1
        if _armed["left"] == 0:
            _armed["patch"] = ""
            sys.stderr.write(f"[injected] ours-{patch} {line}\n")
            sys.stderr.flush()
            raise RuntimeError(f"injected at line {line} of {patch}")


def _watch(file: Path) -> None:
    said = ""
    while True:
        time.sleep(_LOOK_S)
        try:
            text = file.read_text()
        except OSError:
            continue
        if text != said:
            said = text
            patch, left, _ = text.split()
            _armed.update(left=int(left), patch=patch)


class _Before(ast.NodeTransformer):
    """Puts a call before each statement of a function that counts."""

    def __init__(self, path: str, patch: str) -> None:
        self._left_out, self._patch = left_out(path), patch
        self._in_function = 0

    def _function(self, node: Any) -> Any:
        self._in_function += 1
        self.generic_visit(node)
        self._in_function -= 1
        return node

    visit_FunctionDef = visit_AsyncFunctionDef = _function  # noqa: N815 - names of ast's

    def generic_visit(self, node: ast.AST) -> ast.AST:
        super().generic_visit(node)
        for name in ("body", "orelse", "finalbody"):
            block = getattr(node, name, None)
            if self._in_function and isinstance(block, list):
                setattr(node, name, [each for statement in block for each in self._before(statement)])
        return node

    def _before(self, statement: ast.stmt) -> list[ast.stmt]:
        is_text = isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)
        if is_text or statement.lineno in self._left_out or isinstance(statement, (ast.Global, ast.Nonlocal)):
            return [statement]
        given: list[ast.expr] = [ast.Constant(self._patch), ast.Constant(statement.lineno)]
        call = ast.Expr(ast.Call(ast.Name(_REACHED, ast.Load()), given, []))
        return [ast.fix_missing_locations(ast.copy_location(call, statement)), statement]


def install() -> None:
    """Compile patches so from now on; without the variable nothing happens."""
    file = os.environ.get(VARIABLE)
    if not file:
        return
    # An exception is ours by its innermost frame's module.
    ours = {"__name__": "omni_fastpath.patches.injected", "_armed": _armed, "sys": sys}
    setattr(builtins, _REACHED, FunctionType(_reached.__code__, ours))
    upstreams = SourceFileLoader.get_code
    watches: list[threading.Thread] = []

    def get_code(loader: SourceFileLoader, fullname: str) -> CodeType | None:
        _, _, patch = fullname.partition("omni_fastpath.patches.")
        if not patch:
            return upstreams(loader, fullname)
        if not watches:
            watches.append(threading.Thread(target=_watch, args=(Path(file),), daemon=True))
            watches[0].start()
        path = loader.get_filename(fullname)
        tree = _Before(path, patch.partition(".")[0]).visit(ast.parse(loader.get_data(path)))
        code: CodeType = compile(tree, path, "exec", dont_inherit=True)
        return code

    SourceFileLoader.get_code = get_code  # type: ignore[method-assign, assignment]

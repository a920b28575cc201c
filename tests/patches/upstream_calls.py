"""Which of upstream's functions a patch calls, seen by ``sys.setprofile`` while its code runs.

A call counts for the patch in whose file the calling line stands: upstream calling upstream is upstream's business.
What stands between in C (wrapt, ``functools.partial``, ``map``) leaves no frame, so that the caller is still ours. A
coroutine of upstream's that a patch awaits is called from the patch's frame, at its first step and at each later one.

A call is named by where the function is defined, ``module:qualname``, as a seam is: an inherited method by its base
class. Where a rig's subclass of an upstream class overrides a method, the method of upstream's that it stands for is
called. Where a patch has wrapped the function, what it wraps is.
"""

from __future__ import annotations

import ast
import contextlib
import copy
import functools
import inspect
import re
import sys
import threading
import warnings
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType, FunctionType
from typing import Any

from typing_extensions import Self

from omni_fastpath.declare import Patch
from omni_fastpath.install import seams_here

UPSTREAM = frozenset({"vllm", "vllm_omni"})
"""Whose functions are seams. What other libraries promise in public needs no declaration."""

PATCHES_PACKAGE = "omni_fastpath.patches."
_PROTOCOL = re.compile(r"\b__\w+__$")
"""Python's own: making, comparing, finding or freeing an object is no call by name."""

_NOT_CALLED = (property, functools.cached_property)
"""What looks like an attribute where it stands: no seam but, as an attribute, a line under Fragility."""


def declared_by(patch: Patch, patches: Sequence[Patch], *, anywhere: bool = False) -> set[str]:
    """The paths of the seams that a patch declares, and of those without whose patches it is not installed.

    Those of the installed release, or with ``anywhere`` of all: a source may hold what only another release is for.
    """
    named = {each.name: each for each in patches}
    seams = [seam for fit in patch.fits for seam in fit.seams] if anywhere else seams_here(patch)
    found = {seam.path for seam in seams}
    return found.union(*(declared_by(named[name], patches, anywhere=anywhere) for name in patch.requires))


class UpstreamCalls:
    """Sees calls of upstream's functions by lines of the patches, on this thread and on all that start meanwhile.

    Attributes:
        found: For each patch the functions that it called, and from which line.
    """

    def __init__(self, patches: Sequence[Patch]) -> None:
        self._patches = patches
        self._is_on = False
        self._before: Any = None
        self.found: dict[str, dict[str, str]] = {patch.name: {} for patch in patches}

    def __enter__(self) -> Self:
        self._is_on, self._before = True, sys.getprofile()
        threading.setprofile(self._see)
        sys.setprofile(self._see)
        return self

    def __exit__(self, *_: object) -> None:
        self._is_on = False
        sys.setprofile(self._before)
        threading.setprofile(None)

    def undeclared(self) -> list[str]:
        """The calls of functions that are no seam of the calling patch, in words."""
        declared = {patch.name: declared_by(patch, self._patches) for patch in self._patches}
        return [
            f"{name} calls {path} at {line}, which is none of its seams"
            for name, found in self.found.items()
            for path, line in sorted(found.items())
            if path not in declared[name] and not _PROTOCOL.search(path)
        ]

    def _see(self, frame: FrameType, event: str, _: Any) -> None:
        if event != "call":
            return
        if not self._is_on:  # a thread that outlived us
            sys.setprofile(None)
            return
        caller = frame.f_back
        # It runs for every call of the process: nothing else before this.
        if caller is None or not caller.f_globals.get("__name__", "").startswith(PATCHES_PACKAGE):
            return
        patch = caller.f_globals["__name__"][len(PATCHES_PACKAGE) :].partition(".")[0]
        if patch in self.found and (path := _called(frame, patch)) is not None:
            self.found[patch].setdefault(path, f"{Path(caller.f_code.co_filename).name}:{caller.f_lineno}")


def _called(callee: FrameType, patch: str) -> str | None:
    """The upstream function that a frame runs, or stands for; None when it is nobody's or only an attribute's."""
    code, module = callee.f_code, callee.f_globals.get("__name__", "")
    if module.startswith(PATCHES_PACKAGE):  # another patch's wrapper stands in the slot; one's own calls on by itself
        is_own = module.startswith(f"{PATCHES_PACKAGE}{patch}.")
        return None if is_own else _path_of(callee.f_locals.get("wrapped"), UPSTREAM)
    first = callee.f_locals.get(code.co_varnames[0]) if code.co_argcount else None
    kind = first if isinstance(first, type) else type(first)
    named = [raw for owner in kind.__mro__ if (raw := _own(owner, code.co_name)) is not None]
    if not _is_among(module, UPSTREAM):  # a rig's, which may stand for upstream's
        return next(filter(None, (_path_of(raw, UPSTREAM) for raw in named)), None)
    if any(_code_of(raw) is code for raw in named if isinstance(raw, _NOT_CALLED)):
        return None
    return f"{module}:{code.co_qualname}"


def _own(owner: type, name: str) -> Any:
    """What a class of upstream's has under a name itself; None for anybody else's."""
    return vars(owner).get(name) if _is_among(owner.__module__, UPSTREAM) else None


def _code_of(attribute: Any) -> Any:
    function: Any = attribute.fget if isinstance(attribute, property) else attribute.func
    return getattr(inspect.unwrap(function), "__code__", None)


def _is_among(module: str, packages: Collection[str]) -> bool:
    return module.partition(".")[0] in packages


def _path_of(raw: Any, packages: Collection[str]) -> str | None:
    """Where a function of one of these packages is defined; None for anything else."""
    function = inspect.unwrap(getattr(raw, "__func__", raw))
    if not isinstance(function, FunctionType) or not _is_among(function.__module__ or "", packages):
        return None
    return f"{function.__module__}:{function.__qualname__}"


# ---- By syntax tree ----


def functions_named(tree: ast.Module, packages: Collection[str]) -> Iterator[tuple[str, str]]:
    """Each upstream function that a file imports or reads off what it imports: its path, and the expression.

    Classes, their members that are no functions, constants and modules are no functions: nothing of theirs is called by
    naming them. What the installed release does not have is another release's, where it is looked at.
    """
    imported: dict[str, Any] = {}
    for node in ast.walk(tree):
        if not isinstance(node, (ast.Import, ast.ImportFrom)) or getattr(node, "level", None):
            continue
        for alias in node.names:
            if _is_among(getattr(node, "module", alias.name), packages):
                alone = copy.copy(node)
                alone.names = [alias]
                # What only another release needs may be deprecated on this one, or not there.
                with warnings.catch_warnings(), contextlib.suppress(ImportError):
                    warnings.simplefilter("ignore", DeprecationWarning)
                    exec(compile(ast.Module([alone], []), "<an import of ours>", "exec"), imported)  # noqa: S102
    for node in ast.walk(tree):
        if isinstance(node, (ast.Name, ast.Attribute)):
            path = _path_of(_value(node, imported), packages)
            if path is not None:
                yield path, ast.unparse(node)


def _value(node: ast.expr, imported: Mapping[str, Any]) -> Any:
    """What an expression of names and dots is, without calling anything; None when it is not upstream's."""
    if isinstance(node, ast.Name):
        return imported.get(node.id)
    if isinstance(node, ast.Attribute):
        owner = _value(node.value, imported)
        return None if owner is None else inspect.getattr_static(owner, node.attr, None)
    return None

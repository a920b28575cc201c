"""Which functions of upstream a patch calls, seen by ``sys.setprofile`` while its code runs.

A call counts for the patch in whose file the calling line is. Calls within upstream do not count. Functions in C
(wrapt, ``functools.partial``, ``map``) leave no frame, so that the caller is still the patch. A coroutine of upstream
that a patch awaits is called from the patch's frame, at its first step and at each later one.

A call is named by where the function is defined, ``module:qualname``, as a seam is: an inherited method by its base
class. Where a rig's subclass of an upstream class overrides a method, the overridden method counts as
called. Where a patch has wrapped the function, what it wraps is.
"""

from __future__ import annotations

import functools
import inspect
import re
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType, FunctionType
from typing import Any

from omni_fastpath.declare import Patch
from omni_fastpath.patches import PATCHES
from tests.fakes.upstream import seams_here

UPSTREAM = frozenset({"vllm", "vllm_omni"})
"""Whose functions are seams. What other libraries promise in public needs no declaration."""

PATCHES_PACKAGE = "omni_fastpath.patches."
_PROTOCOL = re.compile(r"\b__\w+__$")
"""Python's own: making, comparing, finding or freeing an object is no call by name."""

_NOT_CALLED = (property, functools.cached_property)
"""They are read like attributes, which are no seams but lines under Fragility."""


def _declared_by(patch: Patch) -> set[str]:
    """The paths of the seams that a patch declares here, and of those without whose patches it is not installed."""
    required = [each for each in PATCHES if each.name in patch.requires]
    return {seam.path for seam in seams_here(patch)}.union(*map(_declared_by, required))


@contextmanager
def undeclared_calls() -> Iterator[list[str]]:
    """See calls of upstream functions by lines of the patches, on this thread and on all that start meanwhile.

    Yields a list that has, when it has ended, the calls of functions that are no seam of the calling patch, in words.
    """
    found: dict[tuple[str, str], str] = {}
    wrong: list[str] = []
    is_on, before = True, sys.getprofile()

    def see(frame: FrameType, event: str, _: Any) -> None:
        if event != "call":
            return
        if not is_on:  # a thread that outlived us
            sys.setprofile(None)
            return
        caller = frame.f_back
        # It runs for every call of the process: nothing else before this.
        if caller is None or not caller.f_globals.get("__name__", "").startswith(PATCHES_PACKAGE):
            return
        patch = caller.f_globals["__name__"][len(PATCHES_PACKAGE) :].partition(".")[0]
        if (path := _called(frame, patch)) is not None and not _PROTOCOL.search(path):
            found.setdefault((patch, path), f"{Path(caller.f_code.co_filename).name}:{caller.f_lineno}")

    threading.setprofile(see)
    sys.setprofile(see)
    try:
        yield wrong
    finally:
        is_on = False
        sys.setprofile(before)
        threading.setprofile(None)
    declared = {patch.name: _declared_by(patch) for patch in PATCHES}
    wrong += [
        f"{patch} calls {path} at {line}, which is none of its seams"
        for (patch, path), line in sorted(found.items())
        if path not in declared.get(patch, {path})
    ]


def _called(callee: FrameType, patch: str) -> str | None:
    """The upstream function that a frame runs or replaces; None if there is none, or it is only an attribute's."""
    code, module = callee.f_code, callee.f_globals.get("__name__", "")
    if module.startswith(PATCHES_PACKAGE):  # another patch's wrapper in the slot; a patch's own one calls further
        is_own = module.startswith(f"{PATCHES_PACKAGE}{patch}.")
        return None if is_own else _path_of(callee.f_locals.get("wrapped"))
    first = callee.f_locals.get(code.co_varnames[0]) if code.co_argcount else None
    kind = first if isinstance(first, type) else type(first)
    owners = [vars(owner) for owner in kind.__mro__ if _is_upstreams(owner.__module__)]
    named = [found[code.co_name] for found in owners if code.co_name in found]
    if not _is_upstreams(module):  # a rig's, which may override upstream's
        return next(filter(None, map(_path_of, named)), None)
    is_attribute = any(isinstance(raw, _NOT_CALLED) for raw in named)
    return None if is_attribute else f"{module}:{code.co_qualname}"


def _is_upstreams(module: str) -> bool:
    return module.partition(".")[0] in UPSTREAM


def _path_of(raw: Any) -> str | None:
    """Where an upstream function is defined; None for anything else."""
    function = inspect.unwrap(getattr(raw, "__func__", raw))
    if not isinstance(function, FunctionType) or not _is_upstreams(function.__module__ or ""):
        return None
    return f"{function.__module__}:{function.__qualname__}"

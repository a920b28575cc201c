"""The differences between the installed release and the listed ones, for ``seams`` and for ``status --verify``.

The functions import upstream's modules but install nothing.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from types import FunctionType
from typing import Any

from omni_fastpath.declare import AnySeam, Fit, Function, Patch, Reads, Seam
from omni_fastpath.seams import SeamMovedError, differences, find, fingerprint, function_in, shape


def nearest(patch: Patch, release: str) -> tuple[str, Fit]:
    """The nearest release with a ``Fit`` (``Patch.nearest_first``), and that row."""
    return next((each, row) for each, row in patch.nearest_first(release) if isinstance(row, Fit))


def compare(patch: Patch, release: str) -> dict[str, Any]:
    """Compare each seam of the patch with the nearest listed release.

    Returns:
        ``patch``. ``beside``: that release. ``seams``: the result of ``describe`` for each seam. If the installed
        release is not listed, all bodies are compared.
    """
    beside, row = nearest(patch, release)
    exact = patch.listed(release) is None
    return {"patch": patch.name, "beside": beside, "seams": [describe(seam, beside, exact=exact) for seam in row.seams]}


def summary(compared: Mapping[str, Any]) -> list[str]:
    """The lines of a comparison: how many seams are unchanged, then each one that is missing or changed."""
    seams = compared["seams"]
    fitting = sum(not seam["changes"] for seam in seams)
    changed = [f"{seam['seam']}: {'; '.join(seam['changes'])}" for seam in seams if seam["changes"]]
    return [f"{fitting} of {len(seams)} seams are as on {compared['beside']}", *changed]


def describe(seam: AnySeam, release: str, *, exact: bool) -> dict[str, Any]:
    """The installed object of a seam, and its differences from a release.

    Returns:
        ``seam``: its path. ``use``: its class. ``place``: file and line. ``shape`` and ``fingerprint``: of the
        installed function, or None if it is not one. ``changes``: the differences in words.
    """
    use = type(seam).__name__.lower()
    found: dict[str, Any] = {"seam": seam.path, "use": use, "place": None, "shape": None, "fingerprint": None}
    try:
        slot = find(seam)
        if not isinstance(seam, Function):
            found |= {"place": _place(seam, slot.raw() if isinstance(seam, Reads) else slot.owner)}
        elif isinstance(function := function_in(slot.raw()), FunctionType):
            found |= {"place": _place(seam, function), "shape": shape(slot.raw()), "fingerprint": fingerprint(function)}
        return {**found, "changes": list(differences(seam, slot, release, exact=exact))}
    except SeamMovedError as error:
        return {**found, "changes": [str(error).removeprefix(f"{seam.path}: ")]}
    except Exception as error:  # importing an upstream module may raise anything
        return {**found, "changes": [f"it cannot be verified: {error!r}"]}


def _place(seam: Seam, it: Any) -> str:
    """File and line. The path begins at the package."""
    file, top = inspect.getsourcefile(it) or "", seam.module.partition(".")[0]
    _, package, rest = file.rpartition(f"/{top}")
    return f"{package[1:]}{rest or file}:{inspect.getsourcelines(it)[1]}"

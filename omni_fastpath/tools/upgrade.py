"""The differences between the installed release and the listed ones, for ``seams`` and for ``status --verify``.

The functions import upstream's modules but install nothing.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from omni_fastpath.declare import Add, AnySeam, Fit, Patch, Seam
from omni_fastpath.seams import SeamMovedError, find, fingerprint, function_in, verify


def nearest(patch: Patch, release: str) -> tuple[str, Fit]:
    """The nearest release with a ``Fit`` (``Patch.nearest_first``), and that row."""
    return next((each, row) for each, row in patch.nearest_first(release) if isinstance(row, Fit))


def compare(patch: Patch, release: str) -> dict[str, Any]:
    """Compare each seam of the patch with the nearest listed release.

    Returns:
        ``patch``. ``beside``: that release. ``seams``: the result of ``describe`` for each seam.
    """
    beside, row = nearest(patch, release)
    return {"patch": patch.name, "beside": beside, "seams": [describe(seam, beside) for seam in row.seams]}


def summary(compared: Mapping[str, Any]) -> list[str]:
    """The lines of a comparison: how many seams are unchanged, then each one that is missing or changed."""
    seams = compared["seams"]
    fitting = sum(not seam["changes"] for seam in seams)
    changed = [f"{seam['seam']}: {'; '.join(seam['changes'])}" for seam in seams if seam["changes"]]
    return [f"{fitting} of {len(seams)} seams are as on {compared['beside']}", *changed]


def describe(seam: AnySeam, release: str) -> dict[str, Any]:
    """The installed object of a seam, and its difference from a release.

    Returns:
        ``seam``: its path. ``use``: its class. ``place``: file and line. ``fingerprint``: of the installed object, or
        None if it is absent. ``changes``: the differences in words.
    """
    found: dict[str, Any] = {"seam": seam.path, "use": type(seam).__name__.lower(), "place": None, "fingerprint": None}
    try:
        slot = find(seam)
        it = slot.owner if isinstance(seam, Add) else function_in(slot.raw())
        if callable(it):
            found |= {"place": _place(seam, it), "fingerprint": None if it is slot.owner else fingerprint(it)}
        verify(seam, release)
    except SeamMovedError as error:
        return {**found, "changes": [str(error).removeprefix(f"{seam.path}: ")]}
    except Exception as error:  # importing an upstream module may raise anything
        return {**found, "changes": [f"it cannot be verified: {error!r}"]}
    return {**found, "changes": []}


def _place(seam: Seam, it: Any) -> str:
    """File and line. The path begins at the package."""
    file, top = inspect.getsourcefile(it) or "", seam.module.partition(".")[0]
    _, package, rest = file.rpartition(f"/{top}")
    return f"{package[1:]}{rest or file}:{inspect.getsourcelines(it)[1]}"

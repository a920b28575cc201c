"""How the installed release differs from what the patches were made for: ``seams``, and a look before an upgrade.

Everything here imports upstream's modules, and installs nothing.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from types import FunctionType
from typing import Any

from omni_fastpath.declare import AnySeam, Fit, Function, Patch, Reads, Seam
from omni_fastpath.seams import SeamMovedError, differences, find, fingerprint, function_in, shape


def nearest(patch: Patch, release: str) -> tuple[str, Fit]:
    """The nearest release on which the patch is installed (``Patch.nearest_first``), and its row there."""
    return next((each, row) for each, row in patch.nearest_first(release) if isinstance(row, Fit))


def compare(patch: Patch, release: str) -> dict[str, Any]:
    """Each seam of the patch as it is installed, beside the nearest release that the patch knows.

    Returns:
        ``patch``; ``beside``: that release; ``seams``: ``look`` at each, body and all where the release is not listed.
    """
    beside, row = nearest(patch, release)
    exact = patch.row_on(release) is None
    return {"patch": patch.name, "beside": beside, "seams": [look(seam, beside, exact=exact) for seam in row.seams]}


def told(compared: Mapping[str, Any]) -> list[str]:
    """A comparison in lines: how many seams are as they were, then each that is missing or changed."""
    seams = compared["seams"]
    fitting = sum(not seam["changes"] for seam in seams)
    changed = [f"{seam['seam']}: {'; '.join(seam['changes'])}" for seam in seams if seam["changes"]]
    return [f"{fitting} of {len(seams)} seams are as on {compared['beside']}", *changed]


def look(seam: AnySeam, release: str, *, exact: bool) -> dict[str, Any]:
    """What is where a seam is declared.

    Returns:
        ``seam`` and ``use``: as declared. ``place``: file and line. ``shape`` and ``fingerprint``: of a function, as
        found; None where there is none. ``changes``: each difference from the release in words; empty where it fits.
    """
    found: dict[str, Any] = {"seam": seam.path, "use": seam.use, "place": None, "shape": None, "fingerprint": None}
    try:
        slot = find(seam)
        if not isinstance(seam, Function):
            found |= {"place": _place(seam, slot.raw() if isinstance(seam, Reads) else slot.owner)}
        elif isinstance(function := function_in(slot.raw()), FunctionType):
            found |= {"place": _place(seam, function), "shape": shape(slot.raw()), "fingerprint": fingerprint(function)}
        return {**found, "changes": list(differences(seam, slot, release, exact=exact))}
    except SeamMovedError as error:
        return {**found, "changes": [str(error).removeprefix(f"{seam.path}: ")]}
    except Exception as error:  # whatever importing upstream's module raises
        return {**found, "changes": [f"it cannot be verified: {error!r}"]}


def _place(seam: Seam, it: Any) -> str:
    """File and line, the file from its package on."""
    file, top = inspect.getsourcefile(it) or "", seam.module.partition(".")[0]
    _, package, rest = file.rpartition(f"/{top}")
    return f"{package[1:]}{rest or file}:{inspect.getsourcelines(it)[1]}"

"""What an installed release is to the declarations, where nobody has read it yet: for a look before an upgrade.

Everything here imports upstream's modules, and installs nothing. What is compared with is the row of the nearest
release that is known; each finding is plain data with stable keys.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import inspect
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from packaging.version import InvalidVersion, Version

from omni_fastpath.declare import AnySeam, Fit, Function, Patch, Row, Seam
from omni_fastpath.install import import_wrappers
from omni_fastpath.ledger import logger
from omni_fastpath.releases import Release
from omni_fastpath.seams import SeamMovedError, SourceError, descriptor, differences, find, fingerprint, function_in

_NOTHING: Mapping[str, None] = dict.fromkeys(("place", "parameters", "descriptor", "fingerprint"))
_SHOWN = 3
"""Places where a name is defined; a name that stands in more says nothing."""


def nearest(rows: Sequence[Row], release: str) -> tuple[str, Row]:
    """The newest of the rows' releases that is not newer than this one, else the oldest; and its row.

    A development or pre-release counts as what it leads to. The newest, where the release cannot be compared.
    """
    known = [(each, row) for row in rows for each in row.releases]
    try:
        target = Version(Version(release).base_version)
    except InvalidVersion:
        return known[-1]
    return next(((each, row) for each, row in reversed(known) if Version(each) <= target), known[0])


def compare(patch: Patch, release: str) -> dict[str, Any]:
    """How upstream as it is installed differs from what the patch was made for.

    Returns:
        ``beside``: the release compared with. ``state`` and ``words``: what the patch is there, and what is said of it.
        ``seams``: ``look`` at each that it has there, and what its wrappers import and cannot have, of use ``import``.
    """
    beside, row = nearest(patch.rows, release)
    found = [*(look(seam) for seam in row.seams), *_missing(patch)] if isinstance(row, Fit) else []
    return {"beside": beside, "state": row.state.value, "words": row.note, "seams": found}


def _missing(patch: Patch) -> list[dict[str, Any]]:
    """What the patch only imports of upstream and would not find: a seam of its own in what is told."""
    try:
        import_wrappers(patch)
    except SeamMovedError as error:
        module, _, what = str(error).partition(": ")
        return [{"seam": module, "use": "import", **_NOTHING, "changes": [what]}]
    except Exception:  # after seams that moved nothing more is known of it
        logger.debug("omni-fastpath: the wrappers of %s cannot be imported", patch.name, exc_info=True)
    return []


def look(seam: AnySeam) -> dict[str, Any]:
    """What stands where a seam is declared.

    Args:
        seam: As declared.

    Returns:
        ``seam`` and ``use``: as declared. ``place``: file and line. ``parameters``, ``descriptor`` and ``fingerprint``:
        as found; None where there is none. ``changes``: each difference in words; empty where it fits.
    """
    found: dict[str, Any] = {"seam": seam.path, "use": seam.use, **_NOTHING}
    changes: list[str] = []
    try:
        slot = find(seam)
        if isinstance(seam, Function):
            changes += differences(seam, slot)
            if slot.present:
                found |= _function(seam, slot.raw())
            else:
                changes += _elsewhere(seam)
        else:
            found["place"] = _place(seam, slot.owner)
            changes += ["upstream has one of its own"] if hasattr(slot.owner, slot.name) else []
    except (SeamMovedError, SourceError) as error:
        changes += [str(error).removeprefix(f"{seam.path}: "), *_elsewhere(seam)]
    except Exception as error:  # whatever importing upstream's module raises
        changes.append(f"looking at it failed: {error!r}")
    return {**found, "changes": changes}


def _function(seam: Function, raw: Any) -> dict[str, Any]:
    function = function_in(raw)
    return {
        "place": _place(seam, function),
        "parameters": list(inspect.signature(function).parameters),
        "descriptor": descriptor(raw),
        "fingerprint": fingerprint(function),
    }


def _place(seam: Seam, it: Any) -> str:
    """File and line, the file from its package on."""
    file, top = inspect.getsourcefile(it) or "", seam.module.partition(".")[0]
    _, package, rest = file.rpartition(f"/{top}")
    return f"{package[1:]}{rest or file}:{inspect.getsourcelines(it)[1]}"


def _elsewhere(seam: AnySeam) -> list[str]:
    """Where upstream has a function of that name now."""
    package, name = seam.module.partition(".")[0], seam.qualname.rpartition(".")[2]
    places = _definitions(package).get(name, [])
    return [f"one of that name is in {', '.join(places)}"] if 0 < len(places) <= _SHOWN else []


@functools.cache
def _definitions(package: str) -> dict[str, list[str]]:
    """File and line of each function in a package's source, by its name."""
    found: dict[str, list[str]] = {}
    spec = importlib.util.find_spec(package)
    for folder in (spec.submodule_search_locations or ()) if spec is not None else ():
        for file in sorted(Path(folder).rglob("*.py")):
            for line, text in enumerate(file.read_text(encoding="utf-8", errors="replace").splitlines(), 1):
                if (match := re.match(r"\s*(?:async )?def (\w+)\(", text)) is not None:
                    found.setdefault(match[1], []).append(f"{file.relative_to(Path(folder).parent)}:{line}")
    return found


# ---- A row to begin with ----


def sheet(patch: Patch, installed: Release) -> dict[str, Any]:
    """What a row for the installed release would be made of, to be read and judged.

    Returns:
        ``patch``, ``release``, ``source`` of that, ``beside``: the nearest release on which the patch is installed;
        ``seams``: ``look`` at each of that one's; ``row``: these as Python source.
    """
    beside, row = nearest(patch.fits, installed.version)
    assert isinstance(row, Fit)
    found = [look(seam) for seam in row.seams]
    about = {"patch": patch.name, "release": installed.version, "beside": beside}
    return {**about, "seams": found, "row": _as_row(installed.version, row, found)}


def _as_row(release: str, row: Fit, found: Sequence[Mapping[str, Any]]) -> str:
    try:
        version = Version(release)
    except InvalidVersion:
        version = Version("0")
    lines = ["Fit(", f"    releases=({version.public!r},),", *(["    preview=True,"] if version.is_prerelease else [])]
    lines += [f"    {name}={value!r}," for name, value in _given(row) if name not in {"releases", "seams", "preview"}]
    lines += ["    seams=("]
    for seam, here in zip(row.seams, found, strict=True):
        body = f", body {here['fingerprint']}" if here["fingerprint"] else ""
        lines += [f"        # {here['place'] or 'nowhere'}{body}: {'; '.join(here['changes']) or 'as declared'}"]
        lines += [f"        {_as_source(seam, here)},"] if here["place"] else []
    return "\n".join([*lines, "    ),", "),"])


def _as_source(seam: AnySeam, found: Mapping[str, Any]) -> str:
    if isinstance(seam, Function):
        here: dict[str, Any] = {"parameters": tuple(found["parameters"]), "descriptor": found["descriptor"]}
        here |= {"fingerprints": (found["fingerprint"],)} if seam.fingerprints else {}
        seam = dataclasses.replace(seam, **here)
    places = [field.name for field in dataclasses.fields(seam) if field.init and not field.kw_only]
    said = [*(repr(getattr(seam, name)) for name in places), *(f"{name}={value!r}" for name, value in _given(seam))]
    return f"{type(seam).__name__}({', '.join(said)})"


def _given(declared: Any) -> list[tuple[str, Any]]:
    """The keywords of a declaration that are not their defaults."""
    fields = [field for field in dataclasses.fields(declared) if field.kw_only and field.init]
    pairs = [(field, getattr(declared, field.name)) for field in fields]
    return [(field.name, value) for field, value in pairs if value != field.default]

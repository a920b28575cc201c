"""A release that nobody has read yet: what still fits there, what moved and to what, and a row to begin with."""

from __future__ import annotations

import ast
import sys
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from omni_fastpath.declare import Call, Fit, Pin, Row, State
from omni_fastpath.releases import Release
from omni_fastpath.seams import fingerprint
from omni_fastpath.tools import upgrade
from tests.fakes.upstream import (
    ADDED,
    CHECK,
    EVENTS,
    LISTEN,
    MAKE,
    MODULE,
    RUN,
    RUN_BODY,
    SOURCE,
    Upstream,
    load,
    patch,
    upstream,
)

__all__ = ["upstream"]

PINNED = Pin(MODULE, "Loop.run", ("self", "rounds"), fingerprints=(RUN_BODY,))
OLD = Fit(releases=("0.22.0", "0.24.0"), seams=(LISTEN,))
NEW = Fit(releases=("0.30.0",), seams=(PINNED, MAKE))
AHEAD = Row(releases=("0.32.0rc1",), state=State.SUPERSEDED, note="upstream does it", preview=True)


@pytest.mark.parametrize(
    ("release", "beside"),
    [
        ("0.21.0", "0.22.0"),
        ("0.23.0", "0.22.0"),
        ("0.24.1", "0.24.0"),
        ("0.28.0", "0.24.0"),
        ("0.30.0.dev4+gabc", "0.30.0"),
        ("0.31.0", "0.30.0"),
        ("0.32.0rc2", "0.32.0rc1"),
        ("0.32.0", "0.32.0rc1"),
        ("0.40.0", "0.32.0rc1"),
        ("main", "0.32.0rc1"),
    ],
)
def test_the_nearest_release_is_the_newest_that_is_not_newer(release: str, beside: str) -> None:
    """A development or candidate counts as what it leads to; below all it is the oldest, unreadable the newest."""
    assert upgrade.nearest((OLD, NEW, AHEAD), release)[0] == beside


def changes(found: Mapping[str, Any]) -> dict[str, list[str]]:
    """Of a comparison, what is said of each seam."""
    return {seam["seam"]: seam["changes"] for seam in found["seams"]}


def changed(upstream: Upstream, folder: Path, **replaced: tuple[str, str]) -> None:
    """Have an upstream with another source installed."""
    source = SOURCE
    for old, new in replaced.values():
        assert old in source
        source = source.replace(old, new)
    module = load(folder, source)
    upstream.module_is(module)


def test_what_still_fits_is_told(upstream: Upstream) -> None:
    """With the same functions under another release nothing has moved, and the release compared with is named."""
    found = upgrade.compare(patch("a", rows=(OLD, NEW)), "0.31.0")
    assert (found["beside"], found["state"]) == ("0.30.0", "applied")
    assert changes(found) == {PINNED.path: [], MAKE.path: []}
    [pinned, _] = found["seams"]
    assert (pinned["use"], pinned["parameters"], pinned["fingerprint"]) == ("pin", ["self", "rounds"], RUN_BODY)


def test_what_moved_is_told_with_what_it_is_now(upstream: Upstream, tmp_path: Path) -> None:
    """Old and new parameters, descriptors and fingerprints are told, and functions that are gone."""
    changed(
        upstream,
        tmp_path,
        body=('        return ("stock", rounds)', '        rounds += 1\n        return ("newer", rounds)'),
        parameters=("def listen(port, *, backlog=5)", "def listen(port, *, depth=5, backlog=5)"),
        kind=("    @classmethod\n    def make(cls, size)", "    def make(cls, size)"),
    )
    gone = Call(MODULE, "Loop.gone", ("self",))
    moved = patch("moved", PINNED, LISTEN, MAKE, gone, Call("made_up_missing", "run", ()), ADDED)
    found = changes(upgrade.compare(moved, "0.31.0"))
    [print_] = found[PINNED.path]
    assert print_.startswith("its body moved: fingerprint ")
    assert found[LISTEN.path] == [
        "its parameters are ('port', 'depth', 'backlog'), expected ('port', 'backlog')",
    ]
    assert found[MAKE.path] == ["is a function, expected a classmethod"]
    assert found[gone.path] == ["<class 'made_up_upstream.Loop'> itself has no 'gone'"]
    assert found["made_up_missing:run"] == ["the module cannot be imported (No module named 'made_up_missing')"]
    assert found[ADDED.path] == []


def test_a_function_that_went_elsewhere_is_found(
    upstream: Upstream, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a slot that is gone, upstream's functions of the same name are named, unless they are many."""
    package = tmp_path / "made_up_package"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "loop.py").write_text("class Other:\n    async def turns(self):\n        pass\n")
    (package / "many.py").write_text("def often(): pass\n" * 4)
    monkeypatch.syspath_prepend(tmp_path)
    for name, told in (("turns", ["one of that name is in made_up_package/loop.py:2"]), ("often", []), ("never", [])):
        seam = Call("made_up_package", f"Loop.{name}", ())
        [first, *rest] = changes(upgrade.compare(patch("a", seam), "0.31.0"))[seam.path]
        assert first.endswith("has no 'Loop'")
        assert rest == told


def test_what_breaks_while_it_is_looked_at_is_told(upstream: Upstream, tmp_path: Path) -> None:
    """An upstream module that raises on import is a line, and the other seams are looked at."""
    (tmp_path / "modules" / "made_up_breaks.py").write_text("raise RuntimeError('no such kernel')")
    broken = Call("made_up_breaks", "f", ())
    with pytest.MonkeyPatch.context() as patched:
        patched.syspath_prepend(tmp_path / "modules")
        found = changes(upgrade.compare(patch("a", broken, RUN), "0.31.0"))
    assert found == {broken.path: ["looking at it failed: RuntimeError('no such kernel')"], RUN.path: []}


def test_what_only_the_wrappers_import_is_told(
    upstream: Upstream, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A class of upstream's that is gone, in whose module the patch has no seam, stands among those that moved."""
    monkeypatch.setitem(sys.modules, "vllm_omni", ModuleType("vllm_omni"))
    (tmp_path / "made_up_importing.py").write_text("from vllm_omni import Thing\n")
    monkeypatch.syspath_prepend(tmp_path)
    found = upgrade.compare(patch("a", RUN, wrappers_module="made_up_importing"), "0.31.0")
    assert changes(found)[RUN.path] == []
    [told] = changes(found)["vllm_omni"]
    assert told.startswith("what the patch imports from it cannot be had (cannot import name 'Thing'")


@pytest.mark.parametrize(
    "row", [AHEAD, Row(releases=("0.32.0rc1",), state=State.NOT_APPLICABLE, note="no queue", preview=True)]
)
def test_a_patch_that_is_not_installed_on_the_nearest_has_nothing_to_compare(upstream: Upstream, row: Row) -> None:
    """What it is there is told, and why."""
    found = upgrade.compare(patch("a", rows=(NEW, row)), "0.32.0")
    assert found == {"beside": "0.32.0rc1", "state": row.state.value, "words": row.note, "seams": []}


def test_a_sheet_is_a_row_to_begin_with(upstream: Upstream, tmp_path: Path) -> None:
    """What is found stands in the place of what was declared, each seam with its line; what is gone is a comment."""
    changed(upstream, tmp_path, body=('return ("stock", rounds)', 'return ("newer", rounds)'))
    row = Fit(
        releases=("0.30.0",), seams=(PINNED, MAKE, CHECK, ADDED, EVENTS, Call(MODULE, "Loop.gone", ("self",))), note="n"
    )
    sheet = upgrade.sheet(patch("a", rows=(row, AHEAD)), Release("vllm-omni", "0.33.0rc2+cpu"))
    assert (sheet["patch"], sheet["release"], sheet["beside"]) == ("a", "0.33.0rc2+cpu", "0.30.0")
    found = fingerprint(upstream.imported().Loop.run)
    told = sheet["row"].splitlines()
    assert told[:5] == ["Fit(", "    releases=('0.33.0rc2',),", "    preview=True,", "    note='n',", "    seams=("]
    assert told[5].startswith(f"        # made_up_upstream_1.py:12, body {found}: its body moved: ")
    names = {"Fit": Fit, "Pin": Pin, "Wrap": type(RUN), "Add": type(ADDED), "Call": Call}
    made = eval(compile(ast.parse(sheet["row"].rstrip(","), mode="eval"), "row", "eval"), names)  # noqa: S307
    assert made.releases == ("0.33.0rc2",)
    assert made.seams == (
        Pin(MODULE, "Loop.run", ("self", "rounds"), fingerprints=(found,)),
        MAKE,
        CHECK,
        ADDED,
        EVENTS,
    )

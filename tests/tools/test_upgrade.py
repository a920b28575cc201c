"""A release that nobody has read yet: which seams still fit there, and which are missing or changed."""

from __future__ import annotations

from pathlib import Path

import pytest

from omni_fastpath.declare import Call, Fit, Pin
from omni_fastpath.tools import upgrade
from tests.fakes.upstream import ADDED, LISTEN, MAKE, MODULE, RUN_BODY, SOURCE, Upstream, load, patch, upstream

__all__ = ["upstream"]

PINNED = Pin(MODULE, "Loop.run", ("self", "rounds"), fingerprints=(RUN_BODY,))
KNOWN = patch(
    "a", rows=(Fit(releases=("0.28.0",), seams=(LISTEN,)), Fit(releases=("0.30.0",), seams=(PINNED, MAKE, ADDED)))
)


@pytest.mark.parametrize(
    ("release", "beside"),
    [("0.27.0", "0.28.0"), ("0.29.1", "0.28.0"), ("0.30.0.dev4+gabc", "0.30.0"), ("0.31.0", "0.30.0")],
)
def test_the_nearest_release_is_the_newest_that_is_not_newer(release: str, beside: str) -> None:
    """A development release counts as what it leads to; below all it is the oldest."""
    assert upgrade.nearest(KNOWN, release)[0] == beside


def test_what_still_fits_is_told(upstream: Upstream) -> None:
    """With the same functions under another release nothing has moved; each seam with what it is now."""
    found = upgrade.compare(KNOWN, "0.31.0")
    assert (found["patch"], found["beside"]) == ("a", "0.30.0")
    assert [seam["changes"] for seam in found["seams"]] == [[], [], []]
    pinned = found["seams"][0]
    assert (pinned["use"], pinned["parameters"], pinned["fingerprint"]) == ("pin", ["self", "rounds"], RUN_BODY)


def test_what_is_missing_or_changed_is_told(upstream: Upstream, tmp_path: Path) -> None:
    """A body, parameters, a kind, a name that is gone, and a module that cannot be imported or raises."""
    source = SOURCE
    for old, new in (
        ('return ("stock", rounds)', 'return ("newer", rounds)'),
        ("def listen(port, *, backlog=5)", "def listen(port, *, depth=5, backlog=5)"),
        ("    @classmethod\n    def make(cls, size)", "    def make(cls, size)"),
    ):
        assert old in source
        source = source.replace(old, new)
    upstream.module_is(load(tmp_path, source))
    (tmp_path / "modules" / "made_up_breaks.py").write_text("raise RuntimeError('no such kernel')")
    gone, missing = Call(MODULE, "Loop.gone", ("self",)), Call("made_up_missing", "run", ())
    broken = Call("made_up_breaks", "f", ())
    with pytest.MonkeyPatch.context() as patched:
        patched.syspath_prepend(tmp_path / "modules")
        found = upgrade.compare(patch("moved", PINNED, LISTEN, MAKE, gone, missing, broken, ADDED), "0.31.0")
    changes = {seam["seam"]: seam["changes"] for seam in found["seams"]}
    [body] = changes[PINNED.path]
    assert body.startswith("its body moved: fingerprint ")
    assert changes[LISTEN.path] == ["its parameters are ('port', 'depth', 'backlog'), expected ('port', 'backlog')"]
    assert changes[MAKE.path] == ["is a function, expected a classmethod"]
    assert changes[gone.path] == ["<class 'made_up_upstream.Loop'> itself has no 'gone'"]
    assert changes[missing.path] == ["the module cannot be imported (No module named 'made_up_missing')"]
    assert changes[broken.path] == ["looking at it failed: RuntimeError('no such kernel')"]
    assert changes[ADDED.path] == []

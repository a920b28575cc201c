"""A release that nobody has read yet: which seams still fit there, and which are missing or changed."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest

from omni_fastpath.declare import AnySeam, Call, Fit, Pin, Reads
from omni_fastpath.tools import upgrade
from tests.fakes.upstream import ADDED, LISTEN, MAKE, MODULE, RUN, Upstream, patch, upstream

__all__ = ["upstream"]

PINNED = Pin(MODULE, "Loop.run")
READ = Reads(MODULE, "Loop", ("constant",))
KNOWN = patch(
    "a", rows=(Fit(releases=("0.28.0",), seams=(LISTEN,)), Fit(releases=("0.30.0",), seams=(PINNED, MAKE, ADDED, READ)))
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
    assert [seam["changes"] for seam in found["seams"]] == [[], [], [], []]
    assert [seam["use"] for seam in found["seams"]] == ["pin", "wrap", "add", "reads"]
    pinned = found["seams"][0]
    assert [pinned["shape"], pinned["fingerprint"]] == upstream.functions["0.30.0"][PINNED.path]
    assert upgrade.summary(found) == ["4 of 4 seams are as on 0.30.0"]


def test_what_is_missing_or_changed_is_told(upstream: Upstream, monkeypatch: pytest.MonkeyPatch) -> None:
    """A difference of a seam, in ``verify``'s words (test_seams)."""
    monkeypatch.setitem(sys.modules, "made_up_breaks", SimpleNamespace(f=1))
    upstream.read(RUN.path, "function(self, rounds)", "0" * 16)
    expected: dict[AnySeam, str] = {
        RUN: "its body has changed: fingerprint ",
        Call("made_up_breaks", "f"): "is int, expected ",
        Reads(MODULE, "Loop", ("gone",)): "the class does not declare gone",
    }
    found = upgrade.compare(patch("moved", *expected), "0.31.0")["seams"]
    for seam, words in zip(found, expected.values(), strict=True):
        assert [each.startswith(words) for each in seam["changes"]] == [True], seam

"""Installed releases, read from metadata."""

from __future__ import annotations

import re

import pytest

from omni_fastpath import __version__, releases
from omni_fastpath.releases import installed_release, vllm_release


def test_installed_release_is_read_from_metadata() -> None:
    """The version comes from the distribution, without importing it; an unknown one gives None."""
    assert installed_release("pytest") == pytest.__version__
    assert installed_release("made-up-distribution") is None


def test_our_own_release_is_the_distributions() -> None:
    """``__version__`` is asked for as every other release is."""
    assert __version__ == installed_release("omni-fastpath")


def _installed(monkeypatch: pytest.MonkeyPatch, **versions: str) -> None:
    """Have these distributions installed, each of which brings the package vllm, and no others."""
    monkeypatch.setattr(releases, "installed_release", lambda name: versions.get(name.replace("-", "_")))
    monkeypatch.setattr(releases, "packages_distributions", lambda: {"vllm": [*versions]} if versions else {})


def test_vllm_build_is_found_under_any_of_its_names(monkeypatch: pytest.MonkeyPatch) -> None:
    """Name and version of whichever build is installed; None when none is."""
    for name in releases.VLLM_DISTRIBUTIONS:
        _installed(monkeypatch, **{name.replace("-", "_"): "0.30.0"})
        assert str(vllm_release()) == f"{name} 0.30.0"
    _installed(monkeypatch)
    assert vllm_release() is None


def test_vllm_build_of_an_unknown_name_is_found_by_its_package(monkeypatch: pytest.MonkeyPatch) -> None:
    """A vendor's build under its own name is named as it is."""
    _installed(monkeypatch, vendor="0.30.0+vendor")
    assert str(vllm_release()) == "vendor 0.30.0+vendor"


@pytest.mark.upstream
def test_installed_vllm_is_named() -> None:
    """The build installed here is one that is known."""
    assert re.fullmatch(r"vllm\S* \d+\.\d+.*", str(vllm_release()))

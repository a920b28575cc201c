"""Installed releases, read from the metadata of distributions."""

from __future__ import annotations

import pytest

from omni_fastpath import __version__, releases
from omni_fastpath.releases import installed_release, vllm_omni_release, vllm_release


def test_installed_release_is_read_from_metadata() -> None:
    """The version is the distribution's, our own too; a distribution that is not installed has none."""
    assert installed_release("pytest") == pytest.__version__
    assert installed_release("omni-fastpath") == __version__
    assert installed_release("made-up-distribution") is None


@pytest.mark.parametrize("name", releases.VLLM_DISTRIBUTIONS)
def test_a_build_of_vllm_is_found_under_any_of_its_names(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """The release has the name and version of the build that is installed."""
    monkeypatch.setattr(releases, "installed_release", lambda each: "0.30.0" if each == name else None)
    assert str(vllm_release()) == f"{name} 0.30.0"


def test_nothing_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without vLLM and vLLM-Omni there is no release of either."""
    monkeypatch.setattr(releases, "installed_release", lambda _: None)
    vllm_omni_release.cache_clear()
    assert (vllm_release(), vllm_omni_release()) == (None, None)
    vllm_omni_release.cache_clear()

"""Installed releases, read from metadata or a version file."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from omni_fastpath import __version__, releases
from omni_fastpath.releases import Release, installed_release, vllm_omni_release, vllm_release


@pytest.fixture(autouse=True)
def _looked_up_again() -> Iterator[None]:
    """What is found once stays so in a process."""
    vllm_omni_release.cache_clear()
    yield
    vllm_omni_release.cache_clear()


def test_installed_release_is_read_from_metadata() -> None:
    """The version comes from the distribution, without importing it; an unknown one gives None."""
    assert installed_release("pytest") == pytest.__version__
    assert installed_release("made-up-distribution") is None


def test_our_own_release_is_the_distributions() -> None:
    """``__version__`` is asked for as every other release is."""
    assert __version__ == installed_release("omni-fastpath")


def _installed(monkeypatch: pytest.MonkeyPatch, package: str = "vllm", **versions: str) -> None:
    """Have these distributions installed, each of which brings the package, and no others."""
    monkeypatch.setattr(releases, "installed_release", lambda name: versions.get(name.replace("-", "_")))
    monkeypatch.setattr(releases, "packages_distributions", lambda: {package: [*versions]} if versions else {})


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


def test_vllm_omni_under_a_vendors_name_is_found_by_its_package(monkeypatch: pytest.MonkeyPatch) -> None:
    """A wheel of another name that brings the package says which vLLM-Omni it is, and that it was asked."""
    _installed(monkeypatch, "vllm_omni", acme_omni="0.30.0+acme.2")
    assert vllm_omni_release() == Release("acme_omni", "0.30.0+acme.2", "the metadata of acme_omni")


@pytest.mark.parametrize(
    ("files", "version", "source"),
    [
        ({"_version.py": "TYPE = 1\n__version__ = version = '0.31.0.dev5+gabc'\n"}, "0.31.0.dev5+gabc", "_version.py"),
        ({"_version.py": "no python", "version.py": '__version__ = "0.30.0"\n'}, "0.30.0", "version.py"),
        ({"__init__.py": 'raise RuntimeError\n__version__ = "0.28.0"\n'}, "0.28.0", "__init__.py"),
        ({"version.py": "from ._version import __version__\n"}, releases.UNKNOWN, "nothing: "),
        ({"_version.py": "__version__ = make()\n"}, releases.UNKNOWN, "nothing: "),
    ],
)
def test_a_source_tree_says_its_version_in_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, files: dict[str, str], version: str, source: str
) -> None:
    """A tree on the path that no distribution has brought: the file is read, nothing is imported."""
    _installed(monkeypatch)
    folder = tmp_path / "vllm_omni"
    folder.mkdir()
    for name, text in {"__init__.py": "raise RuntimeError", **files}.items():
        (folder / name).write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "vllm_omni", raising=False)
    found = vllm_omni_release()
    assert found is not None
    assert found[:2] == ("vllm_omni", version)
    assert source in found.source
    assert str(folder) in found.source
    assert "vllm_omni" not in sys.modules


def test_no_vllm_omni_at_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither a distribution nor a package: None."""
    _installed(monkeypatch)
    monkeypatch.setattr(releases.importlib.util, "find_spec", lambda _: None)  # type: ignore[attr-defined]
    assert vllm_omni_release() is None


@pytest.mark.upstream
def test_installed_vllm_is_named() -> None:
    """The build installed here is one that is known."""
    assert re.fullmatch(r"vllm\S* \d+\.\d+.*", str(vllm_release()))
    assert re.fullmatch(r"vllm-omni \d+\.\d+.*", str(vllm_omni_release()))

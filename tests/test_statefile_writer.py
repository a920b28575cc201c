"""What other processes see: the state file."""

from __future__ import annotations

import json
import logging
import multiprocessing
import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from omni_fastpath import __version__, statefile
from omni_fastpath.declare import Counter, Process, State
from omni_fastpath.ledger import LEDGER
from omni_fastpath.metrics import Collector
from omni_fastpath.statefile import Publisher, stage_and_replica
from tests.fakes.processes import process
from tests.fakes.upstream import patch

DRUM = patch("drum", counters=(Counter("beats", "beats"),))
FLUTE = patch("flute", counters=())
KEEP_FRESH = statefile.Publisher._keep_fresh


@pytest.fixture(autouse=True)
def _ledger(monkeypatch: pytest.MonkeyPatch) -> None:
    """A ledger of the test's own, no exit handler and no refreshing thread."""
    monkeypatch.setattr(LEDGER, "_entries", {})
    monkeypatch.setattr(LEDGER, "_listeners", [])
    monkeypatch.setattr("omni_fastpath.statefile.atexit.register", lambda function: function)
    monkeypatch.setattr(statefile.Publisher, "_keep_fresh", lambda self: None)


def on_disk() -> dict[str, Any]:
    """This process's state file."""
    found: dict[str, Any] = json.loads(statefile.path().read_text())
    return found


def test_file_says_what_the_ledger_says() -> None:
    """The file has role, releases, source and all of the ledger, and a change of a state is written at once."""
    LEDGER.set(DRUM, State.APPLIED, "yes")
    LEDGER.set(FLUTE, State.FAILED, "no")
    LEDGER.named("drum").counters["beats"] = 7
    Publisher(Process.SERVER, "deploy.yaml").start()
    LEDGER.set(FLUTE, State.FAILED, "for another reason")
    found = on_disk()
    assert (found["role"], found["source"], found["process_name"]) == ("server", "deploy.yaml", "MainProcess")
    assert (found["omni_fastpath"], found["pid"]) == (__version__, os.getpid())
    assert found["patches"] == LEDGER.snapshot()
    assert found["threads"] == {"front_end": threading.main_thread().native_id}


def test_nothing_is_written_when_nothing_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A check without a change writes nothing. A counter or another source is a change."""
    write = Mock(wraps=statefile.write)
    monkeypatch.setattr(statefile, "write", write)
    publisher = Publisher(Process.SERVER, "one.yaml")
    LEDGER.set(DRUM, State.APPLIED, "yes")
    publisher.start()
    publisher.write()
    assert write.call_count == 1
    LEDGER.named("drum").counters["beats"] += 1
    publisher.write()
    publisher.update("two.yaml")
    publisher.update("two.yaml")
    writes = [each.args[0] for each in write.call_args_list]
    found = [(each["source"], each["patches"]["drum"]["counters"]["beats"]) for each in writes]
    assert found == [("one.yaml", 0), ("one.yaml", 1), ("two.yaml", 1)]


def test_file_says_the_port(monkeypatch: pytest.MonkeyPatch) -> None:
    """The port is that of ``vllm serve --omni``, and no other command has one."""
    for command, port in (("serve --omni", 8091), ("serve", None), ("bench serve --omni", None)):
        monkeypatch.setattr(sys, "argv", ["vllm", *command.split(), "--port", "8091"])
        Publisher(Process.SERVER, None).start()
        assert on_disk()["port"] == port


def test_a_full_disk_is_logged_once(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """Failing writes are one warning, and the next write that succeeds is complete."""
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
    assert told == ["omni-fastpath: the state file cannot be written, so status does not show this process: disk full"]
    monkeypatch.setattr(statefile, "write", real)
    publisher.write()
    assert on_disk()["patches"]["drum"]["reason"] == "reason 2"


def returns(function: Callable[[], Any]) -> bool:
    """Whether a call returns, on a daemon thread."""
    thread = threading.Thread(target=function, daemon=True)
    thread.start()
    thread.join(20)
    return not thread.is_alive()


@pytest.mark.parametrize("who", ["the state file", "what collects for scrapes, with the state file's beside it"])
def test_figures_that_fail_stop_nobody(who: str) -> None:
    """Figures that report a failure while the state file or a scrape reads them cause no deadlock."""
    publisher = Publisher(Process.SERVER, None)
    LEDGER.set(DRUM, State.APPLIED, "yes")
    publisher.start()
    beside = threading.Thread(target=publisher.write, daemon=True)

    def figures() -> dict[str, Any]:
        if LEDGER.named("drum").state is State.FAILED or threading.current_thread() is beside:
            return {}
        if "beside" in who:
            beside.start()
            beside.join(0.5)  # where it cannot be through, it waits with a lock in its hands
        LEDGER.set(DRUM, State.FAILED, "observing failed")
        return {}

    LEDGER.named("drum").figures = figures
    scrape = Collector(LEDGER, Process.SERVER).refresh
    assert returns(publisher.write if who == "the state file" else scrape)
    assert returns(publisher.write)
    assert returns(scrape)
    assert on_disk()["patches"]["drum"]["state"] == "failed"


@pytest.mark.parametrize("role", [Process.STAGE, Process.WORKER, Process.HEADLESS, Process.SERVER])
def test_no_thread_where_nothing_can_change(monkeypatch: pytest.MonkeyPatch, role: Process) -> None:
    """One thread runs if a patch is applied, and in a server that collects processes for ``/metrics``, else none."""
    monkeypatch.setattr(statefile.Publisher, "_keep_fresh", KEEP_FRESH)
    started: list[str] = []
    monkeypatch.setattr(threading.Thread, "start", lambda thread: started.append(thread.name))
    Publisher(role, None).start()
    LEDGER.set(DRUM, State.OFF, "OMNI_FASTPATH=0")
    assert started == []
    for state in (State.NOT_APPLICABLE, State.UNSUPPORTED):
        LEDGER.set(DRUM, state, "no")
    assert len(started) == (role is Process.SERVER)
    for patch_ in (DRUM, FLUTE):
        LEDGER.set(patch_, State.APPLIED, "here")
    assert started == ["omni-fastpath-state"]


def test_a_forked_child_leaves_its_parents_file_alone() -> None:
    """A state that changes in a fork does not change the parent's file or wait for its locks."""
    publisher = Publisher(Process.SERVER, None)
    LEDGER.set(DRUM, State.APPLIED, "yes")
    publisher.start()
    path, before = statefile.path(), statefile.path().read_bytes()
    child = multiprocessing.get_context("fork").Process(target=LEDGER.set, args=(DRUM, State.FAILED, "in the child"))
    with publisher._lock:  # as the refreshing thread may hold it at the fork
        child.start()
        child.join(30)
    assert child.exitcode == 0
    assert list(path.parent.iterdir()) == [path]
    assert path.read_bytes() == before


SCRIPT = """
import os, shutil, sys, time
from tests.fakes.upstream import patch
from omni_fastpath import statefile
from omni_fastpath.declare import Counter, Process, State
from omni_fastpath.ledger import LEDGER
statefile.REFRESH_S = 0.01
beside = []
statefile.BESIDE.append(lambda: beside.append(1))
drum = patch("drum", counters=(Counter("beats", "beats"),))
LEDGER.set(drum, State.APPLIED, "yes")
statefile.Publisher(Process.SERVER, None).start()
LEDGER.named("drum").counters["beats"] = 5
def beats():
    return statefile.read_live()[0]["patches"]["drum"]["counters"]["beats"]
while beats() != 5 or not beside:
    time.sleep(0.005)
for lose in (statefile.path().unlink, lambda: shutil.rmtree(statefile.folder())):
    lose()
    while not statefile.read_live():
        time.sleep(0.005)
if os.fork() == 0:
    sys.exit()  # runs the inherited exit handlers
os.wait()
print(len(statefile.read_live()), flush=True)
"""


def test_counters_follow_and_the_file_goes_with_its_process() -> None:
    """Counters and ``BESIDE`` are refreshed, a deleted file is written again, and the process's end removes it.

    The end of a forked child does not remove it.
    """
    assert process(sys.executable, "-c", SCRIPT).stdout == "1\n"
    assert list(statefile.folder().iterdir()) == []


# Stage and replica


@pytest.mark.parametrize(
    ("name", "arguments", "expected"),
    [
        ("StageEngineCoreProc_stage12_replica0_DP3", {"omni_stage_id": 9, "omni_replica_id": 9}, (12, 0)),
        ("StageDiffusionProc", {"omni_stage_id": 2, "omni_replica_id": 1}, (2, 1)),
        ("VllmWorker-0", {"rank": 0}, (None, None)),
    ],
)
def test_stage_and_replica(name: str, arguments: dict[str, int], expected: tuple[int | None, int | None]) -> None:
    """It finds stage and replica in the name of an engine process, or in the arguments of a diffusion process."""
    context = multiprocessing.get_context("spawn")
    receive, send = context.Pipe(duplex=False)
    child = context.Process(target=_child, name=name, args=(send,), kwargs=arguments)
    child.start()
    assert receive.recv() == expected
    child.join()


def _child(send: Any, **_arguments: int) -> None:
    send.send(stage_and_replica())

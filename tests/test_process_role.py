"""What kind of process this is, which process an id means, and which of its threads matter."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from functools import partial

import pytest

from omni_fastpath import process_role, threads
from omni_fastpath.process_role import port, spawned_as, value


@pytest.mark.parametrize(
    ("name", "role"),
    [
        ("StageEngineCoreProc_stage0_replica1", "stage"),
        ("EngineCore", "stage"),
        ("EngineCore_DP1", "stage"),
        ("StageDiffusionProc", "worker"),
        ("VllmWorker-0", "worker"),
        ("ApiServer_0", None),
        ("Process-1", None),
    ],
)
def test_a_spawned_process_is_known_by_its_name(monkeypatch: pytest.MonkeyPatch, name: str, role: str | None) -> None:
    """Upstream's process name gives the role, and a process that was not spawned has none."""
    monkeypatch.setattr(multiprocessing.current_process(), "name", name)
    assert spawned_as() is None
    monkeypatch.setattr(multiprocessing, "parent_process", object)
    assert spawned_as() == role


@pytest.mark.parametrize(
    ("arguments", "found"),
    [([], None), (["--port"], None), (["--port", "1", "--port=2"], "2"), (["--port", "--host", "h"], None)],
)
def test_the_value_of_an_option(arguments: list[str], found: str | None) -> None:
    """The last value of an option counts, a missing one is None, and ``_`` means ``-`` in an option's name."""
    assert value(arguments, "--port") == found
    assert value(["--deploy_config", "a_b.yaml"], "--deploy-config") == "a_b.yaml"
    assert port(arguments) == (None if found is None else int(found))


# ---- Ids and threads ----


def test_a_process_that_waits_to_be_reaped_has_ended() -> None:
    """A zombie counts as ended although its id exists."""
    with subprocess.Popen([sys.executable, "-c", ""]) as child:
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        assert process_role.started(child.pid) is None


@contextlib.contextmanager
def running(target: Callable[[], object], name: str | None = None) -> Iterator[int | None]:
    """A thread that calls this and then waits; the kernel's id of it."""
    begun, ended = threading.Event(), threading.Event()

    def run() -> None:
        target()
        begun.set()
        ended.wait()

    thread = threading.Thread(target=run, name=name)
    thread.start()
    assert begun.wait(30)
    try:
        yield thread.native_id
    finally:
        ended.set()
        thread.join()


def test_every_thread_of_a_role_is_known_while_it_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """All orchestrators are found by their name, front ends as noted, and a name is given again after its thread.

    Until a front end is noted it is the main thread. The kernel counts the time of each.
    """
    monkeypatch.setattr(threads, "_named", {})
    orchestrator = partial(running, threads.own, "orchestrator")  # own() in many threads at once
    front_end = partial(running, partial(threads.note, "front_end"))
    main = {"front_end": threading.main_thread().native_id}
    with orchestrator() as first, orchestrator() as second:
        assert threads.own() == {**main, "orchestrator": first, "orchestrator-2": second}
        with front_end() as serving, front_end() as other:
            assert other != serving
            expected = {"front_end": serving, "front_end-2": other, "orchestrator": first, "orchestrator-2": second}
            assert threads.own() == expected
            assert threads.used().keys() == expected.keys()
    assert threads.own() == main
    with orchestrator() as third:
        assert threads.own() == {**main, "orchestrator": third}

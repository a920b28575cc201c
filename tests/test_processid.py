"""Which process: exact to the tick, and the same answer with and without /proc."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from omni_fastpath import processid
from omni_fastpath.processid import ProcessId


@pytest.fixture
def no_proc(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A system without /proc."""
    monkeypatch.setattr(processid, "_PROC", tmp_path / "none")
    monkeypatch.setattr(processid, "boot_id", lambda: "")


def itself() -> ProcessId:
    """This process."""
    found = ProcessId.of(os.getpid())
    assert found is not None
    return found


@pytest.mark.parametrize("change", [{"pid": 1}, {"started": 1}, {"boot": "0"}, {"namespace": 1}])
def test_every_part_counts(change: dict[str, int]) -> None:
    """The same id with another beginning, boot or namespace is another process."""
    assert itself().alive
    assert not replace(itself(), **change).alive  # type: ignore[arg-type] # of its own type each


def test_one_tick_makes_another_process() -> None:
    """There is no tolerance: ids are used again within a second on a busy machine."""
    assert not replace(itself(), started=itself().started + 1).alive


@pytest.mark.usefixtures("no_proc")
def test_without_proc_psutil_is_asked() -> None:
    """Another system than Linux tells a process apart too, by its creation time."""
    assert itself().alive
    assert itself() == itself()
    assert itself().namespace == 0
    assert not replace(itself(), started=itself().started + 1).alive
    assert os.getppid() in processid.ancestors(os.getpid())


def test_a_name_may_hold_anything(tmp_path: Path) -> None:
    """A program called ``) Z 1 (`` is read as the living process that it is."""
    odd = tmp_path / ") Z 1 ("
    odd.symlink_to(sys.executable)
    with subprocess.Popen([odd, "-c", "input()"], stdin=subprocess.PIPE) as child:
        found = ProcessId.of(child.pid)
        assert found is not None
        assert found.alive
        assert next(processid.ancestors(child.pid)) == os.getpid()
        child.communicate(b"\n")
    assert not found.alive


def test_what_waits_to_be_reaped_has_ended() -> None:
    """A zombie has its id still, and is no process; its file is deleted when the id is free."""
    with subprocess.Popen([sys.executable, "-c", ""]) as child:
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        assert ProcessId.of(child.pid) is None
        assert processid.exists(child.pid)
    assert not processid.exists(child.pid)


def test_ancestors_are_those_of_the_process() -> None:
    """From the parent on, to the first process."""
    found = list(processid.ancestors(os.getpid()))
    assert found[0] == os.getppid()
    assert os.getpid() not in found


def test_who_sees_other_files_is_elsewhere() -> None:
    """A process of another mount namespace; not this one, nor one of which nothing can be told."""
    assert not processid.is_elsewhere(os.getpid())
    assert not processid.is_elsewhere(2**22 + 1)
    command = ["unshare", "--mount", sys.executable, "-c", "print(flush=True); input()"]
    try:
        other = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    except FileNotFoundError:
        pytest.skip("no unshare here")
    with other:
        assert other.stdout is not None
        if not other.stdout.readline():
            pytest.skip("no mount namespace of one's own here")
        assert processid.is_elsewhere(other.pid)
        other.communicate(b"\n")

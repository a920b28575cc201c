"""What dead servers left: only what is theirs by name, this user's, and nobody's any more."""

from __future__ import annotations

import mmap
import os
import time
from pathlib import Path

import psutil
import pytest

from omni_fastpath.tools.findings import leftovers
from omni_fastpath.tools.findings.leftovers import Holder, find

CHUNK = "chatcmpl-a'b c_0_3"
LOCK = f"shm_{CHUNK}_lockfile.lock"
OFFLOAD = "vllm_offload_e7.mmap"
DEVICE = "vllm_omni_device_0_init.lock"


@pytest.fixture
def shared(tmp_path: Path) -> Path:
    """A folder of shared memory with files of all kinds, written an hour ago."""
    folder = tmp_path / "shm"
    folder.mkdir()
    for name in (CHUNK, LOCK, OFFLOAD, "psm_0123", "sem.mp-x", "chatcmpl-other_0_1", "vllm_offload", "nccl-1"):
        write(folder / name)
    (folder / "shm_link_lockfile.lock").symlink_to(folder / "psm_0123")
    return folder


@pytest.fixture
def temporary(tmp_path: Path) -> Path:
    """A folder of temporary files."""
    folder = tmp_path / "tmp"
    folder.mkdir()
    for name in (DEVICE, ".vllm_omni_device_lock_x", "vllm_omni_device_0_init.lock.bak"):
        write(folder / name)
    return folder


def write(file: Path, age_s: float = 3600.0) -> None:
    """A file of so many seconds ago."""
    file.write_bytes(b"x" * 5000)
    os.utime(file, (time.time() - age_s,) * 2)


def names(shared: Path, temporary: Path, *holders: Holder) -> set[str]:
    """What is left."""
    return {each.path.name for each in find(shared, temporary, holders)}


def test_names_decide(shared: Path, temporary: Path) -> None:
    """A chunk is one by its lock beside it; Python's own names, links and others' files are left alone."""
    assert names(shared, temporary) == {CHUNK, LOCK, OFFLOAD, DEVICE, ".vllm_omni_device_lock_x"}
    [chunk] = [each for each in find(shared, temporary, ()) if each.path.name == CHUNK]
    assert (chunk.kind, chunk.size) == ("shared memory", 8192)


def test_what_somebody_holds_is_not_left(shared: Path, temporary: Path) -> None:
    """Open or mapped by whomever."""
    holder = Holder(frozenset({f"{shared}/{OFFLOAD}", f"{temporary}/{DEVICE}"}), False, 0.0)
    assert names(shared, temporary, holder) == {CHUNK, LOCK, ".vllm_omni_device_lock_x"}


def test_what_a_live_process_could_have_written_is_not_left(shared: Path, temporary: Path) -> None:
    """A chunk that waits for its receiver is held by nobody; its sender began before it was written."""
    write(shared / OFFLOAD, 7200.0)
    assert names(shared, temporary, Holder(frozenset(), True, time.time() - 5000.0)) == {OFFLOAD}
    assert CHUNK in names(shared, temporary, Holder(frozenset(), False, time.time() - 5000.0))
    assert CHUNK in names(shared, temporary, Holder(frozenset(), True, time.time() - 100.0))


def test_what_is_young_is_not_left(shared: Path, temporary: Path) -> None:
    """Its writer may have ended just now, and its reader not."""
    write(shared / CHUNK, 10.0)
    assert names(shared, temporary) == {LOCK, OFFLOAD, DEVICE, ".vllm_omni_device_lock_x"}


def test_other_users_files_are_not_named(shared: Path, temporary: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are not this user's to remove."""
    theirs = os.geteuid() + 1
    monkeypatch.setattr(os, "geteuid", lambda: theirs)
    assert names(shared, temporary) == set()


def test_live_processes_are_looked_at(shared: Path, temporary: Path) -> None:
    """What a process has mapped, or open, is found in its own tables."""
    child = os.fork()
    if child == 0:
        with (shared / OFFLOAD).open("r+b") as file:
            mapped = mmap.mmap(file.fileno(), 0)
        opened = (temporary / DEVICE).open("rb")
        while True:
            time.sleep(1)
            assert mapped, opened
    try:
        deadline = time.monotonic() + 20
        while len(held := _held(child, shared, temporary)) < 2:
            assert time.monotonic() < deadline, held
    finally:
        os.kill(child, 9)
        os.waitpid(child, 0)


def _held(pid: int, shared: Path, temporary: Path) -> frozenset[str]:
    began = psutil.Process(pid).create_time()
    holders = leftovers._holders((f"{shared}/", f"{temporary}/"))
    return frozenset[str]().union(*(each.files for each in holders if each.began == began))


def test_nothing_is_removed(shared: Path, temporary: Path) -> None:
    """Looking leaves every file where it was."""
    before = {*shared.iterdir(), *temporary.iterdir()}
    find(shared, temporary, ())
    assert {*shared.iterdir(), *temporary.iterdir()} == before


def test_no_folder_is_no_trouble(tmp_path: Path) -> None:
    """A system without shared memory."""
    assert find(tmp_path / "no", tmp_path / "none") == []
    assert leftovers.size_of(tmp_path / "no") == 0

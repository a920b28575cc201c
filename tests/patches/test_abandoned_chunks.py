"""What ended requests leave in shared memory is removed, and nothing else."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import closing
from multiprocessing import resource_tracker
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from omni_fastpath.patches.abandoned_chunks.leftovers import FOLDER, GRACE_S, MOST_REQUESTS, Leftovers

NOW = 1_000_000.0
LATER = NOW + GRACE_S


@pytest.fixture
def shm(tmp_path: Path) -> Path:
    """A folder in place of the shared memory."""
    folder = tmp_path / "shm"
    folder.mkdir()
    return folder


@pytest.fixture
def found(shm: Path) -> Leftovers:
    """The patch's, over that folder."""
    return Leftovers({"chunks": 0, "lock_files": 0}, shm)


def put(folder: Path, request: str, stage: int = 0, number: int = 0, at: float = NOW) -> set[str]:
    """Write a chunk and its lock file as upstream names them, and return their names."""
    names = {f"{request}_{stage}_{number}": b"chunk", f"shm_{request}_{stage}_{number}_lockfile.lock": b""}
    for name, content in names.items():
        (folder / name).write_bytes(content)
        os.utime(folder / name, (at, at))
    return names.keys() | set()


def left(folder: Path) -> set[str]:
    """What is there."""
    return {path.name for path in folder.iterdir()}


def test_only_what_an_ended_request_left(shm: Path, found: Leftovers) -> None:
    """Chunks and lock files of each stage go; those of other requests, and other files, stay."""
    for place in range(3):
        put(shm, "ended", stage=place, number=place * 11)
    stays = put(shm, "lives") | put(shm, "ended_0") | put(shm, "of-another-server")
    files = {"ended", "psm_ended", "shm_ended_lockfile.lock", "ended_0", "sem.ended_0_0"}
    for name in files:
        (shm / name).touch()
    (shm / "ended_7_7").mkdir()
    (shm / "ended_8_8").symlink_to(shm / "ended")
    for name in files | {"ended_7_7"}:
        os.utime(shm / name, (NOW, NOW))
    stays |= files | {"ended_7_7", "ended_8_8"}
    found.note_ended(["ended"], {"lives"}, NOW)
    found.remove(LATER)
    assert left(shm) == stays
    assert found._counters == {"chunks": 3, "lock_files": 3}


@pytest.mark.parametrize("request_id", ["ü", "a:b", "a\nREGISTER:other:shared_memory\nb"])
def test_an_id_of_any_characters(request_id: str, shm: Path, found: Leftovers, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever id a client chose, what it left goes. Python's tracker, which takes no such name, is not told."""
    for name in ("register", "unregister"):
        monkeypatch.delattr(resource_tracker, name)
    put(shm, request_id)
    found.note_ended([request_id], (), NOW)
    found.remove(LATER)
    assert left(shm) == set()


def test_a_while_after_its_end_and_again(shm: Path, found: Leftovers) -> None:
    """Nothing goes before the grace period, of the end or of the file; a chunk that is put later goes later."""
    first = put(shm, "ended", at=NOW - 100)
    found.note_ended(["ended"], (), NOW)
    found.remove(LATER - 0.1)
    assert left(shm) == first
    late = put(shm, "ended", number=1, at=LATER - 0.1)
    found.remove(LATER)
    assert left(shm) == late
    found.remove(LATER + GRACE_S)
    assert left(shm) == set()


def test_a_request_that_has_the_id_of_an_ended_one(shm: Path, found: Leftovers) -> None:
    """While a request lives, nothing under its id goes; when it has ended, all of it does."""
    live = set[str]()
    files = put(shm, "same")
    found.note_ended(["same"], live, NOW)
    live.add("same")
    files |= put(shm, "same", number=1, at=NOW + 1)
    found.remove(NOW + 1000)
    assert left(shm) == files
    live.remove("same")
    found.note_ended(["same"], live, NOW + 1000)
    found.remove(NOW + 1000 + GRACE_S)
    assert left(shm) == set()


def test_it_is_bounded(shm: Path, found: Leftovers) -> None:
    """Above the bound the earliest requests are forgotten, as are those that ended long ago."""
    for number in range(MOST_REQUESTS + 2):
        found.note_ended([f"request-{number}"], (), NOW + number)
    found.note_ended(["request-2"], (), NOW + MOST_REQUESTS + 2)  # no longer the earliest
    files = {number: put(shm, f"request-{number}") for number in (1, 2, 3)}
    assert found.forget(NOW + 4)
    found.remove(NOW + 2 * MOST_REQUESTS)
    assert left(shm) == files[1] | files[3]
    assert not found.forget(float("inf"))


# ---- Upstream's ----


@pytest.mark.upstream
@pytest.mark.every_release
def test_the_names_of_the_real_connector(found: Leftovers) -> None:
    """Its unread chunk and lock file go. One that was read is gone already, and the key can be used again."""
    pytest.importorskip("vllm_omni")
    from vllm_omni.distributed.omni_connectors.connectors.shm_connector import SharedMemoryConnector

    sender, receiver = (SharedMemoryConnector({"stage_id": stage}) for stage in (0, 1))
    name, found._folder = f"fl{os.getpid()}-abandoned", FOLDER  # as the rigs name theirs
    for number in range(3):
        assert sender.put("0", "1", f"{name}_0_{number}", {"number": number})[0]
    assert receiver.get("0", "1", f"{name}_0_0")[0] == {"number": 0}
    found.note_ended([name], (), time.time())
    assert sum(name in path.name for path in FOLDER.iterdir()) == 4
    found.remove(time.time() + GRACE_S)
    assert not any(name in path.name for path in FOLDER.iterdir())
    assert found._counters == {"chunks": 2, "lock_files": 2}
    assert receiver.get("0", "1", f"{name}_0_1") is None
    assert sender.put("0", "1", f"{name}_0_1", {"number": "again"})[0]
    assert receiver.get("0", "1", f"{name}_0_1")[0] == {"number": "again"}
    found.remove(time.time() + GRACE_S)


@pytest.fixture
def patched(shm: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The patch alone, over a folder of its own and without its thread."""
    pytest.importorskip("vllm_omni")
    from tests.patches.drive import only

    with only("abandoned_chunks") as entry:
        from omni_fastpath.patches.abandoned_chunks import wrappers

        found = Leftovers(entry.counters, shm)
        monkeypatch.setattr(wrappers, "_leftovers", found)
        yield SimpleNamespace(entry=entry, leftovers=found, wrappers=wrappers)


@pytest.mark.upstream
@pytest.mark.every_release
def test_every_end_of_a_request(patched: Any, event_driven: bool, shm: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On the real orchestrator: the answered, the failed and the aborted request are noted, the living one is not."""
    from tests.patches.test_submission_errors import begun, serves, submit

    monkeypatch.setattr(patched.wrappers, "_start", lambda: None)
    files = {name: put(shm, name, at=0.0) for name in ("good", "failed", "aborted", "lives")}
    with closing(begun(event_driven=event_driven)) as world:
        for name in ("failed", "aborted", "lives"):
            submit(world, name)
        assert serves(world, "good")
        world.send(0, [("failed", "text", 7, "stop")])
        world.send(2, [("failed", "audio", 7, "error")])
        world.abort("aborted", waits=False)
        world.advance(0.01)
        patched.leftovers.remove(2 * time.time())
        assert left(shm) == files["lives"]
        assert serves(world, "lives")
    patched.leftovers.remove(2 * time.time())
    assert left(shm) == set()


@pytest.mark.upstream
@pytest.mark.every_release
def test_one_thread_while_there_is_something(patched: Any, shm: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It removes, counts and ends; the next end of a request starts another one, also if there is no such folder."""
    wrappers = patched.wrappers
    monkeypatch.setattr(wrappers, "EVERY_S", 0.01)
    monkeypatch.setattr(wrappers, "KEEP_S", 0.0)
    for folder in (shm, shm / "none", shm):
        patched.leftovers._folder = folder
        put(shm, "ended", at=0.0)
        patched.leftovers.note_ended(["ended"], (), 0.0)
        for _ in range(2):
            wrappers._start()
        while wrappers._thread is not None:
            time.sleep(0.01)
    assert left(shm) == set()
    assert patched.entry.counters == {"chunks": 2, "lock_files": 2}

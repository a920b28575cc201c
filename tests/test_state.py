"""The state files: who may read them, when they count, what survives, and what they say."""

from __future__ import annotations

import json
import logging
import multiprocessing
import os
import stat
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from omni_fastpath import __version__, process_role, state
from omni_fastpath.declare import Counter, Process, State
from omni_fastpath.ledger import LEDGER
from omni_fastpath.state import Publisher, read_live, stage_and_replica, write
from tests.fakes.processes import process
from tests.fakes.upstream import patch
from tests.tools.made import snapshot

SAID = snapshot(os.getpid())
DRUM = patch("drum", counters=(Counter("beats", "beats"),))
FLUTE = patch("flute", counters=())


@pytest.fixture(autouse=True)
def _alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """A ledger of the test's own, no exit handler, and no thread."""
    monkeypatch.setattr(LEDGER, "_entries", {})
    monkeypatch.setattr(LEDGER, "_listeners", [])
    monkeypatch.setattr(state, "atexit", Mock())
    monkeypatch.setattr(state, "export", Mock())
    monkeypatch.setattr(Publisher, "_can_change", lambda *_: False)


# ---- A file ----


def test_a_file_is_read_by_its_owner_alone() -> None:
    """What is written is read. The folder has mode 0700 and the file 0600, whatever the umask."""
    before = os.umask(0)
    try:
        path = write(SAID)
    finally:
        os.umask(before)
    assert read_live() == [SAID]
    assert [stat.S_IMODE(each.stat().st_mode) for each in (path.parent, path)] == [0o700, 0o600]


def test_files_of_processes_that_have_ended_are_deleted() -> None:
    """Also of an earlier process that had the id of a running one and began a hundredth of a second before it."""
    path = write(SAID)
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    for suffix, text in ((".json", path.read_text()), (".json", "{"), (".tmp", "{")):
        path.with_name(f"{ended.pid}-{process_role.namespace()}{suffix}").write_text(text)
        assert read_live() == [SAID]
        assert list(path.parent.iterdir()) == [path]
    write({**SAID, "started": SAID["started"] - 1})
    assert read_live() == []
    assert not path.exists()


DAMAGED: Any = ({"schema": 0}, {"patches": None}, {"patches": {"drum": {}}}, {"role": "x"}, {"cpu_s": {"a": ""}})


@pytest.mark.parametrize("content", ["\0\xff", "{", "[" * 9999, *DAMAGED], ids=range(8))
def test_a_file_that_is_damaged_or_of_another_version_is_skipped(content: Any) -> None:
    """It is neither read nor deleted. Nor is a file with another name or of another process namespace."""
    content = content if isinstance(content, str) else json.dumps({**SAID, **content})
    path = write(SAID)
    others = [path.with_name(name) for name in ("notes.txt", "x.json", ".hidden", "1-1.json")]
    for each in (path, *others):
        each.write_text(content)
    assert read_live() == []
    assert all(each.exists() for each in (path, *others))


def test_a_file_of_another_user_is_not_believed() -> None:
    """Links and files of other users are not read."""
    path = write(SAID)
    elsewhere = path.rename(path.parent.parent / "elsewhere.json")
    path.symlink_to(elsewhere)
    assert read_live() == []
    path.unlink()
    elsewhere.rename(path)
    if os.geteuid() != 0:
        pytest.skip("only root can give a file away")
    os.chown(path, 1234, -1)
    assert read_live() == []


# ---- Where it is ----


@pytest.mark.parametrize("how", ["link", "open", "file", "another user's"])
def test_a_folder_that_is_not_ours_alone_is_passed_over(tmp_path: Path, how: str) -> None:
    """Nothing is written to or read from a folder that another user could have made. The next one is used."""
    folder, elsewhere = tmp_path / "runtime/omni-fastpath", tmp_path / "elsewhere"
    elsewhere.mkdir(mode=0o700)
    if how == "link":
        folder.symlink_to(elsewhere)
    elif how == "file":
        folder.write_text("")
    else:
        folder.mkdir()
        folder.chmod(0o777 if how == "open" else 0o700)
    if how == "another user's":
        if os.geteuid() != 0:
            pytest.skip("only root can give a folder away")
        os.chown(folder, 1234, -1)
    elif how != "file":
        (folder / f"{os.getpid()}-{process_role.namespace()}.json").write_text(json.dumps(SAID))
        assert read_live([folder]) == []
    assert write(SAID).parent == next(each for each in state.folders(os.environ, Path("/")) if each != folder)
    assert len(list(elsewhere.iterdir())) == (how == "link")
    write(SAID).unlink()


def test_the_folders_of_a_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A private runtime folder, of the variable or the system's, comes first. Then those where ``tempfile`` looks."""
    monkeypatch.setattr(os, "geteuid", lambda: 1234)
    own = {tmp_path, Path("/run/user/1234")}
    monkeypatch.setattr(state, "_is_private", lambda base: base in own)
    variables = {"XDG_RUNTIME_DIR": str(tmp_path), "TMPDIR": "relative", "TEMP": "/x", "TMP": ""}
    runtime = [tmp_path / "omni-fastpath", Path("/run/user/1234/omni-fastpath")]
    temporary = [tmp_path / "relative", Path("/x"), Path("/tmp"), Path("/var/tmp"), Path("/usr/tmp"), tmp_path]  # noqa: S108
    assert state.folders(variables, tmp_path) == [*runtime, *(each / "omni-fastpath-1234" for each in temporary)]
    own.clear()
    for asked in ("", "relative", "/run/user/1234", str(tmp_path)):
        found = state.folders({**variables, "XDG_RUNTIME_DIR": asked}, tmp_path)
        assert found[0] == tmp_path / "relative" / "omni-fastpath-1234"


# ---- What it says ----


def test_the_file_says_what_the_ledger_says(monkeypatch: pytest.MonkeyPatch) -> None:
    """The file has role, releases, source, port and all of the ledger, and a change of a state is written at once."""
    monkeypatch.setattr(sys, "argv", ["vllm", "serve", "--omni", "--port", "8091"])
    LEDGER.set(FLUTE, State.FAILED, "no")
    publisher = Publisher(Process.SERVER, "one.yaml")
    publisher.start()
    LEDGER.set(DRUM, State.APPLIED, "yes")
    LEDGER.named("drum").counters["beats"] = 7
    publisher.update("deploy.yaml")
    LEDGER.set(FLUTE, State.FAILED, "for another reason")
    [found] = read_live()
    assert (found["role"], found["source"], found["process_name"]) == ("server", "deploy.yaml", "MainProcess")
    assert (found["omni_fastpath"], found["port"], found["above"][0]) == (__version__, 8091, os.getppid())
    assert found["patches"] == LEDGER.snapshot()
    assert found["cpu_s"].keys() == {"front_end"}


def test_a_full_disk_is_logged_once(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """Failing writes are one warning, and the next write that succeeds is complete."""
    publisher = Publisher(Process.SERVER, None)
    with monkeypatch.context() as patched:
        patched.setattr(state, "write", Mock(side_effect=OSError("disk full")))
        publisher.start()
        for number in range(3):
            LEDGER.set(DRUM, State.FAILED, f"reason {number}")
    told = [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING and "state file" in r.getMessage()]
    assert told == ["omni-fastpath: the state file cannot be written, so status does not show this process: disk full"]
    publisher.write()
    assert read_live()[0]["patches"]["drum"]["reason"] == "reason 2"


def test_figures_that_fail_stop_nobody() -> None:
    """Figures that report a failure while the state file is written, here and on another thread, cause no deadlock."""
    publisher = Publisher(Process.SERVER, None)
    LEDGER.set(DRUM, State.APPLIED, "yes")
    publisher.start()
    beside = threading.Thread(target=publisher.write, daemon=True)

    def figures() -> dict[str, Any]:
        if LEDGER.named("drum").state is State.APPLIED and threading.current_thread() is not beside:
            beside.start()
            beside.join(0.5)  # where it cannot be through, it waits with a lock in its hands
            LEDGER.set(DRUM, State.FAILED, "observing failed")
        return {}

    LEDGER.named("drum").figures = figures
    writing = threading.Thread(target=publisher.write, daemon=True)
    writing.start()
    for each in (writing, beside):
        each.join(20)
        assert not each.is_alive()
    assert read_live()[0]["patches"]["drum"]["state"] == "failed"


@pytest.mark.parametrize("role", [Process.STAGE, Process.WORKER, Process.HEADLESS, Process.SERVER])
def test_no_thread_where_nothing_can_change(monkeypatch: pytest.MonkeyPatch, role: Process) -> None:
    """One thread runs if a patch is applied, and in a server that collects processes for ``/metrics``, else none."""
    monkeypatch.undo()
    monkeypatch.setattr(LEDGER, "_entries", {})
    monkeypatch.setattr(LEDGER, "_listeners", [])
    monkeypatch.setattr(state, "write", Mock())
    started: list[str] = []
    monkeypatch.setattr(threading.Thread, "start", lambda thread: started.append(thread.name))
    publisher = Publisher(role, None)
    LEDGER.listen(lambda *_: publisher.write())
    LEDGER.set(DRUM, State.OFF, "OMNI_FASTPATH=0")
    assert started == []
    for found in (State.NOT_APPLICABLE, State.UNSUPPORTED):
        LEDGER.set(DRUM, found, "no")
    assert len(started) == (role is Process.SERVER)
    for each in (DRUM, FLUTE):
        LEDGER.set(each, State.APPLIED, "here")
    assert started == ["omni-fastpath-state"]


def test_a_forked_child_leaves_its_parents_file_alone() -> None:
    """A state that changes in a fork does not change the parent's file or wait for its locks."""
    publisher = Publisher(Process.SERVER, None)
    LEDGER.set(DRUM, State.APPLIED, "yes")
    publisher.start()
    before = read_live()
    child = multiprocessing.get_context("fork").Process(target=LEDGER.set, args=(DRUM, State.FAILED, "in the child"))
    with publisher._lock:  # as the refreshing thread may hold it at the fork
        child.start()
        child.join(30)
    assert child.exitcode == 0
    assert read_live() == before


def test_the_end_is_the_last_word(monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread, at work when the process ends, does not write the file again after it was removed."""
    publisher = Publisher(Process.SERVER, None)
    publisher.start()

    def said() -> Any:
        publisher._remove()
        return SAID

    monkeypatch.setattr(publisher, "said", said)
    publisher.write()
    assert read_live() == []


SCRIPT = """
import os, shutil, sys, time
from tests.fakes.upstream import patch
from omni_fastpath import state
from omni_fastpath.declare import Counter, Process, State
from omni_fastpath.ledger import LEDGER
state.REFRESH_S = 0.01
looked = []
drum = patch("drum", counters=(Counter("beats", "beats"),))
LEDGER.set(drum, State.APPLIED, "yes")
publisher = state.Publisher(Process.SERVER, None, lambda: looked.append(1))
publisher.start()
LEDGER.named("drum").counters["beats"] = 5
def beats(samples):
    return [each.value for family in samples for each in family.samples if each.name == "omni_fastpath_events_total"]
def in_file():
    return state.read_live()[0]["patches"]["drum"]["counters"]["beats"]
while in_file() != 5 or beats(publisher.collect()) != [5] or not looked:
    time.sleep(0.005)
for lose in (publisher._path.unlink, lambda: shutil.rmtree(publisher._path.parent)):
    lose()
    while not state.read_live():
        time.sleep(0.005)
if os.fork() == 0:
    sys.exit()  # runs the inherited exit handlers
os.wait()
print(len(state.read_live()), flush=True)
"""


def test_counters_follow_and_the_file_goes_with_its_process() -> None:
    """File, metrics and the look at slots are refreshed, a deleted file is written again, and the end removes it.

    The end of a forked child does not remove it.
    """
    assert process(sys.executable, "-c", SCRIPT).stdout == "1\n"
    assert list(state.folder().iterdir()) == []


@pytest.mark.parametrize(
    ("name", "arguments", "expected"),
    [
        ("StageEngineCoreProc_stage12_replica0_DP3", {"omni_stage_id": 9, "omni_replica_id": 9}, (12, 0)),
        ("StageDiffusionProc", {"omni_stage_id": 2, "omni_replica_id": 1}, (2, 1)),
        ("VllmWorker-0", {"rank": 0}, (None, None)),
    ],
)
def test_stage_and_replica(
    name: str, arguments: dict[str, int], expected: tuple[int | None, int | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It finds stage and replica in the name of an engine process, or in the arguments of a diffusion process."""
    made = multiprocessing.get_context("spawn").Process(name=name, kwargs=arguments)
    monkeypatch.setattr(multiprocessing, "current_process", lambda: made)
    assert stage_and_replica() == expected

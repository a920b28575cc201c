"""The state files: who may read them, when they count, what survives."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import psutil
import pytest

from omni_fastpath import statefile

SNAPSHOT: dict[str, Any] = {
    "role": "server",
    "process_name": "MainProcess",
    "omni_fastpath": "0.1.0",
    "vllm": "0.30.0",
    "vllm_omni": "0.30.0",
    "source": "deploy.yaml",
    "patches": {
        "drum": {
            "state": "applied",
            "reason": "",
            "origin": "OMNI_FASTPATH_DRUM=1",
            "options": {"count": 3},
            "counters": {"beats": 5},
        }
    },
}


@pytest.fixture(autouse=True)
def runtime(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A private runtime directory; platformdirs wants mode 0700."""
    runtime = tmp_path / "runtime"
    runtime.mkdir(mode=0o700)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(runtime))
    return runtime


def mode(path: Path) -> int:
    """The permission bits."""
    return stat.S_IMODE(path.stat().st_mode)


def dead_pid() -> int:
    """The id of a process that has ended."""
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    return ended.pid


def test_what_is_written_is_read() -> None:
    """A snapshot comes back whole, with the process that wrote it filled in."""
    path = statefile.write(SNAPSHOT)
    [read] = statefile.read_live()
    assert path.name == f"{os.getpid()}.json"
    assert {key: read[key] for key in SNAPSHOT} == SNAPSHOT
    assert (read["schema"], read["pid"], read["ppid"]) == (1, os.getpid(), os.getppid())
    assert read["created"] == pytest.approx(psutil.Process().create_time(), abs=2)


def test_only_the_owner_may_look() -> None:
    """The folder has mode 0700 and the file 0600, whatever the umask."""
    before = os.umask(0)
    try:
        path = statefile.write(SNAPSHOT)
    finally:
        os.umask(before)
    assert (mode(path.parent), mode(path)) == (0o700, 0o600)


def test_a_folder_open_to_others_is_closed(runtime: Path) -> None:
    """A folder of ours that others may enter is closed at the next write."""
    folder = runtime / "omni-fastpath"
    folder.mkdir()
    folder.chmod(0o755)
    statefile.write(SNAPSHOT)
    assert mode(folder) == 0o700


def test_the_last_write_counts() -> None:
    """A second write replaces the first and leaves no other file."""
    statefile.write(SNAPSHOT)
    path = statefile.write({**SNAPSHOT, "role": "stage"})
    assert [read["role"] for read in statefile.read_live()] == ["stage"]
    assert list(path.parent.iterdir()) == [path]


def test_identity_cannot_be_overwritten() -> None:
    """A snapshot that brings another process's identity is still filed as this process's."""
    statefile.write({**SNAPSHOT, "pid": 1, "created": 0, "schema": 9})
    assert [read["pid"] for read in statefile.read_live()] == [os.getpid()]


def test_a_failed_write_leaves_the_last_file(monkeypatch: pytest.MonkeyPatch) -> None:
    """When the rename fails the old file stays and no temporary one does."""
    path = statefile.write(SNAPSHOT)

    def refuse(*_: object) -> Path:
        raise OSError("no")

    monkeypatch.setattr(Path, "replace", refuse)
    with pytest.raises(OSError, match="no"):
        statefile.write({**SNAPSHOT, "role": "stage"})
    assert list(path.parent.iterdir()) == [path]
    assert statefile.read_live()[0]["role"] == "server"


def test_remove_is_for_this_process_and_repeatable() -> None:
    """Removal takes this process's file only, and none is no error."""
    path = statefile.write(SNAPSHOT)
    other = path.with_name("1.json")
    other.write_text("{}")
    statefile.remove()
    statefile.remove()
    assert list(path.parent.iterdir()) == [other]


def test_nothing_is_read_or_made_without_a_folder(runtime: Path) -> None:
    """Reading does not make the folder."""
    assert statefile.read_live() == []
    assert list(runtime.iterdir()) == []


def copied(path: Path, name: str, **changes: Any) -> Path:
    """A copy of a state file under another name, with other fields."""
    copy = path.with_name(name)
    copy.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
    return copy


def test_files_of_dead_processes_are_deleted() -> None:
    """A file, a temporary file and garbage of a process that has ended go, whoever reads next."""
    path = statefile.write(SNAPSHOT)
    pid = dead_pid()
    left = [copied(path, f"{pid}.json", pid=pid), copied(path, f"{pid}.abc.tmp")]
    assert [read["pid"] for read in statefile.read_live()] == [os.getpid()]
    assert not any(file.exists() for file in left)
    garbage = path.with_name(f"{pid}.json")
    garbage.write_text("{")
    statefile.read_live()
    assert not garbage.exists()


def test_a_reused_id_is_not_the_same_process() -> None:
    """A file whose process began at another time than the one that has the id now is deleted."""
    path = statefile.write(SNAPSHOT)
    copied(path, path.name, created=json.loads(path.read_text())["created"] - 60)
    assert statefile.read_live() == []
    assert not path.exists()


def test_a_stepped_clock_does_not_kill_a_file() -> None:
    """Creation and boot time that moved together still name the living process."""
    path = statefile.write(SNAPSHOT)
    fields = json.loads(path.read_text())
    copied(path, path.name, created=fields["created"] - 3600, boot=fields["boot"] - 3600)
    assert len(statefile.read_live()) == 1


@pytest.mark.parametrize(
    "content",
    ["", "{", "[]", "{}", "\0\xff", '{"schema": 2}', '{"schema": 1, "pid": "x"}'],
)
def test_garbage_of_a_live_process_is_skipped(content: str) -> None:
    """A file that another version may have written is neither read nor deleted."""
    path = statefile.write(SNAPSHOT)
    path.write_text(content)
    assert statefile.read_live() == []
    assert path.exists()


def test_an_unknown_state_is_skipped_and_an_unknown_key_kept() -> None:
    """A state that nobody can judge is not shown; a key that a later version added is."""
    path = statefile.write({**SNAPSHOT, "later": 1})
    assert statefile.read_live()[0]["later"] == 1
    record = {**SNAPSHOT["patches"]["drum"], "state": "asleep"}
    copied(path, path.name, patches={"drum": record})
    assert statefile.read_live() == []


def test_other_files_are_left_alone() -> None:
    """What does not look like ours is not touched."""
    folder = statefile.write(SNAPSHOT).parent
    others = [folder / name for name in ("notes.txt", "x.json", ".hidden")]
    for other in others:
        other.write_text("x")
    statefile.read_live()
    assert all(other.exists() for other in others)


def test_a_link_is_refused(runtime: Path, tmp_path: Path) -> None:
    """A folder that is a link may lead anywhere: nothing is written or read through it."""
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir(mode=0o700)
    (runtime / "omni-fastpath").symlink_to(elsewhere)
    with pytest.raises(statefile.UnsafeFolderError):
        statefile.write(SNAPSHOT)
    with pytest.raises(statefile.UnsafeFolderError):
        statefile.read_live()
    assert list(elsewhere.iterdir()) == []


def test_somebody_elses_folder_is_refused(runtime: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder of another user is refused, for writing and for reading."""
    (runtime / "omni-fastpath").mkdir(mode=0o700)
    monkeypatch.setattr(statefile, "folder", lambda: runtime / "omni-fastpath")
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    with pytest.raises(statefile.UnsafeFolderError, match="belongs to user"):
        statefile.write(SNAPSHOT)
    with pytest.raises(statefile.UnsafeFolderError, match="belongs to user"):
        statefile.read_live()


def test_an_unset_runtime_directory_does_not_warn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without XDG_RUNTIME_DIR, the usual case in a container, nothing is printed."""
    monkeypatch.delenv("XDG_RUNTIME_DIR")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert statefile.folder().name == "omni-fastpath"


def test_a_child_and_its_parent_have_a_file_each() -> None:
    """Two live processes are listed by id, each with its own role."""
    script = (
        "import sys, json; from omni_fastpath import statefile;"
        "statefile.write(json.loads(sys.argv[1])); print(flush=True); sys.stdin.read()"
    )
    statefile.write(SNAPSHOT)
    child = subprocess.Popen(
        [sys.executable, "-c", script, json.dumps({**SNAPSHOT, "role": "stage"})],
        env={**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parent.parent)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    with child:
        assert child.stdout is not None
        child.stdout.readline()
        roles = {read["pid"]: read["role"] for read in statefile.read_live()}
        assert roles == {os.getpid(): "server", child.pid: "stage"}
        child.communicate()
    assert [read["pid"] for read in statefile.read_live()] == [os.getpid()]

"""The state files: who may read them, when they count, what survives."""

from __future__ import annotations

import json
import os
import shutil
import stat
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

from omni_fastpath import processid, statefile
from omni_fastpath.processid import ProcessId

ROOT = Path(__file__).resolve().parent.parent

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
            "figures": {
                "omni_fastpath_ring_seconds": [{"labels": {"stage": "2"}, "counts": [1, 0], "sum": 0.5, "value": None}],
                "omni_fastpath_hanging": [{"labels": {}, "counts": None, "sum": 0.0, "value": 3.0}],
            },
        }
    },
}


@pytest.fixture(autouse=True)
def runtime(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A runtime directory that is this user's alone."""
    runtime = tmp_path / "runtime"
    runtime.mkdir(mode=0o700)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(runtime))
    return runtime


def mode(path: Path) -> int:
    """The permission bits."""
    return stat.S_IMODE(path.stat().st_mode)


def name_of(pid: int, suffix: str = ".json") -> str:
    """What the state file of a process of this namespace and boot is called."""
    return f"{pid}-{processid.namespace()}-{processid.boot_id()}{suffix}"


def dead_pid() -> int:
    """The id of a process that has ended."""
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    return ended.pid


def test_what_is_written_is_read() -> None:
    """A snapshot comes back whole, with the process that wrote it filled in."""
    path = statefile.write(SNAPSHOT)
    [read] = statefile.read_live()
    assert path == statefile.path()
    assert path.name == name_of(os.getpid())
    assert {key: read[key] for key in SNAPSHOT} == SNAPSHOT
    assert (read["schema"], read["pid"], read["ppid"]) == (2, os.getpid(), os.getppid())
    assert ProcessId(*(read[key] for key in ("pid", "started", "boot", "namespace"))).alive


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


def test_bytes_that_are_no_text_hide_no_process() -> None:
    """A deploy YAML whose name is no Unicode: the file is written, read, and its source shown as far as it is text."""
    statefile.write({**SNAPSHOT, "source": os.fsdecode(b"/caf\xe9.yaml")})
    assert [read["source"] for read in statefile.read_live()] == ["/caf?.yaml"]


def test_the_last_write_counts() -> None:
    """A second write replaces the first and leaves no other file."""
    statefile.write(SNAPSHOT)
    path = statefile.write({**SNAPSHOT, "role": "stage"})
    assert [read["role"] for read in statefile.read_live()] == ["stage"]
    assert list(path.parent.iterdir()) == [path]


def test_identity_cannot_be_overwritten() -> None:
    """A snapshot that brings another process's identity is still filed as this process's."""
    statefile.write({**SNAPSHOT, "pid": 1, "started": 0, "boot": "", "namespace": 1, "schema": 9})
    assert [read["pid"] for read in statefile.read_live()] == [os.getpid()]


def test_a_failed_write_leaves_the_last_file(monkeypatch: pytest.MonkeyPatch) -> None:
    """When the rename fails the old file stays and no temporary one does."""
    path = statefile.write(SNAPSHOT)

    def refuse(*_: object, **__: object) -> None:
        raise OSError("no")

    monkeypatch.setattr(os, "replace", refuse)
    with pytest.raises(OSError, match="no"):
        statefile.write({**SNAPSHOT, "role": "stage"})
    assert list(path.parent.iterdir()) == [path]
    assert statefile.read_live()[0]["role"] == "server"


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
    left = [copied(path, name_of(pid), pid=pid), copied(path, name_of(pid, ".abc.tmp"))]
    assert [read["pid"] for read in statefile.read_live()] == [os.getpid()]
    assert not any(file.exists() for file in left)
    garbage = path.with_name(name_of(pid))
    garbage.write_text("{")
    statefile.read_live()
    assert not garbage.exists()


def test_a_dead_file_that_cannot_be_deleted_hides_no_live_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the folder is mounted read-only, what lives is shown."""
    path = statefile.write(SNAPSHOT)
    pid = dead_pid()
    copied(path, name_of(pid), pid=pid)

    def refuse(*_: object, **__: object) -> None:
        raise OSError("read-only file system")

    monkeypatch.setattr(os, "unlink", refuse)
    assert [read["pid"] for read in statefile.read_live()] == [os.getpid()]


@pytest.mark.parametrize("ticks", [-1, 1, -6000])
def test_a_reused_id_is_not_the_same_process(ticks: int) -> None:
    """A file whose process began a hundredth of a second before or after the one that has the id now is deleted."""
    path = statefile.write(SNAPSHOT)
    copied(path, path.name, started=json.loads(path.read_text())["started"] + ticks)
    assert statefile.read_live() == []
    assert not path.exists()


def test_another_boot_counts_for_nothing() -> None:
    """A file with this process's id and start, ticks since boot, of an earlier boot is neither shown nor deleted."""
    path = statefile.write(SNAPSHOT)
    yesterday = "0123456789abcdef" * 2
    old = copied(path, path.name.replace(processid.boot_id(), yesterday), boot=yesterday)
    swapped = copied(path, path.name, boot=yesterday)  # and where only the content says so, it is not ours
    assert statefile.read_live() == []
    assert old.exists()
    assert not swapped.exists()
    assert statefile.foreign() == 1


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
    statefile.write(SNAPSHOT)
    monkeypatch.setattr(statefile, "folder", lambda: runtime / "omni-fastpath")
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    with pytest.raises(statefile.UnsafeFolderError, match="belongs to user"):
        statefile.write(SNAPSHOT)
    with pytest.raises(statefile.UnsafeFolderError, match="belongs to user"):
        statefile.read_live()


# ---- Where the folder is ----


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder for temporary files of the test's own, as sticky and open as the machine's."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    folder.chmod(0o1777)
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    return folder


def fallback(temporary: Path) -> Path:
    """The runtime folder of this user where there is no other."""
    return temporary / f"runtime-{os.geteuid()}" / "omni-fastpath"


def test_a_pod_without_a_runtime_directory_has_one(temporary: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Unset, a name of a folder that cannot be made, or somebody else's: the state lies below the temporary files."""
    monkeypatch.setattr(os, "geteuid", lambda: 1234)  # there is no /run/user/1234
    assert statefile.folder() == fallback(temporary)  # the runtime directory is root's, or the tester's
    for unusable in ("", "relative", "/run/user/1234", "/proc/1/nowhere", "/proc/1/root/nowhere", f"/{'x' * 300}"):
        monkeypatch.setenv("XDG_RUNTIME_DIR", unusable)
        assert statefile.folder() == fallback(temporary)
    monkeypatch.delenv("XDG_RUNTIME_DIR")
    assert statefile.folder() == fallback(temporary)


def test_the_fallback_is_closed_to_others(temporary: Path, runtime: Path) -> None:
    """What is made below the temporary files is this user's alone, whatever the umask; files there are found."""
    runtime.chmod(0o777)  # so that nobody may trust it
    before = os.umask(0)
    try:
        path = statefile.write(SNAPSHOT)
    finally:
        os.umask(before)
    assert path.parent == fallback(temporary)
    assert (mode(path.parent), mode(path.parent.parent)) == (0o700, 0o700)
    assert [read["pid"] for read in statefile.read_live()] == [os.getpid()]


def test_a_prepared_fallback_is_refused(temporary: Path, runtime: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A link, an open folder or somebody else's, put there before us, is neither written nor read."""
    runtime.chmod(0o777)
    prepared = fallback(temporary).parent
    elsewhere = temporary / "elsewhere"
    elsewhere.mkdir()
    prepared.symlink_to(elsewhere)
    with pytest.raises(statefile.UnsafeFolderError, match="no plain folder"):
        statefile.write(SNAPSHOT)
    prepared.unlink()
    prepared.mkdir()
    prepared.chmod(0o777)
    with pytest.raises(statefile.UnsafeFolderError, match="others may write"):
        statefile.write(SNAPSHOT)
    prepared.chmod(0o700)
    statefile.write(SNAPSHOT)
    (prepared / "omni-fastpath").chmod(0o755)  # others may look: closed again at the next write
    statefile.write(SNAPSHOT)
    assert mode(prepared / "omni-fastpath") == 0o700
    found = fallback(temporary)
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    monkeypatch.setattr(statefile, "folder", lambda: found)
    with pytest.raises(statefile.UnsafeFolderError, match="belongs to user"):
        statefile.read_live()


def test_what_was_looked_at_is_what_is_used(
    temporary: Path, runtime: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A link put in place of our folder, after it was found good, gets and loses nothing.

    A pod's ``emptyDir`` is open to all without the sticky bit.
    """
    runtime.chmod(0o777)  # so that nobody may trust it
    temporary.chmod(0o777)
    ours = fallback(temporary).parent
    other = tmp_path / "other"
    shutil.copytree(statefile.write(SNAPSHOT).parent.parent, other)
    [there] = (other / "omni-fastpath").iterdir()
    dead = there.with_name(name_of(dead_pid()))
    there.rename(dead)

    def exchange(function: Any) -> Any:
        def after(*given: Any, **named: Any) -> Any:
            if not ours.is_symlink():
                ours.rename(tmp_path / "away")
                ours.symlink_to(other)
            return function(*given, **named)

        return after

    for first in ("listdir", "replace"):
        with monkeypatch.context() as patched:
            patched.setattr(os, first, exchange(getattr(os, first)))
            if first == "listdir":
                assert [read["pid"] for read in statefile.read_live()] == [os.getpid()]
            else:
                statefile.write(SNAPSHOT)
        assert ours.is_symlink()
        assert list((other / "omni-fastpath").iterdir()) == [dead]
        ours.unlink()
        (tmp_path / "away").rename(ours)


@pytest.mark.skipif(os.geteuid() != 0, reason="becomes another user, as a pod's process is")
def test_a_process_that_is_not_root_has_a_folder(temporary: Path) -> None:
    """As user 1234 without a runtime directory or a home: the file is written and found."""
    script = (
        "import json, os, sys; from omni_fastpath import statefile\n"
        "statefile.Snapshot.model_rebuild(); os.setgid(1234); os.setuid(1234)  # may not read where Python lies\n"
        "path = statefile.write(json.loads(sys.argv[1]))\n"
        "assert [each['pid'] for each in statefile.read_live()] == [os.getpid()]\n"
        "print(path)"
    )
    variables = {name: text for name, text in os.environ.items() if name not in ("XDG_RUNTIME_DIR", "HOME")}
    with tempfile.TemporaryDirectory(dir="/tmp") as open_to_all:
        Path(open_to_all).chmod(0o1777)
        run = subprocess.run(
            [sys.executable, "-c", script, json.dumps(SNAPSHOT)],
            env={**variables, "TMPDIR": open_to_all, "PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
            check=False,
        )
        assert run.stderr == ""
        assert Path(run.stdout.strip()).parent == Path(open_to_all) / "runtime-1234/omni-fastpath"


# ---- Several process namespaces and one folder ----

WRITES_AND_WAITS = """
import json, os, sys
from omni_fastpath import statefile
print(os.getpid(), statefile.write(json.loads(sys.argv[1])), flush=True)
sys.stdin.read()
print(*(each["pid"] for each in statefile.read_live()), statefile.foreign(), flush=True)
"""


def in_a_container(script: str, *arguments: str, proc: bool = True) -> subprocess.Popen[str]:
    """A process that is number 1 or so of a process namespace of its own, with this runtime directory."""
    command = ["unshare", "--pid", "--fork", *(["--mount-proc"] if proc else []), sys.executable, "-c", script]
    return subprocess.Popen(
        [*command, *arguments],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def can_have_namespaces() -> bool:
    """Whether this test run may make process namespaces."""
    unshare = shutil.which("unshare")
    command = [str(unshare), "--pid", "--fork", "--mount-proc", "true"]
    return unshare is not None and subprocess.run(command, capture_output=True, check=False).returncode == 0


@pytest.mark.skipif(not can_have_namespaces(), reason="process namespaces cannot be made here")
@pytest.mark.parametrize("proc", [True, False], ids=["with its own /proc", "with the outer /proc"])
def test_two_containers_with_one_folder_do_not_meet(proc: bool) -> None:
    """Equal ids in two namespaces have a file each; each reader sees its own, and nobody deletes the others'."""
    outer = statefile.write(SNAPSHOT)
    containers = [in_a_container(WRITES_AND_WAITS, json.dumps(SNAPSHOT), proc=proc) for _ in range(2)]
    try:
        said = [container.stdout.readline().split() for container in containers if container.stdout]
        assert {pid for pid, _ in said} == {"1"}
        paths = {Path(path) for _, path in said}
        assert len(paths) == 2
        assert [read["pid"] for read in statefile.read_live()] == [os.getpid()]
        assert statefile.foreign() == 2
        seen = [container.communicate()[0].split() for container in containers]
        assert seen == [["1", "2"], ["1", "2"]]
        assert all(path.exists() for path in (outer, *paths))
    finally:
        for container in containers:
            container.kill()
            container.wait()


def test_what_cannot_be_seen_is_not_dead(monkeypatch: pytest.MonkeyPatch) -> None:
    """A living process that ``/proc`` does not show (``hidepid``, another namespace's) keeps its file."""
    path = statefile.write(SNAPSHOT)
    hidden = copied(path, name_of(1), pid=1)
    monkeypatch.setattr(ProcessId, "of", lambda _: None)
    assert statefile.read_live() == []
    assert path.exists()
    assert hidden.exists()


def test_a_child_and_its_parent_have_a_file_each() -> None:
    """Two live processes are listed by id, each with its own role."""
    script = (
        "import sys, json; from omni_fastpath import statefile;"
        "statefile.write(json.loads(sys.argv[1])); print(flush=True); sys.stdin.read()"
    )
    statefile.write(SNAPSHOT)
    child = subprocess.Popen(
        [sys.executable, "-c", script, json.dumps({**SNAPSHOT, "role": "stage"})],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
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


def test_whose_file_is_of_another_version() -> None:
    """A live process's that is no snapshot of this one; not a dead one's, a half-written one or another container's."""
    own = statefile.write(SNAPSHOT)
    for name in (name_of(dead_pid()), name_of(1, ".0a.tmp"), f"1-1-{processid.boot_id()}.json"):
        own.with_name(name).write_text("{}")
    assert statefile.unreadable() == frozenset()
    own.write_text(json.dumps({**json.loads(own.read_text()), "schema": 99}))
    assert statefile.unreadable() == statefile.unreadable(own.parent) == {os.getpid()}
    assert statefile.read_live() == []
    assert own.exists()
    os.utime(own, (1.0, 1.0))  # before this process began: an earlier one's, which had its id
    assert statefile.unreadable() == frozenset()

"""The state files: who may read them, when they count, what survives."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
import tempfile
from pathlib import Path
from unittest.mock import Mock

import pytest

from omni_fastpath import process_role, statefile
from tests.tools.made import record, snapshot

ROOT = Path(__file__).resolve().parent.parent

SNAPSHOT = snapshot(
    0,
    patches={
        "drum": {
            **record(),
            "same_as": "0.30.0",
            "options": {"count": 3},
            "figures": {"omni_fastpath_ring_seconds": [{"labels": {"stage": "2"}, "counts": [1, 0], "sum": 0.5}]},
        }
    },
)


def test_what_is_written_is_read() -> None:
    """A snapshot is read as it was written, with the writing process filled in."""
    path = statefile.write({**SNAPSHOT, "pid": 1, "started": 0, "schema": 9, "later": 1})
    [read] = statefile.read_live()
    assert path == statefile.path()
    assert {key: read[key] for key in SNAPSHOT} == {**SNAPSHOT, "pid": os.getpid()}
    assert (read["started"], read["later"]) == (process_role.started(os.getpid()), 1)


def test_only_the_owner_may_look() -> None:
    """The folder has mode 0700 and the file 0600, whatever the umask."""
    before = os.umask(0)
    try:
        path = statefile.write(SNAPSHOT)
    finally:
        os.umask(before)
    assert [stat.S_IMODE(each.stat().st_mode) for each in (path.parent, path)] == [0o700, 0o600]


def test_a_failed_write_leaves_the_last_file(monkeypatch: pytest.MonkeyPatch) -> None:
    """When the rename fails the old file stays, and the next write leaves no other."""
    path = statefile.write(SNAPSHOT)

    def refuse(*_: object) -> None:
        raise OSError("no")

    with monkeypatch.context() as patched:
        patched.setattr(Path, "replace", refuse)
        with pytest.raises(OSError, match="no"):
            statefile.write({**SNAPSHOT, "role": "stage"})
    assert [read["role"] for read in statefile.read_live()] == ["server"]
    statefile.write({**SNAPSHOT, "role": "stage"})
    assert [read["role"] for read in statefile.read_live()] == ["stage"]
    assert list(path.parent.iterdir()) == [path]


def test_files_of_dead_processes_are_deleted() -> None:
    """All files of a process that has ended are deleted by the next reader."""
    assert statefile.read_live() == []  # before there is a folder
    path = statefile.write(SNAPSHOT)
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    for suffix, text in ((".json", path.read_text()), (".json", "{"), (".tmp", "{")):
        path.with_name(f"{ended.pid}-{process_role.namespace()}{suffix}").write_text(text)
        assert [read["pid"] for read in statefile.read_live()] == [os.getpid()]
        assert list(path.parent.iterdir()) == [path]


def test_a_file_is_parsed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """An unchanged file is not parsed again."""
    path = statefile.write(SNAPSHOT)
    [before] = statefile.read_live()
    parse = Mock(wraps=statefile.Snapshot.model_validate_json)
    monkeypatch.setattr(statefile.Snapshot, "model_validate_json", parse)
    assert statefile.read_live() == [before]
    assert parse.call_count == 0
    statefile.write({**SNAPSHOT, "role": "stage"})
    assert [each["role"] for each in statefile.read_live()] == ["stage"]
    path.unlink()
    assert statefile.read_live() == []


def test_a_reused_id_is_not_the_same_process() -> None:
    """A file whose process began a hundredth of a second before the one that has the id now is deleted."""
    path = statefile.write(SNAPSHOT)
    said = json.loads(path.read_text())
    path.write_text(json.dumps({**said, "started": said["started"] - 1}))
    assert statefile.read_live() == []
    assert not path.exists()


@pytest.mark.parametrize("content", ["\0\xff", '{"schema": 2}'])
def test_garbage_of_a_live_process_is_skipped(content: str) -> None:
    """A file that another version may have written is neither read nor deleted."""
    path = statefile.write(SNAPSHOT)
    path.write_text(content)
    assert statefile.read_live() == []
    assert path.exists()


def test_a_file_of_another_user_is_not_believed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Links and files of other users are not read."""
    path = statefile.write(SNAPSHOT)
    elsewhere = path.rename(path.parent.parent / "elsewhere.json")
    path.symlink_to(elsewhere)
    assert statefile.read_live() == []
    path.unlink()
    elsewhere.rename(path)
    if os.geteuid() != 0:
        pytest.skip("only root can give a file away")
    os.chown(path, 1234, -1)
    assert statefile.read_live() == []


def test_other_files_are_left_alone() -> None:
    """Files with other names, or of another process namespace, are neither read nor deleted."""
    folder = statefile.write(SNAPSHOT).parent
    others = [folder / name for name in ("notes.txt", "x.json", ".hidden", "1-1.json")]
    for other in others:
        other.write_text("x")
    assert [read["pid"] for read in statefile.read_live()] == [os.getpid()]
    assert all(other.exists() for other in others)


@pytest.mark.parametrize("how", ["link", "open", "file", "another user's"])
def test_a_folder_that_is_not_ours_alone_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    """Nothing is written to or read from a folder that another user could have made."""
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
        monkeypatch.setattr(statefile, "folder", lambda: folder)
        monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    with pytest.raises(OSError, match=r"not a folder that only user|File exists"):
        statefile.write(SNAPSHOT)
    with pytest.raises(statefile.UnsafeFolderError):
        statefile.read_live()
    assert list(elsewhere.iterdir()) == []


# Where the folder is


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder for temporary files of the test's own, as open as a pod's."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    folder.chmod(0o777)
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    return folder


def test_without_a_runtime_directory(temporary: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a usable runtime directory the files are in the folder for temporary files."""
    for user in (1234, os.geteuid()):  # there is no /run/user/1234
        monkeypatch.setattr(os, "geteuid", lambda user=user: user)
        monkeypatch.setattr(statefile, "_is_private", lambda base: base.is_relative_to(tmp_path))
        for asked in ("", "relative", "/run/user/1234", "/proc/1/nowhere", "/proc/1/root/nowhere", f"/{'x' * 300}"):
            monkeypatch.setenv("XDG_RUNTIME_DIR", asked)
            assert statefile.folder() == temporary / f"omni-fastpath-{user}"
        new = {"XDG_RUNTIME_DIR": str(tmp_path / "new")}
        assert statefile.folders(new, tmp_path) == [tmp_path / "new/omni-fastpath"]


def test_a_reader_asks_every_folder_that_tempfile_tries(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A process has its files where ``tempfile`` finds a place: its variables, the system's, its working folder."""
    monkeypatch.setattr(statefile, "_runtime", lambda _: None)
    monkeypatch.chdir(tmp_path)
    for name, value in (("TMPDIR", "relative"), ("TEMP", "/x"), ("TMP", "")):
        monkeypatch.setenv(name, value)
    tried = [tmp_path / each for each in tempfile._candidate_tempdir_list()]  # type: ignore[attr-defined]
    assert [each.parent for each in statefile.folders(os.environ, tmp_path)] == tried


def test_the_system_s_runtime_directory_is_found_without_the_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the variable ``/run/user/UID`` is used, so a server started by cron and a shell use the same folder."""
    monkeypatch.setattr(statefile, "_is_private", lambda base: str(base).startswith("/run/user/"))
    monkeypatch.delenv("XDG_RUNTIME_DIR")
    assert statefile.folder() == Path(f"/run/user/{os.geteuid()}/omni-fastpath")


# Several process namespaces and one folder


def test_two_containers_with_one_folder_do_not_meet(monkeypatch: pytest.MonkeyPatch) -> None:
    """Equal ids in two namespaces have separate files, and a reader neither reads nor deletes the other's."""
    paths = set[Path]()
    for namespace, role in ((11, "server"), (12, "stage")):
        monkeypatch.setattr(process_role, "namespace", lambda namespace=namespace: namespace)
        paths.add(statefile.write({**SNAPSHOT, "role": role}))
        assert [read["role"] for read in statefile.read_live()] == [role]
    assert len(paths) == 2
    assert all(path.exists() for path in paths)

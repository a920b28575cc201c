"""One small JSON file per process, in which ``omni-fastpath status`` and the metrics find what is true there.

The files lie in a per-user folder that only its owner may enter. Several containers and machines may share it: a file's
name says which process of which process namespace and boot wrote it. What is of another namespace or boot cannot be
judged from here, and is neither shown nor deleted.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import stat
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from omni_fastpath import processid
from omni_fastpath.declare import Process, State
from omni_fastpath.processid import ProcessId

SCHEMA = 2

_FOLDER = "omni-fastpath"
_OWN_FILES = re.compile(r"([0-9]+)-([0-9]+)-([0-9a-f]*)\.(json|[^.]+\.tmp)")
# Folders above ours may be theirs: root's, and what a user namespace shows of an owner that it does not map.
_ROOT, _UNMAPPED = 0, 65534
_OTHERS_MAY_WRITE = stat.S_IWGRP | stat.S_IWOTH


class UnsafeFolderError(PermissionError):
    """The runtime folder is a link, or somebody else's, or somebody else could exchange it."""


class PatchRecord(BaseModel):
    """One patch in a state file."""

    model_config = ConfigDict(extra="allow")

    state: State
    reason: str = ""
    origin: str = ""
    options: dict[str, Any] = {}
    counters: dict[str, int] = {}


class Snapshot(BaseModel):
    """A state file."""

    model_config = ConfigDict(extra="allow", populate_by_name=True)

    schema_: Literal[2] = Field(alias="schema")
    pid: int
    started: int
    boot: str
    namespace: int
    ppid: int
    role: Process
    process_name: str
    stage: int | None = None
    replica: int | None = None
    omni_fastpath: str
    vllm: str | None
    vllm_omni: str | None
    updated: float
    source: str | None
    patches: dict[str, PatchRecord]

    @property
    def process(self) -> ProcessId:
        """The process that wrote it."""
        return ProcessId(self.pid, self.started, self.boot, self.namespace)


def folder() -> Path:
    """The runtime folder of this user; it need not be there.

    In ``$XDG_RUNTIME_DIR``, else in ``/run/user/UID``, else in ``runtime-UID`` in the folder for temporary files: the
    first that is this user's alone. A pod often has neither of the first two.

    Raises:
        OSError: There is no folder for temporary files either.
    """
    asked = Path(os.environ.get("XDG_RUNTIME_DIR", "").strip())
    if asked.is_absolute() and (_is_private(asked) or _can_be_made(asked)):
        return asked / _FOLDER
    system = Path(f"/run/user/{os.geteuid()}")
    if _is_private(system):
        return system / _FOLDER
    return Path(tempfile.gettempdir()) / f"runtime-{os.geteuid()}" / _FOLDER


def path() -> Path:
    """Where this process's file belongs now.

    Raises:
        OSError: Nowhere.
        ProcessLookupError: This process cannot see itself in the process table.
    """
    return _path(_here())


def write(snapshot: Mapping[str, Any]) -> Path:
    """Write this process's file in place of its last one.

    ``schema``, ``ppid``, ``updated`` and what names the process are filled in here.

    Raises:
        UnsafeFolderError: The folder cannot be trusted.
        OSError: It cannot be made or written.
        ProcessLookupError: This process cannot see itself in the process table.
    """
    here = _here()
    own = {
        "schema": SCHEMA,
        "pid": here.pid,
        "started": here.started,
        "boot": here.boot,
        "namespace": here.namespace,
        "ppid": os.getppid(),
    }
    content = json.dumps({**own, **snapshot, **own, "updated": time.time()}, default=str)
    file = _path(here)
    _make(file.parent)
    # mkstemp makes the file with mode 0600; the name tells whose it is when the process dies before the rename.
    handle, temporary = tempfile.mkstemp(prefix=f"{file.stem}.", suffix=".tmp", dir=file.parent)
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as opened:
            opened.write(content)
        Path(temporary).replace(file)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
    return file


def read_live() -> list[dict[str, Any]]:
    """The files of processes that live here, by process id; what dead ones left is deleted.

    A file that cannot be read as a snapshot is skipped: another version may have written it. So is one of another
    process namespace or boot: ``foreign`` counts those.

    Raises:
        UnsafeFolderError: The folder cannot be trusted, so that neither can its files.
    """
    ours = [file for file in _files() if file.is_here]
    return [snapshot for file in sorted(ours, key=lambda each: each.pid) for snapshot in _live(file)]


def foreign() -> int:
    """How many files other process namespaces and other boots have left in the folder, of live processes or dead.

    Raises:
        UnsafeFolderError: The folder cannot be trusted.
    """
    return sum(not file.is_here for file in _files() if file.path.suffix == ".json")


class _File(NamedTuple):
    path: Path
    pid: int
    is_here: bool
    """Whether it was written in this process's namespace, since the machine booted."""


def _files() -> Iterator[_File]:
    found = folder()
    if not found.exists() and not found.is_symlink():
        return
    _refuse_unsafe(found)
    here = (processid.namespace(), processid.boot_id())
    for file in found.iterdir():
        match = _OWN_FILES.fullmatch(file.name)
        if match:
            yield _File(file, int(match[1]), (int(match[2]), match[3]) == here)


def _live(file: _File) -> Iterator[dict[str, Any]]:
    """The snapshot in a file, or nothing. Only what is known to be dead is deleted."""
    if not processid.exists(file.pid):
        _delete(file.path)
        return
    now = ProcessId.of(file.pid)
    snapshot = _parsed(file.path, file.pid)
    if now is None or snapshot is None:
        return  # not to be seen just now, or not to be read: neither says that it is dead
    if snapshot.process == now:
        yield snapshot.model_dump(mode="json", by_alias=True)
    else:
        _delete(file.path)


def _delete(path: Path) -> None:
    with contextlib.suppress(OSError):  # where it may not be deleted, it is at least not shown
        path.unlink()


def _parsed(file: Path, pid: int) -> Snapshot | None:
    if file.suffix != ".json":
        return None
    try:
        snapshot = Snapshot.model_validate_json(file.read_bytes())
    except (OSError, ValidationError):
        return None
    return snapshot if snapshot.pid == pid else None


def _here() -> ProcessId:
    here = ProcessId.of(os.getpid())
    if here is None:
        raise ProcessLookupError(f"process {os.getpid()} cannot see itself in the process table")
    return here


def _path(process: ProcessId) -> Path:
    return folder() / f"{process.pid}-{process.namespace}-{process.boot}.json"


def _is_private(base: Path) -> bool:
    """Whether a folder is there, is no link, and nobody else can write into it."""
    try:
        found = base.lstat()
    except OSError:
        return False
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid() and not found.st_mode & _OTHERS_MAY_WRITE


def _can_be_made(base: Path) -> bool:
    """Whether a folder is missing, and the last that is there above it is this user's alone."""
    if base.exists() or base.is_symlink():
        return False
    return _is_private(next(above for above in base.parents if above.exists()))


def _make(runtime: Path) -> None:
    """Make the runtime folder if need be, and see to it that nobody else may enter."""
    for each in (runtime.parent, runtime):
        each.mkdir(mode=0o700, parents=True, exist_ok=True)
    _refuse_unsafe(runtime)
    if stat.S_IMODE(runtime.lstat().st_mode) != 0o700:
        runtime.chmod(0o700)


def _refuse_unsafe(runtime: Path) -> None:
    """Refuse a folder that somebody else could fill with files of theirs, above all one prepared below ``/tmp``.

    Raises:
        UnsafeFolderError: It, or the one that it is in, is a link, somebody else's or open to others' writing; or
            somebody else could exchange one of those above.
    """
    for each in (runtime, runtime.parent):
        found = each.lstat()
        if not stat.S_ISDIR(found.st_mode):
            raise UnsafeFolderError(f"{each} is no plain folder; remove it or set XDG_RUNTIME_DIR")
        if found.st_uid != os.geteuid():
            raise UnsafeFolderError(
                f"{each} belongs to user {found.st_uid}, not to {os.geteuid()}; set XDG_RUNTIME_DIR"
            )
    if runtime.parent.lstat().st_mode & _OTHERS_MAY_WRITE:
        raise UnsafeFolderError(f"others may write into {runtime.parent}; set XDG_RUNTIME_DIR")
    for above in runtime.parent.resolve().parents:
        found = above.stat()
        exchangeable = found.st_mode & stat.S_IWOTH and not found.st_mode & stat.S_ISVTX
        if found.st_uid not in (_ROOT, _UNMAPPED, os.geteuid()) or exchangeable:
            raise UnsafeFolderError(f"somebody else could exchange what is in {above}; set XDG_RUNTIME_DIR")

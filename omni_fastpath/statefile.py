"""One small JSON file per process, in which ``omni-fastpath status`` finds what is true there.

The files lie in a per-user runtime folder that only its owner may enter. A file counts as long as its process lives:
its name is the process id, and inside stands when that process began, because ids are used again.
"""

from __future__ import annotations

import functools
import json
import os
import re
import stat
import tempfile
import time
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import platformdirs
import psutil
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from omni_fastpath.declare import Process, State

SCHEMA = 1

_FOLDER = "omni-fastpath"
_OWN_FILES = re.compile(r"([0-9]+)\.(json|[^.]+\.tmp)")
# The boot time is whole seconds, which two readings may round differently.
_SAME_START_S = 2.0


class UnsafeFolderError(PermissionError):
    """The runtime folder is a link, or somebody else's, or somebody else could exchange it."""


@dataclass(frozen=True)
class ProcessId:
    """A process, told apart from a later one with the same id.

    Attributes:
        pid: Its id.
        created: When it began, as ``psutil.Process.create_time`` gives it.
        boot: When the machine booted, as seen at the same moment. A step of the clock moves both alike, and what is
            between them is compared.
    """

    pid: int
    created: float
    boot: float

    @classmethod
    def of(cls, pid: int) -> ProcessId | None:
        """The process that has this id now; None when none lives."""
        try:
            process = psutil.Process(pid)
            boot = psutil.boot_time()
            created = process.create_time()
            return None if process.status() == psutil.STATUS_ZOMBIE else cls(pid, created, boot)
        except psutil.Error:
            return None

    def same_as(self, other: ProcessId | None) -> bool:
        """Whether both are one process."""
        if other is None or self.pid != other.pid:
            return False
        return abs((self.created - self.boot) - (other.created - other.boot)) <= _SAME_START_S

    @property
    def alive(self) -> bool:
        """Whether this process still runs."""
        return self.same_as(ProcessId.of(self.pid))


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

    schema_: Literal[1] = Field(alias="schema")
    pid: int
    created: float
    boot: float
    ppid: int
    role: Process
    process_name: str
    omni_fastpath: str
    vllm: str | None
    vllm_omni: str | None
    updated: float
    source: str | None
    patches: dict[str, PatchRecord]

    @property
    def process(self) -> ProcessId:
        """The process that wrote it."""
        return ProcessId(self.pid, self.created, self.boot)


def folder() -> Path:
    """The runtime folder of this user; it need not be there."""
    return _folder(os.environ.get("XDG_RUNTIME_DIR"))


@functools.lru_cache
def _folder(_runtime_dir: str | None) -> Path:
    with warnings.catch_warnings():
        # platformdirs warns when XDG_RUNTIME_DIR is unset, which is the usual case in a container. Cached, because
        # catch_warnings swaps the filters of every thread.
        warnings.simplefilter("ignore")
        return platformdirs.user_runtime_path(_FOLDER)


def write(snapshot: Mapping[str, Any]) -> Path:
    """Write this process's file in place of its last one.

    ``schema``, ``pid``, ``ppid``, ``created``, ``boot`` and ``updated`` are filled in here.

    Raises:
        UnsafeFolderError: The folder cannot be trusted.
        OSError: It cannot be made or written.
    """
    pid = os.getpid()
    here = ProcessId.of(pid)
    if here is None:
        raise ProcessLookupError(f"process {pid} cannot see itself in the process table")
    own = {"schema": SCHEMA, "pid": pid, "created": here.created, "boot": here.boot, "ppid": os.getppid()}
    content = json.dumps({**own, **snapshot, **own, "updated": time.time()}, default=str)
    path = _made_folder() / f"{pid}.json"
    # mkstemp makes the file with mode 0600; the name tells whose it is when the process dies before the rename.
    handle, temporary = tempfile.mkstemp(prefix=f"{pid}.", suffix=".tmp", dir=path.parent)
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(content)
        Path(temporary).replace(path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
    return path


def remove() -> None:
    """Remove this process's file, if there is one.

    Raises:
        OSError: It cannot be removed.
    """
    (folder() / f"{os.getpid()}.json").unlink(missing_ok=True)


def read_live() -> list[dict[str, Any]]:
    """The files of processes that live, by process id; what dead ones left is deleted.

    A file that cannot be read as a snapshot is skipped: another version may have written it.

    Raises:
        UnsafeFolderError: The folder cannot be trusted, so that neither can its files.
    """
    path = folder()
    if not path.exists() and not path.is_symlink():
        return []
    _refuse_unsafe(path)
    files = sorted(_own_files(path), key=lambda each: each[1])
    return [snapshot for file, pid in files for snapshot in _live(file, pid)]


def _own_files(path: Path) -> Iterator[tuple[Path, int]]:
    for file in path.iterdir():
        match = _OWN_FILES.fullmatch(file.name)
        if match:
            yield file, int(match[1])


def _live(file: Path, pid: int) -> Iterator[dict[str, Any]]:
    """The snapshot in a file, or nothing."""
    now = ProcessId.of(pid)
    snapshot = _parsed(file, pid)
    if now is None or (snapshot is not None and not snapshot.process.same_as(now)):
        file.unlink(missing_ok=True)
    elif snapshot is not None:
        yield snapshot.model_dump(mode="json", by_alias=True)


def _parsed(file: Path, pid: int) -> Snapshot | None:
    if file.suffix != ".json":
        return None
    try:
        snapshot = Snapshot.model_validate_json(file.read_bytes())
    except (OSError, ValidationError):
        return None
    return snapshot if snapshot.pid == pid else None


def _made_folder() -> Path:
    path = folder()
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    path.mkdir(mode=0o700, exist_ok=True)
    _refuse_unsafe(path)
    if stat.S_IMODE(path.lstat().st_mode) != 0o700:
        path.chmod(0o700)
    return path


def _refuse_unsafe(path: Path) -> None:
    """Refuse a folder that somebody else could fill with files of theirs, above all one prepared below ``/tmp``."""
    found = path.lstat()
    if not stat.S_ISDIR(found.st_mode):
        raise UnsafeFolderError(f"{path} is no plain folder; remove it or set XDG_RUNTIME_DIR")
    if found.st_uid != os.geteuid():
        raise UnsafeFolderError(f"{path} belongs to user {found.st_uid}, not to {os.geteuid()}; set XDG_RUNTIME_DIR")
    parent = path.parent.stat()
    if parent.st_uid not in (0, os.geteuid()):
        raise UnsafeFolderError(f"{path.parent} belongs to user {parent.st_uid}; set XDG_RUNTIME_DIR")

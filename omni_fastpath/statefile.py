"""One small JSON file per process, in which ``omni-fastpath status`` and the metrics find what is true there.

The files lie in a per-user folder that only its owner may enter. Several containers and machines may share it: a file's
name says which process of which process namespace and boot wrote it. What is of another namespace or boot cannot be
judged from here, and is neither shown nor deleted.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import secrets
import stat
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple

import psutil
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from omni_fastpath import processid
from omni_fastpath.config import to_json
from omni_fastpath.declare import Process, State
from omni_fastpath.processid import ProcessId

SCHEMA = 2

_FOLDER = "omni-fastpath"
_OWN_FILES = re.compile(r"([0-9]+)-([0-9]+)-([0-9a-f]*)\.(json|[^.]+\.tmp)")
_TEMPORARY = ("/tmp", "/var/tmp", "/usr/tmp")  # noqa: S108
"""Where ``tempfile`` looks (``_candidate_tempdir_list``) when no variable says a place."""
_CLOCK_S = 2.0
"""By how much the time at which a process began may be wrong, seconds: it is counted from the boot's."""
_OTHERS_MAY_WRITE = stat.S_IWGRP | stat.S_IWOTH


class UnsafeFolderError(PermissionError):
    """The runtime folder, or the one that it is in, is a link, or somebody else's, or open to others' writing."""


class Sample(BaseModel):
    """One sample of a patch's figures (``omni_fastpath.figures``): of a histogram, or one value."""

    model_config = ConfigDict(extra="allow")

    labels: dict[str, str] = {}
    counts: list[int] | None = None
    sum: float = 0.0
    value: float | None = None


class PatchRecord(BaseModel):
    """One patch in a state file."""

    model_config = ConfigDict(extra="allow")

    state: State
    reason: str = ""
    origin: str = ""
    options: dict[str, Any] = {}
    counters: dict[str, int] = {}
    figures: dict[str, list[Sample]] = {}


class HookRecord(BaseModel):
    """The hook plugins of a process by name; of those that do not run, why (``hooks.HookManager.told``)."""

    model_config = ConfigDict(extra="allow")

    used: list[str] = []
    unusable: dict[str, str] = {}
    switched_off: dict[str, str] = {}


class Snapshot(BaseModel):
    """A state file.

    ``port`` is that of ``vllm serve``, where its command line says it. ``foreign_wrappers`` has the seams of each
    applied patch that somebody else wraps too, in words.
    """

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
    port: int | None = None
    hooks: HookRecord | None = None
    foreign_wrappers: dict[str, list[str]] = {}

    @property
    def process(self) -> ProcessId:
        """The process that wrote it."""
        return ProcessId(self.pid, self.started, self.boot, self.namespace)


def folder(environ: Mapping[str, str] | None = None) -> Path:
    """The runtime folder of this user; it need not be there.

    In ``$XDG_RUNTIME_DIR``, else in ``/run/user/UID``, else in ``runtime-UID`` in the folder for temporary files: the
    first that is this user's alone. A pod often has neither of the first two.

    Args:
        environ: The environment of another process, for where that one's file is; None for this process's own.

    Raises:
        OSError: There is no folder for temporary files either.
    """
    asked = Path((os.environ if environ is None else environ).get("XDG_RUNTIME_DIR", "").strip())
    if asked.is_absolute() and (_is_private(asked) or _can_be_made(asked)):
        return asked / _FOLDER
    system = Path(f"/run/user/{os.geteuid()}")
    if _is_private(system):
        return system / _FOLDER
    return _temporary(environ) / f"runtime-{os.geteuid()}" / _FOLDER


def _temporary(environ: Mapping[str, str] | None) -> Path:
    """Where ``tempfile`` puts files in this process, or in another one, which may not have this one's variables.

    Raises:
        OSError: Nowhere.
    """
    if environ is None:
        return Path(tempfile.gettempdir())
    named = [each for name in ("TMPDIR", "TEMP", "TMP") if (each := environ.get(name))]
    for each in (*named, *_TEMPORARY):
        if Path(each).is_dir() and os.access(each, os.W_OK | os.X_OK):
            return Path(each)
    raise FileNotFoundError(f"no folder for temporary files among {', '.join((*named, *_TEMPORARY))}")


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
    content = to_json({**own, **snapshot, **own, "updated": time.time()})
    file = _path(here)
    # The name tells whose it is when the process dies before the rename.
    temporary = f"{file.stem}.{secrets.token_hex(8)}.tmp"
    with _opened(file.parent, make=True) as handle:
        created = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600, dir_fd=handle)
        try:
            with os.fdopen(created, "w", encoding="utf-8") as opened:
                opened.write(content)
            os.replace(temporary, file.name, src_dir_fd=handle, dst_dir_fd=handle)
        except BaseException:
            _delete(temporary, handle)
            raise
    return file


def read_live(at: Path | None = None) -> list[dict[str, Any]]:
    """The files of processes that live here, by process id; what dead ones left is deleted.

    A file that cannot be read as a snapshot is skipped: another version may have written it. So is one of another
    process namespace or boot: ``foreign`` counts those.

    Args:
        at: Another runtime folder than this process's own.

    Raises:
        UnsafeFolderError: The folder cannot be trusted, so that neither can its files.
    """
    found = folder() if at is None else at
    if not _is_there(found):
        return []
    with _opened(found) as handle:
        ours = sorted(file for file in _files(handle) if file.is_here)
        return [snapshot for file in ours for snapshot in _live(file, handle)]


def unreadable(at: Path | None = None) -> frozenset[int]:
    """The processes that live here whose file is no snapshot of this version.

    Args:
        at: As in ``read_live``.

    Raises:
        UnsafeFolderError: The folder cannot be trusted.
    """
    found = folder() if at is None else at
    if not _is_there(found):
        return frozenset()
    with _opened(found) as handle:
        files = [file for file in _files(handle) if file.is_here and file.name.endswith(".json")]
        return frozenset(file.pid for file in files if processid.exists(file.pid) and _is_unreadable(file, handle))


def _is_unreadable(file: _File, handle: int) -> bool:
    """Whether a file is there that is none of this version's, and not of an earlier process with the same id."""
    if _parsed(file, handle) is not None:
        return False
    try:
        written = os.stat(file.name, dir_fd=handle, follow_symlinks=False).st_mtime
        return written >= psutil.Process(file.pid).create_time() - _CLOCK_S
    except (OSError, psutil.Error):  # one of them is gone
        return False


def foreign() -> int:
    """How many files other process namespaces and other boots have left in the folder, of live processes or dead.

    Raises:
        UnsafeFolderError: The folder cannot be trusted.
    """
    return len(_others())


def of_other_namespaces() -> int:
    """How many of the ``foreign`` ones were written since this machine booted: by other containers on it.

    Raises:
        UnsafeFolderError: The folder cannot be trusted.
    """
    return sum(file.boot == processid.boot_id() for file in _others())


def _others() -> list[_File]:
    found = folder()
    if not _is_there(found):
        return []
    with _opened(found) as handle:
        return [file for file in _files(handle) if file.name.endswith(".json") and not file.is_here]


class _File(NamedTuple):
    pid: int
    name: str
    is_here: bool
    """Whether it was written in this process's namespace, since the machine booted."""
    boot: str


def _files(handle: int) -> Iterator[_File]:
    here = (processid.namespace(), processid.boot_id())
    for name in os.listdir(handle):
        match = _OWN_FILES.fullmatch(name)
        if match:
            yield _File(int(match[1]), name, (int(match[2]), match[3]) == here, match[3])


def _live(file: _File, handle: int) -> Iterator[dict[str, Any]]:
    """The snapshot in a file, or nothing. Only what is known to be dead is deleted."""
    if not processid.exists(file.pid):
        _delete(file.name, handle)
        return
    now = ProcessId.of(file.pid)
    snapshot = _parsed(file, handle)
    if now is None or snapshot is None:
        return  # not to be seen just now, or not to be read: neither says that it is dead
    if snapshot.process == now:
        yield snapshot.model_dump(mode="json", by_alias=True)
    else:
        _delete(file.name, handle)


def _delete(name: str, handle: int) -> None:
    with contextlib.suppress(OSError):  # where it may not be deleted, it is at least not shown
        os.unlink(name, dir_fd=handle)


def _parsed(file: _File, handle: int) -> Snapshot | None:
    if not file.name.endswith(".json"):
        return None
    try:
        with os.fdopen(os.open(file.name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=handle), "rb") as opened:
            snapshot = Snapshot.model_validate_json(opened.read())
    except (OSError, ValidationError):
        return None
    return snapshot if snapshot.pid == file.pid else None


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
    try:
        if base.exists() or base.is_symlink():
            return False
        return _is_private(next(above for above in base.parents if above.exists()))
    except OSError:  # it is where this user may not look, or can be nowhere
        return False


def _is_there(runtime: Path) -> bool:
    return runtime.exists() or runtime.is_symlink()


@contextlib.contextmanager
def _opened(runtime: Path, *, make: bool = False) -> Iterator[int]:
    """The runtime folder, looked at and then used by one handle.

    In a pod the folder for temporary files is often open to all without the sticky bit. Whoever exchanges there what
    lies under a name of ours changes nothing about the folder that was looked at.

    Raises:
        UnsafeFolderError: It, or the one that it is in, is a link, somebody else's or open to others' writing.
    """
    if make:
        runtime.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    above = _handle(runtime.parent, str(runtime.parent), None)
    try:
        if os.fstat(above).st_mode & _OTHERS_MAY_WRITE:
            raise UnsafeFolderError(f"others may write into {runtime.parent}; set XDG_RUNTIME_DIR")
        if make:
            with contextlib.suppress(FileExistsError):
                os.mkdir(runtime.name, 0o700, dir_fd=above)
        handle = _handle(runtime, runtime.name, above)
    finally:
        os.close(above)
    try:
        if make and stat.S_IMODE(os.fstat(handle).st_mode) != 0o700:
            os.fchmod(handle, 0o700)
        yield handle
    finally:
        os.close(handle)


def _handle(path: Path, name: str, above: int | None) -> int:
    """An open folder of this user's.

    Raises:
        UnsafeFolderError: It is a link, no folder, or somebody else's.
    """
    try:
        handle = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=above)
    except OSError as error:
        if error.errno in (errno.ENOTDIR, errno.ELOOP):
            raise UnsafeFolderError(f"{path} is no plain folder; remove it or set XDG_RUNTIME_DIR") from None
        raise
    owner = os.fstat(handle).st_uid
    if owner != os.geteuid():
        os.close(handle)
        raise UnsafeFolderError(f"{path} belongs to user {owner}, not to {os.geteuid()}; set XDG_RUNTIME_DIR")
    return handle

"""One JSON file per process with the states of its patches, for ``omni-fastpath status`` and the metrics.

The files ``PID-NAMESPACE.json`` are in a folder that only this user can write. Containers may share the folder, so
files of other process namespaces are neither shown nor deleted. An error while a file is written is logged once, and
the server continues.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import multiprocessing
import os
import re
import stat
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from omni_fastpath import __version__, process_role, threads
from omni_fastpath.declare import Process, State
from omni_fastpath.ledger import LEDGER, warn_once
from omni_fastpath.releases import vllm_omni_release, vllm_release

SCHEMA = 2

_FOLDER = "omni-fastpath"
_NAME = re.compile(r"([0-9]{1,9})-([0-9]+)\.(json|tmp)")


REFRESH_S = 2.0
"""Seconds after which a changed counter is written, and a lost file is written again."""

_STAGE_PROCESS = re.compile(r"_stage(\d+)_replica(\d+)")


class UnsafeFolderError(PermissionError):
    """The folder is a link, belongs to another user, or others may write into it."""


class PatchRecord(BaseModel):
    """One patch in a state file. ``reason`` is the ledger's ``cause``.

    The first of ``counters`` is the number of times that it took effect. ``figures`` has the samples of its metrics
    (``omni_fastpath.figures``).
    """

    model_config = ConfigDict(extra="allow")

    state: State
    reason: str = ""
    remarks: str = ""
    same_as: str = ""
    options: dict[str, Any] = {}
    counters: dict[str, int] = {}
    figures: dict[str, list[dict[str, Any]]] = {}


class Snapshot(BaseModel):
    """A state file.

    ``started`` is in clock ticks since boot, ``updated`` in seconds since 1970. ``port`` is from the command line of
    ``vllm serve``, if it is there. ``threads`` is the result of ``omni_fastpath.threads.own`` in a server process.
    """

    model_config = ConfigDict(extra="allow", populate_by_name=True)

    schema_: Literal[2] = Field(alias="schema")
    pid: int
    started: int
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
    threads: dict[str, int] = {}


def folder() -> Path:
    """The folder of this process's state file. It may not exist.

    It is in ``$XDG_RUNTIME_DIR``, else in ``/run/user/UID``, if only this user can write there, else in the folder for
    temporary files, because a pod often has neither of the first two.

    Raises:
        FileNotFoundError: This process can write in no folder for temporary files.
    """
    return _runtime(os.environ) or Path(tempfile.gettempdir(), f"{_FOLDER}-{os.geteuid()}")


def folders(environ: Mapping[str, str], working: Path) -> list[Path]:
    """Where the state file of a process of this user may be, the likeliest folder first. This process writes nowhere.

    Args:
        environ: The variables of that process.
        working: Its working folder, in which it may have a relative ``TMPDIR``, or no other folder that it can write.
    """
    named = [environ[name] for name in ("TMPDIR", "TEMP", "TMP") if environ.get(name)]
    runtime, places = _runtime(environ), (*named, "/tmp", "/var/tmp", "/usr/tmp", "")  # noqa: S108 - as in tempfile
    return [working / each / f"{_FOLDER}-{os.geteuid()}" for each in places] if runtime is None else [runtime]


def _runtime(environ: Mapping[str, str]) -> Path | None:
    asked, system = Path(environ.get("XDG_RUNTIME_DIR", "").strip()), Path(f"/run/user/{os.geteuid()}")
    if asked.is_absolute() and (_is_private(asked) or (_is_private(asked.parent) and not os.path.lexists(asked))):
        return asked / _FOLDER
    return system / _FOLDER if _is_private(system) else None


def path() -> Path:
    """The path of this process's file."""
    return folder() / f"{os.getpid()}-{process_role.namespace()}.json"


def write(snapshot: Mapping[str, Any]) -> Path:
    """Replace this process's file. ``schema``, ``pid``, ``started`` and ``updated`` are added.

    Raises:
        UnsafeFolderError: The folder cannot be trusted.
        OSError: It cannot be created or written.
    """
    file = path()
    for each in (file.parent.parent, file.parent):
        each.mkdir(mode=0o700, exist_ok=True)
    _check(file.parent)
    own = {"schema": SCHEMA, "pid": os.getpid(), "started": process_role.started(os.getpid()), "updated": time.time()}
    temporary = file.with_suffix(".tmp")
    created = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600)
    with os.fdopen(created, "w", encoding="utf-8") as opened:
        json.dump({**snapshot, **own}, opened, default=str)
    temporary.replace(file)
    return file


def read_live(at: Path | None = None) -> list[dict[str, Any]]:
    """The files of the running processes of this namespace, by process id. Files of dead processes are deleted.

    Files that are not valid snapshots are skipped, because another version may have written them. So are files of other
    users.

    Args:
        at: The folder. None means this process's.

    Raises:
        UnsafeFolderError: The folder, and therefore its files, cannot be trusted.
    """
    found, own = folder() if at is None else at, process_role.namespace()
    if not os.path.lexists(found):
        return []
    _check(found)
    live, parsed = [], {}
    for file in found.iterdir():
        match = _NAME.fullmatch(file.name)
        if match is None or int(match[2]) != own:
            continue
        pid, parsed[file] = int(match[1]), _parsed(file)
        snapshot, began = parsed[file][1], process_role.started(pid)
        if began is None or (snapshot is not None and snapshot["started"] != began):
            with contextlib.suppress(OSError):  # if it cannot be deleted, it is at least not shown
                file.unlink()
        elif snapshot is not None and snapshot["pid"] == pid:
            live.append(snapshot)
    _PARSED.clear()
    _PARSED.update(parsed)
    return sorted(live, key=lambda snapshot: int(snapshot["pid"]))


_Parsed = tuple[tuple[int, ...], dict[str, Any] | None]
_PARSED: dict[Path, _Parsed] = {}
"""The files of the last reading, each with a key that changes when it is replaced, so that each is parsed once."""


def _parsed(file: Path) -> _Parsed:
    try:
        of_file = file.lstat()
        version = of_file.st_ino, of_file.st_mtime_ns, of_file.st_size, of_file.st_uid
        if (before := _PARSED.get(file)) is not None and before[0] == version:
            return before
        is_ours = stat.S_ISREG(of_file.st_mode) and of_file.st_uid == os.geteuid() and file.suffix == ".json"
        snapshot = Snapshot.model_validate_json(file.read_bytes()) if is_ours else None
        return version, None if snapshot is None else snapshot.model_dump(mode="json", by_alias=True)
    except (OSError, ValidationError):
        return (), None


def _is_private(base: Path) -> bool:
    """Whether a folder exists, is not a link, belongs to this user, and no other user can write into it."""
    try:
        found = base.lstat()
    except OSError:
        return False
    others_may_write = bool(found.st_mode & (stat.S_IWGRP | stat.S_IWOTH))
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid() and not others_may_write


def _check(runtime: Path) -> None:
    if not _is_private(runtime):
        raise UnsafeFolderError(
            f"{runtime} is not a folder that only user {os.geteuid()} can write; remove it or set XDG_RUNTIME_DIR"
        )


# ---- Writing it ----


def stage_and_replica() -> tuple[int | None, int | None]:
    """The stage and the replica for which this process was spawned. None if they are unknown.

    The name of an engine process contains them (``StageEngineCoreProcManager``). A diffusion process gets them as
    arguments (``StageDiffusionProcManager``), which the process object keeps. Workers know neither.
    """
    process = multiprocessing.current_process()
    match = _STAGE_PROCESS.search(process.name)
    if match:
        return int(match[1]), int(match[2])
    arguments = getattr(process, "_kwargs", {})
    stage, replica = arguments.get("omni_stage_id"), arguments.get("omni_replica_id")
    return (stage, replica) if isinstance(stage, int) and isinstance(replica, int) else (None, None)


BESIDE: list[Callable[[], None]] = []
"""Further functions that the refreshing thread calls each time. None of them raises."""


class Publisher:
    """Writes this process's state file.

    It writes after every change of a state. If a patch is applied, and in a server in which a patch is enabled, a
    thread also checks every ``REFRESH_S`` seconds whether counters have changed or the file is gone, because a cleaner
    of temporary files or a user's logout may delete it. In other processes no counter changes and no thread runs.

    Args:
        process: The kind of this process.
        source: The source of the configuration, for display.
    """

    def __init__(self, process: Process, source: str | None) -> None:
        serves = process is Process.SERVER and process_role.is_serve(sys.argv)
        stage, replica = stage_and_replica()
        vllm, vllm_omni = vllm_release(), vllm_omni_release()
        # These do not change while the process runs.
        self._fixed = {
            "role": process.value,
            "process_name": multiprocessing.current_process().name,
            "stage": stage,
            "replica": replica,
            "port": process_role.port(sys.argv[1:]) if serves else None,
            "omni_fastpath": __version__,
            "vllm": str(vllm) if vllm is not None else None,
            "vllm_omni": vllm_omni.version if vllm_omni is not None else None,
        }
        self._source = source
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._last: dict[str, Any] = {}
        self._path: Path | None = None
        self._refreshing = False
        self._ended = threading.Event()

    def start(self) -> None:
        """Write the file now, keep it up to date, and remove it at exit."""
        LEDGER.listen(lambda *_: self.write())
        atexit.register(self._remove)
        self.write()

    def update(self, source: str | None) -> None:
        """Set the source of a configuration that was read later."""
        self._source = source
        self.write()

    def write(self) -> None:
        """Write the file if anything has changed since the last time, or if the file is missing.

        If two threads write at the same time, the older values may be written last. The next refresh corrects that.
        """
        if os.getpid() != self._pid:
            return  # a forked child must not write its parent's file, and may have inherited a locked lock
        try:
            # Without the lock, because a patch whose figures fail reports a state, which calls this method again.
            now: dict[str, Any] = {"source": self._source, "patches": LEDGER.snapshot()}
            if self._fixed["role"] == Process.SERVER.value:
                now["threads"] = threads.own()
            with self._lock:
                self._write(now)
        except Exception as error:
            warn_once(f"the state file cannot be written, so status does not show this process: {error}")
        self._keep_fresh()

    def _write(self, now: dict[str, Any]) -> None:
        wanted, before = path(), self._path
        # The folder may have changed too, because /run/user/UID exists only during a user's sessions.
        if now == self._last and wanted == before and wanted.exists():
            return
        self._path, self._last = write({**self._fixed, **now}), now
        if before is not None and before != wanted:
            before.unlink(missing_ok=True)

    def _keep_fresh(self) -> None:
        """Start the refreshing thread if a counter can change, or if a patch is enabled in a server."""
        is_server = self._fixed["role"] == Process.SERVER.value
        moving = (entry.state is State.APPLIED or (is_server and entry.state is not State.OFF) for entry in LEDGER)
        with self._lock:
            if self._refreshing or not any(moving):
                return
            threading.Thread(target=self._refresh, name="omni-fastpath-state", daemon=True).start()
            self._refreshing = True

    def _refresh(self) -> None:
        while not self._ended.wait(REFRESH_S):
            self.write()
            for each in BESIDE:
                each()

    def _remove(self) -> None:
        if os.getpid() != self._pid or self._path is None:  # a forked child inherits the handler but not the file
            return
        self._ended.set()  # otherwise the thread may find the file gone and write it again
        with contextlib.suppress(OSError):
            self._path.unlink()

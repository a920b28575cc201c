"""One small JSON file per process, in which ``omni-fastpath status`` and the metrics find the states of its patches.

The files lie in a folder of this user alone, ``PID-NAMESPACE.json`` each: containers may share the folder, and a file
of another process namespace is neither shown nor deleted.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import stat
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import psutil
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from omni_fastpath import processid
from omni_fastpath.declare import Process, State

SCHEMA = 2

_FOLDER = "omni-fastpath"
_NAME = re.compile(r"([0-9]+)-([0-9]+)\.(json|tmp)")


class UnsafeFolderError(PermissionError):
    """The folder is a link, belongs to another user, or others may write into it."""


class PatchRecord(BaseModel):
    """One patch in a state file; ``figures`` has the samples of each of its metrics (``omni_fastpath.figures``)."""

    model_config = ConfigDict(extra="allow")

    state: State
    reason: str = ""
    origin: str = ""
    options: dict[str, Any] = {}
    counters: dict[str, int] = {}
    figures: dict[str, list[dict[str, Any]]] = {}


class Snapshot(BaseModel):
    """A state file.

    ``started`` is in clock ticks since boot, ``updated`` in seconds since 1970. ``port`` is that of ``vllm serve``,
    where its command line says it. ``hooks`` is what ``HookManager.told`` says.
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
    hooks: dict[str, Any] | None = None

    @property
    def is_live(self) -> bool:
        """Whether the process that wrote it still runs."""
        return processid.started(self.pid) == self.started


def folder(environ: Mapping[str, str] | None = None) -> Path:
    """The folder of the state files; it need not be there.

    In ``$XDG_RUNTIME_DIR``, else in ``/run/user/UID``, where that is this user's alone; else in the folder for
    temporary files: a pod often has neither of the first two.

    Args:
        environ: The environment of another process; None for this process's own.
    """
    variables = os.environ if environ is None else environ
    asked, system = Path(variables.get("XDG_RUNTIME_DIR", "").strip()), Path(f"/run/user/{os.geteuid()}")
    if asked.is_absolute() and (_is_private(asked) or (_is_private(asked.parent) and not os.path.lexists(asked))):
        return asked / _FOLDER
    if _is_private(system):
        return system / _FOLDER
    temporary = tempfile.gettempdir() if environ is None else environ.get("TMPDIR") or "/tmp"  # noqa: S108
    return Path(temporary) / f"{_FOLDER}-{os.geteuid()}"


def path() -> Path:
    """Where this process's file belongs now."""
    return folder() / f"{os.getpid()}-{processid.namespace()}.json"


def write(snapshot: Mapping[str, Any]) -> Path:
    """Write this process's file in place of its last one; ``schema``, ``pid``, ``started`` and ``updated`` are added.

    Raises:
        UnsafeFolderError: The folder cannot be trusted.
        OSError: It cannot be made or written.
    """
    file = path()
    for each in (file.parent.parent, file.parent):
        each.mkdir(mode=0o700, exist_ok=True)
    _check(file.parent)
    own = {"schema": SCHEMA, "pid": os.getpid(), "started": processid.started(os.getpid()), "updated": time.time()}
    temporary = file.with_suffix(".tmp")
    created = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600)
    with os.fdopen(created, "w", encoding="utf-8") as opened:
        json.dump({**snapshot, **own}, opened, default=str)
    temporary.replace(file)
    return file


def read_live(at: Path | None = None) -> list[dict[str, Any]]:
    """The files of this namespace's processes that run, by process id; files of dead processes are deleted.

    What cannot be read as a snapshot is skipped: another version may have written it. So is what another user owns.

    Args:
        at: Another folder than this process's own.

    Raises:
        UnsafeFolderError: The folder cannot be trusted, so that neither can its files.
    """
    found = folder() if at is None else at
    if not os.path.lexists(found):
        return []
    _check(found)
    live = []
    for file in found.iterdir():
        match = _NAME.fullmatch(file.name)
        if match is None or int(match[2]) != processid.namespace():
            continue
        snapshot = _parsed(file)
        if not psutil.pid_exists(int(match[1])) or (snapshot is not None and not snapshot.is_live):
            with contextlib.suppress(OSError):  # where it may not be deleted, it is at least not shown
                file.unlink()
        elif snapshot is not None and snapshot.pid == int(match[1]):
            live.append(snapshot.model_dump(mode="json", by_alias=True))
    return sorted(live, key=lambda snapshot: int(snapshot["pid"]))


def _parsed(file: Path) -> Snapshot | None:
    try:
        is_ours = stat.S_ISREG(file.lstat().st_mode) and file.lstat().st_uid == os.geteuid()
        return Snapshot.model_validate_json(file.read_bytes()) if is_ours and file.suffix == ".json" else None
    except (OSError, ValidationError):
        return None


def _is_private(base: Path) -> bool:
    """Whether a folder is there, is no link, belongs to this user, and nobody else can write into it."""
    try:
        found = base.lstat()
    except OSError:
        return False
    others_may_write = bool(found.st_mode & (stat.S_IWGRP | stat.S_IWOTH))
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid() and not others_may_write


def _check(runtime: Path) -> None:
    if not _is_private(runtime):
        raise UnsafeFolderError(
            f"{runtime} is no folder of user {os.geteuid()} alone; remove it or set XDG_RUNTIME_DIR"
        )

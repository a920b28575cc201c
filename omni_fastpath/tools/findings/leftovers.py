"""Files that dead servers left in shared memory and among the temporary files. Nothing here deletes any.

A file counts only where its name says that vLLM or vLLM-Omni made it, where it is this user's, where no live process
has it open or mapped, and where no live process of this user that could have made it began before it was written: a
chunk that waits for its receiver is held by nobody. Python's own names (``psm_...``) may be anybody's: they are left
alone.
"""

from __future__ import annotations

import contextlib
import os
import re
import stat
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

import psutil

SHARED = Path("/dev/shm")  # noqa: S108 - where upstream's connector writes
TEMPORARY = Path("/tmp")  # noqa: S108 - where upstream's device locks lie, whatever TMPDIR says

YOUNG_S = 60.0
"""A file that was written so lately is nobody's leftover yet, seconds."""

_CHUNK_LOCK = re.compile(r"shm_(?P<key>.+)_lockfile\.lock")
"""Upstream's ``SharedMemoryConnector`` makes one beside each chunk, which lies under the bare key."""
_SEGMENT = re.compile(r"vllm_(offload|ec)_.+\.mmap|vllm_engram_.+|VLLM_OBJECT_STORAGE_SHM_BUFFER_[0-9a-f]{32}")
_DEVICE_LOCK = re.compile(r"vllm_omni_device_[0-9]+_init\.lock|\.vllm_omni_device_lock_.+")

_TORCH = "/libtorch"
"""In the maps of every process that could have written a segment."""

Kind = Literal["shared memory", "lock"]


@dataclass(frozen=True)
class Leftover:
    """A file that a dead server left.

    Attributes:
        path: Where it lies.
        kind: Shared memory, with the lock of a chunk, or the lock of a device.
        size: What it takes, bytes.
        age_s: Since it was written, seconds.
    """

    path: Path
    kind: Kind
    size: int
    age_s: float


class Holder(NamedTuple):
    """A live process, as far as it can be read."""

    files: frozenset[str]
    """What it has open or mapped of the folders in question."""
    may_have_made: bool
    """Whether it is this user's and could have written a segment."""
    began: float
    """Seconds since 1970."""


def find(shared: Path = SHARED, temporary: Path = TEMPORARY, holders: Sequence[Holder] | None = None) -> list[Leftover]:
    """The leftovers, by path.

    Args:
        shared: The folder of shared memory.
        temporary: The folder of device locks.
        holders: The live processes; None for those of this machine, looked at only where there is a candidate.
    """
    candidates = [*_candidates(shared, "shared memory"), *_candidates(temporary, "lock")]
    if not candidates:
        return []
    if holders is None:
        holders = list(_holders((f"{shared}/", f"{temporary}/")))
    held = frozenset[str]().union(*(holder.files for holder in holders))
    oldest = min((holder.began for holder in holders if holder.may_have_made), default=time.time())
    return sorted(
        (
            Leftover(path, kind, found.st_blocks * 512, time.time() - found.st_mtime)
            for path, kind, found in candidates
            if str(path) not in held and found.st_mtime < oldest and time.time() - found.st_mtime >= YOUNG_S
        ),
        key=lambda leftover: leftover.path,
    )


def size_of(shared: Path = SHARED) -> int:
    """The size of the file system of shared memory, bytes; 0 where there is none."""
    try:
        found = os.statvfs(shared)
    except OSError:
        return 0
    return found.f_frsize * found.f_blocks


def _candidates(folder: Path, kind: Kind) -> Iterator[tuple[Path, Kind, os.stat_result]]:
    try:
        names = {each.name for each in folder.iterdir()}
    except OSError:
        return
    for name in _named(names) if kind == "shared memory" else filter(_DEVICE_LOCK.fullmatch, names):
        with contextlib.suppress(OSError):
            found = (folder / name).lstat()
            if stat.S_ISREG(found.st_mode) and found.st_uid == os.geteuid():
                yield folder / name, kind, found


def _named(names: set[str]) -> Iterable[str]:
    locks = {name: match["key"] for name in names if (match := _CHUNK_LOCK.fullmatch(name))}
    return {*locks, *names.intersection(locks.values()), *filter(_SEGMENT.fullmatch, names)}


def _holders(prefixes: tuple[str, ...]) -> Iterator[Holder]:
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            folder = Path("/proc", str(process.pid))
            mine = folder.stat().st_uid == os.geteuid()
            if process.pid == os.getpid() or process.status() == psutil.STATUS_ZOMBIE:
                continue
            try:
                maps = [
                    line.split(maxsplit=5)[5:] for line in (folder / "maps").read_text("utf-8", "replace").splitlines()
                ]
                files = {*(path for (path,) in filter(None, maps)), *_open(folder)}
            except OSError:  # whatever it is
                yield Holder(frozenset(), mine, process.create_time())
                continue
            may_have_made = mine and any(_TORCH in each for each in files)
            yield Holder(
                frozenset(each for each in files if each.startswith(prefixes)), may_have_made, process.create_time()
            )


def _open(folder: Path) -> Iterator[str]:
    for each in (folder / "fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # closed in the meantime
            yield str(each.readlink())

"""Which process: told apart from a later one with the same id, and from one with it elsewhere.

Process ids are used again, and two containers have the same ones. The kernel says when a process began in clock ticks
since the machine booted, exactly and whatever is done to the clock; with the boot's own id and the process namespace
that names a process among all that ever share a folder.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import psutil

_PROC = Path("/proc")
_MACHINES_OWN = 0xEFFFFFFC
"""The number of the first process namespace of every Linux (``PROC_PID_INIT_INO`` in the kernel's proc_ns.h)."""
_ENDED = ("Z", "X")
"""What ``/proc/PID/stat`` says of a process that has ended and was not waited for yet."""


@dataclass(frozen=True)
class ProcessId:
    """A process.

    Attributes:
        pid: Its id in its own process namespace.
        started: When it began, in clock ticks since boot; without ``/proc`` in hundredths of a second since 1970.
        boot: The id of the machine's boot, 32 hexadecimal digits; empty where there is none.
        namespace: Number of the process namespace in which ``pid`` means something; 0 where there are none.
    """

    pid: int
    started: int
    boot: str
    namespace: int

    @classmethod
    def of(cls, pid: int) -> ProcessId | None:
        """The process that has this id here now; None when none lives, or none can be seen."""
        seen = _look(pid)
        return None if seen is None or seen.ended else cls(pid, seen.started, boot_id(), namespace())

    @property
    def alive(self) -> bool:
        """Whether this process still runs, as far as can be seen from here."""
        return self == ProcessId.of(self.pid)


def boot_id() -> str:
    """The id that the kernel gave this boot, without its dashes; empty where there is none."""
    return _boot_id()


@functools.cache
def _boot_id() -> str:
    try:
        return (_PROC / "sys/kernel/random/boot_id").read_text().strip().replace("-", "")
    except OSError:
        return ""


def namespace() -> int:
    """The number of this process's own process namespace; 0 where there are none.

    Asked each time: a forked child may be in another one.
    """
    try:
        return (_PROC / "self/ns/pid").stat().st_ino
    except OSError:
        return 0


def is_contained() -> bool:
    """Whether this process is in another process namespace than the machine's own, so that it sees a part of it."""
    return namespace() not in {0, _MACHINES_OWN}


def is_elsewhere(pid: int) -> bool:
    """Whether a process sees other process ids than this one, or other files: in a container, or a unit of systemd's.

    Its paths need not mean anything here. Not where that cannot be told.
    """
    try:
        return any(
            (_PROC / str(pid) / kind).stat().st_ino != (_PROC / "self" / kind).stat().st_ino
            for kind in ("ns/pid", "ns/mnt")
        )
    except OSError:
        return False


def exists(pid: int) -> bool:
    """Whether any process has this id here, seen or not: the kernel's word, which needs no ``/proc``."""
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except OSError:  # somebody else's
        return True
    return True


def ancestors(pid: int) -> Iterator[int]:
    """The ids of a process's parent, its parent's parent and so on, as they are now."""
    known = {pid}
    while (seen := _look(pid)) is not None and seen.parent > 0 and seen.parent not in known:
        pid = seen.parent
        known.add(pid)
        yield pid


class _Seen(NamedTuple):
    parent: int
    started: int
    ended: bool


def _look(pid: int) -> _Seen | None:
    """What the system says of the process with this id; None when it shows none."""
    itself = pid == os.getpid()
    if not (_PROC / "self/stat").exists():
        return _look_without_proc(pid)
    if not itself and not _proc_is_of_our_namespace():
        return None
    try:
        text = (_PROC / ("self" if itself else str(pid)) / "stat").read_text(errors="replace")
    except OSError:
        return None
    # The second field is the program's name in parentheses, which may hold anything (proc_pid_stat(5)).
    fields = text.rpartition(")")[2].split()
    return _Seen(int(fields[1]), int(fields[19]), fields[0] in _ENDED)


def _proc_is_of_our_namespace() -> bool:
    """Whether the ids that ``/proc`` shows are ours: after ``unshare --pid`` alone it is still the outer one's."""
    return (_PROC / "self").readlink().name == str(os.getpid())


def _look_without_proc(pid: int) -> _Seen | None:
    try:
        process = psutil.Process(pid)
        with process.oneshot():
            ended = process.status() == psutil.STATUS_ZOMBIE
            return _Seen(process.ppid(), round(process.create_time() * 100), ended)
    except psutil.Error:
        return None

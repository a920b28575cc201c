"""Which process: told apart from a later one with the same id, and from one of another process namespace.

``/proc`` is read as it stands: psutil's times of creation move with the machine's clock.
"""

from __future__ import annotations

from pathlib import Path

_PROC = Path("/proc")


def started(pid: int) -> int | None:
    """When the process with this id began, in clock ticks since boot; None when none runs."""
    fields = _stat(pid)
    return None if fields is None or fields[0] in ("Z", "X") else int(fields[19])


def ancestors(pid: int) -> list[int]:
    """The ids of a process's parent, its parent's parent and so on, as they are now."""
    found = []
    while (fields := _stat(pid)) is not None and (pid := int(fields[1])) > 0:
        found.append(pid)
    return found


def namespace() -> int:
    """The number of this process's process namespace; 0 where there is none.

    Two containers that share a folder both have a process 1.
    """
    try:
        return (_PROC / "self/ns/pid").stat().st_ino
    except OSError:
        return 0


def _stat(pid: int) -> list[str] | None:
    """What the kernel says of a process from its state on (proc_pid_stat(5)); None when it shows none."""
    try:
        text = (_PROC / str(pid) / "stat").read_text(errors="replace")
    except OSError:
        return None
    return text.rpartition(")")[2].split()  # the program's name before it may hold anything

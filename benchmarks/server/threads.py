"""Processor time of the threads of a process, from outside."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from pathlib import Path

FRONT_END, ORCHESTRATOR, SOCKETS, OTHERS = "front end", "orchestrator", "sockets", "others"
NAMES = (FRONT_END, ORCHESTRATOR, SOCKETS, OTHERS)


def used(pid: int) -> dict[int, tuple[str, int]]:
    """Name and nanoseconds on a processor of each thread, by its id."""
    found = {}
    for task in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(OSError, ValueError):
            name = (task / "comm").read_text().strip()
            found[int(task.name)] = name, int((task / "schedstat").read_text().split()[0])
    return found


def spent(pid: int, before: Mapping[int, tuple[str, int]], after: Mapping[int, tuple[str, int]]) -> dict[str, float]:
    """Seconds between two readings of the API process, by what the thread does.

    Its first thread is the front end. The orchestrator's cannot be told by name on Python 3.11, which does not give its
    threads' names to the kernel: it is the busiest of the rest that is no thread of ZeroMQ.
    """
    seconds = {each: (time - before.get(each, ("", 0))[1]) / 1e9 for each, (_, time) in after.items()}
    found = dict.fromkeys(NAMES, 0.0)
    found[FRONT_END] = seconds.pop(pid, 0.0)
    for each in [each for each in seconds if after[each][0].startswith("ZMQ")]:
        found[SOCKETS] += seconds.pop(each)
    if seconds:
        found[ORCHESTRATOR] = seconds.pop(max(seconds, key=lambda each: seconds[each]))
    found[OTHERS] = sum(seconds.values())
    return found

"""Processor time of the threads of API processes, from outside."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping
from pathlib import Path

FRONT_END, ORCHESTRATOR, SOCKETS, OTHERS = "front end", "orchestrator", "sockets", "others"
NAMES = (FRONT_END, ORCHESTRATOR, SOCKETS, OTHERS)

Used = Mapping[int, Mapping[int, tuple[str, int]]]
"""Name and nanoseconds on a processor of each thread by its id, by process."""


def used(pids: Iterable[int]) -> Used:
    """What the threads of these processes have used so far."""
    return {pid: _threads(pid) for pid in pids}


def _threads(pid: int) -> dict[int, tuple[str, int]]:
    found = {}
    for task in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(OSError, ValueError):
            name = (task / "comm").read_text().strip()
            found[int(task.name)] = name, int((task / "schedstat").read_text().split()[0])
    return found


def spent(pids: Iterable[int], before: Used, after: Used) -> dict[str, float]:
    """Seconds between two readings, by what the thread does, summed over the processes.

    A process's first thread is the front end. The orchestrator's cannot be told by name on Python 3.11, which does not
    give its threads' names to the kernel: it is the busiest of the rest that is no thread of ZeroMQ.
    """
    found = dict.fromkeys(NAMES, 0.0)
    for pid in pids:
        earlier, now = before[pid], after[pid]
        seconds = {each: (time - earlier.get(each, ("", 0))[1]) / 1e9 for each, (_, time) in now.items()}
        found[FRONT_END] += seconds.pop(pid, 0.0)
        for each in [each for each in seconds if now[each][0].startswith("ZMQ")]:
            found[SOCKETS] += seconds.pop(each)
        if seconds:
            found[ORCHESTRATOR] += seconds.pop(max(seconds, key=lambda each: seconds[each]))
        found[OTHERS] += sum(seconds.values())
    return found

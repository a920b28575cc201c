"""Processor time of the threads of API processes, from outside."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping
from pathlib import Path

from omni_fastpath import threads
from omni_fastpath.threads import FRONT_END, ORCHESTRATOR, OTHERS

Used = Mapping[int, Mapping[int, float]]
"""Seconds on a processor of each thread by its id, by process."""


def used(pids: Iterable[int]) -> Used:
    """What the threads of these processes have used so far, to the nanosecond, for levels of a few requests."""
    return {pid: _threads(pid) for pid in pids}


def _threads(pid: int) -> dict[int, float]:
    found = {}
    for task in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(OSError, ValueError):
            found[int(task.name)] = int((task / "schedstat").read_text().split()[0]) / 1e9
    return found


def spent(pids: Iterable[int], before: Used, after: Used) -> dict[str, float]:
    """Seconds between two readings, by what the thread does, summed over the processes; stock tells no threads' ids."""
    found = [threads.spent(pid, before[pid], after[pid], {}) for pid in pids]
    return {name: sum(each[name] for each in found) for name in (FRONT_END, ORCHESTRATOR, OTHERS)}

"""Processor time of the threads of API processes, from outside."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping
from pathlib import Path

from omni_fastpath.threads import FRONT_END, ORCHESTRATOR, role

OTHERS = "others"

Used = Mapping[int, Mapping[int, float]]
"""Seconds on a processor of each thread by its id, by process."""
Known = Mapping[int, Mapping[str, int]]
"""The ids of the front end's and of the orchestrator's thread, by process."""


def used(pids: Iterable[int]) -> Used:
    """What the threads of these processes have used so far, to the nanosecond, for levels of a few requests."""
    return {pid: _threads(pid) for pid in pids}


def _threads(pid: int) -> dict[int, float]:
    found = {}
    for task in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(OSError, ValueError):
            found[int(task.name)] = int((task / "schedstat").read_text().split()[0]) / 1e9
    return found


def known(before: Used, after: Used, told: Known) -> Known:
    """Which threads are which, after requests that brought text alone: recordings are decoded in threads of their own.

    Args:
        before: A reading before these requests.
        after: One after them.
        told: What the state files say. Stock's are silent of the orchestrator's: it is the busiest of the threads that
            are neither the process's first nor ZMQ's.
    """
    found: dict[int, Mapping[str, int]] = {}
    for pid, threads in after.items():
        took = {each: seconds - before[pid].get(each, 0.0) for each, seconds in threads.items()}
        others = [each for each in took if each != pid and not _is_zmqs(pid, each)]
        found[pid] = {FRONT_END: pid, ORCHESTRATOR: max(others, key=took.__getitem__, default=0), **told.get(pid, {})}
    return found


def _is_zmqs(pid: int, thread: int) -> bool:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/task/{thread}/comm").read_text().startswith("ZMQbg")
    return False


def spent(which: Known, before: Used, after: Used) -> dict[str, float]:
    """Seconds between two readings, by what the thread does, summed over the processes."""
    found = dict.fromkeys((FRONT_END, ORCHESTRATOR, OTHERS), 0.0)
    for pid, names in which.items():
        name_of = {thread: role(name) for name, thread in names.items()}
        for thread, seconds in after[pid].items():
            found[name_of.get(thread, OTHERS)] += seconds - before[pid].get(thread, 0.0)
    return found

"""The front end's and the orchestrator's thread of an API process, and what they take of a processor.

The kernel counts that by itself: nothing runs here between two looks. The two share Python's lock, so that both
together cannot have more than one core.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping

import psutil

FRONT_END, ORCHESTRATOR, OTHERS = "front_end", "orchestrator", "others"


def own() -> dict[str, int]:
    """The ids that the kernel has for this process's two; of the orchestrator's from when it runs.

    ``orchestrator`` is upstream's name for the thread, in every release.
    """
    found = {each.name: each.native_id for each in threading.enumerate() if each.name == ORCHESTRATOR}
    found[FRONT_END] = threading.main_thread().native_id
    return {name: thread for name, thread in found.items() if thread is not None}


def used(pid: int) -> dict[int, float]:
    """Seconds on a processor of each thread of a process, by id; none where it has ended or may not be looked at."""
    try:
        return {each.id: each.user_time + each.system_time for each in psutil.Process(pid).threads()}
    except psutil.Error:
        return {}


def spent(
    pid: int, before: Mapping[int, float], after: Mapping[int, float], known: Mapping[str, int]
) -> dict[str, float]:
    """Seconds between two readings of a process's threads, by what they do.

    Args:
        pid: The process.
        before: The first reading, as ``used`` has it.
        after: The second.
        known: What ``own`` says in that process. Where it is silent, the first thread is taken for the front end's, and
            the busiest of the rest for the orchestrator's: Python 3.11 does not tell the kernel its threads' names.
    """
    left = {thread: seconds - before.get(thread, 0.0) for thread, seconds in after.items()}
    front_end = left.pop(known.get(FRONT_END, pid), 0.0)
    busiest = known.get(ORCHESTRATOR) or max(left, key=left.__getitem__, default=0)
    return {FRONT_END: front_end, ORCHESTRATOR: left.pop(busiest, 0.0), OTHERS: sum(left.values())}

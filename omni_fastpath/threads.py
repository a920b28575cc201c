"""The front-end thread and the orchestrator thread of an API process, and their processor time.

The kernel counts processor time, so nothing runs here between two readings. The two threads share Python's interpreter
lock, so together they can use about one core.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping

from omni_fastpath import process_role

FRONT_END, ORCHESTRATOR = "front_end", "orchestrator"


def own() -> dict[str, int]:
    """The kernel's ids of these threads in this process. The orchestrator's is missing until that thread runs.

    ``orchestrator`` is upstream's name for the thread, in every release.
    """
    found = {each.name: each.native_id for each in threading.enumerate() if each.name == ORCHESTRATOR}
    found[FRONT_END] = threading.main_thread().native_id
    return {name: thread for name, thread in found.items() if thread is not None}


def used(pid: int, known: Mapping[str, int]) -> dict[str, float]:
    """Processor time of these threads of a process in seconds, by name. Threads that have ended are left out.

    Other threads are not read, because an API process may have hundreds.
    """
    stats = {name: process_role.stat(f"{pid}/task/{thread}") for name, thread in known.items()}
    ticks_a_second = os.sysconf("SC_CLK_TCK")
    return {name: (int(stat[11]) + int(stat[12])) / ticks_a_second for name, stat in stats.items() if stat}

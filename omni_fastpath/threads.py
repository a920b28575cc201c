"""The front end's and the orchestrator's thread of an API process, and what they have used of processors.

The kernel counts that by itself: nothing runs here between two looks. The two share Python's lock, so that both
together have about one core.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping

from omni_fastpath import process_role

FRONT_END, ORCHESTRATOR = "front_end", "orchestrator"


def own() -> dict[str, int]:
    """The ids that the kernel has for this process's two; of the orchestrator's from when it runs.

    ``orchestrator`` is upstream's name for the thread, in every release.
    """
    found = {each.name: each.native_id for each in threading.enumerate() if each.name == ORCHESTRATOR}
    found[FRONT_END] = threading.main_thread().native_id
    return {name: thread for name, thread in found.items() if thread is not None}


def used(pid: int, known: Mapping[str, int]) -> dict[str, float]:
    """Seconds on a processor of these threads of a process, by name; without those that have ended.

    Only these are looked at: an API process may have hundreds.
    """
    stats = {name: process_role.stat(f"{pid}/task/{thread}") for name, thread in known.items()}
    ticks_a_second = os.sysconf("SC_CLK_TCK")
    return {name: (int(stat[11]) + int(stat[12])) / ticks_a_second for name, stat in stats.items() if stat}

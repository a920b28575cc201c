"""The front-end threads and the orchestrator threads of an API process, and their processor time.

The kernel counts processor time, so nothing runs here between two readings. All these threads share Python's
interpreter lock, so together they can use about one core.
"""

from __future__ import annotations

import os
import threading

from omni_fastpath import process_role

FRONT_END, ORCHESTRATOR = "front_end", "orchestrator"

_named: dict[str, threading.Thread] = {}
"""The noted threads by name, running or not."""
_lock = threading.Lock()


def note(role: str, thread: threading.Thread | None = None) -> None:
    """Note that a thread, by default this one, runs the event loop of a front end or of an orchestrator.

    The first thread of a role has the role's name, and others have a number too, as in ``orchestrator-2``. The name of
    a thread that has ended goes to the next one.
    """
    thread = thread or threading.current_thread()
    if thread in _named.values():  # one step of the interpreter
        return
    with _lock:
        names = (f"{role}-{number}" if number > 1 else role for number in range(1, len(_named) + 2))
        _named[next(each for each in names if each not in _named or not _named[each].is_alive())] = thread


def own() -> dict[str, int]:
    """The kernel's ids of the running threads of both roles in this process, by name.

    Upstream names each thread of an orchestrator ``orchestrator``, in every release. The front end's is the main thread
    until a patch notes another one.
    """
    for each in threading.enumerate():
        if each.name == ORCHESTRATOR:
            note(ORCHESTRATOR, each)
    running = {name: thread for name, thread in _named.copy().items() if thread.is_alive()}
    found = {FRONT_END: threading.main_thread(), **running}
    return {name: thread.native_id for name, thread in found.items() if thread.native_id is not None}


def used() -> dict[str, float]:
    """Their processor time in seconds, by name. Threads that have ended meanwhile are left out."""
    stats = {name: process_role.stat(f"{os.getpid()}/task/{thread}") for name, thread in own().items()}
    ticks_a_second = os.sysconf("SC_CLK_TCK")
    return {name: (int(stat[11]) + int(stat[12])) / ticks_a_second for name, stat in stats.items() if stat}

"""The wrapper of ``abandoned_chunks`` at the end of a request, and the thread that removes what is left."""

from __future__ import annotations

import time
from threading import Event, Lock, Thread
from typing import Any

from omni_fastpath.guard import AwaitedCall
from omni_fastpath.ledger import state_of

from .leftovers import KEEP_S, Leftovers

EVERY_S = 2.5
"""How often the thread looks. It waits longer if looking takes long, because it uses the interpreter of the server."""

_patch = state_of("abandoned_chunks")
_leftovers = Leftovers(_patch.counters)
_lock, _off = Lock(), Event()
_thread: Thread | None = None


async def wrapped_cleanup_request_ids(wrapped: AwaitedCall, instance: Any, args: Any, kwargs: Any) -> Any:
    """End requests, and note which the orchestrator no longer has. Companions and parents may be among them."""
    before = tuple(states := instance.request_states)
    try:
        return await wrapped(*args, **kwargs)
    finally:
        _leftovers.note_ended((each for each in before if each not in states), states, time.time())
        _start()


def _start() -> None:
    global _thread  # noqa: PLW0603 - one in a process
    with _lock:
        if _thread is None or not _thread.is_alive():
            _off.clear()
            _thread = Thread(target=_run, name="omni-fastpath-chunks", daemon=True)
            _thread.start()


def _run() -> None:
    """Remove what ended requests left, until there are none to look for."""
    global _thread  # noqa: PLW0603 - as above
    with _patch.guard("removing what ended requests left"):
        took_s = 0.0
        while not _off.wait(max(EVERY_S, 100 * took_s)):
            began_s = time.thread_time()  # of this thread alone, however busy the others are
            _leftovers.remove(time.time())
            took_s = time.thread_time() - began_s
            with _lock:
                if not _leftovers.forget(time.time() - KEEP_S):
                    _thread = None
                    return


def step_aside() -> None:
    """Forget all requests, and let the thread end."""
    _leftovers.forget(float("inf"))
    _off.set()

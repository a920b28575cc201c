"""Which threads matter in an API process, and what they take of a processor."""

from __future__ import annotations

import os
import threading

from omni_fastpath import threads


def test_the_orchestrators_is_known_while_it_runs() -> None:
    """By the name that upstream gives it; the kernel counts both."""
    ended = threading.Event()
    orchestrator = threading.Thread(target=ended.wait, name="orchestrator")
    front_end = {"front_end": threading.main_thread().native_id}
    orchestrator.start()
    try:
        assert threads.own() == {**front_end, "orchestrator": orchestrator.native_id}
        assert threads.used(os.getpid(), threads.own()).keys() == {"front_end", "orchestrator"}
    finally:
        ended.set()
        orchestrator.join()
    assert threads.own() == front_end


def test_nothing_is_known_of_what_has_ended() -> None:
    """No error: a scrape looks at processes and threads that may end meanwhile."""
    assert threads.used(os.getpid(), {"front_end": os.getpid(), "orchestrator": 2**31 - 1}).keys() == {"front_end"}
    assert threads.used(2**31 - 1, {"front_end": 2**31 - 1}) == {}

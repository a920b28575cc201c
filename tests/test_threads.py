"""Which threads matter in an API process, and what they take of a processor."""

from __future__ import annotations

import os
import threading

import pytest

from omni_fastpath import threads


def test_the_orchestrators_is_known_while_it_runs() -> None:
    """By the name that upstream gives it; the kernel counts both."""
    ended = threading.Event()
    orchestrator = threading.Thread(target=ended.wait, name="orchestrator")
    front_end = {"front_end": threading.main_thread().native_id}
    orchestrator.start()
    try:
        assert threads.own() == {**front_end, "orchestrator": orchestrator.native_id}
        assert set(threads.own().values()) <= threads.used(os.getpid()).keys()
    finally:
        ended.set()
        orchestrator.join()
    assert threads.own() == front_end


@pytest.mark.parametrize(
    ("known", "front_end", "orchestrator"),
    [
        ({}, 4.0, 3.0),
        ({"front_end": 7}, 4.0, 3.0),
        ({"front_end": 8, "orchestrator": 9}, 1.0, 2.0),
        ({"front_end": 7, "orchestrator": 99}, 4.0, 0.0),
    ],
)
def test_what_they_took(known: dict[str, int], front_end: float, orchestrator: float) -> None:
    """Those that the process names; where it does not, its first thread and the busiest other one."""
    after = {7: 5.0, 8: 1.0, 9: 2.0, 10: 3.0}
    others = 10.0 - front_end - orchestrator
    expected = {"front_end": front_end, "orchestrator": orchestrator, "others": others}
    assert threads.spent(7, {7: 1.0}, after, known) == expected


def test_nothing_is_known_of_a_process_that_has_ended() -> None:
    """No error: a scrape and ``doctor`` look at processes that may end meanwhile."""
    assert threads.used(2**31 - 1) == {}
    assert threads.spent(7, {7: 1.0}, {}, {}) == {"front_end": 0.0, "orchestrator": 0.0, "others": 0.0}

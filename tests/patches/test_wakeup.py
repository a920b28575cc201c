"""Sleeps and yields of the drain's loop, on a real event loop."""

from __future__ import annotations

import asyncio
import socket
import threading
from unittest import mock

import pytest

from omni_fastpath.patches.budgeted_drain.wakeup import Wakeup


@pytest.fixture
def wakeup() -> Wakeup:
    """One that has not begun."""
    return Wakeup(dict.fromkeys(("wakeups", "longest_stretch_us", "longest_away_us"), 0))


async def test_sleep_ends_when_it_is_woken(wakeup: Wakeup) -> None:
    """By a call on its own thread or on another one; each sleep is counted."""
    wakeup.begin()
    loop = asyncio.get_running_loop()
    thread = threading.Thread(target=wakeup.wake_from_any_thread)
    for wake in (wakeup.wake, thread.start):
        loop.call_later(0.01, wake)
        await asyncio.wait_for(wakeup.sleep(60.0), 30)
    thread.join()
    assert wakeup._counters["wakeups"] == 2


def test_wake_without_a_sleeper_is_nothing(wakeup: Wakeup) -> None:
    """Before it began, between two sleeps, and after the event loop was closed."""

    async def begin() -> None:
        wakeup.begin()
        wakeup.wake()

    wakeup.wake()
    wakeup.wake_from_any_thread()
    asyncio.run(begin())
    wakeup.wake_from_any_thread()


@pytest.mark.parametrize("has_data", [False, True])
def test_yield_takes_the_turns_that_it_needs(wakeup: Wakeup, has_data: bool) -> None:
    """One turn when nothing arrived; the data of a socket is read within one yield, and its reader task has run."""
    ours, theirs = socket.socketpair()
    read = []

    async def reader() -> None:
        loop = asyncio.get_running_loop()
        arrived = loop.create_future()
        loop.add_reader(ours, lambda: arrived.set_result(ours.recv(9)))
        read.append(await arrived)
        loop.remove_reader(ours)

    async def run() -> int:
        wakeup.begin()
        task = asyncio.create_task(reader())
        await asyncio.sleep(0)
        if has_data:
            theirs.send(b"something")
        with mock.patch("asyncio.sleep", wraps=asyncio.sleep) as turns:
            await wakeup.yield_turns()
        task.cancel()
        return turns.call_count

    with ours, theirs:
        assert asyncio.run(run()) == (3 if has_data else 1)
    assert read == [b"something"] * has_data

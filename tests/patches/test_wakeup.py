"""Sleeps and yields of the drain's loop, on a real event loop."""

from __future__ import annotations

import asyncio
import socket
import threading
from unittest import mock

import pytest

from omni_fastpath.patches.budgeted_drain.wakeup import Wakeup


def wakeup() -> Wakeup:
    """One on the running event loop."""
    return Wakeup({"longest_stretch_us": 0})


async def test_a_sleep_ends_when_it_is_woken() -> None:
    """By a call on its own thread or on another one."""
    found, loop = wakeup(), asyncio.get_running_loop()
    thread = threading.Thread(target=found.wake_from_any_thread)
    for wake in (found.wake, thread.start):
        loop.call_later(0.01, wake)
        await asyncio.wait_for(found.sleep(60.0), 30)
    thread.join()


def test_a_closed_event_loop_does_not_disturb_an_attach() -> None:
    """A wake-up on another thread has no effect then."""

    async def made() -> Wakeup:
        return wakeup()

    asyncio.run(made()).wake_from_any_thread()


@pytest.mark.parametrize("has_data", [False, True])
def test_yield_takes_the_turns_that_it_needs(has_data: bool) -> None:
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
        found = wakeup()
        task = asyncio.create_task(reader())
        await asyncio.sleep(0)
        if has_data:
            theirs.send(b"something")
        with mock.patch("asyncio.sleep", wraps=asyncio.sleep) as turns:
            await found.yield_turns()
        task.cancel()
        return turns.call_count

    with ours, theirs:
        assert asyncio.run(run()) == (3 if has_data else 1)
    assert read == [b"something"] * has_data

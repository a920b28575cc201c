"""Sleeps and yields of the drain's loop, on a real event loop."""

from __future__ import annotations

import asyncio
import socket
import threading
from unittest import mock

import pytest

from omni_fastpath.patches.budgeted_drain.wakeup import Wakeup


async def test_a_sleep_ends_when_it_is_woken() -> None:
    """By a call on its own thread or on another one."""
    found, loop = Wakeup(), asyncio.get_running_loop()
    thread = threading.Thread(target=found.wake_from_any_thread)
    for wake in (found.wake, thread.start):
        loop.call_later(0.01, wake)
        await asyncio.wait_for(found.sleep(60.0), 30)
    thread.join()


def test_a_closed_event_loop_does_not_disturb_an_attach() -> None:
    """A wake-up on another thread has no effect then."""

    async def made() -> Wakeup:
        return Wakeup()

    asyncio.run(made()).wake_from_any_thread()


@pytest.mark.parametrize("has_data", [False, True])
async def test_yield_takes_the_turns_that_it_needs(has_data: bool) -> None:
    """One turn when nothing arrived; the data of a socket is read within one yield, and its reader task has run."""
    found, loop, read = Wakeup(), asyncio.get_running_loop(), list[bytes]()
    arrived = loop.create_future()

    async def reader() -> None:
        read.append(await arrived)

    ours, theirs = socket.socketpair()
    with ours, theirs:
        loop.add_reader(ours, lambda: arrived.set_result(ours.recv(9)))
        task = asyncio.create_task(reader())
        await asyncio.sleep(0)
        if has_data:
            theirs.send(b"something")
        with mock.patch("asyncio.sleep", wraps=asyncio.sleep) as turns:
            await found.yield_turns()
        loop.remove_reader(ours)
        task.cancel()
    assert (turns.call_count, read) == ((3, [b"something"]) if has_data else (1, []))

"""Sleeps and yields: who ends them, and how many turns of the event loop they give. On a real event loop."""

from __future__ import annotations

import asyncio
import socket
import threading

import pytest

from omni_fastpath.patches.budgeted_drain.wakeup import Wakeup

SECONDS = 30.0
"""Longer than any test: who sleeps so long was not woken."""


def counters() -> dict[str, int]:
    """The counters of sleeps and yields."""
    return dict.fromkeys(("wakeups", "longest_stretch_us", "longest_away_us"), 0)


async def test_sleep_ends_when_it_is_woken() -> None:
    """By a call on its own thread, or from another one; each sleep is counted."""
    counted = counters()
    wakeup = Wakeup(counted)
    wakeup.begin()
    loop = asyncio.get_running_loop()
    began = loop.time()
    loop.call_soon(wakeup.wake)
    await wakeup.sleep(SECONDS)
    thread = threading.Thread(target=wakeup.wake_from_any_thread)
    loop.call_soon(thread.start)
    await wakeup.sleep(SECONDS)
    thread.join()
    assert loop.time() - began < SECONDS / 3
    assert counted["wakeups"] == 2


async def test_wake_without_a_sleeper_is_nothing() -> None:
    """Before it began, between two sleeps, and after the event loop was closed."""
    wakeup = Wakeup(counters())
    wakeup.wake()
    wakeup.wake_from_any_thread()
    wakeup.begin()
    wakeup.wake()
    closed = Wakeup(counters())

    def ran() -> None:
        async def begin() -> None:
            closed.begin()

        asyncio.run(begin())

    thread = threading.Thread(target=ran)
    thread.start()
    thread.join()
    closed.wake_from_any_thread()


@pytest.mark.parametrize("socket_has_something", [False, True])
def test_yield_takes_the_turns_that_it_needs(socket_has_something: bool) -> None:
    """One turn when nothing has come; what stands in a socket is in its queue after one yield, reader task and all."""
    wakeup = Wakeup(counters())
    turns, read = 0, []

    async def run() -> None:
        nonlocal turns
        loop = asyncio.get_running_loop()
        wakeup.begin()
        arrived, (ours, theirs) = loop.create_future(), socket.socketpair()
        with ours, theirs:

            def take() -> None:
                if not arrived.done():
                    arrived.set_result(ours.recv(9))

            loop.add_reader(ours, take)

            async def reader() -> None:
                read.append(await arrived)

            task = asyncio.create_task(reader())
            await asyncio.sleep(0)  # now it waits for the socket
            if socket_has_something:
                theirs.send(b"something")
            sleep = asyncio.sleep

            async def counting(delay: float) -> None:
                nonlocal turns
                turns += 1
                await sleep(delay)

            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(asyncio, "sleep", counting)
                await wakeup.yield_turns()
            loop.remove_reader(ours)
            task.cancel()

    asyncio.run(run())
    assert (turns, read) == ((3, [b"something"]) if socket_has_something else (1, []))

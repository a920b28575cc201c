"""Requests on their way in, from the end of their body to the orchestrator, and how long outputs wait for them."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from time import perf_counter_ns
from typing import Any

from omni_fastpath.connection import Connection, Follower, follow
from omni_fastpath.ledger import state_of

_COUNTS = re.compile(r".*/((completions|audio/speech)(/batch)?|responses|messages|audio/(generate|trans\w+))")
"""Paths whose requests count. Images and videos do not, because their first output takes long anyway."""

LONGEST_WAY_S = 0.25
"""A request that takes longer than this stops counting, because it waits for a remote file or a paused engine and not
for this event loop."""

TICK_S = 0.001
"""How long a taker of the front end sleeps at a time. Rendering and tokenizing run in other threads and need the
interpreter lock, and a turn of the event loop without a sleep releases it only for an instant."""

LONGEST_NS = 5_000_000
"""Longest pause, apart from the rest of its last tick."""

LEAST_NS = 2_000_000
"""A shorter pause is not begun, because each ends a batch of outputs and small batches cost throughput."""

PRICE = 2
"""For each unit of time in a pause, outputs get this many, which is two thirds of all time."""

_patch = state_of("delivery")
_guard = _patch.guard("following a request's way in")

ON_THEIR_WAY: set[OnItsWay] = set()
"""The requests that count now."""


class OnItsWay(Follower):
    """One request. Uses the application's ``receive`` to find the end of its body."""

    def __init__(self, connection: Connection) -> None:
        self._receive, connection.receive = connection.receive, self._received

    async def _received(self) -> Any:
        message = await self._receive()
        with _guard:
            if message["type"] == "http.request" and not message.get("more_body"):
                _patch.counters["requests"] += 1
                asyncio.get_running_loop().call_later(LONGEST_WAY_S, self.ended)
                ON_THEIR_WAY.add(self)
        return message

    def submitting(self, _request_id: str) -> None:
        """It is at its goal."""
        self.ended()

    def ended(self) -> None:
        """It was refused, failed, was cancelled, has been answered, or takes too long."""
        ON_THEIR_WAY.discard(self)


def _begin(connection: Connection) -> OnItsWay | None:
    """Follow a connection, if it is a request for text or speech and the option is on."""
    counts = connection.is_post and _patch.options.requests_first and _COUNTS.fullmatch(connection.scope["path"])
    return OnItsWay(connection) if counts else None


follow(_patch, _begin)


class Pause:
    """Lets one of the front end's takers wait while requests are on their way.

    Pauses are paid from a budget that grows while outputs are delivered, up to one longest pause. So an endless stream
    of requests, served or refused, gets its share of the time and no more.

    Args:
        clock: In nanoseconds.
    """

    def __init__(self, clock: Callable[[], int] = perf_counter_ns) -> None:
        self._clock, self._budget_ns, self._ended_ns = clock, LONGEST_NS, clock()

    async def before_output(self) -> None:
        """Wait until no request is on its way, for as long as the budget allows."""
        began_ns = now_ns = self._clock()
        budget_ns = min(self._budget_ns + (began_ns - self._ended_ns) // PRICE, LONGEST_NS)
        if budget_ns < LEAST_NS:
            return
        while ON_THEIR_WAY and now_ns - began_ns < budget_ns:
            await asyncio.sleep(TICK_S)
            now_ns = self._clock()
        self._budget_ns, self._ended_ns = budget_ns - (now_ns - began_ns), now_ns
        _patch.counters["waits"] += 1

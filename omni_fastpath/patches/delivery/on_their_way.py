"""Which requests are on their way in: from the end of their body until they are handed to the orchestrator."""

from __future__ import annotations

import asyncio
import re
from typing import Any

from omni_fastpath.connection import Connection, Follower
from omni_fastpath.ledger import runtime

_COUNTS = re.compile(
    r".*/(completions(/batch)?|responses|messages|audio/(speech(/batch)?|generate|transcriptions|translations))"
)
"""Paths whose requests count. Images and videos do not, because their first output takes long anyway."""

LONGEST_WAY_S = 0.25
"""A request that takes longer than this stops counting, because it waits for a remote file or a paused engine and not
for this event loop."""

_runtime = runtime("delivery")
_guard = _runtime.guard("following a request's way in")

ON_THEIR_WAY: set[OnItsWay] = set()
"""The requests that count now."""


class OnItsWay(Follower):
    """One request. Uses the application's ``receive`` to find the end of its body."""

    def __init__(self, connection: Connection) -> None:
        self._receive, connection.receive = connection.receive, self._received
        self._is_complete = False

    async def _received(self) -> Any:
        message = await self._receive()
        with _guard:
            if message["type"] == "http.request" and not message.get("more_body") and not self._is_complete:
                self._is_complete = True
                _runtime.counters["requests"] += 1
                asyncio.get_running_loop().call_later(LONGEST_WAY_S, self.ended)
                ON_THEIR_WAY.add(self)
        return message

    def submitting(self, _request_id: str) -> None:
        """It is at its goal."""
        ON_THEIR_WAY.discard(self)

    def ended(self) -> None:
        """It was refused, failed, was cancelled, has been answered, or takes too long."""
        ON_THEIR_WAY.discard(self)


def begin(connection: Connection) -> OnItsWay | None:
    """Follow a connection, if it is a request for text or speech and the option is on."""
    counts = connection.is_post and _runtime.options.requests_first and _COUNTS.fullmatch(connection.scope["path"])
    return OnItsWay(connection) if counts else None

"""Which requests are on their way in: from the end of their body until they are handed to the orchestrator."""

from __future__ import annotations

import asyncio
from typing import Any

from omni_fastpath.connection import Connection, Follower
from omni_fastpath.ledger import runtime

ROUTES = (
    "/completions",
    "/completions/batch",
    "/responses",
    "/messages",
    "/audio/speech",
    "/audio/speech/batch",
    "/audio/generate",
    "/audio/transcriptions",
    "/audio/translations",
)
"""Ends of the paths whose requests count. Images and videos do not, because their first output takes long anyway."""

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
        self._timer: asyncio.TimerHandle | None = None

    async def _received(self) -> Any:
        message = await self._receive()
        with _guard:
            if message["type"] == "http.request" and not message.get("more_body") and self._timer is None:
                self._timer = asyncio.get_running_loop().call_later(LONGEST_WAY_S, self.leave)
                _runtime.counters["requests"] += 1
                ON_THEIR_WAY.add(self)
        return message

    def leave(self) -> None:
        """Count it no more."""
        ON_THEIR_WAY.discard(self)

    def submitting(self, _request_id: str) -> None:
        """It is at its goal."""
        ON_THEIR_WAY.discard(self)

    def ended(self) -> None:
        """It was refused, failed, was cancelled, or has been answered."""
        if self._timer is not None:
            self._timer.cancel()
        ON_THEIR_WAY.discard(self)


def begin(connection: Connection) -> OnItsWay | None:
    """Follow a connection, if it is a request for text or speech and the option is on."""
    counts = connection.is_post and connection.scope["path"].endswith(ROUTES)
    return OnItsWay(connection) if counts and _runtime.options.requests_first else None

"""Messages on their way out that a patch keeps: none while no patch keeps any."""

from __future__ import annotations

from collections.abc import Callable

KEPT: list[Callable[[], int]] = []
"""Each says how many messages a patch has taken out of the orchestrator's queue and not handed to their requests yet;
called on any thread."""


def kept() -> int:
    """How many of this process's messages are kept so."""
    return sum(each() for each in KEPT)

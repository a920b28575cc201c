"""Messages for the front end that a patch has taken out of the orchestrator's queue."""

from __future__ import annotations

from collections.abc import Callable

KEPT: list[Callable[[], int]] = []
"""Functions that count the messages which a patch has taken and not yet handed to their requests. They are called on
any thread."""


def kept() -> int:
    """The number of such messages in this process."""
    return sum(each() for each in KEPT)

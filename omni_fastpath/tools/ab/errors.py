"""What ends a measurement."""

from __future__ import annotations

INTERRUPTED = "interrupted"
"""What a report says of a series that ``Interrupted`` ended."""


class MeasureError(RuntimeError):
    """A measurement could not be made; the message says why, with the end of the log that knows more."""


class Interrupted(SystemExit):
    """SIGINT, SIGTERM or SIGHUP. A ``SystemExit``, because an event loop hands on that and no other exception."""

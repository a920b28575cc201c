"""Where the time to a request's first audio and first text is spent, leg by leg, from the application to the transport.

A request is followed while its connection is open. Two threads write: the orchestrator's until a first output is in the
front end's queue, and then the front end's.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise
from time import monotonic
from typing import Any

from . import PATCH, PREFIX
from .histograms import Distribution, Distributions

SEEN = Distributions({metric.name.removeprefix(PREFIX): metric.bounds for metric in PATCH.metrics if metric.bounds})
"""The distributions of this process, by names of metrics without the prefix."""

OUTPUTS = ("audio", "text")
LEGS = ("way_in", "engines", "queue", "dispatch", "hand_over", "writing")
QUEUES = ("replica", "front_end")
_TCP_INFO, _LAST_DATA = (6, 11), slice(52, 56)
"""Level and name of a socket option of Linux, and the position in it of the milliseconds since data arrived, on the
processors that upstream supports."""
_MADE, _PUT, _HANDED_OVER = range(4, 7)
"""How many times of a first output are known at each point."""


def unread_s(receive: Any) -> float:
    """Seconds for which a request was in the kernel before the event loop read it, or 0 if that is not known.

    uvicorn's ``receive`` is a method of the object with the connection. The kernel's resolution is some milliseconds.
    """
    try:
        info = receive.__self__.transport.get_extra_info("socket").getsockopt(*_TCP_INFO, _LAST_DATA.stop)
    except (AttributeError, OSError):  # another server, or kind of connection
        return 0.0
    return int.from_bytes(info[_LAST_DATA], "little") / 1000


def distributions(output: str) -> list[Distribution]:
    """For a kind of first output: its time, the part in the API process, each leg, and the items ahead of it."""
    whole = [SEEN.of(f"first_output_{each}", output=output) for each in ("seconds", "api_process_seconds")]
    legs = [SEEN.of("first_output_leg_seconds", output=output, leg=leg) for leg in LEGS]
    return [*whole, *legs, *(SEEN.of("first_output_ahead", output=output, queue=queue) for queue in QUEUES)]


@dataclass(slots=True, eq=False)
class First:
    """A request's first audio or first text, until it is sent.

    Attributes:
        output: ``audio`` or ``text``.
        stage_id: The stage that made it.
        times: The beginning of the request, and the end of each leg so far.
        ahead: The number of items ahead of it in its replica's queue, and in the front end's.
        message: The front end's message that contains it, until it was sent.
    """

    output: str
    stage_id: int
    times: list[float]
    ahead: list[int]
    message: Any = None

    def note_put(self, message: Any, ahead: int) -> None:
        """Note that it was put into the front end's queue, behind *ahead* messages."""
        self.times.append(monotonic())
        self.ahead.append(ahead)
        self.message = message

    def note_arrived(self) -> None:
        """Note that its bytes were passed to the transport, and count its legs."""
        self.times.append(monotonic())
        self.message = None
        legs = [end_s - begin_s for begin_s, end_s in pairwise(self.times)]
        values = [sum(legs), sum(legs) - legs[LEGS.index("engines")], *legs, *self.ahead]
        for distribution, value in zip(distributions(self.output), values, strict=True):
            distribution.observe(value)


@dataclass(slots=True, eq=False)
class FirstOutput:
    """One request, from the application's first line to the end of its connection.

    Attributes:
        began_s: When the server had the request.
        request_id: The orchestrator's id, or empty before the connection's first request has one. Later requests of a
            connection are not followed.
        submitted_s: When a stage had the request. None also if the request is no longer followed.
        firsts: Its first outputs so far.
        taken: The first outputs that the request's handler has taken and not sent.
        arrived: The number of first outputs that were sent.
    """

    began_s: float
    request_id: str = ""
    submitted_s: float | None = None
    firsts: list[First] = field(default_factory=list)
    taken: list[First] = field(default_factory=list)
    arrived: int = 0

    # On the orchestrator's thread.

    def note_submitted(self) -> None:
        """Note that a stage has the request. Later stages do not count."""
        self.submitted_s = self.submitted_s or monotonic()

    def note_made(self, output: str, stage_id: int, times: tuple[float, float], ahead: int) -> None:
        """Note that a raw output with a first output was processed. *times*: of its construction and its dequeue."""
        if self.submitted_s is not None and all(first.output != output for first in self.firsts):
            self.firsts.append(First(output, stage_id, [self.began_s, self.submitted_s, *times], [ahead]))

    def first_in(self, message: Any) -> First | None:
        """The first output that a message for the front end contains, or None."""
        made = (each for each in self.firsts if len(each.times) == _MADE and hasattr(message, "engine_outputs"))
        return next((each for each in made if each.stage_id == message.stage_id), None)

    # On the front end's thread.

    def note_handed_over(self, message: Any) -> bool:
        """Note that a message is in the request's own queue. Returns True if nothing is left to observe."""
        for first in self._in(message, _PUT):
            first.times.append(monotonic())
        return self.arrived == len(OUTPUTS)

    def note_taken(self, message: Any) -> bool:
        """Note that the request's handler took a message. Returns the same."""
        self.taken += self._in(message, _HANDED_OVER)
        return self.arrived == len(OUTPUTS)

    def note_sent(self, message: Any) -> None:
        """Note that a part of the answer was sent. An answer with a content length has no parts and is not followed."""
        if any(name == b"content-length" for name, _ in message.get("headers", ())):
            self.submitted_s = None
            self.firsts, self.taken = [], []
        elif self.taken and message.get("body"):
            for first in self.taken:
                first.note_arrived()
            self.arrived += len(self.taken)
            self.taken = []

    def _in(self, message: Any, known: int) -> list[First]:
        return [first for first in self.firsts if first.message is message and len(first.times) == known]

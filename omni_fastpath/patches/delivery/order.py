"""The order of delivery: when messages are due, and the queued ones by earliest deadline, in order within a request."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from heapq import heappop, heappush
from itertools import count
from math import inf
from typing import Any

from vllm_omni.engine.messages import EngineQueueMessage, OutputMessage
from vllm_omni.metrics.definitions import resolve_audio_sample_rate_or_none
from vllm_omni.metrics.utils import count_audio_frames, iter_mm_outputs

AT_ONCE_S = 10.0
"""First audio is due this long before its arrival, and so before anything that has been queued for less."""

LONGEST_SLACK_S = 5.0
"""Latest deadline of audio, after its arrival. A stage makes audio several times faster than a listener plays it."""

FORGOTTEN_AFTER_S = 60.0
"""A listener is forgotten this long after its audio was played. Its request was probably aborted, which is not reported
here. If it continues, its next audio counts as its first."""


class Deadlines:
    """The deadlines of one engine's messages.

    Args:
        ask: Asks plugins for the deadline of a message. None without plugins.
        clock: Returns seconds.
    """

    def __init__(self, ask: Callable[..., float | None] | None, clock: Callable[[], float]) -> None:
        self._ask, self._clock = ask, clock
        # By request: samples per second, and when all audio that arrived has been played, if playing began with the
        # first packet. The one with the latest audio is last.
        self._listeners: dict[str, tuple[int, float]] = {}

    def of(self, message: Any) -> tuple[str | None, float]:
        """The request of a message that has just arrived, and its deadline.

        Returns:
            The request's id, and the deadline in seconds on the clock. For a message without a request the deadline is
            minus infinity (deliver it at once) or infinity (nothing overtakes it, and it overtakes nothing).
        """
        request_id = getattr(message, "request_id", None)
        if request_id is None:
            return None, inf if isinstance(message, EngineQueueMessage) else -inf
        deadline = now = self._clock()
        if isinstance(message, OutputMessage):
            payloads = iter_mm_outputs(message.engine_outputs)
            if frames := sum(map(count_audio_frames, payloads)):
                deadline = self._of_audio(request_id, frames, payloads, now)
            if message.finished:
                self._listeners.pop(request_id, None)
                deadline = max(deadline, now)  # a complete answer has no listener
        if self._ask is not None:
            answer = self._ask(message=message, arrived=now, deadline=deadline)
            deadline = deadline if answer is None else answer
        return request_id, deadline

    def _of_audio(self, request_id: str, frames: int, payloads: Any, now: float) -> float:
        """When audio is due. If its sample rate is unknown, when it arrived."""
        if listener := self._listeners.pop(request_id, None):
            rate, deadline = listener
        elif rate := resolve_audio_sample_rate_or_none(payloads):
            deadline = now - AT_ONCE_S
        else:
            return now
        self._listeners[request_id] = rate, max(deadline, now) + frames / rate
        oldest = next(iter(self._listeners))
        if now - self._listeners[oldest][1] > FORGOTTEN_AFTER_S:
            del self._listeners[oldest]
        return min(deadline, now + LONGEST_SLACK_S)


DeadlineOf = Callable[[Any], tuple[str | None, float]]
"""Gives the request and the deadline of a message that has just arrived."""


class QueuedMessages:
    """Queued messages of one engine. The front end's event loop calls ``collect`` and ``take``.

    The messages are in one dictionary, by number of arrival. All other structures only refer to it, so that after an
    error the dictionary is enough to return the messages.

    Args:
        arrived: Where messages arrive. Any thread may append.
        of: Gives the request and the deadline of each.
        counters: The patch's counters.

    Attributes:
        queued: The messages by number of arrival, in order of arrival.
        is_open: Whether more messages may be collected. A message with an infinite deadline prevents that until it is
            taken, so that nothing overtakes it.
    """

    def __init__(self, arrived: deque[Any], of: DeadlineOf, counters: dict[str, int]) -> None:
        self.queued: dict[int, Any] = {}
        self.is_open = True
        self._arrived, self._of, self._counters = arrived, of, counters
        # A heap. A message taken on the turn of a later one of its request leaves its entry until that is on top.
        self._due: list[tuple[float, int, str | None]] = []
        self._requests: dict[str | None, deque[int]] = {}  # the numbers of each request's messages
        self._numbers, self._latest = count(), -1

    def __len__(self) -> int:
        """How many there are. Any thread may ask."""
        return len(self.queued) + len(self._arrived)

    def collect(self) -> None:
        """Note the deadlines of all that arrived."""
        while self.is_open and self._arrived:
            number = next(self._numbers)
            self.queued[number] = self._arrived.popleft()
            request_id, deadline = self._of(self.queued[number])
            self.is_open = deadline != inf
            self._requests.setdefault(request_id, deque()).append(number)
            heappush(self._due, (deadline, number, request_id))

    def take(self) -> Any:
        """Take the next message. There is one. If it raises, it has taken none."""
        if not self.queued:
            self.collect()
        while (own := self._requests.get(self._due[0][2])) is None or self._due[0][1] < own[0]:
            heappop(self._due)
        deadline, _, request_id = self._due[0]
        number = own.popleft()
        self._counters["messages"] += 1
        self._counters["overtaken"] += number < self._latest
        self._latest = max(self._latest, number)
        if not own:
            del self._requests[request_id]
            self.is_open = self.is_open or deadline == inf
            if not self._requests:
                self._due.clear()
        return self.queued.pop(number)

    def give_back(self) -> None:
        """Return all to where they arrived, in order, in front of what arrived since, and take no more. On any thread.

        If it raises, each message is here or there, and the next call continues.
        """
        self.is_open = False
        while self.queued:
            self._arrived.appendleft(self.queued.popitem()[1])  # the last one first

"""The deadline of a message: at once, when its listener would run out of audio, or when it arrived."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

from vllm_omni.engine.messages import EngineQueueMessage, OutputMessage
from vllm_omni.metrics.definitions import resolve_audio_sample_rate_or_none
from vllm_omni.metrics.utils import count_audio_frames, iter_mm_outputs

AT_ONCE_S = 10.0
"""First audio is due this long before its arrival, and so before anything that has been queued for less."""

LONGEST_SLACK_S = 5.0
"""Latest deadline of audio, after its arrival. A stage makes audio several times faster than a listener plays it."""

FORGOTTEN_AFTER_S = 60.0
"""After this time without audio a listener is forgotten. Its request was probably aborted, which is not reported here.
If it continues, its next audio counts as its first."""


class _Listener(NamedTuple):
    """Who plays the audio of one request.

    Attributes:
        rate: Samples per second.
        plays_until: When all audio that arrived has been played, if playing began with the first packet.
        last_s: When the last audio arrived.
    """

    rate: int
    plays_until: float
    last_s: float


class Deadlines:
    """The deadlines of one engine's messages.

    Args:
        ask: Asks plugins for the deadline of a message. None without plugins.
        clock: Returns seconds.
    """

    def __init__(self, ask: Callable[..., float | None] | None, clock: Callable[[], float]) -> None:
        self._ask = ask
        self._clock = clock
        self._listeners: dict[str, _Listener] = {}  # the one with the latest audio is last

    def of(self, message: Any) -> tuple[str | None, float]:
        """The request of a message that has just arrived, and its deadline.

        Returns:
            The request's id, and the deadline in seconds on the clock. For a message without a request the deadline is
            minus infinity (deliver it at once) or infinity (nothing overtakes it, and it overtakes nothing).
        """
        request_id = getattr(message, "request_id", None)
        if request_id is None:
            return None, math.inf if isinstance(message, EngineQueueMessage) else -math.inf
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
        listener = self._listeners.pop(request_id, None)
        if listener is not None:
            rate, begins = listener.rate, max(listener.plays_until, now)
            deadline = min(listener.plays_until, now + LONGEST_SLACK_S)
        elif rate := resolve_audio_sample_rate_or_none(payloads):
            begins, deadline = now, now - AT_ONCE_S
        else:
            return now
        self._listeners[request_id] = _Listener(rate, begins + frames / rate, now)
        oldest = next(iter(self._listeners))
        if now - self._listeners[oldest].last_s > FORGOTTEN_AFTER_S:
            del self._listeners[oldest]
        return deadline

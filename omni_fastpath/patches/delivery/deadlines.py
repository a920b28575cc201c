"""The deadline of a message: at once, when its listener would run out of audio, or when it arrived."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from vllm_omni.engine.messages import EngineQueueMessage, OutputMessage
from vllm_omni.metrics.definitions import resolve_audio_sample_rate_or_none
from vllm_omni.metrics.utils import count_audio_frames, iter_mm_outputs

AT_ONCE_S = 10.0
"""A first output is due this long before its arrival, and so before anything that has been queued for less."""

LONGEST_SLACK_S = 5.0
"""Latest deadline of audio, after its arrival. A stage makes audio several times faster than a listener plays it."""

FORGOTTEN_AFTER_S = 60.0
"""After this time without outputs a request is forgotten. It was probably aborted, which is not reported here. If it
continues, its next output counts as its first."""


class _Answer:
    """The state of one request's answer.

    Attributes:
        kinds: The kinds of outputs that were seen: each stage with text, and None for audio.
        rate: Samples per second of its audio. 0 if unknown.
        plays_until: When a listener who started with the first audio has played everything that arrived.
        last_s: When its last output arrived.
    """

    __slots__ = ("kinds", "last_s", "plays_until", "rate")

    def __init__(self) -> None:
        self.kinds: set[int | None] = set()
        self.rate = 0
        self.plays_until = 0.0
        self.last_s = 0.0


class Deadlines:
    """The deadlines of one engine's messages.

    Args:
        ask: Asks plugins for the deadline of a message. None without plugins.
        clock: Returns seconds.
    """

    def __init__(self, ask: Callable[..., float | None] | None, clock: Callable[[], float]) -> None:
        self._ask = ask
        self._clock = clock
        self._answers: dict[str, _Answer] = {}

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
            deadline = self._of_output(message, now)
        if self._ask is not None:
            answer = self._ask(message=message, arrived=now, deadline=deadline)
            deadline = deadline if answer is None else answer
        return request_id, deadline

    def _of_output(self, message: Any, now: float) -> float:
        answer = self._answers.pop(message.request_id, None) or _Answer()
        answer.last_s = now
        seconds = _seconds(message.engine_outputs, answer)
        kind = message.stage_id if seconds is None else None
        is_first, deadline = kind not in answer.kinds, now
        if seconds is not None:
            deadline = min(answer.plays_until, now + LONGEST_SLACK_S)
            answer.plays_until = max(answer.plays_until, now) + seconds
        if message.finished:
            return max(deadline, now)
        answer.kinds.add(kind)
        self._answers[message.request_id] = answer  # at the end of the dictionary
        self._forget(now)
        return now - AT_ONCE_S if is_first else deadline

    def _forget(self, now: float) -> None:
        """Forget the request whose last output is the oldest, if it is too old. Each call forgets at most one."""
        longest = next(iter(self._answers))
        if now - self._answers[longest].last_s > FORGOTTEN_AFTER_S:
            del self._answers[longest]


def _seconds(outputs: Any, answer: _Answer) -> float | None:
    """Seconds of audio in an output. None if there is none, or if the sample rate is unknown."""
    payloads = iter_mm_outputs(outputs)
    frames = sum(map(count_audio_frames, payloads))
    if not frames:
        return None
    answer.rate = answer.rate or resolve_audio_sample_rate_or_none(payloads) or 0
    return frames / answer.rate if answer.rate else None

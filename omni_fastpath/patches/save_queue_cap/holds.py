"""Chooses the streams that are left out of the next step because too much payload is under way.

Over the limit each stream may have the limit, less twice the excess of the total over it. So one stream alone may have
the whole limit, and many equal ones have equal shares. As the total falls the share grows, and held streams continue. A
stream with less than a sixteenth of its equal share of the limit is never held, so that the backlog of others does not
stop it. All together there is at most twice the limit, plus what the running steps add and a step for each hold that
expired. There is no thread, lock or clock in here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf
from typing import Any

_STEEPNESS = 2
_ALWAYS = 16


@dataclass(frozen=True, slots=True)
class Load:
    """How much of a running request is under way to the next stage.

    Attributes:
        request: The request.
        request_id: Its id.
        progress: A number that changes with each step that it takes.
        nbytes: Bytes that are queued, being sent, or put and not fetched.
        tasks: Tasks that are queued or being sent.
    """

    request: Any
    request_id: str
    progress: int
    nbytes: int
    tasks: int


@dataclass(slots=True)
class _Hold:
    """A hold that lasts over several steps. ``passing_at`` is the progress when it expired, until a step was taken."""

    began_s: float
    passing_at: int | None = None


class Holds:
    """The holds of one stage.

    Args:
        max_bytes: Limit of all streams together, or None.
        max_tasks: The same for tasks.
        max_hold_s: Seconds after which a hold ends for one step.
    """

    def __init__(self, max_bytes: int | None, max_tasks: int | None, max_hold_s: float) -> None:
        self.began = 0
        """Holds so far."""
        self.expired = 0
        """Holds of these that ``max_hold_s`` ended for a step."""
        self._max_bytes = inf if max_bytes is None else float(max_bytes)
        self._max_tasks = inf if max_tasks is None else float(max_tasks)
        self._max_hold_s = max_hold_s
        self._holds: dict[str, _Hold] = {}

    def is_over(self, nbytes: int, tasks: int) -> bool:
        """Whether the totals of all streams are over a limit."""
        return nbytes > self._max_bytes or tasks > self._max_tasks

    def end_all(self) -> None:
        """End every hold, because no limit is reached."""
        self._holds.clear()

    def choose(self, running: Sequence[Load], nbytes: int, tasks: int, now: float) -> list[Any]:
        """The requests to leave out of the next step.

        A hold lasts for a step and is renewed here, so that nothing remains of it when its request is aborted,
        preempted or ended.

        Args:
            running: All running requests.
            nbytes: Total of all streams, including those that do not run.
            tasks: The same for tasks.
            now: Monotonic seconds.
        """
        most_nbytes = _share(self._max_bytes, nbytes, len(running))
        most_tasks = _share(self._max_tasks, tasks, len(running))
        holds: dict[str, _Hold] = {}
        held: list[Any] = []
        for each in running:
            if each.nbytes <= most_nbytes and each.tasks <= most_tasks:
                continue
            hold = self._holds.get(each.request_id)
            if hold is None or hold.passing_at not in (None, each.progress):
                hold = _Hold(now)
                self.began += 1
            holds[each.request_id] = hold
            if hold.passing_at is None and now - hold.began_s > self._max_hold_s:
                # Its receiver may wait for something that this stream keeps (KV blocks), so it takes one step.
                hold.passing_at = each.progress
                self.expired += 1
            if hold.passing_at is None:
                held.append(each.request)
        self._holds = holds
        return held


def _share(limit: float, total: int, streams: int) -> float:
    """How much each of the running streams may have, for a total of all streams."""
    return max(limit + _STEEPNESS * (limit - total), limit / _ALWAYS / max(1, streams))

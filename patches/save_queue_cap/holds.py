"""Which streams are left out of the next step because too much is on its way, and for how long.

Over its limit each stream may have twice as much as is left up to one and a half times the limit: one stream alone the
whole limit, many alike an equal share each. As the total falls that share grows, and held streams go on. A stream with
less than its part of a sixteenth is never held, so that others' backlogs do not stop it. All together there is at most
twice the limit, besides what the steps in flight bring and a step of each hold that expired.
No thread, no lock and no clock in here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

_STEEPNESS = 2
_ALWAYS = 16

NO_LIMIT = float("inf")


@dataclass(frozen=True, slots=True)
class Load:
    """What a running request has on its way.

    Attributes:
        request: It.
        request_id: Its id.
        progress: A number that changes with each step that it takes.
        nbytes: Queued, being sent and put but not fetched.
        tasks: Queued and being sent.
    """

    request: Any
    request_id: str
    progress: int
    nbytes: int
    tasks: int


@dataclass(slots=True)
class _Hold:
    """A hold that goes on from step to step. ``passing_at``: the progress when it expired, until a step was taken."""

    began_s: float
    passing_at: int | None = None


class Holds:
    """The holds of one stage.

    Args:
        max_bytes: Of all streams together; None: no limit.
        max_tasks: The same of tasks.
        max_hold_s: After which a hold ends for one step.
    """

    def __init__(self, max_bytes: int | None, max_tasks: int | None, max_hold_s: float) -> None:
        self.began = 0
        """Holds so far."""
        self.expired = 0
        """Of them, those that ``max_hold_s`` ended for a step."""
        self._max_bytes = NO_LIMIT if max_bytes is None else float(max_bytes)
        self._max_tasks = NO_LIMIT if max_tasks is None else float(max_tasks)
        self._max_hold_s = max_hold_s
        self._holds: dict[str, _Hold] = {}

    def is_over(self, nbytes: int, tasks: int) -> bool:
        """Whether so much of all streams is over a limit."""
        return nbytes > self._max_bytes or tasks > self._max_tasks

    def none(self) -> None:
        """No limit is reached: every hold ends."""
        self._holds.clear()

    def choose(self, running: Sequence[Load], nbytes: int, tasks: int, now: float) -> list[Any]:
        """The requests to leave out of the next step.

        A hold is as long as a step and renewed here, so that nothing is left of it when its request is aborted, is
        preempted or ends.

        Args:
            running: All running requests.
            nbytes: Of all streams, also of those that do not run.
            tasks: The same of tasks.
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
                # What it waits for may be waiting for what it keeps (KV blocks): one step goes through.
                hold.passing_at = each.progress
                self.expired += 1
            if hold.passing_at is None:
                held.append(each.request)
        self._holds = holds
        return held


def _share(limit: float, total: int, streams: int) -> float:
    """How much one of so many running streams may have while all together have so much."""
    if limit == NO_LIMIT:
        return NO_LIMIT
    return max(limit + _STEEPNESS * (limit - total), limit / _ALWAYS / max(1, streams))

"""From stamps to figures: residence, hops, throughput. Times in milliseconds unless the name says otherwise.

Residence is from the sending of a raw output by its stage to the end of its routing. What was never routed, in a run
that was cut off, counts with its residence so far, which is a lower bound.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from benchmarks.replay.load import CODE2WAV, STAGE_NAMES, STAGES, THINKER, Request, Schedule, first_audible
from benchmarks.replay.measure import Stamps
from benchmarks.rigs.quantiles import quantile

NEVER = -1

Times = npt.NDArray[np.int64]


def spread(values: Any, unit: float = 1e6) -> dict[str, float | int | None]:
    """p50, p99, max and mean of values, in units of so many, and how many they are; durations are nanoseconds."""
    if len(values) == 0:
        return {"p50": None, "p99": None, "max": None, "mean": None, "n": 0}
    array = np.sort(np.asarray(values, dtype=np.float64)) / unit
    ordered = array.tolist()
    return {
        "p50": quantile(ordered, 0.5),
        "p99": quantile(ordered, 0.99),
        "max": ordered[-1],
        "mean": float(array.mean()),
        "n": len(ordered),
    }


class Dispatches:
    """What became of each raw output; arrays are in the schedule's order, as far as it was sent.

    A raw output may be dispatched in parts: its main part, and entries that were held. It is routed when its last part
    is; what a user waits for is in the main part.

    Attributes:
        stage: The stage that sent it.
        sent: When it was sent.
        began: When its processing began; ``NEVER`` if it did not.
        main_routed: When its first part was routed; ``NEVER`` if it was not.
        routed: When its last part was routed; ``NEVER`` if none was.
    """

    def __init__(self, stamps: Stamps, schedule: Schedule) -> None:
        count = len(stamps.sent)
        self.schedule = schedule
        self.ended_ns = stamps.ended_ns
        self.sent: Times = np.array(stamps.sent, dtype=np.int64)
        self.stage: Times = np.array([stage for _, stage, _ in schedule.order[:count]], dtype=np.int64)
        self.parts_began: Times = np.array(stamps.began, dtype=np.int64)
        parts_routed: Times = np.array(stamps.routed, dtype=np.int64)
        numbers = np.array(stamps.numbers, dtype=np.int64)
        done = numbers[: len(parts_routed)]
        self.began, self.main_routed, self.routed = (np.full(count, NEVER) for _ in range(3))
        # Written backwards, the first part stands; written forwards, the last.
        self.began[numbers[::-1]] = self.parts_began[::-1]
        self.main_routed[done[::-1]] = parts_routed[::-1]
        self.routed[done] = parts_routed

    def residences(self, stage: int) -> Times:
        """Residence of every raw output of a stage; so far, of what is still there."""
        mine = self.stage == stage
        routed = self.routed[mine]
        residences: Times = np.where(routed == NEVER, self.ended_ns, routed) - self.sent[mine]
        return residences

    def number(self, stage: int, request: Request) -> int | None:
        """The raw output with a request's first text or first audio; None if it was never sent."""
        steps = self.schedule.steps[stage][request.number]
        position = first_audible(steps.total) if stage == CODE2WAV else 0
        number = int(self.schedule.places[stage, request.replica][steps.first + position])
        return number if number < len(self.sent) else None

    def first_residences(self, stage: int) -> list[int]:
        """Residence of each request's first text or first audio."""
        numbers = [number for each in self.schedule.requests if (number := self.number(stage, each)) is not None]
        routed = [int(self.main_routed[each]) for each in numbers]
        return [
            (self.ended_ns if until == NEVER else until) - int(self.sent[each])
            for until, each in zip(routed, numbers, strict=True)
        ]

    def ahead(self, number: int) -> int:
        """How many dispatches there were between the sending of a raw output and its own."""
        taken = self.parts_began
        return int(np.searchsorted(taken, self.began[number]) - np.searchsorted(taken, self.sent[number]))


def figures(stamps: Stamps, schedule: Schedule) -> dict[str, Any]:
    """All figures of one run.

    Args:
        stamps: Of the run.
        schedule: What was to be sent.
    """
    dispatches = Dispatches(stamps, schedule)
    sent, routed = len(stamps.sent), int((dispatches.routed != NEVER).sum())
    lasted_ns = stamps.ended_ns - stamps.started_ns
    loaded_until_ns = stamps.fed_ns if stamps.cut else stamps.ended_ns
    by_then = int(((dispatches.routed != NEVER) & (dispatches.routed <= loaded_until_ns)).sum())
    firsts = [dispatches.number(CODE2WAV, each) for each in schedule.requests]
    ahead = [dispatches.ahead(each) for each in firsts if each is not None and dispatches.began[each] != NEVER]
    put, handed, handled = (np.array(each, dtype=np.int64) for each in (stamps.put, stamps.handed, stamps.handled))
    return {
        "rate": schedule.load.rate,
        "sent": sent,
        "routed": routed,
        "cut_off": stamps.cut,
        "requests": len(schedule.requests),
        "unfinished_raw_outputs": sent - routed,
        "unfinished_requests": stamps.unfinished,
        "unhandled_messages": len(put) - int((handled > 0).sum()),
        "feeder_late": spread(stamps.late),
        "residence": {STAGE_NAMES[each]: spread(dispatches.residences(each)) for each in STAGES},
        "first_audio": spread(dispatches.first_residences(CODE2WAV)),
        "first_text": spread(dispatches.first_residences(THINKER)),
        "entries_ahead": spread(ahead, unit=1),
        "raw_outputs_per_s": by_then / ((loaded_until_ns - stamps.sent[0]) / 1e9),
        "cpu_per_raw_us": stamps.cpu_ns / max(routed, 1) / 1e3,
        "front_cpu_per_raw_us": stamps.front_cpu_ns / max(routed, 1) / 1e3,
        "own_utilisation": stamps.cpu_ns / lasted_ns,
        "front_utilisation": stamps.front_cpu_ns / lasted_ns,
        "last_hop": spread(handed - put[: len(handed)]),
        "handled": spread(np.where(handled, handled, stamps.ended_ns) - put[: len(handled)]),
        "user_first_audio": spread(_to_user(stamps, dispatches, CODE2WAV, stamps.first_audio)),
        "user_first_text": spread(_to_user(stamps, dispatches, THINKER, stamps.first_text)),
        "front_end_late": spread(stamps.turns_late),
        **_end_to_end(stamps, schedule),
    }


def _to_user(stamps: Stamps, dispatches: Dispatches, stage: int, firsts: Sequence[int]) -> list[int]:
    """From the sending of each request's first text or audio until the front end has handled it, or so far."""
    found = []
    for request, first in zip(dispatches.schedule.requests, firsts, strict=False):
        if (number := dispatches.number(stage, request)) is not None:
            until_ns = stamps.handled[first] if first >= 0 else 0
            found.append((until_ns or stamps.ended_ns) - int(dispatches.sent[number]))
    return found


def _end_to_end(stamps: Stamps, schedule: Schedule) -> dict[str, Any]:
    """From a request's scheduled start to its last message at the front end, and throughput, of the later waves.

    The last request of each slot is longer than the others and is left out. A closed loop keeps no clock.
    """
    load = schedule.load
    if load.closed:
        return {}
    later = [each for each in schedule.requests if each.wave and not each.last]
    ended_ns = [stamps.final[each.number] or stamps.ended_ns for each in later]
    lasted = [end - stamps.started_ns - each.start_ns for each, end in zip(later, ended_ns, strict=True)]
    done = sum(0 < stamps.final[each.number] <= stamps.fed_ns for each in later)
    return {"e2e_later": spread(lasted), "throughput_later_per_s": done / (load.seconds - load.wave_s)}

"""From stamps to figures: residence, hops, throughput. Times in milliseconds unless the name says otherwise.

Residence is from the sending of a raw output by its stage to the end of its routing. What was never routed, in a run
that was cut off, counts with its residence so far, which is a lower bound.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from benchmarks.replay.load import (
    CODE2WAV,
    STAGE_NAMES,
    STAGES,
    THINKER,
    Request,
    Schedule,
    first_audible,
)
from benchmarks.replay.measure import LEAD_NS, Stamps
from omni_fastpath.tools.ab.quantiles import quantile

NEVER = -1

Times = npt.NDArray[np.int64]


def spread(values: Any) -> dict[str, float | int | None]:
    """p50, p99, max and mean in milliseconds of durations in nanoseconds, and how many they are."""
    if len(values) == 0:
        return {"p50": None, "p99": None, "max": None, "mean": None, "n": 0}
    array = np.sort(np.asarray(values, dtype=np.float64)) / 1e6
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
        position = first_audible(steps.total, self.schedule.load.mix.silent) if stage == CODE2WAV else 0
        number = int(self.schedule.places[stage, request.replica][steps.first + position])
        return number if number < len(self.sent) else None

    def first_residences(self, stage: int, requests: Sequence[Request]) -> list[int]:
        """Residence of each request's first text or first audio."""
        numbers = [number for each in requests if (number := self.number(stage, each)) is not None]
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
    load = schedule.load
    dispatches = Dispatches(stamps, schedule)
    requests = schedule.requests
    first_wave = [each for each in requests if not each.wave]
    later = [each for each in requests if each.wave]
    # A closed loop is under load to its end: at the feeder's end its queues are still full.
    loaded_ns = (stamps.ended_ns if load.closed else stamps.fed_ns) - stamps.started_ns + LEAD_NS
    fed_s = (stamps.fed_ns - stamps.started_ns) / 1e9
    done = dispatches.routed != NEVER
    sent, routed = len(done), int(done.sum())
    by_fed = int((done & (dispatches.routed <= stamps.fed_ns)).sum())
    first_audio = dispatches.first_residences(CODE2WAV, requests)
    found: dict[str, Any] = {
        "rate": load.rate,
        "fed_s": fed_s,
        "sent": sent,
        "routed": routed,
        "cut_off": stamps.cut,
        "unfinished_raw_outputs": sent - routed,
        "unfinished_requests": stamps.unfinished,
        "feeder_late": spread(stamps.late),
        "residence": {STAGE_NAMES[each]: spread(dispatches.residences(each)) for each in STAGES},
        "first_audio": spread(first_audio),
        "first_audio_first_wave": spread(dispatches.first_residences(CODE2WAV, first_wave)),
        "first_audio_later": spread(dispatches.first_residences(CODE2WAV, later)),
        "first_text": spread(dispatches.first_residences(THINKER, requests)),
        "first_text_later": spread(dispatches.first_residences(THINKER, later)),
        "entries_ahead": _ahead(dispatches, schedule),
        "raw_outputs_per_s": _sustained(dispatches, stamps) if load.closed else by_fed / fed_s,
        "cpu_per_raw_us": stamps.cpu_ns[1] / max(routed, 1) / 1e3,
        "front_cpu_per_raw_us": stamps.front_cpu_ns[1] / max(routed, 1) / 1e3,
        "process_cpu_per_raw_us": stamps.process_cpu_ns[1] / max(routed, 1) / 1e3,
        "own_utilisation": stamps.cpu_ns[load.closed] / loaded_ns,
        "front_utilisation": stamps.front_cpu_ns[load.closed] / loaded_ns,
        "waited_share": stamps.waited_ns / (stamps.ended_ns - stamps.started_ns),
        "stretch": spread(stamps.stretches),
        **_hops(stamps),
        "user_first_audio": spread(_to_user(stamps, dispatches, CODE2WAV, stamps.first_audio)),
        "user_first_text": spread(_to_user(stamps, dispatches, THINKER, stamps.first_text)),
        "front_end_late": spread(stamps.turns_late),
    }
    if not load.closed:  # a closed loop keeps no clock
        found |= _end_to_end(stamps, schedule)
    return found


def _ahead(dispatches: Dispatches, schedule: Schedule) -> dict[str, float | None]:
    numbers = [dispatches.number(CODE2WAV, each) for each in schedule.requests]
    counts = [dispatches.ahead(each) for each in numbers if each is not None and dispatches.began[each] != NEVER]
    if not counts:
        return {"p50": None, "p99": None, "max": None, "mean": None}
    p50, p99 = (quantile(counts, share) for share in (0.5, 0.99))
    return {"p50": p50, "p99": p99, "max": max(counts), "mean": sum(counts) / len(counts)}


def _hops(stamps: Stamps) -> dict[str, Any]:
    """Last hop: from the put of a message for the front end to its hand-over; and until the front end has handled it.

    What was never handled counts with its time so far.
    """
    handled = np.array(stamps.handled, dtype=np.int64)
    handed = np.array(stamps.handed, dtype=np.int64)
    hops = handed - np.array(stamps.put, dtype=np.int64)[: len(handed)]
    heard = [each for each in stamps.first_audio if each >= 0]
    return {
        "handled": spread(
            np.where(handled, handled, stamps.ended_ns) - np.array(stamps.put, dtype=np.int64)[: len(handled)]
        ),
        "messages_handled_per_s": int((handled[handled <= stamps.fed_ns] > 0).sum())
        / max((stamps.fed_ns - stamps.started_ns) / 1e9, 1e-9),
        "unhandled_messages": len(stamps.put) - int((handled > 0).sum()),
        "last_hop": spread(hops),
        "last_hop_first_audio": spread(hops[heard]),
        "last_hop_behind": len(stamps.put) - len(handed),
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
    """From a request's scheduled start to its last message at the front end, and throughput of the later waves.

    The last request of each slot is longer than the others and is left out of the later waves.
    """
    load = schedule.load

    def duration(request: Request) -> int:
        return (stamps.final[request.number] or stamps.ended_ns) - stamps.started_ns - request.start_ns

    later = [each for each in schedule.requests if each.wave and not each.last]
    done = sum(0 < stamps.final[each.number] <= stamps.fed_ns for each in later)
    return {
        "e2e_first_wave": spread([duration(each) for each in schedule.requests if not each.wave]),
        "e2e_later": spread([duration(each) for each in later]),
        "throughput_later_per_s": done / (load.seconds - load.wave_s),
        "later_done_share": done / len(later) if later else None,
        "wave_s": load.wave_s,
        "requests": len(schedule.requests),
    }


def _sustained(dispatches: Dispatches, stamps: Stamps) -> float:
    """Raw outputs a second of a closed loop, front end included: until the last message is handed over, or the cut."""
    last = stamps.fed_ns if stamps.cut else stamps.ended_ns
    return int(((dispatches.routed != NEVER) & (dispatches.routed <= last)).sum()) / ((last - stamps.sent[0]) / 1e9)

"""From what the starts recorded to one table: waves and quantiles.

Nothing here knows of servers: the input is plain numbers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.rigs.samples import Sample, Wave, in_wave, times
from omni_fastpath.tools.ab.quantiles import quantile
from omni_fastpath.tools.ab.rows import Measure, Row, rows


@dataclass(frozen=True)
class Start:
    """What one start of a server gave.

    Attributes:
        arm: ``stock`` or ``fastpath``.
        throughput: Requests a second, from the bench.
        failed: Requests that failed in the bench.
        duration_s: How long the bench's load took.
        cpu_s: Processor seconds of the server's processes during the bench's load, by role.
        samples: The capture client's requests in the closed loop.
        start_s: How long the server took to be ready.
        paced: Its requests in the open loop, in which every start gets the same arrivals.
    """

    arm: str
    throughput: float
    failed: int
    duration_s: float
    cpu_s: dict[str, float]
    samples: Sequence[Sample]
    start_s: float
    paced: Sequence[Sample] = ()

    @property
    def cpu_total_s(self) -> float:
        """Processor seconds of all processes."""
        return sum(self.cpu_s.values())


_SHORT = {"ttft": "time to first text", "ttfp": "TTFP", "e2e": "E2E"}
_NAMES = {"ttft": "time to first text", "ttfp": "time to first audio packet (TTFP)", "e2e": "end to end (E2E)"}


OPEN_LOOP = "open loop, the same arrivals for every start"
PRIMARY = "TTFP, p50"
"""Of the open loop: what issue #4561 is about, at a load that is the same for both arms."""


def _latency(name: str, wave: Wave, share: float, concurrency: int) -> Measure[Start]:
    def read(start: Start) -> float:
        return 1000 * quantile(times(in_wave(start.samples, wave, concurrency), name), share)

    waves = "first wave" if wave == "first" else "later waves"
    group = f"{_NAMES[name]}, capture client"
    judged = wave == "later" and share == 0.5 and name != "ttft"
    return Measure(group, f"{waves}, p{100 * share:.0f}", "ms", "lower", read, judged=judged)


def _paced(name: str, share: float) -> Measure[Start]:
    def read(start: Start) -> float:
        return 1000 * quantile(times(start.paced, name), share)

    title = f"{_SHORT[name]}, p{100 * share:.0f}"
    return Measure(OPEN_LOOP, title, "ms", "lower", read, judged=True, primary=title == PRIMARY)


def measures(concurrency: int) -> list[Measure[Start]]:
    """Every row of the table, in its order."""
    bench = "vllm bench serve --omni"
    found: list[Measure[Start]] = [
        Measure(bench, "throughput", "req/s", "higher", lambda start: start.throughput, 2, judged=True),
        Measure(bench, "failed requests", "", "lower", lambda start: start.failed),
        Measure(bench, "server CPU during the load", "s", "lower", lambda start: start.cpu_total_s, 1, judged=True),
        Measure(
            bench,
            "server CPU a second of load",
            "cores",
            "neither",
            lambda start: start.cpu_total_s / start.duration_s if start.duration_s else math.nan,
            2,
        ),
    ]
    waves: tuple[Wave, Wave] = ("first", "later")
    found += [
        _latency(name, wave, share, concurrency)
        for name in ("ttfp", "e2e", "ttft")
        for wave in waves
        for share in (0.5, 0.99)
    ]
    found += [_paced(name, share) for name in ("ttfp", "e2e", "ttft") for share in (0.5, 0.9)]
    return found


def table(starts: Sequence[Start], concurrency: int) -> list[Row]:
    """The rows of the starts, with their verdicts."""
    return rows(measures(concurrency), starts)


CLOSED_LOOP = (
    "The load is a closed loop: the arm that answers sooner starts the next requests sooner, so that its stages work "
    "on more requests at once and on more of the processor, and requests that end together are followed by requests "
    "that start together. A time to first audio of the waves is to be read beside the throughput; the rows with the "
    "same arrivals for every start compare it by itself."
)

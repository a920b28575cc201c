"""From what the starts recorded to one table: waves, percentiles, spreads, and whether a difference exceeds them.

Nothing here knows of servers: the input is plain numbers.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

Better = Literal["higher", "lower", "neither"]
Wave = Literal["first", "later"]


@dataclass(frozen=True)
class Sample:
    """The times of one request of the capture client, seconds; None where there was none.

    Attributes:
        order: Position in which it was started.
        ttft: To the first text.
        ttfp: To the first audio packet.
        e2e: To the end of the answer.
        error: Why it failed; None when it was answered to its end.
        digest: Of everything in the answer that does not depend on time.
        audio_bytes: Samples that came back, in bytes.
    """

    order: int
    ttft: float | None
    ttfp: float | None
    e2e: float
    error: str | None
    digest: str
    audio_bytes: int


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


@dataclass(frozen=True)
class Measure:
    """One row's name, how to read it from a start, and which way is better."""

    group: str
    name: str
    unit: str
    better: Better
    read: Callable[[Start], float]
    digits: int = 0


@dataclass(frozen=True)
class Row:
    """One measure over all starts.

    Attributes:
        measure: What it is.
        values: A value per start, by arm, in the order of the starts.
    """

    measure: Measure
    values: dict[str, list[float]]

    def mean(self, arm: str) -> float:
        """Mean of an arm's starts."""
        return statistics.fmean(self.values[arm])

    def spread(self, arm: str) -> float | None:
        """Distance between an arm's highest and lowest start; None with a single start, which has no spread."""
        values = self.values[arm]
        return max(values) - min(values) if len(values) > 1 else None

    @property
    def ratio(self) -> float | None:
        """Fastpath over stock, of the means; None over a zero."""
        stock = self.mean("stock")
        return self.mean("fastpath") / stock if stock else None

    @property
    def exceeds_spread(self) -> bool | None:
        """Whether the arms differ by more than the wider spread within an arm; None when there is no spread."""
        spreads = [self.spread(arm) for arm in ("stock", "fastpath")]
        known = [spread for spread in spreads if spread is not None]
        if len(known) < len(spreads) or any(math.isnan(value) for arm in self.values.values() for value in arm):
            return None
        return abs(self.mean("fastpath") - self.mean("stock")) > max(known)

    @property
    def verdict(self) -> str:
        """``yes, better``, ``yes, worse``, ``yes`` where neither way is better, ``no``, or ``unknown``."""
        if self.exceeds_spread is None:
            return "unknown"
        if not self.exceeds_spread:
            return "no"
        if self.measure.better == "neither":
            return "yes"
        higher = self.mean("fastpath") > self.mean("stock")
        return "yes, better" if higher == (self.measure.better == "higher") else "yes, worse"


def in_wave(samples: Sequence[Sample], wave: Wave, concurrency: int) -> list[Sample]:
    """The requests of a wave: blocks of ``concurrency`` in start order, the first one or all later ones."""
    ordered = sorted(samples, key=lambda sample: sample.order)
    return ordered[:concurrency] if wave == "first" else ordered[concurrency:]


def percentile(values: Sequence[float], share: float) -> float:
    """The value below which *share* of the values lie, interpolated; NaN of nothing."""
    if not values:
        return math.nan
    ordered = sorted(values)
    place = share * (len(ordered) - 1)
    below = math.floor(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (place - below)


def times(samples: Sequence[Sample], name: str) -> list[float]:
    """One time of every request that was answered to its end, seconds."""
    found = (getattr(sample, name) for sample in samples if sample.error is None)
    return [value for value in found if value is not None]


_SHORT = {"ttft": "time to first text", "ttfp": "TTFP", "e2e": "E2E"}
_NAMES = {"ttft": "time to first text", "ttfp": "time to first audio packet (TTFP)", "e2e": "end to end (E2E)"}


def _latency(name: str, wave: Wave, share: float, concurrency: int) -> Measure:
    def read(start: Start) -> float:
        return 1000 * percentile(times(in_wave(start.samples, wave, concurrency), name), share)

    waves = "first wave" if wave == "first" else "later waves"
    return Measure(f"{_NAMES[name]}, capture client", f"{waves}, p{100 * share:.0f}", "ms", "lower", read)


def _paced(name: str, share: float) -> Measure:
    def read(start: Start) -> float:
        return 1000 * percentile(times(start.paced, name), share)

    return Measure(
        "the same arrivals for every start (open loop)", f"{_SHORT[name]}, p{100 * share:.0f}", "ms", "lower", read
    )


def measures(concurrency: int, *, paced: bool = False) -> list[Measure]:
    """Every row of the table, in its order; *paced*: those of the open loop too."""
    bench = "vllm bench serve --omni"
    rows = [
        Measure(bench, "throughput", "req/s", "higher", lambda start: start.throughput, 2),
        Measure(bench, "failed requests", "", "lower", lambda start: start.failed),
        Measure(bench, "server CPU during the load", "s", "lower", lambda start: start.cpu_total_s, 1),
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
    rows += [
        _latency(name, wave, share, concurrency)
        for name in ("ttfp", "e2e", "ttft")
        for wave in waves
        for share in (0.5, 0.99)
    ]
    if paced:
        rows += [_paced(name, share) for name in ("ttfp", "e2e", "ttft") for share in (0.5, 0.9)]
    return rows


def rows(starts: Sequence[Start], concurrency: int) -> list[Row]:
    """The table of the starts."""
    table = []
    for measure in measures(concurrency, paced=any(start.paced for start in starts)):
        values: dict[str, list[float]] = {"stock": [], "fastpath": []}
        for start in starts:
            values[start.arm].append(measure.read(start))
        table.append(Row(measure, values))
    return table


def shown(value: float | None, digits: int) -> str:
    """A number as the table shows it."""
    return "-" if value is None or math.isnan(value) else f"{value:.{digits}f}"


def header(starts: Sequence[Start]) -> list[str]:
    """The table's column names."""
    numbered = [f"{arm} {index + 1}" for arm in ("stock", "fastpath") for index in range(_count(starts, arm))]
    spreads = ["spread stock", "spread fastpath"]
    return ["measure", *numbered, *spreads, "fastpath / stock", "difference larger than the spread"]


def cells(row: Row) -> list[str]:
    """One row of the table as text."""
    measure = row.measure
    numbers = [*row.values["stock"], *row.values["fastpath"], row.spread("stock"), row.spread("fastpath")]
    name = f"{measure.name}, {measure.unit}" if measure.unit else measure.name
    return [name, *(shown(number, measure.digits) for number in numbers), shown(row.ratio, 2), row.verdict]


def _count(starts: Sequence[Start], arm: str) -> int:
    return sum(start.arm == arm for start in starts)


def summary(table: Sequence[Row]) -> str:
    """The verdicts, counted, in a sentence."""
    verdicts = [row.verdict for row in table]
    if all(verdict == "unknown" for verdict in verdicts):
        return "One start an arm has no spread: nothing can be said about any difference."
    neutral = f", and {verdicts.count('yes')} has no better way" if "yes" in verdicts else ""
    return (
        f"Of {len(table)} rows, the arms differ by more than the wider spread between starts of one arm in "
        f"{sum(verdict.startswith('yes') for verdict in verdicts)}: fastpath is better in "
        f"{verdicts.count('yes, better')} and worse in {verdicts.count('yes, worse')}{neutral}. "
        f"In {verdicts.count('no')} they do not"
        + (f"; {verdicts.count('unknown')} cannot be told." if "unknown" in verdicts else ".")
    )


CLOSED_LOOP = (
    "The load is a closed loop: the arm that answers sooner starts the next requests sooner, so that its stages work "
    "on more requests at once and on more of the processor, and requests that end together are followed by requests "
    "that start together. A time to first audio of the waves is to be read beside the throughput; the rows with the "
    "same arrivals for every start compare it by itself."
)

"""From what the starts recorded to one table: waves, quantiles, spreads, and the verdict where one was named for it.

Nothing here knows of servers: the input is plain numbers.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from omni_fastpath.compare import verdict
from omni_fastpath.compare.quantiles import quantile
from omni_fastpath.compare.verdict import Verdict

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
    """One row.

    Attributes:
        group: The rows that it stands among.
        name: Within the group.
        unit: Of its values; empty for a count.
        better: Which way is better.
        read: Its value of a start.
        digits: Behind the point, in the table.
        judged: It gets a verdict. Nine besides the primary one: of more, six starts an arm could not tell all.
    """

    group: str
    name: str
    unit: str
    better: Better
    read: Callable[[Start], float]
    digits: int = 0
    judged: bool = False

    @property
    def title(self) -> str:
        """The name by itself."""
        return f"{self.name} ({self.group})"


@dataclass(frozen=True)
class Row:
    """One measure over all starts.

    Attributes:
        measure: What it is.
        values: A value per start, by arm, in the order of the starts.
        verdict: Of fastpath against stock; None where none was named beforehand, or a start has no value.
    """

    measure: Measure
    values: dict[str, list[float]]
    verdict: Verdict | None = None

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
    def is_whole(self) -> bool:
        """Whether every start has a value."""
        return not any(math.isnan(value) for values in self.values.values() for value in values)

    @property
    def exceeds_spread(self) -> bool | None:
        """Whether the arms differ by more than the wider spread within an arm; None when there is no spread."""
        spreads = [self.spread(arm) for arm in ("stock", "fastpath")]
        known = [spread for spread in spreads if spread is not None]
        if len(known) < len(spreads) or not self.is_whole:
            return None
        return abs(self.mean("fastpath") - self.mean("stock")) > max(known)


def in_wave(samples: Sequence[Sample], wave: Wave, concurrency: int) -> list[Sample]:
    """The requests of a wave: blocks of ``concurrency`` in start order, the first one or all later ones."""
    ordered = sorted(samples, key=lambda sample: sample.order)
    return ordered[:concurrency] if wave == "first" else ordered[concurrency:]


def times(samples: Sequence[Sample], name: str) -> list[float]:
    """One time of every request that was answered to its end, seconds."""
    found = (getattr(sample, name) for sample in samples if sample.error is None)
    return [value for value in found if value is not None]


_SHORT = {"ttft": "time to first text", "ttfp": "TTFP", "e2e": "E2E"}
_NAMES = {"ttft": "time to first text", "ttfp": "time to first audio packet (TTFP)", "e2e": "end to end (E2E)"}


OPEN_LOOP = "the same arrivals for every start (open loop)"
PRIMARY = "TTFP, p50"
"""Of the open loop: what issue #4561 is about, at a load that is the same for both arms."""


def _latency(name: str, wave: Wave, share: float, concurrency: int) -> Measure:
    def read(start: Start) -> float:
        return 1000 * quantile(times(in_wave(start.samples, wave, concurrency), name), share)

    waves = "first wave" if wave == "first" else "later waves"
    group = f"{_NAMES[name]}, capture client"
    judged = wave == "later" and share == 0.5 and name != "ttft"
    return Measure(group, f"{waves}, p{100 * share:.0f}", "ms", "lower", read, judged=judged)


def _paced(name: str, share: float) -> Measure:
    def read(start: Start) -> float:
        return 1000 * quantile(times(start.paced, name), share)

    return Measure(OPEN_LOOP, f"{_SHORT[name]}, p{100 * share:.0f}", "ms", "lower", read, judged=True)


def measures(concurrency: int, *, paced: bool = False) -> list[Measure]:
    """Every row of the table, in its order; *paced*: those of the open loop too."""
    bench = "vllm bench serve --omni"
    rows = [
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
    return judge(table)


def judge(table: Sequence[Row]) -> list[Row]:
    """The rows with their verdicts; without any where the primary measure has no value in some start."""
    judged = {row.measure.title: row for row in table if row.measure.judged and row.is_whole}
    primary = f"{PRIMARY} ({OPEN_LOOP})"
    if primary not in judged:
        return list(table)
    known = {
        title: verdict.Measure(title, row.measure.unit, "higher" if row.measure.better == "higher" else "lower")
        for title, row in judged.items()
    }
    stock, fastpath = ({title: row.values[arm] for title, row in judged.items()} for arm in ("stock", "fastpath"))
    found = verdict.verdicts(known[primary], list(known.values()), stock, fastpath)
    return [replace(row, verdict=found.get(row.measure.title)) for row in table]


def shown(value: float | None, digits: int) -> str:
    """A number as the table shows it."""
    return "-" if value is None or math.isnan(value) else f"{value:.{digits}f}"


def header(starts: Sequence[Start]) -> list[str]:
    """The table's column names."""
    numbered = [f"{arm} {index + 1}" for arm in ("stock", "fastpath") for index in range(_count(starts, arm))]
    spreads = ["spread stock", "spread fastpath"]
    return ["measure", *numbered, *spreads, "fastpath / stock", "verdict"]


def cells(row: Row) -> list[str]:
    """One row of the table as text."""
    measure = row.measure
    numbers = [*row.values["stock"], *row.values["fastpath"], row.spread("stock"), row.spread("fastpath")]
    name = f"{measure.name}, {measure.unit}" if measure.unit else measure.name
    return [name, *(shown(number, measure.digits) for number in numbers), shown(row.ratio, 2), str(row.verdict or "")]


def _count(starts: Sequence[Start], arm: str) -> int:
    return sum(start.arm == arm for start in starts)


def _counted(words: Sequence[str]) -> str:
    if set(words) == {"too few starts"}:
        return "too few starts for a verdict on any of them, so that the table describes these starts and no others"
    return ", ".join(f"{word} in {words.count(word)}" for word in dict.fromkeys(words))


def summary(table: Sequence[Row]) -> list[str]:
    """What the table says, in sentences: the verdicts, what they rest on, and the spreads."""
    words = [row.verdict.word for row in table if row.verdict is not None]
    lines = []
    if words:
        starts = min(len(values) for values in table[0].values.values())
        primary = verdict.Measure(f"{PRIMARY} of the open loop", "ms", "lower")
        lines += [f"Fastpath against stock, {len(words)} rows that were named beforehand: {_counted(words)}."]
        lines += [verdict.legend(primary, len(words) - 1, starts)]
    else:
        lines += [f"There is no verdict: {PRIMARY} of the open loop has no value in some start."]
    told = [row.exceeds_spread for row in table]
    if all(each is None for each in told):
        return [*lines, "One start an arm has no spread."]
    description = f"the arms differ by more than the wider spread between starts of one arm in {told.count(True)}"
    return [*lines, f"Of all {len(table)} rows, {description}; that describes these starts, and is no verdict."]


def plain(found: Verdict | None) -> dict[str, object] | None:
    """A verdict as plain data; what is no finite number is None."""
    if found is None:
        return None

    def finite(value: float) -> float | None:
        return value if math.isfinite(value) else None

    return {
        "word": found.word,
        "ratio": finite(found.ratio),
        "interval": [finite(each) for each in found.interval],
        "p": found.p,
        "threshold": found.threshold,
    }


CLOSED_LOOP = (
    "The load is a closed loop: the arm that answers sooner starts the next requests sooner, so that its stages work "
    "on more requests at once and on more of the processor, and requests that end together are followed by requests "
    "that start together. A time to first audio of the waves is to be read beside the throughput; the rows with the "
    "same arrivals for every start compare it by itself."
)

"""What is sent, when: the schedule of one cell, the same for every arm and the same again for the same seed.

The pipeline is Qwen3-Omni's: thinker (text), talker (codes that nobody sees), code2wav (audio), each with the same
number of replicas. A raw output is one scheduler step of one replica and has an entry for each request that is active
there. **Load is stationary**: each replica has a fixed number of slots and each slot always holds a request, so that a
raw output always has the same number of entries, and each replica steps at a constant rate from its first step to its
last (gaps are exponential). What varies is only which request a slot holds.

The **first wave** is the first request of every slot: all start at once, as in a closed-loop benchmark. Their lengths
are spread evenly between one and two request durations, so that from then on starts are spread evenly over a wave
period. A wave period is one request duration; every slot starts one request a period, on the clock, whatever the
orchestrator does (open loop). The last request of a slot is longer than the others, so that the slot is held to the
end.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

THINKER, TALKER, CODE2WAV = STAGES = (0, 1, 2)
STAGE_NAMES = ("thinker", "talker", "code2wav")

STEP_MS = (15.0, 12.0, 8.0)
"""Ratio of the stages' step periods: those of the whole-server runs on the simulated device. A cell scales them."""

LAG_STEPS = (0.0, 2.0, 6.0)
"""How many steps of the stage before pass until a stage has its first: some chunks must be there first."""

SILENT = 3
"""Outputs of code2wav without audio before each one with: the N N N A of issue #4561."""

THINKER_STEPS = 64
"""Mean steps of a request on the thinker; the other stages' follow from their periods."""

WARM_STEPS = 8
"""Raw outputs that each replica sends before the clock starts: imports, caches and the first call of everything."""


@dataclass(frozen=True)
class Mix:
    """Batch size and payloads of the raw outputs: a set of service times.

    Attributes:
        name: As tables show it.
        entries: Requests active on a replica, the same on each stage: the entries of a raw output.
        samples: Audio samples in an audio output.
        frames: Codec frames in a talker's output, of 16 codes each.
        nominal: Raw outputs a second of a calibration. They are sent as fast as they are taken, so that only their
            number counts.
    """

    name: str
    entries: int
    samples: int
    frames: int
    nominal: float


SERVER = Mix("server", entries=4, samples=1920, frames=1, nominal=2200.0)
"""As in a whole server's run: four requests a replica, 80 ms of audio a packet, one codec frame a step."""

DEAR = Mix("dear", entries=32, samples=9600, frames=8, nominal=560.0)
"""1 ms of real processing and more: 32 requests a replica, 0.4 s of audio a packet, eight frames a step."""


@dataclass(frozen=True)
class Load:
    """The load of one cell.

    Attributes:
        mix: Batch size and payloads.
        replicas: Replicas of each stage.
        rate: Raw outputs a second, all replicas together.
        seconds: How long the load lasts.
        seed: Of gaps and phases.
        closed: Send as fast as the orchestrator takes it, in the schedule's order, instead of on the clock.
    """

    mix: Mix
    replicas: int
    rate: float
    seconds: float
    seed: int = 1
    closed: bool = False

    @property
    def scale(self) -> float:
        """What the step periods of ``STEP_MS`` are multiplied with."""
        return self.replicas * sum(1000 / step for step in STEP_MS) / self.rate

    def period_s(self, stage: int) -> float:
        """Mean step period of a replica of a stage."""
        return self.scale * STEP_MS[stage] / 1000

    def lag_s(self, stage: int) -> float:
        """How long after the thinker a stage has a request's first step."""
        return sum(LAG_STEPS[each] * self.period_s(each - 1) for each in range(1, stage + 1))

    @property
    def wave_s(self) -> float:
        """Duration of a request on each stage, which is the wave period."""
        return THINKER_STEPS * self.period_s(THINKER)


class Request(NamedTuple):
    """One request.

    Attributes:
        number: Its place among all.
        replica: The replica of each stage that serves it.
        slot: Its slot on that replica.
        wave: Which request of its slot it is; 0 is the first wave.
        start_ns: Scheduled start on the thinker, since the clock's start.
        end_ns: Scheduled end there.
        last: It is its slot's last one, and longer than the others.
    """

    number: int
    replica: int
    slot: int
    wave: int
    start_ns: int
    end_ns: int
    last: bool

    @property
    def id(self) -> str:
        """As the engine knows it."""
        return f"request-{self.number:06d}"


class Steps(NamedTuple):
    """Where the raw outputs of one request stand among those of its replica of one stage."""

    first: int
    total: int


class Entry(NamedTuple):
    """One entry of a raw output: the ``position``-th of ``total`` of a request on a stage."""

    request_id: str
    position: int
    total: int

    @property
    def finished(self) -> bool:
        """Whether it carries the finish reason."""
        return self.position == self.total - 1


def audible(position: int, total: int) -> bool:
    """Whether this output of code2wav has audio: N N N A, and always the last."""
    return position % (SILENT + 1) == SILENT or position == total - 1


def first_audible(total: int) -> int:
    """Position of a request's first output with audio."""
    return min(SILENT, total - 1)


class Schedule:
    """The raw outputs of one cell, in the order in which they are due."""

    def __init__(self, load: Load) -> None:
        self.load = load
        self.times = {
            (stage, replica): self._times(stage, replica) for stage in STAGES for replica in range(load.replicas)
        }
        self.requests = self._requests()
        self.steps = [[self._steps(stage, request) for request in self.requests] for stage in STAGES]

    def _times(self, stage: int, replica: int) -> npt.NDArray[np.int64]:
        """When one replica emits, nanoseconds since the clock's start."""
        load = self.load
        period, begin = load.period_s(stage), load.lag_s(stage)
        end = load.seconds - (load.lag_s(CODE2WAV) - begin)
        if end - begin < 2 * period:
            raise ValueError(f"{load.seconds} s are too short for a step every {period} s")
        rng = np.random.default_rng([load.seed, stage, replica])
        expected = (end - begin) / period
        gaps = rng.exponential(period, int(expected + 10 * expected**0.5 + 10))  # ten deviations: always enough
        times = begin + np.cumsum(gaps)
        times = times[times < end]
        return (times * 1e9).astype(np.int64)

    def _requests(self) -> list[Request]:
        load = self.load
        slots = load.mix.entries * load.replicas
        end, wave = load.seconds - load.lag_s(CODE2WAV), load.wave_s
        found: list[tuple[float, float, int, int, bool]] = []
        for slot in range(slots):
            start, length, number = 0.0, wave * (1 + slot / slots), 0
            while start + length + wave <= end:
                found.append((start, start + length, slot, number, False))
                start, length, number = start + length, wave, number + 1
            found.append((start, end, slot, number, True))
        found.sort()
        return [
            Request(number, slot % load.replicas, slot // load.replicas, wave_, int(start * 1e9), int(stop * 1e9), last)
            for number, (start, stop, slot, wave_, last) in enumerate(found)
        ]

    def _steps(self, stage: int, request: Request) -> Steps:
        times = self.times[stage, request.replica]
        lag = int(self.load.lag_s(stage) * 1e9)
        first = int(np.searchsorted(times, request.start_ns + lag))
        stop = len(times) if request.last else int(np.searchsorted(times, request.end_ns + lag))
        if stop <= first:
            raise ValueError(f"{request.id} has no step on stage {stage}: make requests or the cell longer")
        return Steps(first, stop - first)

    @cached_property
    def order(self) -> list[tuple[int, int, int]]:
        """Due time, stage and replica of every raw output, in the order of sending."""
        keys = list(self.times)
        times = np.concatenate([self.times[key] for key in keys])
        which = np.repeat(np.arange(len(keys)), [len(self.times[key]) for key in keys])
        ranked = np.argsort(times, kind="stable")
        return [(int(times[place]), *keys[which[place]]) for place in ranked]

    @cached_property
    def places(self) -> dict[tuple[int, int], npt.NDArray[np.int64]]:
        """For each stage and replica, which raw outputs of ``order`` are its."""
        keys = np.array([each[1] * self.load.replicas + each[2] for each in self.order])
        return {key: np.flatnonzero(keys == key[0] * self.load.replicas + key[1]) for key in self.times}

    def entries(self, stage: int, replica: int) -> Iterator[list[Entry]]:
        """The entries of each raw output of one replica, one for each slot."""
        slots: list[list[tuple[Request, Steps]]] = [[] for _ in range(self.load.mix.entries)]
        for request in self.requests:
            if request.replica == replica:
                slots[request.slot].append((request, self.steps[stage][request.number]))
        held = [0] * len(slots)
        for step in range(len(self.times[stage, replica])):
            raw = []
            for slot, queue in enumerate(slots):
                request, steps = queue[held[slot]]
                if step >= steps.first + steps.total:
                    held[slot] += 1
                    request, steps = queue[held[slot]]
                raw.append(Entry(request.id, step - steps.first, steps.total))
            yield raw

    @property
    def messages(self) -> int:
        """How many output messages the front end gets: one for each entry of a final-output stage."""
        return sum(each.total for stage in (THINKER, CODE2WAV) for each in self.steps[stage])


def warm_ids(load: Load, replica: int) -> list[str]:
    """The requests that warm a replica up, one for each slot."""
    return [f"warm-{replica}-{slot}" for slot in range(load.mix.entries)]


def warm_entries(load: Load, replica: int) -> list[list[Entry]]:
    """The entries of the raw outputs that warm a replica of any stage up."""
    return [[Entry(each, position, WARM_STEPS) for each in warm_ids(load, replica)] for position in range(WARM_STEPS)]


@dataclass(frozen=True)
class Cell:
    """One point of the grid.

    Attributes:
        mix: Batch size and payloads.
        replicas: Replicas of each stage.
        utilisation: Of fastpath's orchestrator; None: as fast as it takes it (closed loop).
    """

    mix: Mix
    replicas: int
    utilisation: float | None

    @property
    def name(self) -> str:
        """As options and tables show it."""
        if self.utilisation is None:
            return f"{self.mix.name}-{str(self.replicas) * 3}"
        return f"{self.mix.name}-{self.utilisation:g}"

    def load(self, capacity: float, seconds: float, seed: int) -> Load:
        """The load at this capacity (raw outputs a second at saturation)."""
        closed = self.utilisation is None
        rate = capacity * (1.0 if self.utilisation is None else self.utilisation)
        return Load(self.mix, self.replicas, rate, seconds, seed, closed)


CELLS = {
    cell.name: cell
    for mix in (SERVER, DEAR)
    for cell in (
        *(Cell(mix, 1, 0.4), Cell(mix, 2, 0.8), Cell(mix, 2, 0.95), Cell(mix, 2, 1.1)),
        *(Cell(mix, replicas, None) for replicas in (1, 2, 4)),
    )
}
USUAL = tuple(name for name, cell in CELLS.items() if cell.utilisation is not None or cell.replicas == 4)
"""The cells that run unless told otherwise; the other two of a mix are calibrations."""

"""A fleet: pipeline, requests, what their stages send and when, and what goes wrong; from a seed and nothing else."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any, Literal

Kind = Literal["text", "codes", "audio", "silent", "kv"]


@dataclass(frozen=True)
class Step:
    """What a stage sends of one request at one time.

    Attributes:
        at: Seconds after it was submitted to the stage.
        kind: What is in it.
        value: Makes it unlike any other.
        finish: How it ends the request (or the segment) at this stage.
    """

    at: float
    kind: Kind
    value: int
    finish: Literal["", "stop", "length", "error"] = ""


@dataclass(frozen=True)
class Request:
    """One request.

    Attributes:
        name: Its id.
        at: When it is submitted.
        output_kind: ``DELTA``, ``CUMULATIVE`` or ``FINAL_ONLY``.
        final_output_stages: The stages whose outputs it asked for.
        segments: For each segment of input (one, unless it is a streaming-input session) each stage's steps.
        pauses: Before each segment's input but the first, seconds after the segment before ended.
        abort_at: When its user aborts it.
        abort_rpc: Whether the user waits for the abort.
        in_flight_s: For how long a stage goes on sending after the abort.
    """

    name: str
    at: float
    output_kind: str
    final_output_stages: tuple[int, ...]
    segments: tuple[tuple[tuple[Step, ...], ...], ...]
    pauses: tuple[float, ...] = ()
    abort_at: float | None = None
    abort_rpc: bool = False
    in_flight_s: float = 0.0

    @property
    def session(self) -> bool:
        """Whether it is a streaming-input session."""
        return len(self.segments) > 1


@dataclass(frozen=True)
class Death:
    """A replica dies: the ``which``-th of those that the stage has had by then."""

    at: float
    stage: int
    which: int


@dataclass(frozen=True)
class Attach:
    """A replica is attached."""

    at: float
    stage: int


@dataclass(frozen=True)
class Fast:
    """How our arm is configured.

    Attributes:
        event_driven: The orchestrator's mode.
        options: Values of ``budgeted_drain``.
        chooser: Seed of what its plugin chooses as the next stage; None: it has none.
    """

    event_driven: bool
    options: dict[str, Any]
    chooser: int | None = None


@dataclass(frozen=True)
class Fleet:
    """A whole script."""

    seed: int
    async_chunk: bool
    stages: tuple[tuple[bool, str], ...]
    """For each stage whether its outputs go to the user, and its modality."""
    replicas: tuple[int, ...]
    cost_s: tuple[float, ...]
    """What processing a raw output of each stage takes."""
    tick_s: float
    """Stages send at multiples of this; what is due of several requests by then is one raw output."""
    requests: tuple[Request, ...]
    deaths: tuple[Death, ...] = ()
    attaches: tuple[Attach, ...] = ()
    fast: tuple[Fast, ...] = field(default_factory=tuple)


PIPELINES: dict[str, tuple[tuple[bool, str], ...]] = {
    "omni": ((True, "text"), (False, "latent"), (True, "audio")),
    "audio": ((False, "latent"), (False, "latent"), (True, "audio")),
    "all": ((True, "text"), (True, "text"), (True, "audio")),
    "tts": ((False, "latent"), (True, "audio")),
    "text": ((True, "text"),),
}


def fleet(seed: int) -> Fleet:
    """The fleet of a seed."""
    rng = random.Random(seed)
    name = rng.choices(list(PIPELINES), weights=(8, 2, 2, 3, 1))[0]
    stages = PIPELINES[name]
    async_chunk = len(stages) > 1 and rng.random() < 0.7
    count = rng.choice((1, 1, 2, 2, 3))
    replicas = tuple(rng.randrange(1, count + 1) for _ in stages)
    troubled = rng.random() < 0.7
    sessions = rng.random() < 0.15 and name in ("omni", "tts", "all")
    pace = rng.choice((0.0005, 0.001, 0.003))
    requests = tuple(
        _request(rng, n, stages, async_chunk=async_chunk, troubled=troubled, sessions=sessions, pace=pace)
        for n in range(rng.randrange(1, 10))
    )
    last = max(request.at for request in requests) + 0.03
    deaths: tuple[Death, ...] = ()
    attaches: tuple[Attach, ...] = ()
    if troubled and rng.random() < 0.6:
        deaths = tuple(
            Death(rng.uniform(0.001, last), rng.randrange(len(stages)), rng.randrange(3))
            for _ in range(rng.choice((1, 1, 2, 3)))
        )
    if rng.random() < 0.4:
        attaches = tuple(Attach(rng.uniform(0.0, last), rng.randrange(len(stages))) for _ in range(rng.randrange(1, 4)))
    cost = rng.choice((0.0, 3e-5, 2e-4, 6e-4, 2e-3))
    return Fleet(
        seed=seed,
        async_chunk=async_chunk,
        stages=stages,
        replicas=replicas,
        cost_s=tuple(cost * rng.choice((0.2, 1.0, 1.0, 4.0)) for _ in stages),
        tick_s=rng.choice((0.0002, 0.001)),
        requests=requests,
        deaths=deaths,
        attaches=attaches,
        fast=tuple(_fast(rng, len(stages)) for _ in range(2)),
    )


def _request(
    rng: random.Random,
    number: int,
    stages: tuple[tuple[bool, str], ...],
    *,
    async_chunk: bool,
    troubled: bool,
    sessions: bool,
    pace: float,
) -> Request:
    visible = [stage for stage, (seen, _) in enumerate(stages) if seen]
    wanted = tuple(visible)
    if len(visible) > 1:
        wanted = rng.choices((wanted, (visible[-1],), (visible[0],)), weights=(5, 3, 2))[0]
    session = sessions and rng.random() < 0.6
    segments = rng.randrange(2, 4) if session else 1
    at = rng.choice((0.0, rng.uniform(0.0, 0.05)))
    made = tuple(
        _segment(rng, number * 100 + segment, stages, async_chunk=async_chunk, pace=pace) for segment in range(segments)
    )
    if session:  # upstream forwards what has a KV-ready mark as no session's (``_handle_kv_ready_raw_outputs``)
        made = tuple(tuple(tuple(s for s in steps if s.kind != "kv") for steps in segment) for segment in made)
    if troubled and not session and rng.random() < 0.15:
        made = (_with_error(rng, made[0]),)
    aborted = troubled and rng.random() < 0.2
    return Request(
        name=f"q{number}",
        at=at,
        output_kind=rng.choice(("DELTA", "DELTA", "CUMULATIVE", "FINAL_ONLY")),
        final_output_stages=wanted,
        segments=made,
        pauses=tuple(rng.choice((0.0, 0.004)) for _ in range(segments - 1)),
        abort_at=max(0.0, at + rng.uniform(-0.001, 0.06)) if aborted else None,
        abort_rpc=rng.random() < 0.5,
        in_flight_s=rng.choice((0.0, 0.002, 1.0)),
    )


def _segment(
    rng: random.Random,
    number: int,
    stages: tuple[tuple[bool, str], ...],
    *,
    async_chunk: bool,
    pace: float,
) -> tuple[tuple[Step, ...], ...]:
    """Each stage's steps; under async-chunk a stage begins and ends after the one before it has."""
    made: list[tuple[Step, ...]] = []
    begin = end = 0.0
    for stage, (_, modality) in enumerate(stages):
        if not async_chunk:
            begin = end = 0.0
        count = rng.choice((1, 2, 3, 5, 8, 12, 18))
        times = []
        at = begin + rng.choice((0.0, rng.uniform(0.0, 4 * pace)))
        begin = at
        for _ in range(count):
            times.append(at)
            at += rng.choice((0.0, pace, pace, rng.uniform(0.0, 3 * pace)))
        times[-1] = max(times[-1], end)
        end = times[-1] + rng.choice((0.0, pace, rng.uniform(0.0, 5 * pace)))
        heard = rng.choice((0.1, 0.5, 1.0))
        steps = [
            Step(at, _kind(rng, modality, heard, last=n == count - 1), number * 1000 + n) for n, at in enumerate(times)
        ]
        if stage == 0 and not async_chunk and rng.random() < 0.3 and len(stages) > 1:
            place = rng.randrange(len(steps))
            steps.insert(place, Step(steps[place].at, "kv", 0))
        final = steps[-1]
        steps[-1] = Step(final.at, final.kind, final.value, rng.choice(("stop", "length")))
        made.append(tuple(steps))
    return tuple(made)


def _kind(rng: random.Random, modality: str, heard: float, *, last: bool) -> Kind:
    if modality == "text":
        return "text"
    if modality == "latent":
        return "codes"
    return "audio" if last or rng.random() < heard else "silent"


def _with_error(rng: random.Random, segment: tuple[tuple[Step, ...], ...]) -> tuple[tuple[Step, ...], ...]:
    """One stage fails at some step, and sends nothing after it."""
    stage = rng.randrange(len(segment))
    steps = tuple(step for step in segment[stage] if step.kind != "kv")
    steps = steps[: rng.randrange(1, len(steps) + 1)]
    broken = (*steps[:-1], Step(steps[-1].at, steps[-1].kind, steps[-1].value, "error"))
    return tuple(broken if n == stage else each for n, each in enumerate(segment))


def _fast(rng: random.Random, stages: int) -> Fast:
    options = {
        "order": rng.choice(("visible_first", "visible_first", "downstream_first", "stage_order")),
        "floor": rng.choice((None, 0.0, 0.05, 0.5 / stages)),
        "max_items": rng.choice((1, 2, 16, 16)),
        "max_time_us": rng.choice((50, 2000)),
        "stop_at_first_routable": rng.random() < 0.7,
    }
    return Fast(rng.random() < 0.5, options, rng.randrange(1 << 30) if rng.random() < 0.2 else None)

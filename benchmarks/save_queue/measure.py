"""Loads on one stage, in the stage's process: what each stream felt, how deep the queue was, what the steps cost."""

from __future__ import annotations

import itertools
import statistics
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from benchmarks.save_queue.rig import Rig, outstanding, queued, queued_bytes, unfetched

if TYPE_CHECKING:
    from benchmarks.save_queue.receiver import Received, Receiver

SLOW = "slow"
"""In the external request id of the stream whose sends are slow."""
RUN_TIMEOUT_S = 240.0
SAMPLE_S = 0.25
"""Between two looks at what is on its way."""


@dataclass(frozen=True)
class Load:
    """Streams that arrive evenly over a time, whatever the stage does.

    Attributes:
        streams: How many.
        tokens: What each samples, tokens (frames at the talker).
        arrivals_s: From the first arrival to the last, seconds.
        slow: Which one has slow sends; None: nobody.
        slow_ms: What each of its sends takes more, milliseconds.
    """

    streams: int
    tokens: int
    arrivals_s: float
    slow: int | None = None
    slow_ms: float = 200.0


def run_load(rig: Rig, receiver: Receiver, load: Load, tag: str) -> dict[str, Any]:
    """Run a load to the end of its last stream.

    Returns:
        ``streams`` (each a mapping, in order of arrival: ``slow``, ``ttfp_s``, ``e2e_s``, ``gap_s``, ``chunks``,
        ``digest``), ``max_total`` and ``max_stream`` (save tasks that wait), ``chunks_per_s``, ``busy`` (processor time
        of this process, in cores) and ``counters`` (of the patch, this run's).
    """
    names = [f"{tag}-{SLOW if number == load.slow else 'other'}-{number:03}" for number in range(load.streams)]
    undo = _slow_down(rig.stage, load) if load.slow is not None else None
    reset_counters()
    depth = _Depth()
    cpu_s = time.process_time()
    begun = time.monotonic() + 0.05
    arrivals = [begun + number * load.arrivals_s / max(load.streams - 1, 1) for number in range(load.streams)]
    try:
        waiting = 0
        while waiting < load.streams or rig.busy():
            while waiting < load.streams and arrivals[waiting] <= time.monotonic():
                receiver.expect(names[waiting])
                rig.add(names[waiting], tokens=load.tokens, prompt=f"{waiting:03}")
                waiting += 1
            if rig.busy():
                rig.turn()
                depth.look(rig)
            else:
                time.sleep(max(0.0, arrivals[waiting] - time.monotonic()))
        received = receiver.all_received(RUN_TIMEOUT_S)
        ended = time.monotonic()
        _settle(rig)
    finally:
        if undo is not None:
            undo()
    return {
        "streams": [
            {"slow": number == load.slow, **_felt(received[name], arrivals[number])}
            for number, name in enumerate(names)
        ],
        "max_total": depth.total,
        "max_stream": depth.stream,
        "chunks_per_s": sum(len(each.at_s) for each in received.values()) / (ended - begun),
        "busy": (time.process_time() - cpu_s) / (ended - begun),
        "counters": counters(),
    }


def _felt(received: Received, arrival_s: float) -> dict[str, Any]:
    times = received.at_s
    return {
        "ttfp_s": times[0] - arrival_s,
        "e2e_s": times[-1] - arrival_s,
        "gap_s": max((after - before for before, after in itertools.pairwise(times)), default=0.0),
        "chunks": len(times),
        "digest": received.digest,
    }


def _slow_down(stage: int, load: Load) -> Callable[[], None]:
    from omni_simulated_device.slow_sends import for_streams, slow_down

    return slow_down(for_streams(SLOW, load.slow_ms * 1e-3, stage=stage))


def _settle(rig: Rig, timeout_s: float = 60.0) -> None:
    """Wait until every save task is sent: those that nobody waits for too (clean-up)."""
    deadline = time.monotonic() + timeout_s
    while outstanding(rig.adapter):
        assert time.monotonic() < deadline, f"{len(queued(rig.adapter))} save tasks are left"
        time.sleep(0.005)


@dataclass
class _Depth:
    """The deepest queue that was seen, in waiting save tasks.

    Looked at now and then, not after every step: going through thousands of tasks takes the interpreter's lock for
    milliseconds, and an arm that makes more steps would pay for it more often.
    """

    total: int = 0
    stream: int = 0
    next_s: float = 0.0

    def look(self, rig: Rig) -> None:
        now = time.monotonic()
        if now < self.next_s:
            return
        from omni_fastpath.patches.save_queue_cap.queue import stream_of

        self.next_s = now + SAMPLE_S
        tasks = queued(rig.adapter)
        if tasks:
            self.total = max(self.total, len(tasks))
            self.stream = max(self.stream, *Counter(map(stream_of, tasks)).values())


# ---- The patch's own account ----


def _entry() -> Any:
    """The patch's ledger entry; None where the patch is not known."""
    from omni_fastpath.ledger import LEDGER

    return next((entry for entry in LEDGER if entry.patch.name == "save_queue_cap"), None)


def counters() -> dict[str, int]:
    """The patch's counters in this process; empty when it is off."""
    entry = _entry()
    return {} if entry is None else dict(entry.counters)


def reset_counters() -> None:
    """Let a run's counters and maxima be its own."""
    entry = _entry()
    for name in [] if entry is None else list(entry.counters):
        entry.counters[name] = 0


# ---- A receiver that stops, a put that blocks ----


@dataclass(frozen=True)
class Stall:
    """Streams that would go on for as long as the next stage takes nothing.

    Attributes:
        how: ``receiver``: its process is stopped (SIGSTOP); ``put``: every write to shared memory blocks.
        seconds: For how long.
        streams: How many.
        tokens: What each samples.
        before_s: Time from the last arrival until the stall, seconds.
    """

    how: str
    seconds: float
    streams: int
    tokens: int
    before_s: float = 1.0


def run_stall(rig: Rig, receiver: Receiver, stall: Stall, tag: str) -> dict[str, Any]:
    """Run a stall and then everything to its end.

    Returns:
        ``samples`` (seconds since the stall began, bytes queued, bytes not fetched, tasks queued), ``task_bytes`` and
        ``chunk_bytes`` (the largest that one task and one segment were seen to be), ``digests``, ``completed``,
        ``after_s`` (from the stall's end to the last chunk) and ``counters``.
    """
    names = [f"{tag}-stream-{number:03}" for number in range(stall.streams)]
    reset_counters()
    for number, name in enumerate(names):
        receiver.expect(name)
        rig.add(name, tokens=stall.tokens, prompt=f"{number:03}")
    samples = _Samples(rig, tag)
    begun = _run_for(rig, stall.before_s, samples)
    begin, end = _stalls(stall, receiver)
    begin()
    try:
        ended = _run_for(rig, stall.seconds, samples)
    finally:
        end()
    deadline = ended + RUN_TIMEOUT_S
    while rig.busy():
        assert time.monotonic() < deadline, f"{len(rig.scheduler.requests)} requests are left"
        rig.turn()
        samples.look()
    received = receiver.all_received(RUN_TIMEOUT_S)
    last = max(each.at_s[-1] for each in received.values())
    _settle(rig)
    samples.look(now=True)
    return {
        "samples": [(at - begun, *rest) for at, *rest in samples.found],
        "task_bytes": samples.task_bytes,
        "chunk_bytes": samples.chunk_bytes,
        "digests": [received[name].digest for name in names],
        "completed": sum(each.finished for each in received.values()),
        "after_s": last - ended,
        "counters": counters(),
    }


def _run_for(rig: Rig, seconds: float, samples: _Samples) -> float:
    """Run the stage for a time, also when it has nothing left to do; return when that was over."""
    deadline = time.monotonic() + seconds
    while (now := time.monotonic()) < deadline:
        if rig.busy():
            rig.turn()
        else:
            time.sleep(0.01)
        samples.look()
    return now


def _stalls(stall: Stall, receiver: Receiver) -> tuple[Callable[[], None], Callable[[], None]]:
    """What begins the stall, and what ends it."""
    if stall.how == "receiver":
        return receiver.stop, receiver.go_on
    from omni_simulated_device.slow_sends import slow_down

    open_again = threading.Event()
    undo: list[Callable[[], None]] = []

    def blocked(_stream: str, _stage: int) -> float:
        open_again.wait()
        return 0.0

    def end() -> None:
        open_again.set()
        for each in undo:
            each()

    return lambda: undo.append(slow_down(blocked)), end


class _Samples:
    """Bytes on their way over time. Looked at from the stage's own loop: a thread more would cost the others time."""

    def __init__(self, rig: Rig, tag: str) -> None:
        self._rig, self._tag = rig, tag
        self._next = 0.0
        self.found: list[tuple[float, int, int, int]] = []
        self.task_bytes = 0
        self.chunk_bytes = 0

    def look(self, *, now: bool = False) -> None:
        at = time.monotonic()
        if at < self._next and not now:
            return
        self._next = at + SAMPLE_S
        tasks = queued(self._rig.adapter)
        chunks = unfetched(self._tag, self._rig.stage)
        self.task_bytes = max(self.task_bytes, *(queued_bytes([task]) for task in tasks[-1:]), 0)
        self.chunk_bytes = max(self.chunk_bytes, *chunks, 0)
        self.found.append((at, queued_bytes(tasks), sum(chunks), len(tasks)))


# ---- What it costs the scheduler's thread ----


@dataclass
class _Span:
    """Microseconds of the calls of one function."""

    us: list[float] = field(default_factory=list)

    def timed(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            begun = time.perf_counter_ns()
            try:
                return function(*args, **kwargs)
            finally:
                self.us.append((time.perf_counter_ns() - begun) / 1e3)

        return call


def run_overhead(rig: Rig, receiver: Receiver, streams: int, steps: int, tag: str) -> dict[str, Any]:
    """Run *streams* for *steps* steps, nothing slow, and time what the scheduler's thread does.

    ``around``: schedule() less what upstream's own body takes, from its first helper to its last; stock has a figure
    too, which is what the body does outside of them. ``append``: all appends of a step together; a deque's cannot be
    timed from inside and counts as nothing.

    Returns:
        Medians and means in microseconds a step: ``schedule``, ``update``, ``around``, ``append``; ``appends`` a step.
    """
    scheduler, adapter = rig.scheduler, rig.adapter
    schedule, update, append = _Span(), _Span(), _Span()
    body: list[float] = []
    begun_ns = [0]

    def first(wrapped: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            if not begun_ns[0]:  # upstream calls this helper twice a step
                begun_ns[0] = time.perf_counter_ns()
            return wrapped(*args, **kwargs)

        return call

    def last(wrapped: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            result = wrapped(*args, **kwargs)
            body.append((time.perf_counter_ns() - begun_ns[0]) / 1e3)
            begun_ns[0] = 0
            return result

        return call

    timed = {
        "_drop_aborted_queued_requests": first(scheduler._drop_aborted_queued_requests),
        "_wrap_omni_scheduler_output": last(scheduler._wrap_omni_scheduler_output),
        "schedule": schedule.timed(scheduler.schedule),
        "update_from_output": update.timed(scheduler.update_from_output),
    }
    queue = adapter._pending_save_reqs
    ours = hasattr(queue, "streams")
    names = [f"{tag}-stream-{number:03}" for number in range(streams)]
    appended_before: list[int] = []
    try:
        for name, function in timed.items():
            setattr(scheduler, name, function)
        if ours:
            queue.append = append.timed(queue.append)
        for number, name in enumerate(names):
            receiver.expect(name)
            rig.add(name, tokens=steps, prompt=f"{number:03}")
        while rig.busy():
            appended_before.append(len(append.us))
            rig.turn()
        receiver.all_received(RUN_TIMEOUT_S)
    finally:
        for name in timed:
            delattr(scheduler, name)
        if ours:
            del queue.append
    around = [whole - inner for whole, inner in zip(schedule.us, body, strict=True)]
    appends = [
        sum(append.us[start:end])
        for start, end in itertools.pairwise([*appended_before, len(append.us)])
        if end > start
    ]
    spans: Mapping[str, list[float]] = {
        "schedule": schedule.us,
        "update": update.us,
        "around": around,
        "append": appends or [0.0],
    }
    return {
        **{f"{name}_p50_us": statistics.median(values) for name, values in spans.items()},
        **{f"{name}_mean_us": statistics.fmean(values) for name, values in spans.items()},
        "appends_a_step": len(append.us) / max(len(appends), 1),
        "counters": counters(),
    }

"""Loads on one stage, in the stage's process: what each stream felt, how deep the queue was, what the steps cost."""

from __future__ import annotations

import functools
import itertools
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

from benchmarks.save_queue.rig import Rig, outstanding, queued, queued_bytes, unfetched

if TYPE_CHECKING:
    from benchmarks.save_queue.receiver import Received, Receiver

SLOW = "slow"
"""In the external request id of the stream whose sends are slow."""
FIRST_SLOW = 3
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
        slow: How many of them have slow sends: the fourth and those after it.
        slow_ms: What each of their sends takes more, milliseconds.
    """

    streams: int
    tokens: int
    arrivals_s: float
    slow: int = 0
    slow_ms: float = 200.0

    def is_slow(self, number: int) -> bool:
        """Whether this stream, counted from 0 in order of arrival, is one of them."""
        return FIRST_SLOW <= number < FIRST_SLOW + self.slow


def run_load(rig: Rig, receiver: Receiver, load: Load, tag: str) -> dict[str, Any]:
    """Run a load to the end of its last stream. Sends are slow until nobody but their own streams is left.

    Returns:
        ``streams`` (each a mapping, in order of arrival: ``slow``, ``ttfp_s``, ``e2e_s``, ``gap_s``, ``chunks``,
        ``digest``), ``max_total`` and ``max_stream`` (save tasks that wait), ``chunks_per_s``, ``busy`` (processor time
        of this process, in cores) and ``counters`` (of the patch, this run's).
    """
    names = [f"{tag}-{SLOW if load.is_slow(number) else 'other'}-{number:03}" for number in range(load.streams)]
    slowness = _Slowness(rig, load)
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
            if waiting == load.streams:
                slowness.end_when_alone()
        while not slowness.end_when_alone():
            time.sleep(0.005)
        received = receiver.all_received(RUN_TIMEOUT_S)
        ended = time.monotonic()
        _settle(rig)
    finally:
        slowness.end()
    return {
        "streams": [
            {"slow": load.is_slow(number), **_felt(received[name], arrivals[number])}
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


class _Slowness:
    """Slow sends of a load's slow streams, until the others are done: what comes after tells nothing of them."""

    def __init__(self, rig: Rig, load: Load) -> None:
        from omni_simulated_device.slow_sends import for_streams, slow_down

        self._rig = rig
        self._next_s = 0.0
        self._undo = slow_down(for_streams(SLOW, load.slow_ms * 1e-3, stage=rig.stage)) if load.slow else None

    def end_when_alone(self) -> bool:
        """Whether it has ended; ends it if none but the slow streams has anything left. Looks now and then."""
        now = time.monotonic()
        if self._undo is None or (now >= self._next_s and not self._others_wait()):
            self.end()
            return True
        self._next_s = max(self._next_s, now + SAMPLE_S) if now >= self._next_s else self._next_s
        return False

    def _others_wait(self) -> bool:
        from omni_fastpath.patches.save_queue_cap.tasks import stream_of

        adapter = self._rig.adapter
        if any(SLOW not in name for name in self._rig.scheduler.requests):
            return True
        in_flight = [name for name, token in list(adapter._sender_tokens.items()) if token.in_flight]
        return any(SLOW not in name for name in [*in_flight, *map(stream_of, queued(adapter))])

    def end(self) -> None:
        if self._undo is not None:
            self._undo()
            self._undo = None


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
        from omni_fastpath.patches.save_queue_cap.tasks import stream_of

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


# ---- What it costs ----

WARM_UP_STEPS = 10


class _Clocked:
    """Processor time of the scheduler's thread in upstream's two functions, a pair of clock readings a call.

    ``around`` is ``schedule()`` less upstream's own body from its first helper to its last: stock has a figure too,
    what the body does outside of the two.
    """

    def __init__(self, scheduler: Any) -> None:
        self.schedule_us: list[float] = []
        self.update_us: list[float] = []
        self.around_us: list[float] = []
        self._scheduler = scheduler
        self._inner_ns = self._begun_ns = 0
        self._hooks: dict[str, Callable[..., Any]] = {
            "_drop_aborted_queued_requests": self._first(scheduler._drop_aborted_queued_requests),
            "_wrap_omni_scheduler_output": self._last(scheduler._wrap_omni_scheduler_output),
            "schedule": self._schedule(scheduler.schedule),
            "update_from_output": self._update(scheduler.update_from_output),
        }

    def __enter__(self) -> Self:
        for name, function in self._hooks.items():
            setattr(self._scheduler, name, function)
        return self

    def __exit__(self, *_: object) -> None:
        for name in self._hooks:
            delattr(self._scheduler, name)

    def _first(self, wrapped: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            if not self._begun_ns:  # upstream calls this helper twice a step
                self._begun_ns = time.thread_time_ns()
            return wrapped(*args, **kwargs)

        return call

    def _last(self, wrapped: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            result = wrapped(*args, **kwargs)
            self._inner_ns = time.thread_time_ns() - self._begun_ns
            return result

        return call

    def _schedule(self, wrapped: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            self._begun_ns = 0
            begun = time.thread_time_ns()
            result = wrapped(*args, **kwargs)
            whole = time.thread_time_ns() - begun
            self.schedule_us.append(whole / 1e3)
            self.around_us.append((whole - self._inner_ns) / 1e3)
            return result

        return call

    def _update(self, wrapped: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            begun = time.thread_time_ns()
            result = wrapped(*args, **kwargs)
            self.update_us.append((time.thread_time_ns() - begun) / 1e3)
            return result

        return call


def _lanes(rig: Rig) -> list[int]:
    """Clocks of the processor time of the threads that send."""
    queue = rig.adapter._pending_save_reqs
    threads = getattr(queue, "lanes", (rig.adapter.save_thread,))
    return [time.pthread_getcpuclockid(thread.ident) for thread in threads if thread.ident is not None]


def run_overhead(
    rig: Rig, receiver: Receiver, streams: int, steps: int, tag: str, *, sends: bool = True
) -> dict[str, Any]:
    """Run *streams* at a time for *steps* steps each, nobody slow: processor time of the scheduler's thread and lanes.

    A send costs upstream 150 us of system calls and serialisation, whose drift hides what a queue costs. Without
    *sends* the connector takes a chunk and forgets it, and all else is the same.

    Returns:
        Lists of microseconds, one for each step of all streams: ``schedule``, ``update``, ``around``; ``lane_us``: what
        the threads that send took for each task that was queued; ``tasks``, ``process_us`` a step and ``counters``.
    """
    names = [f"{tag}-stream-{number:03}" for number in range(streams)]
    reset_counters()
    if not sends:
        rig.connector.put = functools.partial(_forgotten, rig.connector)
    for number, name in enumerate(names):
        if sends:
            receiver.expect(name)
        rig.add(name, tokens=steps, prompt=f"{number:03}")
    lanes = _lanes(rig)
    lanes_ns = sum(map(time.clock_gettime_ns, lanes))
    process_s = time.process_time()
    full: list[int] = []
    with _Clocked(rig.scheduler) as clocked:
        while rig.busy():
            rig.turn()
            if rig.in_flight and len(rig.in_flight[0].request_ids) == streams:
                full.append(len(clocked.schedule_us) - 1)
        receiver.all_received(RUN_TIMEOUT_S)
        _settle(rig)
    if not sends:
        del rig.connector.put
    took_ns = sum(map(time.clock_gettime_ns, lanes)) - lanes_ns
    tasks = streams * steps
    full = full[WARM_UP_STEPS:-2]  # the last steps of a stream, and their updates, end requests
    depth = rig.depth - 1
    return {
        "schedule": [clocked.schedule_us[step] for step in full],
        # An update comes after the schedule() of the step after it.
        "update": [clocked.update_us[step - depth] for step in full],
        "around": [clocked.around_us[step] for step in full],
        "lane_us": took_ns / 1e3 / tasks,
        "tasks": tasks,
        "process_us": (time.process_time() - process_s) * 1e6 / steps,
        "counters": counters(),
    }


def _forgotten(connector: Any, **_: Any) -> tuple[bool, int, dict[str, Any] | None]:
    """In the place of ``put``."""
    connector._metrics["puts"] += 1
    connector._metrics["bytes_transferred"] += 1
    return True, 1, None


# ---- A long prompt ----


@dataclass(frozen=True)
class Prompt:
    """One long prompt among streams that decode.

    Attributes:
        streams: That decode.
        tokens: What each samples.
        prompt_tokens: Of the long one, computed in one step.
    """

    streams: int
    tokens: int
    prompt_tokens: int


def run_prompt(rig: Rig, receiver: Receiver, prompt: Prompt, tag: str) -> dict[str, Any]:
    """Let a long prompt come when all others decode.

    Returns:
        ``longest_ms`` (wall) and ``longest_cpu_ms`` of one ``schedule()`` from the prompt's arrival on, ``gap_s`` (the
        others' largest gaps), ``digests``, ``counters``.
    """
    others = [f"{tag}-other-{number:03}" for number in range(prompt.streams)]
    reset_counters()
    schedule = rig.scheduler.schedule
    walls: list[tuple[float, float]] = []

    def timed(*args: Any, **kwargs: Any) -> Any:
        begun, begun_cpu = time.perf_counter(), time.thread_time()
        result = schedule(*args, **kwargs)
        walls.append((time.perf_counter() - begun, time.thread_time() - begun_cpu))
        return result

    rig.scheduler.schedule = timed
    try:
        for number, name in enumerate(others):
            receiver.expect(name)
            rig.add(name, tokens=prompt.tokens, prompt=f"{number:03}")
        steps = 0
        while rig.busy():
            rig.turn()
            steps += 1
            if steps == prompt.tokens // 3:
                walls.clear()
                receiver.expect(f"{tag}-long")
                rig.add(f"{tag}-long", tokens=4, prompt="long", prompt_tokens=prompt.prompt_tokens)
        received = receiver.all_received(RUN_TIMEOUT_S)
        _settle(rig)
    finally:
        del rig.scheduler.schedule
    return {
        "longest_ms": max(wall for wall, _ in walls) * 1e3,
        "longest_cpu_ms": max(cpu for _, cpu in walls) * 1e3,
        "gaps_s": [_felt(received[name], 0.0)["gap_s"] for name in others],
        "digests": [received[name].digest for name in [*others, f"{tag}-long"]],
        "counters": counters(),
    }


# ---- Text beside puts that hang ----

HUNG = "hung"


@dataclass(frozen=True)
class Text:
    """Audio streams, some of whose puts hang, and a request for text alone.

    Attributes:
        streams: With audio.
        hung: How many of them have puts that hang.
        tokens: Of the text of each.
        text_tokens: Of the request for text alone.
        alone_after_s: When that comes, after the others.
        seconds: After which is looked.
    """

    streams: int = 4
    hung: int = 2
    tokens: int = 200
    text_tokens: int = 150
    alone_after_s: float = 1.0
    seconds: float = 4.5


def run_text(rig: Rig, receiver: Receiver, text: Text, tag: str) -> dict[str, Any]:
    """Count the text that comes out of the stage while puts hang, then let everything end.

    Returns:
        ``audio`` and ``alone``: tokens of each audio request and of the one for text alone after ``seconds``;
        ``alone_s``: how long that took (None: it goes on); ``digests`` and ``counters`` (at that time).
    """
    from vllm_omni.engine.serialization import serialize_additional_information

    from omni_simulated_device.slow_sends import slow_down

    open_again = threading.Event()

    def hangs(stream: str, _stage: int) -> float:
        if HUNG in stream:
            open_again.wait()
        return 0.0

    names = [f"{tag}-{HUNG if number < text.hung else 'other'}-{number}" for number in range(text.streams)]
    alone, tokens, done_s = None, Counter[str](), None
    reset_counters()
    undo = slow_down(hangs)
    try:
        begun = time.monotonic()
        for number, name in enumerate(names):
            receiver.expect(name)
            rig.add(name, tokens=text.tokens, prompt=f"{number:03}")
        while (now := time.monotonic()) < begun + text.seconds:
            if alone is None and now >= begun + text.alone_after_s:
                alone = f"{tag}-text"
                request = rig.add(alone, tokens=text.text_tokens, prompt="999")
                request.additional_information = serialize_additional_information({"omni_final_stage_id": 0})
            if not rig.busy():
                time.sleep(0.01)
                continue
            rig.turn(tokens)
            if alone is not None and done_s is None and tokens[alone] >= text.text_tokens:
                done_s = time.monotonic() - begun - text.alone_after_s
        found = {"audio": [tokens[name] for name in names], "alone": tokens[f"{tag}-text"], "alone_s": done_s}
        found["counters"] = counters()
    finally:
        open_again.set()
        undo()
    while rig.busy():
        rig.turn()
    received = receiver.all_received(RUN_TIMEOUT_S)
    _settle(rig)
    return {**found, "digests": [received[name].digest for name in names]}

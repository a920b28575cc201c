"""One arm of one cell, in this process: run it, stamp it, and give the stamps back.

Real are the orchestrator on its own thread and event loop, the stage pools, vLLM's client with its socket reader and
decoder, the output processors, routing, and the front end's drain on uvloop in the main thread, which shares the
interpreter's lock with the orchestrator as in an API server.

What a user waits for ends when the front end has handled a message: each request has a task that takes its messages
and spends ``work_us`` of processor time on each, as making an event of the stream does, under the interpreter's lock.

What is added is the same in all arms: two stamps a raw output (processing begins; routed), three a message (put for the
front end; handed over; handled), with a look at its content, and a timer on the front end's event loop.
"""

from __future__ import annotations

import asyncio
import gc
import multiprocessing
import tempfile
import time
from array import array
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from benchmarks.replay.feeder import DISPATCHED, STOP, feed
from benchmarks.replay.load import (
    CODE2WAV,
    STAGES,
    THINKER,
    WARM_STEPS,
    Load,
    Mix,
    Schedule,
    audible,
    warm_ids,
)
from benchmarks.rigs.arm import Arm

DRAIN_S = 10.0
"""How long after the feeder's end the orchestrator may work off what is queued; then the run is cut off."""

CLOSED_LIMIT = 2.0
"""How many times its nominal duration a closed-loop cell may take."""

LEAD_NS = 100_000_000
"""From the last word to the feeder to the clock's start."""

WORK_US = 200.0
"""What handling a message costs the front end.

From a whole server on the simulated device, Qwen3-Omni, chat streams: processor time of the API server's main thread
(``/proc/PID/task/PID/stat``) by the events that clients got, 350 and 380 µs an event of text (8 requests of 44, two
runs). In it is what each request costs once: its parsing, and its summary of some 3 ms. Without these about 200 are
left, which is an estimate; an event with audio costs more."""

_LOOK_S = 0.1
"""How often the main thread looks whether the run is over."""

_TICK_S = 0.005
"""How often somebody else wants a turn of the front end's event loop."""


@dataclass
class Stamps:
    """What a run left. All clocks are ``monotonic_ns``.

    Attributes:
        started_ns: The clock's start.
        fed_ns: When the feeder had sent everything.
        ended_ns: When everything was handed over, or the run was cut off.
        sent: When each raw output was sent, in the schedule's order.
        late: How much later than due each was sent.
        began: When processing began of what was dispatched, in the order of dispatch.
        routed: When that was routed; shorter than ``began`` by at most one.
        numbers: Which raw output it was. One may be dispatched in parts (fastpath holds an entry that ends a request).
        put: When each output message was put for the front end.
        handed: When each was handed over, in the same order.
        handled: When the front end had done its work on each, in the same order; 0 for never.
        turns_late: How late the front end's event loop was for somebody else's timer.
        first_text: For each request, which handed message was its first text; -1 for none.
        first_audio: The same for audio.
        final: For each request, when its last message was handled; 0 for never.
        cpu_ns: Processor time of the orchestrator's thread.
        front_cpu_ns: The same of the front end's thread.
        errors: What was wrong with the content: at most a few.
        unfinished: Requests whose last message never came.
        cut: The run was cut off.
    """

    started_ns: int = 0
    fed_ns: int = 0
    ended_ns: int = 0
    sent: list[int] = field(default_factory=list)
    late: list[int] = field(default_factory=list)
    began: array[int] = field(default_factory=lambda: array("q"))
    routed: array[int] = field(default_factory=lambda: array("q"))
    numbers: array[int] = field(default_factory=lambda: array("q"))
    put: array[int] = field(default_factory=lambda: array("q"))
    handed: array[int] = field(default_factory=lambda: array("q"))
    handled: array[int] = field(default_factory=lambda: array("q"))
    turns_late: array[int] = field(default_factory=lambda: array("q"))
    first_text: list[int] = field(default_factory=list)
    first_audio: list[int] = field(default_factory=list)
    final: list[int] = field(default_factory=list)
    cpu_ns: int = 0
    front_cpu_ns: int = 0
    errors: list[str] = field(default_factory=list)
    unfinished: int = 0
    cut: bool = False

    def forget(self) -> None:
        """Drop what the warm-up left."""
        for each in (self.began, self.routed, self.numbers, self.put, self.handed, self.handled):
            del each[:]
        del self.turns_late[:]


class Inbox:
    """Stands for a request at the front end: takes its messages, works, stamps, checks content against the schedule.

    Args:
        name: The request's id.
        number: Its number; -1 while warming up.
        counts: Raw outputs of each stage.
        mix: Of the load.
        stamps: Where to note.
    """

    def __init__(self, name: str, number: int, counts: tuple[int, ...], mix: Mix, stamps: Stamps) -> None:
        self._name, self._number, self._counts, self._mix, self._stamps = name, number, counts, mix, stamps
        self._waiting: asyncio.Queue[tuple[int, Any]] = asyncio.Queue()
        self._positions = [0, 0, 0]
        self._packets = 0
        self.done = False

    async def put(self, message: Any) -> None:
        """Upstream's drain hands one message over."""
        stamps = self._stamps
        stamps.handled.append(0)
        stamps.handed.append(time.monotonic_ns())
        await self._waiting.put((len(stamps.handed) - 1, message))

    async def read(self) -> None:
        """Take the messages one by one until the last, as whoever serves the request."""
        while not self.done:
            number, message = await self._waiting.get()
            until_ns = time.thread_time_ns() + round(WORK_US * 1e3)
            while time.thread_time_ns() < until_ns:
                pass
            self._stamps.handled[number] = now_ns = time.monotonic_ns()
            self._check(number, message, now_ns)
        while not self._waiting.empty():  # what comes after the end is an error
            self._check(*self._waiting.get_nowait(), time.monotonic_ns())

    def _check(self, number: int, message: Any, now_ns: int) -> None:
        stamps = self._stamps
        stage = message.stage_id
        position = self._positions[stage]
        self._positions[stage] = position + 1
        completion = message.engine_outputs.outputs[0]
        if stage == THINKER:
            if completion.token_ids != [position]:
                self._wrong(f"thinker's output {position} has the tokens {completion.token_ids}")
            if position == 0 and self._number >= 0:
                stamps.first_text[self._number] = number
        else:
            self._check_audio(completion, position, number)
        if message.engine_outputs.finished != (position == self._counts[stage] - 1):
            self._wrong(f"stage {stage}: output {position} of {self._counts[stage]} is not where it should end")
        if message.finished:
            self._end(now_ns)

    def _check_audio(self, completion: Any, position: int, number: int) -> None:
        audio = completion.multimodal_output.get("audio")
        heard = audio is not None and audio.numel() > 0
        if heard != audible(position, self._counts[CODE2WAV]):
            self._wrong(f"code2wav's output {position} has{'' if heard else ' no'} audio")
        if not heard:
            return
        if audio.numel() != self._mix.samples or int(audio[0]) != self._packets:
            self._wrong(f"packet {self._packets} holds {audio.numel()} samples of packet {int(audio[0])}")
        if self._packets == 0 and self._number >= 0:
            self._stamps.first_audio[self._number] = number
        self._packets += 1

    def _end(self, now_ns: int) -> None:
        if self.done:
            self._wrong("it ended twice")
        self.done = True
        if self._number >= 0:
            self._stamps.final[self._number] = now_ns
        for stage in (THINKER, CODE2WAV):
            if self._positions[stage] != self._counts[stage]:
                self._wrong(f"it ended after {self._positions[stage]} of {self._counts[stage]} of stage {stage}")

    def _wrong(self, what: str) -> None:
        if len(self._stamps.errors) < 20:
            self._stamps.errors.append(f"{self._name}: {what}")


def run(arm: Arm, load: Load) -> tuple[Stamps, Schedule]:
    """Run one arm of one cell in this process.

    Args:
        arm: What is on.
        load: What is sent.

    Raises:
        AssertionError: Something was lost, doubled or put in another order, though the run was not cut off.
    """
    import uvloop

    schedule = Schedule(load)
    with tempfile.TemporaryDirectory() as folder, _Feeder(Path(folder), arm, load) as feeder:
        stamps: Stamps = uvloop.run(_run(arm, schedule, feeder))
    assert not stamps.errors, (arm.name, stamps.errors)
    for problem in out_of_order(stamps.numbers, schedule):
        raise AssertionError(f"{arm.name}: {problem}")
    assert arm.on or len(set(stamps.numbers)) == len(stamps.numbers), (arm.name, "doubled raw outputs")
    if not stamps.cut:
        assert len(stamps.put) == len(stamps.handed) == schedule.messages, (arm.name, "lost or doubled messages")
        assert set(stamps.numbers) == set(range(len(schedule.order))), (arm.name, "lost raw outputs")
    return stamps, schedule


class _Feeder:
    """The feeder process, started early because it imports as much as this one."""

    def __init__(self, folder: Path, arm: Arm, load: Load) -> None:
        context = multiprocessing.get_context("spawn")
        self.addresses = {
            (stage, replica): f"ipc://{folder / f'{stage}-{replica}'}"
            for stage in STAGES
            for replica in range(load.replicas)
        }
        self.shared = context.RawArray("q", 2)
        self._link, theirs = context.Pipe()
        arguments = (self.addresses, load, self.shared, theirs, "forward_gate" in arm.enabled)
        self._process = context.Process(target=feed, args=arguments, daemon=True)

    def __enter__(self) -> Self:
        self._process.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.shared[STOP] = 1
        self._process.join(15)
        self._process.kill()

    def say(self, word: Any) -> None:
        """Tell it to go on."""
        self._link.send(word)

    async def hear(self) -> Any:
        """Its next word.

        Raises:
            RuntimeError: It died.
        """
        while not await asyncio.to_thread(self._link.poll, 1.0):
            # Once more: its last word may have come between the two looks.
            if not self._process.is_alive() and not self._link.poll():
                raise RuntimeError(f"the feeder died with {self._process.exitcode}")
        return self._link.recv()


def out_of_order(numbers: Iterable[int], schedule: Schedule) -> Iterator[str]:
    """What was dispatched before an earlier raw output of its replica; held parts of one come after it, and may."""
    latest = dict.fromkeys(schedule.times, -1)
    seen: set[int] = set()
    for number in numbers:
        if number in seen:
            continue
        seen.add(number)
        _, stage, replica = schedule.order[number]
        if number < latest[stage, replica]:
            yield f"stage {stage}, replica {replica}: {latest[stage, replica]} was dispatched before {number}"
        latest[stage, replica] = number


async def _run(arm: Arm, schedule: Schedule, feeder: _Feeder) -> Stamps:
    import zmq
    import zmq.asyncio
    from vllm.v1.serial_utils import MsgpackDecoder
    from vllm_omni.engine import OmniEngineCoreOutputs

    from benchmarks.rigs.inprocess import QWEN3_OMNI, Pipeline, Stage, front_end

    load = schedule.load
    stages = [Stage(each.final_output, each.modality, load.replicas) for each in QWEN3_OMNI]
    pipeline = Pipeline(stages, event_driven=arm.event_driven)
    stamps = Stamps()
    inboxes = _register(pipeline, schedule, stamps)
    _stamp(pipeline, stamps, feeder.shared, len(schedule.order))
    for (stage, replica), address in feeder.addresses.items():
        socket = zmq.asyncio.Context.instance().socket(zmq.PULL)  # type: ignore[attr-defined]
        socket.setsockopt(zmq.RCVHWM, 0)  # type: ignore[attr-defined]
        socket.bind(address)
        pipeline.replicas[stage][replica].read_from(socket, MsgpackDecoder(OmniEngineCoreOutputs))
    drain = front_end(pipeline, inboxes, event_driven=arm.event_driven)
    with pipeline:
        drain._final_output_handler()
        tasks = [asyncio.ensure_future(each.read()) for each in inboxes.values()]
        tasks.append(asyncio.ensure_future(_watch_turns(stamps)))
        assert await feeder.hear() == "ready"
        feeder.say("warm up")
        assert await feeder.hear() == "warmed up"
        warm = [inboxes[each] for replica in range(load.replicas) for each in warm_ids(load, replica)]
        assert await _until(lambda: all(each.done for each in warm), 30), (arm.name, "the warm-up did not end")
        await _measured(pipeline, schedule, stamps, feeder)
        for task in (*tasks, drain.final_output_task):
            task.cancel()
        *ends, _, _ = await asyncio.gather(*tasks, drain.final_output_task, return_exceptions=True)
    for end in ends:
        if isinstance(end, Exception):
            raise end
    if pipeline.crash is not None:
        raise pipeline.crash
    for replicas in pipeline.replicas:
        for each in replicas:
            each.resources.output_socket.close(linger=0)
    stamps.unfinished = sum(not inboxes[each.id].done for each in schedule.requests)
    return stamps


async def _measured(pipeline: Any, schedule: Schedule, stamps: Stamps, feeder: _Feeder) -> None:
    """From the clock's start to the last message, or to the cut."""
    load = schedule.load
    # As upstream's API server does at its start, so that what lives anyway is not looked through again and again.
    gc.collect()
    gc.freeze()
    pipeline.do(stamps.forget)
    feeder.shared[DISPATCHED] = 0
    clock = time.pthread_getcpuclockid(pipeline.thread.ident)
    cpu_ns, front_cpu_ns = time.clock_gettime_ns(clock), time.thread_time_ns()
    stamps.started_ns = time.monotonic_ns() + LEAD_NS
    feeder.say(stamps.started_ns)
    limit_s = load.seconds * CLOSED_LIMIT if load.closed else load.seconds + 30
    hearing = asyncio.ensure_future(feeder.hear())
    done, _ = await asyncio.wait({hearing}, timeout=limit_s)
    if not done:  # a closed-loop cell waits for an orchestrator that is too slow
        feeder.shared[STOP] = 1
        stamps.cut = True
    stamps.sent, stamps.late, stamps.fed_ns = await hearing
    messages, raw_outputs = schedule.messages, len(schedule.order)

    def all_done() -> bool:
        if stamps.cut:
            return True
        if len(stamps.handed) < messages or not all(stamps.handled) or len(stamps.routed) < len(stamps.began):
            return False
        return len(set(stamps.numbers)) >= raw_outputs

    drained = await _until(all_done, DRAIN_S)
    stamps.cut |= not drained
    stamps.ended_ns = time.monotonic_ns() if stamps.cut else max(*stamps.handled, stamps.routed[-1])
    stamps.cpu_ns = time.clock_gettime_ns(clock) - cpu_ns
    stamps.front_cpu_ns = time.thread_time_ns() - front_cpu_ns


def _register(pipeline: Any, schedule: Schedule, stamps: Stamps) -> dict[str, Inbox]:
    """Register every request before the clock starts, so that no arm pays for it while it is measured."""
    load = schedule.load
    inboxes = {}
    for replica in range(load.replicas):
        for each in warm_ids(load, replica):
            pipeline.add_request(each, replicas=[replica] * len(STAGES))
            inboxes[each] = Inbox(each, -1, (WARM_STEPS,) * len(STAGES), load.mix, stamps)
    for request in schedule.requests:
        pipeline.add_request(request.id, replicas=[request.replica] * len(STAGES))
        counts = tuple(schedule.steps[stage][request.number].total for stage in STAGES)
        inboxes[request.id] = Inbox(request.id, request.number, counts, load.mix, stamps)
    stamps.first_text = [-1] * len(schedule.requests)
    stamps.first_audio = [-1] * len(schedule.requests)
    stamps.final = [0] * len(schedule.requests)
    return inboxes


def _stamp(pipeline: Any, stamps: Stamps, shared: Any, raw_outputs: int) -> None:
    """Stamp what this orchestrator does; its class is not touched."""
    from vllm_omni.engine.messages import OutputMessage

    orchestrator = pipeline.orchestrator
    process, finish = orchestrator._process_llm_stage_outputs, orchestrator._finish_raw_terminal_requests
    put, depth = orchestrator.output_async_queue.put, orchestrator.output_async_queue.qsize
    began, routed, numbers, puts = stamps.began, stamps.routed, stamps.numbers, stamps.put
    seen = bytearray(raw_outputs)
    now = time.monotonic_ns

    async def stamped_process(stage_id: int, replica_id: int, raw: Any, *rest: Any) -> Any:
        began.append(now())
        number = raw.engine_index
        numbers.append(number)
        if number >= 0 and not seen[number]:
            seen[number] = 1
            shared[DISPATCHED] += 1  # the one writer
        return await process(stage_id, replica_id, raw, *rest)

    async def stamped_finish(*args: Any) -> None:
        await finish(*args)
        routed.append(now())

    class StampedOutput:
        async def put(self, message: Any) -> None:
            if type(message) is OutputMessage:
                puts.append(now())
            await put(message)

        def qsize(self) -> int:
            found: int = depth()
            return found

    orchestrator._process_llm_stage_outputs = stamped_process
    orchestrator._finish_raw_terminal_requests = stamped_finish
    orchestrator.output_async_queue = StampedOutput()


async def _watch_turns(stamps: Stamps) -> None:
    """Note how late somebody else's timer is on this event loop."""
    late, now = stamps.turns_late, time.monotonic_ns
    while True:
        due_ns = now() + round(_TICK_S * 1e9)
        await asyncio.sleep(_TICK_S)
        late.append(max(now() - due_ns, 0))


async def _until(true: Callable[[], bool], seconds: float) -> bool:
    """Whether a condition came true in time."""
    deadline = time.monotonic() + seconds
    while not true():
        if time.monotonic() > deadline:
            return False
        await asyncio.sleep(_LOOK_S)
    return True

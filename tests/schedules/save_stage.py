"""One arm of a schedule: upstream's stage, whose save thread the test controls, and a plain model of its queue.

The scheduler, the adapter, its ``save_loop`` and shared memory are real. The payload of a request at a position
contains the position, so that the expected content of each chunk is known.
"""

from __future__ import annotations

import sys
from collections import Counter, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
from vllm.v1.outputs import EMPTY_MODEL_RUNNER_OUTPUT
from vllm.v1.request import RequestStatus
from vllm_omni.distributed.omni_connectors.connectors.shm_connector import SharedMemoryConnector
from vllm_omni.distributed.omni_connectors.transfer_adapter.base import OmniTransferAdapterBase
from vllm_omni.distributed.omni_connectors.transfer_adapter.chunk_transfer_adapter import OmniChunkTransferAdapter
from vllm_omni.outputs import OmniModelRunnerOutput
from vllm_omni.utils.mm_outputs import partition_flat_payload

from omni_fastpath.declare import State
from omni_fastpath.ledger import LEDGER
from omni_fastpath.patches.save_queue_cap.fair_queue import SLOW_S
from omni_fastpath.patches.save_queue_cap.save_queue import SaveQueue
from tests.patches.small_stage import SmallStage
from tests.schedules.save_thread import Condition, Cut, Lock, SaveThread, at_line

WIDTH = 1024
CHUNK = 8 * WIDTH
"""Bytes of a payload. The smallest ``max_bytes`` is eight payloads."""
KEPT = ("_sender_tokens", "put_req_chunk", "request_payload", "code_prompt_token_ids")


class OtherConnector(SharedMemoryConnector):  # type: ignore[misc]  # upstream is not typed here
    """A subclass, for which the patch does not count unfetched chunks."""


class Clock:
    """The clock of a schedule, in place of the module `time`."""

    now = 1000.0

    def monotonic(self) -> float:
        """Return the seconds, as `time.monotonic`."""
        return self.now


@dataclass(frozen=True)
class Shape:
    """The configuration of a stage.

    Attributes:
        asynchronous: Whether upstream's asynchronous scheduler is used.
        device: The device of the payloads. On "cpu" they are a buffer of the runner that a later step overwrites.
        blocks: Blocks of KV cache. If they are few, requests are preempted.
        is_counted: Whether the connector has exactly upstream's shared-memory class.
        options: Options of `save_queue_cap`.
    """

    asynchronous: bool
    device: str
    blocks: int
    is_counted: bool
    options: dict[str, Any]


@dataclass
class Task:
    """A save task in the model.

    Attributes:
        number: Its number in the order of arrival.
        stream: Its stream.
        value: The position in its payload. None without a payload.
        delays: Slow sends that it has waited for, by stream.
        others_s: Seconds of fast sends that it has waited for.
    """

    number: int
    stream: str
    value: int | None
    delays: Counter[str] = field(default_factory=Counter)
    others_s: float = 0.0


class Stage(SmallStage):
    """An arm, with the patch if it is installed.

    Args:
        config: The result of `stage_config`.
        shape: Its configuration.
        clock: The clock of the patch.
    """

    def __init__(self, config: Any, shape: Shape, clock: Clock) -> None:
        kind = "OmniARAsyncScheduler" if shape.asynchronous else "OmniARScheduler"
        config.scheduler_config.async_scheduling = shape.asynchronous
        config.scheduler_config.scheduler_cls = f"vllm_omni.core.sched.omni_ar_scheduler.{kind}"
        self.shape, self.clock, self.turns = shape, clock, SaveThread()
        loop = OmniTransferAdapterBase.save_loop
        connector = (SharedMemoryConnector if shape.is_counted else OtherConnector)({"stage_id": 0})
        with (
            mock.patch.object(OmniTransferAdapterBase, "save_loop", lambda each: self.turns.run(lambda: loop(each))),
            mock.patch.object(OmniTransferAdapterBase, "recv_loop", return_value=None),
            mock.patch.object(OmniChunkTransferAdapter, "create_connector", return_value=connector),
        ):
            super().__init__(config, device=shape.device, blocks=shape.blocks)
        self.condition = self.adapter._save_cond = Condition(self.turns)
        self.receiver = SharedMemoryConnector({"stage_id": 1})
        self.wrong: list[str] = []
        self.rest: dict[str, list[str]] = {}
        self.waiting: dict[int, Task] = {}
        self.aborted, self.preempted, self.unfetched = set[str](), set[str](), set[str]()
        self.cuts = self.failures = self._returns = 0
        self.put_well, self.fetched = Counter[str](), Counter[str]()
        self._failing: dict[str, Mapping[int, str]] = {}
        self._segments: dict[str, list[int]] = {}
        self._slow_s: dict[str, float] = {}
        self._in_flight: deque[Any] = deque()
        self._left_out_s: dict[str, float] = {}
        self._slow: set[str] = set()
        self._was_aside = False
        self._preempt, self.scheduler._preempt_request = self.scheduler._preempt_request, self._preempted
        self._tasks = 0
        self._sending: Task | None = None
        self._buffers = deque(torch.zeros(16, WIDTH, dtype=torch.int64) for _ in range(1 + shape.asynchronous))
        self.is_ours = isinstance(self.queue, SaveQueue)
        if self.is_ours:
            self.queue._lock = Lock(self.turns)
            self._append, self.queue.append = self.queue.append, self._appended
            self._send, self.adapter._send_single_request = self.adapter._send_single_request, self._sent

    def __exit__(self, *_: object) -> None:
        self.adapter.stop_event.set()
        self.turns.free()
        super().__exit__()

    # ---- The model: queued tasks in the order of arrival ----

    def _appended(self, task: dict[str, Any]) -> None:
        payload = task.get("multimodal_output")
        value = None if payload is None else int(payload["codes.audio"][0, 0])
        whose = task["request"].external_req_id if "request" in task else task["cleanup_shm"][0].rsplit("_", 1)[0]
        known = task["model"] = Task(self._tasks, whose, value)
        self.waiting[known.number] = known
        self._tasks += 1
        self._append(task)

    def _sent(self, task: dict[str, Any]) -> None:
        self._begin(task["model"], task)
        since_s = self.clock.now
        try:
            self._send(task)
        finally:
            self._end(task["model"], self.clock.now - since_s)

    def _begin(self, known: Task, task: dict[str, Any]) -> None:
        self.condition.rounds = 0
        if self.waiting.pop(known.number, None) is None:
            raise SystemExit(f"{known} is sent twice")
        earlier = [each for each in self.waiting.values() if self._goes_before(each, known)]
        if earlier:
            self.wrong.append(f"{known} is sent before {earlier[0]}")
        self._was_aside = self.queue.is_aside  # it counts from the next task on, because this one was taken earlier
        if known.value is not None and bool((task["multimodal_output"]["codes.audio"] != known.value).any()):
            self.wrong.append(f"{known} has another payload now")
        self._sending = known

    def _goes_before(self, one: Task, other: Task) -> bool:
        """Whether one must be sent first: one stream, two that were never slow, or a queue that has stepped aside."""
        is_alike = self._was_aside or one.stream == other.stream or not {one.stream, other.stream} & self._slow
        return is_alike and one.number < other.number

    def _end(self, known: Task, seconds: float) -> None:
        """End a send, and check that no fast stream waits for slow ones repeatedly."""
        self._sending = None
        if seconds >= SLOW_S:
            self._slow.add(known.stream)
        for each in self.waiting.values():
            if each.stream in self._slow or self.queue.is_aside:
                continue
            if seconds < SLOW_S:
                each.others_s += seconds
                continue
            each.delays[known.stream] += 1
            if each.delays[known.stream] > 2 + each.others_s / SLOW_S:
                self.wrong.append(f"{each} waits for slow sends of {known.stream}")

    def look(self) -> None:
        """Check the invariants between two events."""
        if self.is_ours:
            where, queue = self.turns.parked, self.queue
            if where == "wait" and self.waiting and not self.condition.is_notified:
                self.wrong.append("the save thread sleeps, and something waits")
            expected = len(self.waiting) + (self._sending is not None)
            if where in ("put", "wait") and queue.tasks != expected and not queue.is_aside:
                self.wrong.append(f"the queue counts {queue.tasks} tasks, and {expected} are there")
            state = LEDGER.named("save_queue_cap").state
            if queue.is_aside or state is not State.APPLIED:
                self.wrong.append(f"{state}, aside: {queue.is_aside}")
        assert not self.wrong, self.wrong

    # ---- What happens ----

    def arrive(
        self, name: str, tokens: int, segments: list[int], failing: Mapping[int, str], slow_s: float, is_fetched: bool
    ) -> None:
        """Add a request, or a session with further segments.

        Args:
            name: Its name.
            tokens: Tokens of the request or of the first segment.
            segments: Tokens of further segments.
            failing: The puts that fail, by number, and how.
            slow_s: Seconds that each of its puts lasts.
            is_fetched: Whether its chunks are fetched.
        """
        self._failing[self.stream(name)] = failing
        self._slow_s[self.stream(name)] = slow_s
        self.unfetched |= set() if is_fetched else {name}
        if segments:
            self._segments[name] = list(segments)
        self.add(name, tokens=tokens, resumable=bool(segments))

    def steps(self, count: int, cut: Cut | None) -> None:
        """Run steps of the engine. At a cut the save thread runs between two lines of the patch."""

        def switch() -> None:
            self.cuts += 1
            for _ in range(cut.turns if cut else 0):
                self.turns.resume()

        before = sys.gettrace()
        sys.settrace(self._trace(cut, switch) or before)
        try:
            for _ in range(count):
                self.step()
        finally:
            sys.settrace(before)

    def sends(self, seconds: list[float], cut: Cut | None) -> None:
        """Let the save thread send, with these further seconds per send. At a cut it stops between two lines."""

        def stop() -> None:
            self.cuts += 1
            self.turns.park("line")

        self._leave_line()
        self.turns.trace = self._trace(cut, stop)
        for each in seconds:
            if self.turns.parked == "put":
                self.clock.now += each + (self._slow_s[self._sending.stream] if self._sending else 0.0)
            elif self.turns.parked == "wait" and not self.condition.is_notified:
                self.clock.now += 0.1  # upstream's loop waits no longer
            self.turns.resume()
            if self.turns.parked == "line":
                break
        self.turns.trace = None

    def _trace(self, cut: Cut | None, action: Callable[[], None]) -> Callable[..., Any] | None:
        return at_line(cut.line, action) if cut is not None else None

    def _leave_line(self) -> None:
        """Let the save thread continue to its next send or wait, without time passing."""
        while self.turns.parked in ("line", "lock"):
            self.turns.resume()

    def wait(self, seconds: float) -> None:
        """Advance the clock."""
        self._leave_line()
        self.clock.now += seconds

    def leave(self, name: str) -> None:
        """Abort a request, as when its client disconnects."""
        if name in self.scheduler.requests:
            self.aborted.add(name)
            self.abort(name)

    def fetch(self, name: str, count: int) -> None:
        """Fetch up to *count* chunks, as the next stage does."""
        while count and name not in self.aborted | self.unfetched:
            count -= 1
            stream = self.stream(name)
            if self.receiver.get("0", "1", f"{stream}_0_{self.fetched[stream]}") is None:
                return
            self.fetched[stream] += 1

    # ---- The stage ----

    def _noted(self, from_stage: str, to_stage: str, put_key: str, data: Any) -> Any:
        """Call upstream's ``put``, which lasts as long as the schedule has it."""
        stream = put_key.rsplit("_", 2)[0]
        codes = None if data.codes is None or data.codes.audio is None else data.codes.audio.flatten().tolist()[:1]
        fails = self._failing[stream].get(len(self.chunks[stream]))
        self.failures += fails is not None
        self.chunks[stream].append((put_key, codes or [], bool(data.meta.finished)))
        result = (False, 0, None) if fails else self._put(from_stage, to_stage, put_key, data)
        self.put_well[stream] += not fails
        self.condition.rounds = 0
        self.turns.park("put")
        if fails == "raises":
            raise RuntimeError("the test's connector raises")
        return result

    def step(self) -> list[str]:
        """Schedule a step, process finished ones, and give sessions their next segment.

        Returns:
            The requests in the step.
        """
        running = list(self.scheduler.running)
        scheduled = self.scheduler.schedule()
        names = list(scheduled.num_scheduled_tokens)
        if self.is_ours and not self.queue.is_aside:
            self._look_at_holds({each.request_id for each in running if each.status == RequestStatus.RUNNING}, names)
        self._in_flight.append((scheduled, self._answer(scheduled)))
        while len(self._in_flight) > (self.shape.asynchronous and bool(names)):
            for batch in self.scheduler.update_from_output(*self._in_flight.popleft()).values():
                for each in batch.outputs:
                    seen = sorted(partition_flat_payload(getattr(each, "multimodal_output", None) or {})[1])
                    said = (each.new_token_ids, str(each.finish_reason), seen, each.prefill_stats is not None)
                    self.outputs[each.request_id].append(said)
        for name, segments in self._segments.items():
            request = self.scheduler.requests.get(name)
            if request is not None and request.status == RequestStatus.WAITING_FOR_STREAMING_REQ:
                if segments:
                    self._returns += 1
                    self.add(name, tokens=segments.pop(0), resumable=True)
                elif self.is_quiet():  # upstream drops what waits of a session that ends
                    self.add(name, tokens=1)
        return names

    def _preempted(self, request: Any, *args: Any, **kwargs: Any) -> None:
        self.preempted.add(request.request_id)
        self._returns += 1
        self._preempt(request, *args, **kwargs)

    def is_quiet(self) -> bool:
        """Whether no task is queued or being sent."""
        return not len(self.queue) and self.turns.parked == "wait"

    def _answer(self, scheduled: Any) -> Any:
        cached, counts = scheduled.scheduled_cached_reqs, scheduled.num_scheduled_tokens
        if not counts:
            return EMPTY_MODEL_RUNNER_OUTPUT
        computed = dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        computed |= {new.req_id: new.num_computed_tokens for new in scheduled.scheduled_new_reqs}
        is_shared = self.is_ours and self.shape.device == "cpu"
        self._buffers.rotate()
        batch = self._buffers[0] if is_shared else torch.zeros_like(self._buffers[0])
        batch.fill_(-7)
        positions = [computed[name] + count for name, count in counts.items()]
        payloads: list[Any] = []
        for row, position in enumerate(positions):
            batch[row] = position
            payloads.append({"codes.audio": batch[row : row + 1], "sr": torch.tensor(24000)})
        return OmniModelRunnerOutput(
            req_ids=list(counts),
            req_id_to_index={name: row for row, name in enumerate(counts)},
            sampled_token_ids=[[1 + position] for position in positions],
            inter_stage_outputs=payloads,
            multimodal_outputs=payloads,
        )

    # ---- Limits ----

    def _look_at_holds(self, running: set[str], scheduled: list[str]) -> None:
        """Check that no hold is too long and that no limit is exceeded."""
        options = LEDGER.named("save_queue_cap").options
        left_out = running - set(scheduled)
        self._left_out_s = {name: self._left_out_s.get(name, self.clock.now) for name in left_out}
        for name, since_s in self._left_out_s.items():
            if self.clock.now - since_s > options.max_hold_s:
                self.wrong.append(f"{name} is held for {self.clock.now - since_s} s")
        # Each request has steps in flight, and one step that it may always take, also after it was resumed. The
        # clean-up at its end has no payload.
        requests, expired = len(self._failing), LEDGER.named("save_queue_cap").counters["expired_holds"]
        steps = requests * (2 + self.shape.asynchronous) + self._returns + expired
        tasks = len(self.waiting) + (self._sending is not None)
        if options.max_tasks is not None and tasks > 2 * options.max_tasks + steps + requests:
            self.wrong.append(f"{tasks} tasks wait")
        unfetched = 0
        if self.shape.is_counted:
            live = [self.stream(name) for name in self.scheduler.requests if name not in self.aborted]
            unfetched = sum(self.put_well[stream] - self.fetched[stream] for stream in live)
        if options.max_bytes is not None and CHUNK * (tasks + unfetched - steps) > 2 * options.max_bytes:
            self.wrong.append(f"{tasks} payloads wait, and {unfetched} are not fetched")

    # ---- The end ----

    def settle(self) -> None:
        """Run until no request, step or task is left."""
        for _ in range(4000):
            self.sends([0.0] * 8, None)
            for name in self.names():
                self.fetch(name, 1000)
            if not self.scheduler.requests and not self._in_flight and self.is_quiet():
                break
            if not self.step():
                self.clock.now += 1.0 + (self.shape.options["max_hold_s"] or 0.0)
            self.look()
        else:
            raise AssertionError(f"hangs: {list(self.scheduler.requests)}, {list(self.waiting.values())[:9]}")
        self.step()
        for _ in range(4):  # two checks, a minute apart, forget unfetched chunks
            self.clock.now += 61.0
            self.sends([0.0], None)
        self.look()
        self.rest = {name: self._left(name) for name in self.names()}
        if self.is_ours and not self.queue.is_aside:
            holds = self.scheduler._omni_fastpath_save_queue.holds
            live = self.adapter._sender_tokens  # upstream keeps those whose last put failed
            kept = [each for each in (*self.queue._fair.streams, *(holds._holds if holds else ())) if each not in live]
            counted = (len(self.queue), self.queue.tasks, self.queue.nbytes)
            assert (counted, kept) == ((0, 0, 0), []), (counted, kept)

    def names(self) -> list[str]:
        """All requests, in the order of arrival."""
        return [stream.rsplit("-", 1)[1] for stream in self._failing]

    def tokens(self, name: str) -> list[int]:
        """The tokens that a request has sampled."""
        return [token for tokens, *_ in self.outputs[name] for token in tokens]

    def _left(self, name: str) -> list[str]:
        """The attributes of the adapter and the segments that still belong to a request."""
        stream = self.stream(name)
        kept = [each for each in KEPT if stream in getattr(self.adapter, each)]
        return kept + sorted(path.name for path in self.segments(stream))

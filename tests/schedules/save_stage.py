"""One arm of a schedule: a `SmallStage` whose save thread the test controls, and a plain model of its queue."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any
from unittest import mock

from vllm.v1.request import RequestStatus
from vllm_omni.distributed.omni_connectors.connectors.shm_connector import SharedMemoryConnector
from vllm_omni.distributed.omni_connectors.transfer_adapter.base import OmniTransferAdapterBase
from vllm_omni.distributed.omni_connectors.transfer_adapter.chunk_transfer_adapter import OmniChunkTransferAdapter

from omni_fastpath.declare import State
from omni_fastpath.ledger import LEDGER
from omni_fastpath.patches.save_queue_cap.fair_queue import SLOW_S
from omni_fastpath.patches.save_queue_cap.save_queue import SaveQueue
from tests.patches.small_stage import SmallStage
from tests.schedules.save_thread import Condition, Cut, Lock, SaveThread, at_line

WIDTH = 1024
"""Numbers in a payload. The smallest ``max_bytes`` is eight payloads."""
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
    """A save task in the model: its number in the order of arrival, its stream, and the value of its payload."""

    number: int
    stream: str
    value: int | None


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
            super().__init__(config, device=shape.device, blocks=shape.blocks, codes=WIDTH, lag=int(shape.asynchronous))
        self.condition = self.adapter._save_cond = Condition(self.turns)
        self.receiver = SharedMemoryConnector({"stage_id": 1})
        self.wrong: list[str] = []
        self.rest: dict[str, list[str]] = {}
        self.waiting: dict[int, Task] = {}
        self.aborted, self.preempted, self.unfetched = set[str](), set[str](), set[str]()
        self.cuts = 0
        self.fetched = Counter[str]()
        self._failing: dict[str, Mapping[int, str]] = {}
        self._slow_s: dict[str, float] = {}
        self._left_out_s: dict[str, float] = {}
        self._slow: set[str] = set()
        self._preempt, self.scheduler._preempt_request = self.scheduler._preempt_request, self._preempted
        self._tasks = 0
        self._sending: Task | None = None
        self.is_ours = isinstance(self.queue, SaveQueue)
        self._is_overwritten &= self.is_ours  # stock sends what the runner has written since
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
        """Upstream's send, and before it: the task waits, its payload is as it was, and none had to be sent earlier."""
        self.condition.rounds = 0
        known: Task = task["model"]
        if self.waiting.pop(known.number, None) is None:
            raise SystemExit(f"{known} is sent twice")
        streams = {known.stream} if known.stream in self._slow else set(self.streams) - self._slow
        earlier = [each for each in self.waiting.values() if each.number < known.number and each.stream in streams]
        if earlier:
            self.wrong.append(f"{known} is sent before {earlier[0]}")
        if known.value is not None and bool((task["multimodal_output"]["codes.audio"] != known.value).any()):
            self.wrong.append(f"{known} has another payload now")
        self._sending, since_s = known, self.clock.now
        try:
            self._send(task)
        finally:
            self._sending = None
            if self.clock.now - since_s >= SLOW_S:
                self._slow.add(known.stream)

    def look(self) -> None:
        """Check the invariants between two events."""
        if self.is_ours:
            where, queue = self.turns.parked, self.queue
            if where == "wait" and self.waiting and not self.condition.is_notified:
                self.wrong.append("the save thread sleeps, and something waits")
            expected = len(self.waiting) + (self._sending is not None)
            if where in ("put", "wait") and queue.tasks != expected:
                self.wrong.append(f"the queue counts {queue.tasks} tasks, and {expected} are there")
            state = LEDGER.named("save_queue_cap").state
            if queue.is_aside or state is not State.APPLIED:
                self.wrong.append(f"{state}, aside: {queue.is_aside}")
        assert not self.wrong, self.wrong

    # ---- What happens ----

    def arrive(self, name: str, tokens: int, failing: Mapping[int, str], slow_s: float, is_fetched: bool) -> None:
        """Add a request.

        Args:
            name: Its name.
            tokens: Tokens that it samples.
            failing: The puts that fail, by number, and how.
            slow_s: Seconds that each of its puts lasts.
            is_fetched: Whether its chunks are fetched.
        """
        self._failing[self.stream(name)] = failing
        self._slow_s[self.stream(name)] = slow_s
        self.unfetched |= set() if is_fetched else {name}
        self.add(name, tokens=tokens)

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
        self.chunks[stream].append((put_key, codes or [], bool(data.meta.finished)))
        result = (False, 0, None) if fails else self._put(from_stage, to_stage, put_key, data)
        self.condition.rounds = 0
        self.turns.park("put")
        if fails == "raises":
            raise RuntimeError("the test's connector raises")
        return result

    def step(self) -> list[str]:
        """Schedule a step, process finished ones, and check that no hold is too long.

        Returns:
            The requests in the step.
        """
        running = list(self.scheduler.running)
        names = super().step()
        left_out = {each.request_id for each in running if each.status == RequestStatus.RUNNING} - set(names)
        self._left_out_s = {name: self._left_out_s.get(name, self.clock.now) for name in left_out}
        for name, since_s in self._left_out_s.items():
            if self.is_ours and self.clock.now - since_s > self.shape.options["max_hold_s"]:
                self.wrong.append(f"{name} is held for {self.clock.now - since_s} s")
        return names

    def _preempted(self, request: Any, *args: Any, **kwargs: Any) -> None:
        self.preempted.add(request.request_id)
        self._preempt(request, *args, **kwargs)

    # ---- The end ----

    def settle(self) -> None:
        """Run until no request, step or task is left."""
        for _ in range(4000):
            self.sends([0.0] * 8, None)
            for name in self.names():
                self.fetch(name, 1000)
            is_quiet = not len(self.queue) and self.turns.parked == "wait"  # nothing is queued or being sent
            if is_quiet and not self.scheduler.requests and not self._in_flight:
                break
            if not self.step():
                self.clock.now += 1.0 + self.shape.options["max_hold_s"]
            self.look()
        else:
            raise AssertionError(f"hangs: {list(self.scheduler.requests)}, {list(self.waiting.values())[:9]}")
        self.step()
        for _ in range(4):  # two checks, a minute apart, forget unfetched chunks
            self.clock.now += 61.0
            self.sends([0.0], None)
        self.look()
        self.rest = {name: self._left(name) for name in self.names()}
        if self.is_ours:
            holds = self.queue.holds
            live = self.adapter._sender_tokens  # upstream keeps those whose last put failed
            kept = [each for each in (*self.queue._fair.streams, *(holds._holds if holds else ())) if each not in live]
            counted = (len(self.queue), self.queue.tasks, self.queue.nbytes)
            assert (counted, kept) == ((0, 0, 0), []), (counted, kept)

    def names(self) -> list[str]:
        """All requests, in the order of arrival."""
        return [stream.rsplit("-", 1)[1] for stream in self._failing]

    def _left(self, name: str) -> list[str]:
        """The attributes of the adapter and the segments that still belong to a request."""
        stream = self.stream(name)
        kept = [each for each in KEPT if stream in getattr(self.adapter, each)]
        return kept + sorted(path.name for path in self.segments(stream))

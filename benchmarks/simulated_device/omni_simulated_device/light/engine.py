"""One light engine: its sockets, its requests, and its clock."""

from __future__ import annotations

import importlib
import itertools
import time
from collections.abc import Callable
from typing import Any

import msgspec

from omni_simulated_device.light import behaviour
from omni_simulated_device.light.behaviour import Answer, Arrival, KeptBack, Live
from omni_simulated_device.light.fastpath import InStage
from omni_simulated_device.light.stream import Stream, Streams
from omni_simulated_device.light.wire import Encoder, Frames, Layout, Record, Request

zmq: Any = importlib.import_module("zmq")  # its stubs lack what it makes at run time

HOP_S = 0.0015
"""What a chunk takes from a stage to the next: the save thread's send, and half of the receiver's millisecond."""

QUEUED, SCHEDULED = 1, 2
"""vLLM's ``EngineCoreEventType``."""

Later = Callable[[float, Callable[[float], None]], None]
"""Calls something at a time (``time.monotonic``), with that time."""


class Spec(msgspec.Struct):
    """One engine, as the server describes it.

    Attributes:
        name: As logs show it.
        stage: Which stage.
        handshake: Address of the server's handshake socket.
        identity: Of this engine's sockets.
        ready: What it says when it is ready, encoded.
        request: Layout of a request.
        output: Layout of a request's output.
        outputs: Layout of a raw output.
        stats: A step's statistics; None: statistics are off.
        stats_every_s: The least time between two steps that have them.
        ends_only: Only ends are sent, as by a stage of model runner v2 that nobody sees.
        slots: Requests in a step at most.
        behaviour: Of the stage.
        fastpath: What omni-fastpath would say in a process of the stage.
    """

    name: str
    stage: int
    handshake: str
    identity: bytes
    ready: bytes
    request: Layout
    output: Layout
    outputs: Layout
    stats: dict[str, Any] | None
    stats_every_s: float
    ends_only: bool
    slots: int
    behaviour: behaviour.StageSpec
    fastpath: InStage | None


class Engine:
    """One engine on the clock; everything here runs in the clock's thread.

    Attributes:
        steps: How many it has made.
        late_s: By how much it sent each step later than due.
        busy_s: Processor time of making and sending them.
    """

    def __init__(
        self, spec: Spec, addresses: list[str], context: Any, streams: Streams, later: Later, kept_back: KeptBack
    ) -> None:
        self.spec = spec
        self.steps = 0
        self.late_s: list[float] = []
        self.busy_s = 0.0
        self._streams, self._later = streams, later
        self._behaviour = behaviour.build(spec.behaviour, kept_back)
        self._sockets = []
        for address in addresses:
            socket = context.socket(zmq.PUSH)
            socket.setsockopt(zmq.SNDHWM, 0)
            socket.setsockopt(zmq.LINGER, 4000)
            socket.connect(address)
            self._sockets.append(socket)
        self._live: dict[str, Live] = {}
        self._queued_at: dict[str, float] = {}
        self._encoder = Encoder()
        self._entry = Record(
            spec.output,
            "request_id",
            "new_token_ids",
            "finish_reason",
            "stop_reason",
            "events",
            "prefill_stats",
            "multimodal_output",
            "num_generation_tokens",
        )
        self._raw = Record(
            spec.outputs,
            "engine_index",
            "outputs",
            "scheduler_stats",
            "timestamp",
            "utility_output",
            "finished_requests",
        )
        self._stats_due = 0.0
        self._waits = False
        self._aborted: list[tuple[int, str]] = []
        self._index = int.from_bytes(spec.identity, "little")
        self._step: list[tuple[Live, Answer]] | None = None

    def close(self) -> None:
        """Send what is left, and be done."""
        for live in list(self._live.values()):
            self.abort([live.request.id])
        for socket in self._sockets:
            socket.close()

    def add(self, request: Request, now: float) -> None:
        """A request has come."""
        live = Live(request, Stream())
        live.stream = self._streams.enter(request.stream, self.spec.stage, self)
        self._live[request.id] = live
        self._queued_at[request.id] = now
        self._behaviour.begin(live)
        self.wake(now)

    def abort(self, names: list[str]) -> None:
        """Requests are wanted no longer; stages with tokens say so in their next raw output."""
        for name in names:
            live = self._live.get(name)
            if live is not None:
                live.aborted = True
                self._drop(live)
                if self._behaviour.samples_tokens:
                    self._aborted.append((live.request.client, name))

    def _drop(self, live: Live) -> None:
        del self._live[live.request.id]
        self._queued_at.pop(live.request.id, None)
        self._streams.leave(live.request.stream, self.spec.stage, aborted=live.aborted)

    def answer_utility(self, client: int, call: int, failure: str | None, result: Any) -> None:
        """The answer to a utility call; a result stands behind its type, which is none of vLLM's."""
        answer = [call, failure, None if failure else [None, result]]
        raw = self._raw.make(self._index, [], None, time.monotonic(), answer, None)
        self._sockets[client].send_multipart(self._encoder.encode(raw))

    def wake(self, now: float) -> None:
        """Begin a step if none runs and there is anything to do."""
        if self._step is None:
            self._begin(now)

    def _begin(self, now: float) -> None:
        ready = (live for live in self._live.values() if self._behaviour.ready(live))
        lives = list(itertools.islice(ready, self.spec.slots))
        if not lives:
            self._wait(now)
            return
        computed = [self._behaviour.cost_tokens(live) for live in lives]
        due = now + self.spec.behaviour.settings.step_s(sum(computed), len(lives))
        began = time.thread_time()
        first = [not live.outputs for live in lives]
        self._step = [(live, self._behaviour.answer(live)) for live in lives]
        for (_, answer), count in zip(self._step, computed, strict=True):
            answer.prefill = count
        messages = self._encoded(first, now, due)
        self.busy_s += time.thread_time() - began
        told = len(self._aborted)
        self._later(due, lambda due: self._end(first, messages, told, now, due))

    def _wait(self, now: float) -> None:
        """Requests that wait for chunks are looked at all the time, and statistics told when they are due."""
        if not self._live or self.spec.stats is None:
            return
        stats = self._stats(now)
        if stats is not None:
            raw = self._raw.make(self._index, [], stats, now, None, None)
            self._sockets[0].send_multipart(self._encoder.encode(raw))
        if not self._waits:
            self._waits = True
            self._later(self._stats_due, self._go_on)

    def _go_on(self, now: float) -> None:
        self._waits = False
        self.wake(now)

    def _end(
        self, first: list[bool], messages: list[tuple[int, Frames]], told: int, began_at: float, due: float
    ) -> None:
        """Send what was made, hand on what the next stage gets, and begin anew."""
        step = self._step
        assert step is not None
        self.late_s.append(time.monotonic() - due)
        began = time.thread_time()
        if len(self._aborted) != told or any(live.aborted for live, _ in step):
            kept = [(each, new) for each, new in zip(step, first, strict=True) if not each[0].aborted]
            step = self._step = [each for each, _ in kept]
            messages = self._encoded([new for _, new in kept], began_at, due)
        for client, frames in messages:
            self._sockets[client].send_multipart(frames, copy=len(frames) == 1)
        self._aborted.clear()
        arrivals: list[tuple[Stream, Arrival]] = []
        for live, answer in step:
            if answer.arrival is not None:
                arrivals.append((live.stream, answer.arrival))
            if answer.finish is not None:
                self._drop(live)
        if arrivals:
            self._later(due + HOP_S, lambda at: self._arrive(arrivals, at))
        self.steps += 1
        self._step = None
        self.busy_s += time.thread_time() - began
        self._begin(due)

    def _arrive(self, arrivals: list[tuple[Stream, Arrival]], now: float) -> None:
        engines: dict[int, Engine] = {}
        for stream, arrival in arrivals:
            arrival(stream)
            engine = stream.engines.get(self.spec.stage + 1)
            if engine is not None:
                engines[id(engine)] = engine
        for engine in engines.values():
            engine.wake(now)

    def _encoded(self, first: list[bool], began: float, due: float) -> list[tuple[int, Frames]]:
        """The raw outputs of the step that runs, one for each client that has any."""
        assert self._step is not None
        by_client: dict[int, list[tuple[Live, Answer, bool]]] = {}
        for (live, answer), new in zip(self._step, first, strict=True):
            if answer.finish is not None or not self.spec.ends_only:
                by_client.setdefault(live.request.client, []).append((live, answer, new))
        for client, _ in self._aborted:
            by_client.setdefault(client, [])
        stats = self._stats(due)
        if stats is not None and not by_client:
            by_client[0] = []
        messages = []
        for client, answers in by_client.items():
            entries = [self._made(*each, began) for each in answers]
            ended = self._ended(client, answers, entries)
            raw = self._raw.make(self._index, entries, stats, due, None, ended)
            messages.append((client, self._encoder.encode(raw)))
            stats = None
        return messages

    def _ended(self, client: int, answers: list[tuple[Live, Answer, bool]], entries: list[Any]) -> list[str] | None:
        """What ended, as schedulers with tokens tell it beside the entries; those that were aborted get one here."""
        if not self._behaviour.samples_tokens:
            return None
        aborted = [name for owner, name in self._aborted if owner == client]
        entries += [self._entry.make(name, [], behaviour.ABORT, None, None, None, None, None) for name in aborted]
        return [live.request.id for live, answer, _ in answers if answer.finish is not None] + aborted or None

    def _made(self, live: Live, answer: Answer, new: bool, began: float) -> list[Any]:
        """One request's entry."""
        payload = None
        if answer.arrays is not None:
            payload = {name: self._encoder.tensor(*array) for name, array in answer.arrays.items()}
        return self._entry.make(
            live.request.id,
            answer.tokens,
            answer.finish,
            answer.stop,
            self._events(live, new, began),
            self._prefill(answer, new),
            payload,
            live.outputs if self._behaviour.samples_tokens else None,
        )

    def _events(self, live: Live, new: bool, began: float) -> list[dict[str, Any]] | None:
        """When it came and when a step took it; code2wav's requests are scheduled anew for each chunk."""
        if self.spec.stats is None or not (new or not self._behaviour.samples_tokens):
            return None
        scheduled = {"type": SCHEDULED, "timestamp": began}
        if not new:
            return [scheduled]
        return [{"type": QUEUED, "timestamp": self._queued_at.get(live.request.id, began)}, scheduled]

    def _prefill(self, answer: Answer, new: bool) -> dict[str, int] | None:
        if not (new or not self._behaviour.samples_tokens):
            return None
        return {"num_prompt_tokens": answer.prefill, "num_computed_tokens": answer.prefill}

    def _stats(self, now: float) -> dict[str, Any] | None:
        if self.spec.stats is None or now < self._stats_due:
            return None
        self._stats_due = now + self.spec.stats_every_s
        running = min(len(self._live), self.spec.slots)
        return {**self.spec.stats, "num_running_reqs": running, "num_waiting_reqs": len(self._live) - running}

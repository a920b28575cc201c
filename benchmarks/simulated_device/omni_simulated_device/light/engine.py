"""One light engine: its requests and its steps, on whatever clock it is given."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from typing import Protocol

from omni_simulated_device.light.behaviour import Answer, Arrival, Behaviour, Live
from omni_simulated_device.light.stream import Stream, Streams
from omni_simulated_device.light.wire import Request

HOP_S = 0.0015
"""What a chunk takes from a stage to the next: the save thread's send, and half of the receiver's millisecond."""

Later = Callable[[float, Callable[[float], None]], None]
"""Calls something at a time, with that time."""


@dataclasses.dataclass(slots=True)
class Part:
    """What one request has of a step.

    Attributes:
        live: The request.
        answer: What it gets.
        new: Whether that is its first.
    """

    live: Live
    answer: Answer
    new: bool


@dataclasses.dataclass(slots=True)
class Step:
    """One step.

    Attributes:
        began: When, on the engine's clock, seconds.
        due: When it ends.
        live: Requests that the engine had.
        parts: Of those that get something.
        aborted: Who got no more meanwhile, as client and request.
    """

    began: float
    due: float
    live: int
    parts: list[Part]
    aborted: list[tuple[int, str]]


class Output(Protocol):
    """Where an engine's steps go."""

    def prepare(self, step: Step) -> None:
        """A step has begun; called again before it is sent if a request of it was aborted."""

    def send(self, step: Step) -> None:
        """It has ended."""

    def idle(self, now: float, live: int) -> float | None:
        """All of so many requests wait; the result is when to say so again, if ever."""


class Engine:
    """One engine; everything here runs in its clock's thread.

    Attributes:
        steps: How many it has made.
        busy_s: Processor time of making and sending them.
    """

    def __init__(
        self,
        stage: int,
        behaviour: Behaviour,
        slots: int,
        budget: int,
        streams: Streams,
        later: Later,
        output: Output,
    ) -> None:
        """Make one.

        Args:
            stage: Which stage.
            behaviour: Of the stage.
            slots: Requests in a step at most.
            budget: Tokens in a step at most; a prompt that is longer takes several.
            streams: What the stages of a server share.
            later: Its clock.
            output: Where its steps go.
        """
        self._output = output
        self.steps = 0
        self.busy_s = 0.0
        self._stage, self._behaviour, self._slots, self._budget = stage, behaviour, slots, budget
        self._streams, self._later = streams, later
        self._live: dict[str, Live] = {}
        self._waits = False
        self._aborted: list[tuple[int, str]] = []
        self._step: Step | None = None

    def add(self, request: Request, now: float) -> None:
        """A request has come."""
        live = Live(request, self._streams.enter(request.stream, self._stage, self), now)
        self._live[request.id] = live
        self._behaviour.begin(live)
        self.wake(now)

    def abort(self, names: list[str] | None = None) -> None:
        """Requests, all unless named, are wanted no longer; stages with tokens say so in their next raw output."""
        for name in list(self._live) if names is None else names:
            live = self._live.get(name)
            if live is not None:
                live.aborted = True
                self._drop(live)
                if self._behaviour.samples_tokens:
                    self._aborted.append((live.request.client, name))

    def _drop(self, live: Live) -> None:
        del self._live[live.request.id]
        self._streams.leave(live.request.stream, self._stage, aborted=live.aborted)

    def wake(self, now: float) -> None:
        """Begin a step if none runs and there is anything to do."""
        if self._step is None:
            self._begin(now)

    def _begin(self, now: float) -> None:
        ready = [live for live in self._live.values() if self._behaviour.ready(live)]
        if not ready:
            self._wait(now)
            return
        began = time.thread_time()
        if self._behaviour.samples_tokens:
            ready.sort(key=lambda live: not live.outputs)  # as vLLM: those that run, then those that wait
        parts, tokens, requests = [], 0, 0
        for live in ready[: self._slots]:
            computed = self._behaviour.cost_tokens(live)
            taken = min(computed - live.computed, self._budget - tokens)
            tokens += taken
            requests += 1
            live.computed += taken
            if live.computed < computed:
                break
            live.computed = 0
            new = not live.outputs
            answer = self._behaviour.answer(live)
            answer.prefill = computed
            parts.append(Part(live, answer, new))
        due = now + self._behaviour.spec.settings.step_s(tokens, requests)
        self._step = step = Step(now, due, len(self._live), parts, [])
        self._output.prepare(step)
        self.busy_s += time.thread_time() - began
        self._later(due, lambda _due: self._end(step))

    def _wait(self, now: float) -> None:
        """Requests that wait for chunks are looked at all the time, and statistics told when they are due."""
        again = self._output.idle(now, len(self._live)) if self._live else None
        if again is not None and not self._waits:
            self._waits = True
            self._later(again, self._go_on)

    def _go_on(self, now: float) -> None:
        self._waits = False
        self.wake(now)

    def _end(self, step: Step) -> None:
        """Send what was made, hand on what the next stage gets, and begin anew."""
        began = time.thread_time()
        if self._aborted or any(part.live.aborted for part in step.parts):
            step.parts = [part for part in step.parts if not part.live.aborted]
            step.aborted, self._aborted = self._aborted, []
            self._output.prepare(step)
        self._output.send(step)
        arrivals: list[tuple[Stream, Arrival]] = []
        for part in step.parts:
            if part.answer.arrival is not None:
                arrivals.append((part.live.stream, part.answer.arrival))
            if part.answer.finish is not None:
                self._drop(part.live)
        if arrivals:
            self._later(step.due + HOP_S * self._behaviour.spec.settings.pace, lambda at: self._arrive(arrivals, at))
        self.steps += 1
        self._step = None
        self.busy_s += time.thread_time() - began
        self._begin(step.due)

    def _arrive(self, arrivals: list[tuple[Stream, Arrival]], now: float) -> None:
        engines: dict[int, Engine] = {}
        for stream, arrival in arrivals:
            arrival(stream)
            engine = stream.engines.get(self._stage + 1)
            if engine is not None:
                engines[id(engine)] = engine
        for engine in engines.values():
            engine.wake(now)

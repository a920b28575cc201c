"""What a light engine sends: its steps as vLLM's raw outputs, through the server's sockets."""

from __future__ import annotations

import importlib
import time
from typing import Any

import msgspec

from omni_simulated_device.light.behaviour import ABORT, StageSpec
from omni_simulated_device.light.engine import Part, Step
from omni_simulated_device.light.fastpath import InStage
from omni_simulated_device.light.wire import Encoder, Frames, Layout, Record

zmq: Any = importlib.import_module("zmq")  # its stubs lack what it makes at run time

QUEUED, SCHEDULED = 1, 2
"""vLLM's ``EngineCoreEventType``."""


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
        budget: Tokens in a step at most.
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
    budget: int
    behaviour: StageSpec
    fastpath: InStage | None


class Sender:
    """The sockets of one engine.

    Attributes:
        late_s: By how much it sent each step later than due.
    """

    def __init__(self, spec: Spec, addresses: list[str], context: Any, *, samples_tokens: bool) -> None:
        self.late_s: list[float] = []
        self._spec, self._samples_tokens = spec, samples_tokens
        self._sockets = []
        for address in addresses:
            socket = context.socket(zmq.PUSH)
            socket.setsockopt(zmq.SNDHWM, 0)
            socket.setsockopt(zmq.LINGER, 4000)
            socket.connect(address)
            self._sockets.append(socket)
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
        self._index = int.from_bytes(spec.identity, "little")
        self._messages: list[tuple[int, Frames]] = []

    def close(self) -> None:
        """No more is sent."""
        for socket in self._sockets:
            socket.close()

    def answer_utility(self, client: int, call: int, failure: str | None, result: Any) -> None:
        """The answer to a utility call; a result stands behind its type, which is none of vLLM's."""
        answer = [call, failure, None if failure else [None, result]]
        raw = self._raw.make(self._index, [], None, time.monotonic(), answer, None)
        self._sockets[client].send_multipart(self._encoder.encode(raw))

    def prepare(self, step: Step) -> None:
        """Encode what will be sent, one raw output for each client that has any."""
        by_client: dict[int, list[Part]] = {}
        for part in step.parts:
            if part.answer.finish is not None or not self._spec.ends_only:
                by_client.setdefault(part.live.request.client, []).append(part)
        for client, _ in step.aborted:
            by_client.setdefault(client, [])
        stats = self._stats(step.due, step.live)
        if stats is not None and not by_client:
            by_client[0] = []
        self._messages = []
        for client, parts in by_client.items():
            entries = [self._made(part, step.began) for part in parts]
            ended = self._ended(parts, [name for owner, name in step.aborted if owner == client], entries)
            raw = self._raw.make(self._index, entries, stats, step.due, None, ended)
            self._messages.append((client, self._encoder.encode(raw)))
            stats = None

    def send(self, step: Step) -> None:
        """Send it."""
        self.late_s.append(time.monotonic() - step.due)
        for client, frames in self._messages:
            self._sockets[client].send_multipart(frames, copy=len(frames) == 1)

    def idle(self, now: float, live: int) -> float | None:
        """Statistics are sent of requests that wait, too."""
        if self._spec.stats is None:
            return None
        stats = self._stats(now, live)
        if stats is not None:
            raw = self._raw.make(self._index, [], stats, now, None, None)
            self._sockets[0].send_multipart(self._encoder.encode(raw))
        return self._stats_due

    def _ended(self, parts: list[Part], aborted: list[str], entries: list[Any]) -> list[str] | None:
        """What ended, as schedulers with tokens tell it beside the entries; those that were aborted get one here."""
        if not self._samples_tokens:
            return None
        entries += [self._entry.make(name, [], ABORT, None, None, None, None, None) for name in aborted]
        return [part.live.request.id for part in parts if part.answer.finish is not None] + aborted or None

    def _made(self, part: Part, began: float) -> list[Any]:
        """One request's entry."""
        live, answer, payload = part.live, part.answer, None
        if answer.arrays is not None:
            payload = {name: self._encoder.tensor(*array) for name, array in answer.arrays.items()}
        scheduled = part.new or not self._samples_tokens  # code2wav's requests are scheduled anew for each chunk
        computed = {"num_prompt_tokens": answer.prefill, "num_computed_tokens": answer.prefill}
        return self._entry.make(
            live.request.id,
            answer.tokens,
            answer.finish,
            answer.stop,
            self._events(part, began) if scheduled and self._spec.stats is not None else None,
            computed if scheduled else None,
            payload,
            live.outputs if self._samples_tokens else None,
        )

    @staticmethod
    def _events(part: Part, began: float) -> list[dict[str, Any]]:
        """When it came and when a step took it."""
        queued = [{"type": QUEUED, "timestamp": part.live.queued_at}] if part.new else []
        return [*queued, {"type": SCHEDULED, "timestamp": began}]

    def _stats(self, now: float, live: int) -> dict[str, Any] | None:
        if self._spec.stats is None or now < self._stats_due:
            return None
        self._stats_due = now + self._spec.stats_every_s
        running = min(live, self._spec.slots)
        return {**self._spec.stats, "num_running_reqs": running, "num_waiting_reqs": live - running}

"""The stages' side: a process that sends real raw outputs over ZMQ on the schedule's clock.

It encodes ahead while it waits, so that what is due only has to be sent, and records when it really sent (the clock is
``time.monotonic_ns``, which processes share). Like an engine it sends without copying and without a limit on queued
messages.
"""

from __future__ import annotations

import gc
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from multiprocessing.connection import Connection
from typing import Any

from benchmarks.replay.load import (
    CODE2WAV,
    SILENT,
    STAGES,
    TALKER,
    WARM_STEPS,
    Entry,
    Load,
    Mix,
    Schedule,
    audible,
    warm_entries,
)

AHEAD = 4000
"""Raw outputs encoded ahead at most: seconds of any cell. Tensors are shared, so one takes kilobytes."""

SPARE = 2.0
"""Encode one more while waiting only if this many times the mean duration of an encoding is left."""

SLEEP_NS = 60_000
"""Sleep this much less than is left, because a sleep ends late by about so much."""

WARM_GAP_S = 0.004
WINDOW = 64
"""Raw outputs a replica that may wait in a closed-loop cell: every queue is full, and memory is bounded."""

DISPATCHED, STOP = 0, 1
"""Places in the shared array: raw outputs whose processing began, and whether to stop."""

WARM = -1
"""Number of a raw output of the warm-up; the others are numbered in the schedule's order."""

Key = tuple[int, int]
"""Stage and replica."""


class Encoder:
    """Makes raw outputs of a mix and encodes them as an engine does.

    Args:
        mix: Of the load.
        gated: The talker sends no codes, as a stage with ``forward_gate``.
    """

    def __init__(self, mix: Mix, *, gated: bool) -> None:
        import torch
        from vllm.v1.engine import FinishReason
        from vllm.v1.serial_utils import MsgpackEncoder

        from benchmarks.rigs.inprocess import SAMPLE_RATE

        self._mix = mix
        self._encoder = MsgpackEncoder()
        self._stop = FinishReason.STOP
        self._rate = torch.tensor(SAMPLE_RATE)
        self._nothing = torch.zeros(0)
        codes = {"codes.audio": torch.zeros(mix.frames, 16, dtype=torch.long)}
        self._talker: Mapping[str, Any] = {} if gated else {"multimodal_output": codes}
        self._audio: list[Any] = []

    def _samples(self, number: int) -> Any:
        """The audio of a request's ``number``-th packet; its samples are the number, for the check of content."""
        import torch

        while len(self._audio) <= number:
            self._audio.append(torch.full((self._mix.samples,), float(len(self._audio))))
        return self._audio[number]

    def encode(self, number: int, stage: int, entries: Sequence[Entry]) -> Sequence[Any]:
        """The frames of one raw output.

        Its number stands in the engine's index, which nothing here reads: a raw output may be dispatched in parts, so
        that counting dispatches would not tell which one it was.
        """
        from benchmarks.rigs.inprocess import batch

        found = batch(*(self._entry(stage, each) for each in entries))
        found.engine_index = number
        frames: Sequence[Any] = self._encoder.encode(found)
        return frames

    def _entry(self, stage: int, entry: Entry) -> Any:
        from vllm_omni.engine import OmniEngineCoreOutput

        finish = self._stop if entry.finished else None
        if stage == CODE2WAV:
            heard = audible(entry.position, entry.total)
            samples = self._samples(entry.position // (SILENT + 1)) if heard else self._nothing
            payload = {"multimodal_output": {"model_outputs": samples, "sr": self._rate}}
            return OmniEngineCoreOutput(entry.request_id, [], finish_reason=finish, **payload)
        codes = self._talker if stage == TALKER else {}
        return OmniEngineCoreOutput(entry.request_id, [entry.position], finish_reason=finish, **codes)


def feed(addresses: Mapping[Key, str], load: Load, shared: Any, link: Connection, gated: bool) -> None:
    """The process: says ``ready``, warms up when told, runs when told the start, and answers with what it did."""
    import zmq

    context = zmq.Context()  # type: ignore[attr-defined]
    sockets = {}
    for key, address in addresses.items():
        sockets[key] = socket = context.socket(zmq.PUSH)  # type: ignore[attr-defined]
        socket.setsockopt(zmq.SNDHWM, 0)  # type: ignore[attr-defined]
        socket.connect(address)
    encoder, schedule = Encoder(load.mix, gated=gated), Schedule(load)
    sender = _Sender(schedule, encoder, sockets, shared)
    gc.collect()
    gc.freeze()
    link.send("ready")
    link.recv()
    _warm_up(load, encoder, sockets)
    link.send("warmed up")
    sender.run(link.recv())
    link.send((sender.sent, sender.late, time.monotonic_ns()))
    for socket in sockets.values():
        socket.close(linger=10_000)
    context.term()


def _warm_up(load: Load, encoder: Encoder, sockets: Mapping[Key, Any]) -> None:
    entries = [warm_entries(load, replica) for replica in range(load.replicas)]
    for position in range(WARM_STEPS):
        for stage in STAGES:
            for replica in range(load.replicas):
                frames = encoder.encode(WARM, stage, entries[replica][position])
                sockets[stage, replica].send_multipart(frames, copy=False)
                time.sleep(WARM_GAP_S)


class _Sender:
    """Sends one schedule.

    Attributes:
        sent: When each raw output of the schedule was sent, in its order, ``monotonic_ns``.
        late: How much later than due each was sent, nanoseconds; empty in a closed-loop cell.
    """

    def __init__(self, schedule: Schedule, encoder: Encoder, sockets: Mapping[Key, Any], shared: Any) -> None:
        self.sent: list[int] = []
        self.late: list[int] = []
        self._load, self._order = schedule.load, schedule.order
        self._sockets, self._shared = sockets, shared
        self._frames = self._encoded(schedule, encoder)
        self._ready: deque[Sequence[Any]] = deque()
        began_ns = time.monotonic_ns()
        while self._encode_ahead():
            pass
        self._spare_ns = SPARE * (time.monotonic_ns() - began_ns) / len(self._ready)

    def _encoded(self, schedule: Schedule, encoder: Encoder) -> Iterator[Sequence[Any]]:
        entries = {key: schedule.entries(*key) for key in self._sockets}
        for number, (_, stage, replica) in enumerate(self._order):
            yield encoder.encode(number, stage, next(entries[stage, replica]))

    def _encode_ahead(self) -> bool:
        """Encode one more; whether there was one, and room for it."""
        if len(self._ready) >= AHEAD:
            return False
        frames = next(self._frames, None)
        if frames is None:
            return False
        self._ready.append(frames)
        return True

    def run(self, start_ns: int) -> None:
        """Send everything, the first at ``start_ns``; a raised stop flag ends it."""
        wait = self._wait_for_room if self._load.closed else self._wait_until
        closed = self._load.closed
        for due_ns, stage, replica in self._order:
            wait(start_ns + due_ns)
            if self._shared[STOP]:
                return
            if not self._ready:
                self._encode_ahead()
            frames = self._ready.popleft()
            now_ns = time.monotonic_ns()
            self._sockets[stage, replica].send_multipart(frames, copy=False)
            self.sent.append(now_ns)
            if not closed:
                self.late.append(now_ns - start_ns - due_ns)

    def _wait_until(self, due_ns: int) -> None:
        while (left := due_ns - time.monotonic_ns()) > 0:
            if left > self._spare_ns and self._encode_ahead():
                continue
            time.sleep(max(left - SLEEP_NS, 10_000) / 1e9)

    def _wait_for_room(self, _due_ns: int) -> None:
        """Until fewer raw outputs wait than the window; one counter serves all, so that the mix stays in order."""
        window = WINDOW * len(self._sockets)
        while len(self.sent) - self._shared[DISPATCHED] >= window and not self._shared[STOP]:
            if not self._encode_ahead():
                time.sleep(0.0002)

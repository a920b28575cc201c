"""Loads on one stage, in the stage's process: what each stream felt, and what went on while one stream hung."""

from __future__ import annotations

import itertools
import threading
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.save_queue.rig import Rig, outstanding, shared_memory

if TYPE_CHECKING:
    from benchmarks.save_queue.receiver import Received, Receiver

RUN_TIMEOUT_S = 240.0


@dataclass(frozen=True)
class Load:
    """Streams that arrive evenly over a time, whatever the stage does; no send is slow.

    Attributes:
        streams: How many.
        tokens: What each samples, tokens (frames at the talker).
        arrivals_s: From the first arrival to the last, seconds.
    """

    streams: int
    tokens: int
    arrivals_s: float


def run_load(rig: Rig, receiver: Receiver, load: Load, tag: str) -> dict[str, Any]:
    """Run a load to the end of its last stream.

    Returns:
        ``streams`` (each a mapping, in order of arrival: ``first_s``, ``gap_s``), ``digests``, ``chunks_per_s``,
        ``cores`` (processor time of this process) and ``counters`` (of the patch, this run's).
    """
    names = [f"{tag}-{number:03}" for number in range(load.streams)]
    reset_counters()
    cpu_s, begun = time.process_time(), time.monotonic() + 0.05
    arrivals = [begun + number * load.arrivals_s / max(load.streams - 1, 1) for number in range(load.streams)]
    waiting = 0
    while waiting < load.streams or rig.busy():
        while waiting < load.streams and arrivals[waiting] <= time.monotonic():
            receiver.expect(names[waiting])
            rig.add(names[waiting], tokens=load.tokens, prompt=f"{waiting:03}")
            waiting += 1
        if rig.busy():
            rig.turn()
        else:
            time.sleep(max(0.0, arrivals[waiting] - time.monotonic()))
    received = receiver.all_received(RUN_TIMEOUT_S)
    took_s = time.monotonic() - begun
    _settle(rig)
    return {
        "streams": [_felt(received[name], arrival) for name, arrival in zip(names, arrivals, strict=True)],
        "digests": [received[name].digest for name in names],
        "chunks_per_s": sum(len(each.at_s) for each in received.values()) / took_s,
        "cores": (time.process_time() - cpu_s) / took_s,
        "counters": dict(counters()),
    }


def _felt(received: Received, arrival_s: float) -> dict[str, float]:
    times = received.at_s
    gaps = (after - before for before, after in itertools.pairwise(times))
    return {"first_s": times[0] - arrival_s, "gap_s": max(gaps, default=0.0)}


@dataclass(frozen=True)
class Hang:
    """Streams of which one hangs for a time.

    Attributes:
        how: ``unfetched``: its receiver fetches nothing; ``put``: its puts do not return.
        streams: How many, the one that hangs not counted.
        tokens: What each of them samples.
        prompt_tokens: Of the one that hangs; 8 KiB of payload each.
        seconds: For how long.
    """

    how: str
    streams: int = 15
    tokens: int = 10_000
    prompt_tokens: int = 600
    seconds: float = 10.0


def run_hang(rig: Rig, receiver: Receiver, hang: Hang, tag: str) -> dict[str, Any]:
    """Count what comes out of the stage while one stream hangs; everything is aborted then.

    Returns:
        ``others`` and ``hung`` (tokens a second: of each other stream, of the one that hangs), ``bytes`` (the most
        seen in shared memory) and ``counters``.
    """
    from omni_simulated_device.slow_sends import slow_down

    hung, others = f"{tag}-hung", [f"{tag}-{number:03}" for number in range(hang.streams)]
    tokens, open_again = Counter[str](), threading.Event()

    def delay(stream: str, _stage: int) -> float:
        if stream == hung:
            open_again.wait()
        return 0.0

    reset_counters()
    undo = slow_down(delay) if hang.how == "put" else lambda: None
    most, next_s = 0, 0.0
    try:
        rig.add(hung, tokens=hang.tokens, prompt="hung", prompt_tokens=hang.prompt_tokens)
        for number, name in enumerate(others):
            receiver.expect(name)
            rig.add(name, tokens=hang.tokens, prompt=f"{number:03}")
        begun = time.monotonic()
        while (now := time.monotonic()) < begun + hang.seconds:
            rig.turn(tokens)
            if now >= next_s:
                next_s = now + 0.25
                most = max(most, sum(map(_size, shared_memory(tag))))
        found = {"others": [tokens[name] / hang.seconds for name in others], "hung": tokens[hung] / hang.seconds}
        found_counters = dict(counters())
    finally:
        open_again.set()
        undo()
    for name in (hung, *others):
        rig.abort(name)
    while rig.busy():
        rig.turn()
    _settle(rig)
    receiver.forget()
    return {**found, "bytes": most, "counters": found_counters}


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:  # fetched meanwhile
        return 0


def _settle(rig: Rig, timeout_s: float = 60.0) -> None:
    """Wait until every save task is sent, clean-up too."""
    deadline = time.monotonic() + timeout_s
    while outstanding(rig.adapter):
        assert time.monotonic() < deadline, f"{len(rig.adapter._pending_save_reqs)} save tasks are left"
        time.sleep(0.005)


def counters() -> dict[str, int]:
    """The patch's counters in this process; empty when it is off."""
    from omni_fastpath.ledger import LEDGER

    return next((entry.counters for entry in LEDGER if entry.patch.name == "save_queue_cap"), {})


def reset_counters() -> None:
    """Let a run's counters and maxima be its own."""
    counters().update(dict.fromkeys(counters(), 0))

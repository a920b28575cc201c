"""``benchmarks.server``: what it makes of a client's record, of a process's threads and of the engines' own words."""

from __future__ import annotations

import math
import os
import struct
import threading
import time

import pytest

from benchmarks.rigs.capture import Capture, Event, chat_request
from benchmarks.server import figures, threads
from benchmarks.server.measure import LEVELS, STOCK, Load, judged, kept_time


def wav(seconds: float) -> bytes:
    """A packet as a chat stream sends it: a WAV file of its own."""
    size = int(seconds * figures.BYTES_A_SECOND)
    return (
        b"RIFF"
        + struct.pack("<I", 36 + size)
        + b"WAVEfmt "
        + bytes(20)
        + b"data"
        + struct.pack("<I", size)
        + bytes(size)
    )


def capture(order: int, started: float, audio: list[tuple[float, float]]) -> Capture:
    """A request whose packets came at these times and play so long."""
    found = Capture(chat_request("x"), order, started, status=200)
    found.events = [Event("text", 0.1, {"text": "a"})]
    found.events += [Event("audio", at_s, {}, wav(plays)) for at_s, plays in audio]
    found.e2e_s = audio[-1][0]
    return found


def test_a_listener_hears_nothing_while_the_next_packet_is_late() -> None:
    """Played from the first packet on: what is late beyond what was played out; what is early is kept."""
    assert figures.ran_dry_s([]) == 0
    assert figures.ran_dry_s([(1.0, 0.3), (1.2, 0.3), (1.9, 1.0)]) == pytest.approx(0.3)
    assert figures.ran_dry_s([(1.0, 0.3), (1.1, 5.0), (2.0, 0.1)]) == 0


def test_figures_tell_the_first_wave_from_later_ones() -> None:
    """As many requests as streams are the first wave, by when they were sent."""
    captures = [
        capture(2, 5.0, [(0.3, 1.0), (0.8, 1.0)]),
        capture(0, 0.0, [(0.1, 1.0), (0.2, 1.0)]),
        capture(1, 0.0, [(0.1, 1.0), (0.6, 1.0)]),
        capture(3, 5.2, [(0.4, 1.0), (0.8, 1.0)]),
    ]
    cpu_s = {threads.FRONT_END: 0.4, threads.ORCHESTRATOR: 0.2, threads.SOCKETS: 0.0, threads.OTHERS: 0.2}
    found = figures.figures(captures, 2, cpu_s)
    assert tuple(found) == figures.FIGURES
    assert found[figures.FIRST_TTFP] == pytest.approx(100)
    assert found[figures.LATER_TTFP] == pytest.approx(350)
    assert found[figures.THROUGHPUT] == pytest.approx(4 / 6.0)
    assert found[figures.GAP_P99] == pytest.approx(500, rel=0.01)
    assert found[figures.FRONT_MS] == pytest.approx(100)
    assert found[figures.PROCESS_A_SECOND] == pytest.approx(1000 * 0.8 / 8)
    assert not any(math.isnan(value) for value in found.values())


def test_threads_are_told_apart() -> None:
    """The first thread is the front end, the busiest other one the orchestrator; their time is the kernel's."""
    stop = threading.Event()
    before = threads.used(os.getpid())
    busy = threading.Thread(target=_spin, args=(0.2,))
    idle = threading.Thread(target=stop.wait)
    for each in (busy, idle):
        each.start()
    time.sleep(0.1)
    during = threads.used(os.getpid())
    stop.set()
    for each in (busy, idle):
        each.join()
    assert {busy.native_id, idle.native_id} <= during.keys()
    found = threads.spent(os.getpid(), before, during)
    assert set(found) == set(threads.NAMES)
    assert found[threads.ORCHESTRATOR] > found[threads.OTHERS]


def _spin(seconds: float) -> None:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        pass


def test_an_engines_last_words_are_read() -> None:
    """What a light engine logs at its end is what the result line says of it."""
    from omni_simulated_device.light.host import LAST_WORDS

    line = LAST_WORDS % ("LightEngine_stage0_replica1", 211, 80.4, 0.11, 3.26, 20.72)
    wanted = {"steps": 211, "work_us": 80.0, "late_p50_ms": 0.11, "late_p99_ms": 3.26}
    assert kept_time(f"(LightEngines pid=7) INFO {line}\n") == {"stage0_replica1": wanted}


def test_rows_with_a_verdict_are_named_beforehand() -> None:
    """Later TTFP and throughput from 16 streams on, the highest first and primary, and end to end at the least."""
    rows = list(judged(LEVELS))
    assert rows[0] == (64, figures.LATER_TTFP)
    assert rows[-1] == (1, figures.E2E)
    assert {level for level, _ in rows} == {1, 16, 32, 64}


def test_every_arm_gets_the_same_requests() -> None:
    """Requests follow from the level alone."""
    assert Load().requests("16", 3) == Load().requests("16", 3)
    assert len({str(request.body) for request in Load().requests("16", 64)}) == 64
    assert not STOCK.on

"""``benchmarks.server``: what it makes of a process's threads and of the engines' own words."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

pytest.importorskip("omni_simulated_device")

from benchmarks.server import threads
from benchmarks.server.measure import kept_time


def test_threads_are_told_apart() -> None:
    """The first thread is the front end, ZeroMQ's are by name, the busiest other one is the orchestrator."""
    before = {7: {7: ("vllm", 10**9), 8: ("python", 0)}}
    after = {7: {7: ("vllm", 5 * 10**9), 8: ("python", 10**9), 9: ("ZMQbg/0", 3 * 10**9), 10: ("python", 2 * 10**9)}}
    found = threads.spent([7], before, after)
    assert found == {threads.FRONT_END: 4, threads.ORCHESTRATOR: 2, threads.SOCKETS: 3, threads.OTHERS: 1}
    _, nanoseconds = threads.used([os.getpid()])[os.getpid()][os.getpid()]
    assert nanoseconds > 0


def test_an_engines_last_words_are_read(tmp_path: Path) -> None:
    """What a light engine logs at its end is what the result line says of it."""
    from omni_simulated_device.light.host import LAST_WORDS

    line = LAST_WORDS % ("LightEngine_stage0_replica1", 211, 80.4, 0.11, 3.26, 20.72)
    wanted = {"steps": 211, "work_us": 80.0, "late_p50_ms": 0.11, "late_p99_ms": 3.26}
    (tmp_path / "log").write_text(f"(LightEngines pid=7) INFO {line}\n")
    assert kept_time(tmp_path / "log") == {"stage0_replica1": wanted}

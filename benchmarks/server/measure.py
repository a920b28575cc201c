"""One start of an arm's server at each level, and the rows that get a verdict."""

from __future__ import annotations

import contextlib
import re
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.rigs import server_arms, whole_server
from benchmarks.rigs.server import Server
from benchmarks.rigs.whole_server import FEWEST, checked, measure_of
from benchmarks.server import observed, threads
from benchmarks.server.arms import ServerArm
from benchmarks.server.figures import (
    CLIENT_MS,
    E2E,
    E2E_P99,
    FIRST_TTFP,
    LATER_TTFP,
    LATER_TTFP_P99,
    THROUGHPUT,
    TTFP,
    TTFP_P99,
    by_request,
    figures,
)
from benchmarks.server.load import Load
from omni_fastpath.compare.capture import run_closed_loop
from omni_fastpath.compare.verdict import Measure

Start = Mapping[str, Any]
"""Of one start: ``figures`` by level and name, ``requests``, ``answers`` (their digests, in the order of asking) and
``seen`` by level, ``engines`` by engine, ``start_s`` and ``stop_s``."""

_LATE = re.compile(
    r"LightEngine_(\S+): (\d+) steps, ([\d.]+) us of work each, late by ([\d.]+) ms .*?, ([\d.]+) ms \(99"
)


@contextlib.contextmanager
def serving(arm: ServerArm, load: Load, model: Path, log: Path, seen: Path | None = None) -> Iterator[Server]:
    """The arm's server, warm, proved before and after.

    Args:
        arm: What it should be.
        load: What it will be asked.
        model: The model's folder.
        log: Where its log goes.
        seen: Folder of the observer's sockets; None: nothing is observed.

    Raises:
        WrongArmError: It was not what its arm says.
    """
    import omni_simulated_device

    environment = whole_server.environment(arm, load.stages, light=True)
    environment[omni_simulated_device.OBSERVE_VARIABLE] = None if seen is None else str(seen)
    deploy = whole_server.deploy(load.deploy)
    with Server(model, deploy, environment=environment, arguments=arm.arguments, log_path=log) as server:
        server_arms.prove(server, arm, {"api"})
        checked(run_closed_loop(server.url, load.asked("warming up", FEWEST), FEWEST), audio=True)
        yield server
        server_arms.prove(server, arm, {"api"})


def api_processes(server: Server) -> list[int]:
    """Their process ids; with several, the process that started them is one of these too."""
    return [pid for pid, role in server.processes().items() if role == "api"]


def measure(arm: ServerArm, load: Load, model: Path, log: Path, *, observe: bool = False) -> Start:
    """One start of the arm's server.

    Raises:
        RuntimeError: A request failed, or the server was not what its arm says.
    """
    found: dict[str, dict[str, float]] = {}
    requests: dict[str, list[dict[str, float | None]]] = {}
    answers: dict[str, list[str]] = {}
    seen: dict[str, Sequence[observed.Seen]] = {}
    with (
        tempfile.TemporaryDirectory(prefix="seen-") as folder,
        serving(arm, load, model, log, Path(folder) if observe else None) as server,
    ):
        pids = api_processes(server)
        for level in load.levels:
            if observe:
                observed.ask(Path(folder), pids)
            before, mine_s = threads.used(pids), time.process_time()
            captures = checked(load.run(server.url, level), audio=True)
            cpu_s, mine_s = threads.spent(pids, before, threads.used(pids)), time.process_time() - mine_s
            found[f"{level:g}"] = figures(captures, load.first_wave(level), cpu_s, streamed=load.streamed)
            found[f"{level:g}"][CLIENT_MS] = 1000 * mine_s / len(captures)
            requests[f"{level:g}"] = by_request(captures)
            answers[f"{level:g}"] = [capture.digest() for capture in captures]
            if observe:
                seen[f"{level:g}"] = observed.ask(Path(folder), pids)
                found[f"{level:g}"] |= observed.figures(seen[f"{level:g}"])
    assert server.shutdown is not None
    return {
        "figures": found,
        "requests": requests,
        "answers": answers,
        "engines": kept_time(log.read_text(encoding="utf-8", errors="replace")),
        "seen": seen,
        "start_s": server.start_s,
        "stop_s": server.shutdown.seconds,
    }


def kept_time(log: str) -> dict[str, dict[str, float]]:
    """What the engines said at their end, by engine: steps, work a step, and by how much they were late."""
    return {
        name: {"steps": int(steps), "work_us": float(work), "late_p50_ms": float(half), "late_p99_ms": float(most)}
        for name, steps, work, half, most in _LATE.findall(log)
    }


def run(
    name: str, arms: Sequence[ServerArm], starts: int, load: Load, *, observe: bool = False
) -> dict[str, list[Start]]:
    """So many starts of each arm, in turn; each is a line in ``results/NAME.jsonl``."""

    def start(arm: ServerArm, model: Path, log: Path) -> Start:
        return {"load": load, "observe": observe, **measure(arm, load, model, log, observe=observe)}

    return whole_server.run_starts(name, arms, starts, load.model, start)


def judged(load: Load) -> dict[tuple[str, str], Measure]:
    """Rows that get a verdict, by level and figure; the first one is primary.

    The highest levels by what a user waits for and by throughput; every other one by the first of these and end to end.
    """
    levels = list(load.levels)
    if not load.streamed:
        waits: tuple[str, ...] = (E2E, E2E_P99)
    elif load.loop == "open":
        waits = (TTFP, TTFP_P99)
    elif later := [level for level in levels if load.count(level) > load.first_wave(level)]:
        waits, levels = (LATER_TTFP, LATER_TTFP_P99), later
    else:
        waits = (FIRST_TTFP,)
    high = [level for level in levels if level >= 16] or [max(levels)]
    rows = [(level, name) for level in sorted(high, reverse=True) for name in (*waits, THROUGHPUT)]
    rows.extend((level, name) for level in load.levels if level not in high for name in (waits[0], E2E))
    return {
        (f"{level:g}", name): measure_of(level, name, higher=name == THROUGHPUT) for level, name in dict.fromkeys(rows)
    }

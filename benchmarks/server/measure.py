"""One start of an arm's server at each level, and the rows that get a verdict."""

from __future__ import annotations

import contextlib
import re
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import omni_simulated_device
from benchmarks.rigs import server_arms, whole_server
from benchmarks.rigs.captures import digest, run_closed_loop
from benchmarks.rigs.server import Server
from benchmarks.rigs.whole_server import FEWEST, Rows, checked, measure_of
from benchmarks.server import threads
from benchmarks.server.arms import ServerArm
from benchmarks.server.figures import Figure, by_request, figures
from benchmarks.server.load import Load
from omni_fastpath.tools.ab.capture import Capture
from omni_simulated_device import depths

Start = Mapping[str, Any]
"""Of one start: ``figures`` by level and name, ``requests``, ``answers`` (their digests, in the order of asking)
by level, ``engines`` by engine, ``start_s`` and ``stop_s``."""

_LATE = re.compile(
    r"LightEngine_(\S+): (\d+) steps, ([\d.]+) us of work each, late by ([\d.]+) ms .*?, ([\d.]+) ms \(99"
)


@dataclass(frozen=True)
class Host:
    """What every arm's server runs on.

    Attributes:
        release: Of vllm-omni, which has been fetched (`benchmarks.rigs.overlays`); None: the one that is installed.
        stages: Real stage engines on the simulated device, instead of light engines.
    """

    release: str | None = None
    stages: bool = False

    def __str__(self) -> str:
        """As a table's title has it."""
        return ("real stage engines" if self.stages else "light engines") + (
            f", vLLM-Omni {self.release}" if self.release else ""
        )


USUAL_HOST = Host()

WARM_TOKENS = 20
"""Of an answer before a load, which takes a fifth of the time of a usual one."""


@contextlib.contextmanager
def serving(
    arm: ServerArm, load: Load, model: Path, log: Path, host: Host = USUAL_HOST
) -> Iterator[tuple[Server, threads.Known]]:
    """The arm's server, warm, proved before and after, and which of its threads are which.

    Args:
        arm: What it should be.
        load: What it will be asked.
        model: The model's folder.
        log: Where its log goes.
        host: What it runs on.

    Raises:
        WrongArmError: It was not what its arm says.
    """
    environment = whole_server.environment(arm, load.stages, light=not host.stages)
    environment[omni_simulated_device.DEPTHS_VARIABLE] = str(depths_of(log))
    deploy = whole_server.deploy(load.deploy)
    with Server(
        model, deploy, environment=environment, arguments=arm.arguments, log_path=log, release=host.release
    ) as server:
        roles = {"api"} if host.stages else {"api", "engines"}
        server_arms.prove(server, arm, roles)
        yield server, warmed(server, load)
        time.sleep(server_arms.STATE_FILES_SETTLE_S)
        server_arms.check_gate(arm, server_arms.prove(server, arm, roles), has_talker=load.model == "qwen3_omni")


def depths_of(log: Path) -> Path:
    """Where the API processes write down how long their queues are, beside their log."""
    return log.with_suffix(".depths")


def api_processes(server: Server) -> list[int]:
    """Their process ids; with several, the process that started them is one of these too."""
    return [pid for pid, role in server.processes().items() if role == "api"]


def warmed(server: Server, load: Load) -> threads.Known:
    """Let a server answer a few requests, text alone first; which of its API processes' threads are which.

    Raises:
        MeasureError: A request failed.
    """
    before = threads.used(api_processes(server))
    load = replace(load, tokens=min(load.tokens, WARM_TOKENS))
    text = replace(load, audio_in=None)
    checked(run_closed_loop(server.url, text.asked("warming up", FEWEST), FEWEST), audio=True)
    told = {each.pid: each.threads for each in server.snapshots().values()}
    known = threads.known(before, threads.used(before), told)
    if load != text:
        checked(run_closed_loop(server.url, load.asked("warming up", FEWEST), FEWEST), audio=True)
    return known


def run_level(
    server: Server, known: threads.Known, load: Load, level: float
) -> tuple[dict[str, float], Sequence[Capture]]:
    """One level of a load: its figures, and what came back.

    Raises:
        MeasureError: A request failed.
    """
    load.asked_at(level)  # recordings are made once, which may take a minute, in which stock's poll loop turns
    before, mine_s = threads.used(known), time.process_time()
    captures = checked(load.run(server.url, level), audio=True)
    cpu_s, mine_s = threads.spent(known, before, threads.used(known)), time.process_time() - mine_s
    found = figures(captures, load.first_wave(level), cpu_s, streamed=load.streamed)
    return {**found, Figure.CLIENT_MS: 1000 * mine_s / len(captures)}, captures


def measure(arm: ServerArm, load: Load, model: Path, log: Path, host: Host = USUAL_HOST) -> Start:
    """One start of the arm's server.

    Raises:
        RuntimeError: A request failed, or the server was not what its arm says.
    """
    found: dict[str, dict[str, float]] = {}
    requests: dict[str, list[dict[str, float | None]]] = {}
    answers: dict[str, list[str]] = {}
    spans: dict[str, tuple[float, float]] = {}
    with serving(arm, load, model, log, host) as (server, known):
        for level in load.levels:
            began = time.monotonic()
            found[f"{level:g}"], captures = run_level(server, known, load, level)
            requests[f"{level:g}"] = by_request(captures)
            answers[f"{level:g}"] = [digest(capture) for capture in captures]
            spans[f"{level:g}"] = began, max(capture.started_at_s + capture.e2e_s for capture in captures)
    for name, span in spans.items():
        if queued := depths.read(depths_of(log), *span):
            found[name] |= {Figure.QUEUED: statistics.fmean(queued), Figure.QUEUED_MOST: max(queued)}
    assert server.shutdown is not None
    return {
        "figures": found,
        "requests": requests,
        "answers": answers,
        "engines": kept_time(log),
        "start_s": server.start_s,
        "stop_s": server.shutdown.seconds,
    }


def kept_time(log: Path) -> dict[str, dict[str, float]]:
    """What the engines said at their end, by engine: steps, work a step, and by how much they were late."""
    return {
        name: {"steps": int(steps), "work_us": float(work), "late_p50_ms": float(half), "late_p99_ms": float(most)}
        for name, steps, work, half, most in _LATE.findall(log.read_text(encoding="utf-8", errors="replace"))
    }


def run(
    name: str, arms: Sequence[ServerArm], starts: int, load: Load, host: Host = USUAL_HOST
) -> dict[str, list[Start]]:
    """So many starts of each arm, in turn; each is a line in ``results/NAME.jsonl``."""

    def start(arm: ServerArm, model: Path, log: Path) -> Start:
        return {"load": load, "host": host, **measure(arm, load, model, log, host)}

    return whole_server.run_starts(name, arms, starts, load.model, start)


def judged(load: Load) -> list[Rows]:
    """The rows that get a verdict, level by level, each a family of its own whose first row is the primary one.

    Nine at most, so that six starts can tell a difference in each.
    """
    return [_judged(load, level) for level in load.levels]


def _judged(load: Load, level: float) -> Rows:
    names: list[str] = [Figure.E2E, Figure.E2E_P99]
    if load.streamed:
        if load.loop == "open":
            audio = [Figure.TTFP, Figure.TTFP_P99]
        elif load.count(level) > load.first_wave(level):
            audio = [Figure.LATER_TTFP, Figure.LATER_TTFP_P99]
        else:
            audio = [Figure.FIRST_TTFP, Figure.FIRST_TTFP_P99]
        names = [*audio, Figure.E2E, Figure.DRY, Figure.GAP]
        if load.api == "chat":
            names += [Figure.FIRST_TEXT, Figure.TEXT_GAP_P99]
    if load.loop == "closed":
        names.append(Figure.THROUGHPUT)
    names.append(Figure.PROCESS_MS)
    return {(f"{level:g}", name): measure_of(level, name, higher=name == Figure.THROUGHPUT) for name in names}

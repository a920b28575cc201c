"""One start of an arm's server at each level, and what it can bear."""

from __future__ import annotations

import contextlib
import math
import re
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import psutil

import omni_simulated_device
from benchmarks.ab.capture import Capture
from benchmarks.ab.serving import MeasureError
from benchmarks.rigs import server_arms, whole_server
from benchmarks.rigs.arm import Arm, WrongArmError
from benchmarks.rigs.captures import digest, quantile, run_closed_loop
from benchmarks.rigs.server import Server
from benchmarks.rigs.whole_server import FEWEST, checked
from benchmarks.server.figures import Figure, figures
from benchmarks.server.load import Load
from omni_simulated_device import without

Start = Mapping[str, Any]
"""Of one start: ``figures`` by level and name, ``answers`` (their digests, in the order of asking) by level,
``start_s`` and ``stop_s``; ``capacity`` where that was asked for."""

Levels = dict[str, dict[str, float]]
"""Figures by level and name."""

LATE_MS = 5.0
"""By how much 99 of 100 steps of the engines may be late, milliseconds."""
CLIENT_LATE_MS = 50.0
CLIENT_CORES = 0.85
"""Where the client needs more of a core, or its event loop is later, it lacked a core."""

LADDER = (8, 10, 12, 16, 20, 25, 32, 40, 50, 64, 80, 100, 128, 160, 200, 256, 320, 400, 512)
"""Streams, in factors of about 1.25."""
TIMES_AUDIO = 2.0
MORE_DRY_MS = 100.0
"""What a server bears: first audio p99 at most so many times the limit's, and underrun p99 at most so much above it."""

_LATE = re.compile(
    r"LightEngine_(\S+): (\d+) steps, ([\d.]+) us of work each, late by ([\d.]+) ms .*?, ([\d.]+) ms \(99"
)
_PATIENCE_S = 5.0


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
def serving(arm: Arm, load: Load, log: Path, host: Host = USUAL_HOST) -> Iterator[Server]:
    """The arm's server, warm, proved before and after.

    Args:
        arm: What it should be.
        load: What it will be asked.
        log: Where its log goes.
        host: What it runs on.

    Raises:
        WrongArmError: It was not what its arm says.
        MeasureError: A request failed.
    """
    given: dict[str, Any] = {"light": not host.stages, "log_path": log, "release": host.release}
    with whole_server.server(arm, load.model, load.deploy, load.device, **given) as server:
        roles = {"api"} if host.stages else {"api", "engines"}
        server_arms.prove(server, arm, roles)
        asked = replace(load, tokens=WARM_TOKENS).asked("warming up", FEWEST)
        checked(run_closed_loop(server.url, asked, FEWEST), audio=load.kind == "audio")
        _check_without(arm, server, log)
        yield server
        time.sleep(server_arms.STATE_FILES_SETTLE_S)
        has_talker = load.model == "qwen3_omni" and load.kind == "audio"
        server_arms.check_gate(arm, server_arms.prove(server, arm, roles), has_talker=has_talker)


def _check_without(arm: Arm, server: Server, log: Path) -> None:
    """Check that the parts that an arm goes without were taken out."""
    said, pids = log.read_text(encoding="utf-8", errors="replace"), server.pids("api")
    for part in filter(None, arm.environment.get(omni_simulated_device.WITHOUT_VARIABLE, "").split(",")):
        if not any(without.SAID % (part, pid) in said for pid in pids):
            raise WrongArmError(f"this server is no {arm.name} arm: it has {part}")


def used_s(server: Server) -> float:
    """Processor seconds of the API processes so far; with several, the one that started them is one of these too."""
    return sum(sum(psutil.Process(pid).cpu_times()[:2]) for pid in server.pids("api"))


def run_level(server: Server, load: Load, level: float, log: Path) -> tuple[dict[str, float], Sequence[Capture]]:
    """One level of a load: its figures, and what came back.

    Raises:
        MeasureError: A request failed.
    """
    late: list[float] = []
    _kept_time_until_now(server, log)
    before, mine_s, began = used_s(server), time.process_time(), time.monotonic()
    captures = checked(load.run(server.url, level, late), audio=load.kind == "audio")
    cpu_s, mine_s, took_s = used_s(server) - before, time.process_time() - mine_s, time.monotonic() - began
    return {
        **figures(load.in_device_time(captures), cpu_s),
        Figure.MEMORY: sum(psutil.Process(pid).memory_info().rss for pid in server.pids("api")) / 2**20,
        Figure.ENGINES_LATE: max(
            (each["late_p99_ms"] / load.pace for each in _kept_time_until_now(server, log).values()), default=math.nan
        ),
        Figure.CLIENT_LATE: 1000 * quantile(late, 0.99) / load.pace,
        Figure.CLIENT: mine_s / took_s,
    }, captures


def unfit(found: Mapping[str, float]) -> str | None:
    """Why a level measured this machine; None where it did not."""
    if found[Figure.ENGINES_LATE] > LATE_MS:
        return f"engines late by {found[Figure.ENGINES_LATE]:.1f} ms"
    if found[Figure.CLIENT_LATE] > CLIENT_LATE_MS or found[Figure.CLIENT] > CLIENT_CORES:
        return f"the client late by {found[Figure.CLIENT_LATE]:.0f} ms, on {found[Figure.CLIENT]:.2f} of a core"
    return None


def measure(arm: Arm, load: Load, log: Path, host: Host = USUAL_HOST) -> Start:
    """One start of the arm's server at each level.

    Raises:
        WrongArmError: The server was not what its arm says.
        MeasureError: A request failed.
    """
    found: Levels = {}
    answers: dict[str, list[str]] = {}
    with serving(arm, load, log, host) as server:
        for level in load.levels:
            found[f"{level:g}"], captures = run_level(server, load, level, log)
            answers[f"{level:g}"] = [digest(capture) for capture in captures]
    assert server.shutdown is not None
    return {
        "figures": found,
        "answers": answers,
        "start_s": server.start_s,
        "stop_s": server.shutdown.seconds,
    }


def capacity(arm: Arm, load: Load, log: Path, host: Host = USUAL_HOST) -> Start:
    """The most streams of `LADDER` that one start of the arm's server bears, found by halves; 0: not the fewest.

    Raises:
        As `measure`.
    """
    found: Levels = {}
    with serving(arm, load, log, host) as server:
        least, most = -1, len(LADDER)
        while most - least > 1:
            at = (least + most) // 2
            level = LADDER[at]
            found[f"{level}"], _ = run_level(server, load, level, log)
            if _bears(found[f"{level}"], figures(load.limit(level))):
                least = at
            else:
                most = at
    return {"figures": found, "answers": {}, "capacity": LADDER[least] if least >= 0 else 0}


def _bears(found: Mapping[str, float], limit: Mapping[str, float]) -> bool:
    return (
        found[Figure.AUDIO_P99] <= TIMES_AUDIO * limit[Figure.AUDIO_P99]
        and found[Figure.DRY_P99] <= limit[Figure.DRY_P99] + MORE_DRY_MS
    )


def _kept_time_until_now(server: Server, log: Path) -> dict[str, dict[str, float]]:
    """What light engines say of their time since they were last asked; nothing of real ones.

    Raises:
        MeasureError: They do not answer.
    """
    told, deadline = log.stat().st_size, time.monotonic() + _PATIENCE_S
    for pid in server.pids("engines"):
        psutil.Process(pid).send_signal(signal.SIGUSR1)
        while b"engines have said" not in (said := log.read_bytes()[told:]):
            if time.monotonic() > deadline:
                raise MeasureError("the light engines do not say how late they were")
            time.sleep(0.05)
        return _said(said.decode(errors="replace"))
    return {}


def kept_time(log: Path) -> dict[str, dict[str, float]]:
    """What the engines said of their time, by engine: steps, work a step, and by how much they were late."""
    return _said(log.read_text(encoding="utf-8", errors="replace"))


def _said(text: str) -> dict[str, dict[str, float]]:
    return {
        name: {"steps": int(steps), "work_us": float(work), "late_p50_ms": float(half), "late_p99_ms": float(most)}
        for name, steps, work, half, most in _LATE.findall(text)
    }


def run(
    name: str,
    arms: Sequence[Arm],
    starts: int,
    load: Load,
    host: Host = USUAL_HOST,
    *,
    goes_on: bool = False,
    minutes: float = math.inf,
    of_start: Callable[..., Start] = measure,
) -> dict[str, list[Start]]:
    """So many starts of each arm, in turn; each is a line in ``results/NAME.jsonl``.

    Args:
        name: Of the file.
        arms: The arms.
        starts: Of each.
        load: What they are asked.
        host: What they run on.
        goes_on: Starts that the file has of the same load count.
        minutes: As of `whole_server.run_starts`.
        of_start: `measure` or `capacity`.
    """

    def start(arm: Arm, log: Path) -> Start:
        return {"load": load, "host": host, **of_start(arm, load, log, host)}

    of = {"load": load, "host": host, "what": of_start.__name__} if goes_on else None
    return whole_server.run_starts(name, arms, starts, start, of=of, minutes=minutes)

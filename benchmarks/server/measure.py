"""One start of an arm's server at each level, and the verdicts over starts."""

from __future__ import annotations

import json
import re
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.rigs import results
from benchmarks.rigs import server_arms as arms
from benchmarks.rigs.capture import Capture, Request, chat_request, run_closed_loop
from benchmarks.rigs.server import Server
from benchmarks.server import threads
from benchmarks.server.figures import E2E, LATER_TTFP, LATER_TTFP_P99, THROUGHPUT, figures
from omni_fastpath.compare import about, verdict
from omni_fastpath.compare.arm import Arm
from omni_fastpath.compare.turns import turns
from omni_fastpath.compare.verdict import Measure

LEVELS = (1, 4, 8, 16, 32, 64)
STOCK, EVENT = Arm("stock"), Arm("stock, event-driven", event_driven=True)
FASTPATH = Arm("fastpath", {"OMNI_FASTPATH": "1"})
ARMS = {"stock": STOCK, "event": EVENT, "fastpath": FASTPATH}
"""By what the command line calls them."""

STEP_MS = {"thinker": 15.0, "talker": 12.0, "code2wav": 8.0}
WAVES = 4
FEWEST = 8
"""Requests at the lowest levels."""
DEPLOYS = {1: "qwen3_omni.yaml", 2: "qwen3_omni_2x.yaml", 4: "qwen3_omni_4x.yaml"}

Figures = Mapping[str, Mapping[str, float]]
"""Of one start: by level and name."""

_LATE = re.compile(
    r"LightEngine_(\S+): (\d+) steps, ([\d.]+) us of work each, late by ([\d.]+) ms .*?, ([\d.]+) ms \(99"
)


@dataclass(frozen=True)
class Load:
    """What every start is asked.

    Attributes:
        levels: Streams in flight, one level after the other.
        replicas: Of each stage.
        tokens: Text tokens of an answer, exactly.
    """

    levels: Sequence[int] = LEVELS
    replicas: int = 1
    tokens: int = 100

    def requests(self, what: str, count: int) -> list[Request]:
        """The same for every arm."""
        return [
            chat_request(f"Question {number} of {what}", max_tokens=self.tokens, ignore_eos=True)
            for number in range(count)
        ]


def measure(arm: Arm, load: Load, model: Path, log: Path) -> tuple[dict[str, dict[str, float]], dict[str, Any]]:
    """One start of the arm's server: figures by level, and how well its engines kept time.

    Raises:
        RuntimeError: A request failed, or the server was not what its arm says.
    """
    import omni_simulated_device

    deploy = Path(omni_simulated_device.__file__).parent / "deploy" / DEPLOYS[load.replicas]
    device = json.dumps({"stages": {stage: {"base_ms": step} for stage, step in STEP_MS.items()}})
    environment = {
        **arms.environment(arm),
        omni_simulated_device.CONFIG_VARIABLE: device,
        omni_simulated_device.ENABLE_VARIABLE: "light",
    }
    found = {}
    with Server(model, deploy, environment=environment, log_path=log) as server:
        arms.prove(server, arm, {"api"})
        _checked(run_closed_loop(server.url, load.requests("warming up", 8), 8))
        [pid] = [pid for pid, role in server.processes().items() if role == "api"]
        for level in load.levels:
            asked = load.requests(str(level), max(FEWEST, WAVES * level))
            before = threads.used(pid)
            captures = _checked(run_closed_loop(server.url, asked, level))
            cpu_s = threads.spent(pid, before, threads.used(pid))
            found[str(level)] = figures(captures, level, cpu_s)
        arms.prove(server, arm, {"api"})
    return found, kept_time(log.read_text(encoding="utf-8", errors="replace"))


def kept_time(log: str) -> dict[str, Any]:
    """What the engines said at their end, by engine: steps, work a step, and by how much they were late."""
    return {
        name: {"steps": int(steps), "work_us": float(work), "late_p50_ms": float(half), "late_p99_ms": float(most)}
        for name, steps, work, half, most in _LATE.findall(log)
    }


def _checked(captures: Sequence[Capture]) -> Sequence[Capture]:
    bad = [capture for capture in captures if not capture.succeeded]
    if bad:
        raise RuntimeError(f"{len(bad)} of {len(captures)} requests failed, the first with {bad[0].error}")
    return captures


def run(name: str, subjects: Sequence[Arm], starts: int, load: Load) -> dict[str, list[Figures]]:
    """Figures of so many starts of each arm, in turn; each start is a line in ``results/NAME.jsonl``."""
    from omni_simulated_device.models import write_qwen3_omni

    about.commit()  # of the code that runs, whatever is committed meanwhile
    found: dict[str, list[Figures]] = {arm.name: [] for arm in subjects}
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / "qwen3_omni"
        write_qwen3_omni(model)
        for place, (_, arm) in enumerate(turns(subjects, starts)):
            results.progress(f"start {place + 1} of {len(subjects) * starts}: {arm.name}")
            start, engines = measure(arm, load, model, Path(folder) / f"{place}.log")
            line = {"arm": arm.name, "place": place, "load": load, "figures": start, "engines": engines}
            results.save(name, line)
            found[arm.name].append(start)
    return found


def judged(levels: Sequence[int]) -> dict[tuple[int, str], Measure]:
    """Rows that get a verdict, by level and figure; the first one is primary."""
    high = [level for level in levels if level >= 16] or [max(levels)]
    rows = [(level, name) for level in reversed(high) for name in (LATER_TTFP, LATER_TTFP_P99, THROUGHPUT)]
    rows.append((min(levels), E2E))
    return {(level, name): _row(level, name) for level, name in rows}


def _row(level: int, figure: str) -> Measure:
    name, _, unit = figure.partition(", ")
    return Measure(f"{name} at {level}", unit, "higher" if figure == THROUGHPUT else "lower")


def judge(
    found: Mapping[str, Sequence[Figures]], a: Arm, b: Arm, rows: Mapping[tuple[int, str], Measure]
) -> dict[str, verdict.Verdict]:
    """The verdict of each row, *b* against *a*, by the measure's name."""
    values = [
        {row.name: [start[str(level)][name] for start in found[arm.name]] for (level, name), row in rows.items()}
        for arm in (a, b)
    ]
    return verdict.verdicts(next(iter(rows.values())), list(rows.values()), *values)

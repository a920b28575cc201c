"""One start of a server at each concurrency, the rows that get a verdict, and the verdicts."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.rigs import results
from benchmarks.rigs import server_arms as arms
from benchmarks.rigs.capture import Capture, chat_request, run_closed_loop
from benchmarks.rigs.server import Server
from omni_fastpath.compare import about, verdict
from omni_fastpath.compare.arm import Arm
from omni_fastpath.compare.quantiles import quantile
from omni_fastpath.compare.turns import turns
from omni_fastpath.compare.verdict import Measure

LEVELS = (1, 2, 4, 8, 16, 32)
WAVES = 3
"""Requests at a level, in blocks of its concurrency."""
FEWEST = 8
"""Requests at the lowest levels."""
OUTPUT_TOKENS = 40
STEP_MS = {"thinker": 15.0, "talker": 12.0, "code2wav": 8.0}
STOCK, FASTPATH = Arm("stock"), Arm("fastpath", {"OMNI_FASTPATH": "1"})
ARMS = (STOCK, FASTPATH)
THROUGHPUT = "throughput, req/s"
TTFP = "TTFP p50, ms"
FIGURES = (THROUGHPUT, "TTFT p50, ms", TTFP, "TTFP p90, ms", "E2E p50, ms", "E2E p90, ms")

Figures = Mapping[str, Mapping[str, float]]
"""Of one start: by level and name."""


def measure_of(level: int, figure: str) -> Measure:
    """A row of the table as the verdict knows it."""
    name, _, unit = figure.partition(", ")
    return Measure(f"{name} at {level}", unit, "higher" if figure == THROUGHPUT else "lower")


JUDGED = {
    (level, figure): measure_of(level, figure)
    for levels, figure in ((LEVELS, TTFP), ((1, 8, 32), "E2E p50, ms"), ((32,), THROUGHPUT))
    for level in levels
}
"""Rows that get a verdict, by level and figure."""
PRIMARY = JUDGED[1, TTFP]
"""Where nothing queues, whatever the fast path costs is all that it does."""


def measure(arm: Arm, model: Path, log: Path, levels: Sequence[int] = LEVELS) -> dict[str, dict[str, float]]:
    """One start of the arm's server: figures by level.

    Raises:
        RuntimeError: A request failed, or the server was not what its arm says.
    """
    import omni_simulated_device

    deploy = Path(omni_simulated_device.__file__).parent / "deploy" / "qwen3_omni.yaml"
    device = json.dumps({"stages": {stage: {"base_ms": step} for stage, step in STEP_MS.items()}})
    environment = {**arms.environment(arm), omni_simulated_device.CONFIG_VARIABLE: device}
    found = {}
    with Server(model, deploy, environment=environment, log_path=log) as server:
        _checked(run_closed_loop(server.url, _requests("warm", 4), 4))
        for level in levels:
            captures = _checked(run_closed_loop(server.url, _requests(str(level), max(FEWEST, WAVES * level)), level))
            found[str(level)] = _figures(captures)
        arms.prove(server, arm, arms.roles(len(STEP_MS)))
    return found


def _requests(what: str, count: int) -> list[Any]:
    return [
        chat_request(f"Question {number} of {what}", max_tokens=OUTPUT_TOKENS, ignore_eos=True)
        for number in range(count)
    ]


def _checked(captures: Sequence[Capture]) -> Sequence[Capture]:
    bad = [capture for capture in captures if not capture.succeeded]
    if bad:
        raise RuntimeError(f"{len(bad)} of {len(captures)} requests failed, the first with {bad[0].error}")
    return captures


def _figures(captures: Sequence[Capture]) -> dict[str, float]:
    begun = min(capture.started_at_s for capture in captures)
    ended = max(capture.started_at_s + capture.e2e_s for capture in captures)
    values = [len(captures) / (ended - begun)]
    for name, shares in (("ttft_s", (0.5,)), ("ttfp_s", (0.5, 0.9)), ("e2e_s", (0.5, 0.9))):
        times = [value * 1000 for capture in captures if (value := getattr(capture, name)) is not None]
        values += [quantile(times, share) for share in shares]
    return dict(zip(FIGURES, values, strict=True))


def run(name: str, subjects: Sequence[Arm], starts: int, levels: Sequence[int] = LEVELS) -> dict[str, list[Figures]]:
    """Figures of so many starts of each arm, in turn; each start is a line in ``results/NAME.jsonl``."""
    from omni_simulated_device.models import write_qwen3_omni

    about.commit()  # of the code that runs, whatever is committed meanwhile
    found: dict[str, list[Figures]] = {arm.name: [] for arm in subjects}
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / "qwen3_omni"
        write_qwen3_omni(model)
        for place, (_, arm) in enumerate(turns(subjects, starts)):
            results.progress(f"start {place + 1} of {len(subjects) * starts}: {arm.name}")
            figures = measure(arm, model, Path(folder) / f"{place}.log", levels)
            results.save(name, {"arm": arm.name, "place": place, "figures": figures})
            found[arm.name].append(figures)
    return found


def judge(found: Mapping[str, Sequence[Figures]]) -> dict[str, verdict.Verdict]:
    """The verdict of each row of ``JUDGED``, by the measure's name."""
    a, b = (
        {row.name: [start[str(level)][name] for start in found[arm.name]] for (level, name), row in JUDGED.items()}
        for arm in ARMS
    )
    return verdict.verdicts(PRIMARY, list(JUDGED.values()), a, b)

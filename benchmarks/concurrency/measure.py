"""One start of a server at each concurrency, the rows that get a verdict, and the verdicts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.rigs import server_arms as arms
from benchmarks.rigs import whole_server
from benchmarks.rigs.server import Server
from benchmarks.rigs.whole_server import FEWEST, STEP_MS, Figures, checked, measure_of
from omni_fastpath.compare import verdict
from omni_fastpath.compare.arm import Arm
from omni_fastpath.compare.capture import Capture, chat_request, run_closed_loop
from omni_fastpath.compare.quantiles import quantile

LEVELS = (1, 2, 4, 8, 16, 32)
WAVES = 3
"""Requests at a level, in blocks of its concurrency."""
OUTPUT_TOKENS = 40
STOCK, FASTPATH = Arm("stock"), Arm("fastpath", {"OMNI_FASTPATH": "1"})
ARMS = (STOCK, FASTPATH)
THROUGHPUT = "throughput, req/s"
TTFP = "TTFP p50, ms"
FIGURES = (THROUGHPUT, "TTFT p50, ms", TTFP, "TTFP p90, ms", "E2E p50, ms", "E2E p90, ms")

JUDGED = {
    (str(level), figure): measure_of(level, figure, higher=figure == THROUGHPUT)
    for levels, figure in ((LEVELS, TTFP), ((1, 8, 32), "E2E p50, ms"), ((32,), THROUGHPUT))
    for level in levels
}
"""Rows that get a verdict, by level and figure."""
PRIMARY = JUDGED["1", TTFP]
"""Where nothing queues, whatever the fast path costs is all that it does."""


def measure(arm: Arm, model: Path, log: Path, levels: Sequence[int] = LEVELS) -> dict[str, dict[str, float]]:
    """One start of the arm's server: figures by level.

    Raises:
        RuntimeError: A request failed, or the server was not what its arm says.
    """
    deploy, environment = whole_server.deploy("qwen3_omni.yaml"), whole_server.environment(arm)
    found = {}
    with Server(model, deploy, environment=environment, log_path=log) as server:
        checked(run_closed_loop(server.url, _requests("warm", 4), 4))
        for level in levels:
            captures = checked(run_closed_loop(server.url, _requests(str(level), max(FEWEST, WAVES * level)), level))
            found[str(level)] = _figures(captures)
        arms.prove(server, arm, arms.roles(len(STEP_MS)))
    return found


def _requests(what: str, count: int) -> list[Any]:
    return [
        chat_request(f"Question {number} of {what}", max_tokens=OUTPUT_TOKENS, ignore_eos=True)
        for number in range(count)
    ]


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

    def start(arm: Arm, model: Path, log: Path) -> Mapping[str, Any]:
        return {"figures": measure(arm, model, log, levels)}

    found = whole_server.run_starts(name, subjects, starts, "qwen3_omni", start)
    return {arm: [each["figures"] for each in lines] for arm, lines in found.items()}


def judge(found: Mapping[str, Sequence[Figures]]) -> dict[str, verdict.Verdict]:
    """The verdict of each row of ``JUDGED``, by the measure's name."""
    a, b = (found[arm.name] for arm in ARMS)
    return whole_server.judge(a, b, JUDGED)

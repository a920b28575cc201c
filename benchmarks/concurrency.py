"""The whole server at concurrency 1 to 32, stock and fastpath: is it anywhere worse?

    python -m benchmarks.concurrency

Qwen3-Omni, one replica a stage, on the simulated device with the step times of a large model, where the orchestrator is
mostly idle. Each start is a server of its own; arms alternate. What one arm varies from start to start is the A/A
interval, and thereby the resolution: a smaller difference cannot be seen here.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.serving.capture import Capture, chat_request, run_closed_loop
from benchmarks.serving.server import Server
from omni_fastpath.declare import Process
from omni_fastpath.patches import PATCHES

LEVELS = (1, 2, 4, 8, 16, 32)
WAVES = 3
"""Requests at a level, in blocks of its concurrency."""
FEWEST = 8
"""Requests at the lowest levels."""
OUTPUT_TOKENS = 40
STEP_MS = {"thinker": 15.0, "talker": 12.0, "code2wav": 8.0}
STARTS = 3
ARMS = ("stock", "fastpath")
FIGURES = ("throughput, req/s", "TTFT p50, ms", "TTFP p50, ms", "TTFP p90, ms", "E2E p50, ms", "E2E p90, ms")


def order(starts: int) -> Iterator[str]:
    """The arm of each start: each pair the other way round, so that drift hits both arms alike."""
    for number in range(starts):
        yield from ARMS if number % 2 == 0 else reversed(ARMS)


def measure(arm: str, model: Path, log: Path) -> dict[str, dict[str, float]]:
    """One start of the arm's server: figures by level.

    Raises:
        RuntimeError: A request failed, or the server was not what its arm says.
    """
    import omni_simulated_device

    deploy = Path(omni_simulated_device.__file__).parent / "deploy" / "qwen3_omni.yaml"
    device = json.dumps({"stages": {stage: {"base_ms": step} for stage, step in STEP_MS.items()}})
    environment = {
        omni_simulated_device.CONFIG_VARIABLE: device,
        "OMNI_FASTPATH": "1" if arm == "fastpath" else "0",
        "VLLM_OMNI_EVENT_DRIVEN_ORCH": "0",
    }
    found = {}
    with Server(model, deploy, environment=environment, log_path=log) as server:
        _checked(run_closed_loop(server.url, _requests("warm", 4), 4))
        for level in LEVELS:
            captures = _checked(run_closed_loop(server.url, _requests(str(level), max(FEWEST, WAVES * level)), level))
            found[str(level)] = _figures(captures)
        _check_arm(server, arm)
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


def _check_arm(server: Server, arm: str) -> None:
    """The server's own state files say what it was."""
    states = [json.loads(path.read_text()) for path in (server.runtime_folder / "omni-fastpath").glob("*.json")]
    (patches,) = [each["patches"] for each in states if each["role"] == "server"]
    here = {patch.name for patch in PATCHES if Process.SERVER in patch.processes}
    wanted = {"applied"} if arm == "fastpath" else {"off"}
    if {each["state"] for name, each in patches.items() if name in here or arm != "fastpath"} != wanted:
        raise RuntimeError(f"this server is no {arm} arm: {patches}")


def _figures(captures: Sequence[Capture]) -> dict[str, float]:
    begun = min(capture.started_at_s for capture in captures)
    ended = max(capture.started_at_s + capture.e2e_s for capture in captures)
    values = [len(captures) / (ended - begun)]
    for name, shares in (("ttft_s", (50,)), ("ttfp_s", (50, 90)), ("e2e_s", (50, 90))):
        times = [value * 1000 for capture in captures if (value := getattr(capture, name)) is not None]
        cuts = statistics.quantiles(times, n=100, method="inclusive")
        values += [cuts[share - 1] for share in shares]
    return dict(zip(FIGURES, values, strict=True))


def _farthest(values: Sequence[float]) -> float:
    """The ratio of the two starts of one arm that differ most."""
    return max(values) / min(values)


def main() -> None:
    """Run the starts and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--starts", type=int, default=STARTS, help="of each arm")
    options = parser.parse_args()
    from omni_simulated_device.models import write_qwen3_omni

    found: dict[str, list[dict[str, dict[str, float]]]] = {arm: [] for arm in ARMS}
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / "qwen3_omni"
        write_qwen3_omni(model)
        for number, arm in enumerate(order(options.starts)):
            print(f"  start {number + 1} of {2 * options.starts}: {arm}", file=sys.stderr, flush=True)
            found[arm].append(measure(arm, model, Path(folder) / f"{number}.log"))
    Path("results").mkdir(exist_ok=True)
    Path("results/concurrency.json").write_text(json.dumps(found))
    show(found)


def show(found: dict[str, list[dict[str, dict[str, float]]]]) -> None:
    """A row for each level and figure: medians, their ratio, and how far two starts of one arm lie apart."""
    table = Table(title=f"Whole server, {len(found['stock'])} starts an arm: median; A/A: widest ratio within an arm")
    for column in ("concurrency", "figure", *ARMS, "ratio", "A/A"):
        table.add_column(column, justify="left" if column == "figure" else "right")
    for level in LEVELS:
        for name in FIGURES:
            runs = [[start[str(level)][name] for start in found[arm]] for arm in ARMS]
            stock, fast = (statistics.median(each) for each in runs)
            apart = max(_farthest(each) for each in runs)
            better = fast >= stock if name.startswith("throughput") else fast <= stock
            ratio = fast / stock
            told = "better or equal" if better else "within A/A" if max(ratio, 1 / ratio) <= apart else "WORSE"
            table.add_row(
                str(level),
                name,
                f"{stock:.1f}",
                f"{fast:.1f}",
                f"{ratio:.2f} {told}",
                f"{apart:.2f}",
                end_section=name == FIGURES[-1],
            )
    Console(width=110).print(table)


if __name__ == "__main__":
    main()

"""``python -m benchmarks.save_queue``."""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import benchmarks.save_queue
from benchmarks.ab.capture import Capture, chat_request
from benchmarks.rigs import results, side_by_side
from benchmarks.rigs import server_arms as arms
from benchmarks.rigs.arm import STOCK, Arm
from benchmarks.rigs.captures import audio_gaps_s, digest, quantile, run_open_loop, ttfp_s
from benchmarks.rigs.results import progress
from benchmarks.rigs.whole_server import checked, run_starts
from benchmarks.rigs.whole_server import server as server_of

FASTPATH = Arm("fastpath", {"OMNI_FASTPATH_SAVE_QUEUE_CAP": "1"})
SLOW_MS = 200.0
OUTPUT_TOKENS = 32
RATE = 5.0
"""Arrivals a second."""
STREAMS = 16
FIRST_SLOW = 3
ARMS = (STOCK, FASTPATH, Arm("stock again"))
"""One server start each; the second stock is the A/A pair."""

Batches = dict[int, list[list[dict[str, Any]]]]
"""By the number of slow streams: of each batch its streams."""


def run(slow: Sequence[int], runs: int, stage: int) -> None:
    """Start the servers one after another, save the lines and print the table.

    Args:
        slow: Numbers of slow streams, one after another.
        runs: Batches of each.
        stage: Whose sends are slow.

    Raises:
        RuntimeError: An answer differs between runs or arms.
    """

    def start(arm: Arm, log: Path) -> dict[str, Any]:
        return {"what": "server", "stage": stage, "batches": _measure(arm, slow, runs, stage, log)}

    starts = run_starts("save_queue", ARMS, 1, start)
    found = {name: start["batches"] for name, [start] in starts.items()}
    _check_content(found)
    _show(found, stage)


def _measure(arm: Arm, slow: Sequence[int], runs: int, stage: int, log: Path) -> Batches:
    import omni_simulated_device

    injection = {"stage": stage, "match": "slow", "ms": SLOW_MS}
    variables = {omni_simulated_device.SLOW_SENDS_VARIABLE: json.dumps(injection)}
    found: Batches = {count: [] for count in slow}
    with server_of(arm, "qwen3_omni", "qwen3_omni.yaml", variables=variables, log_path=log) as server:
        _batch(server.url, 0)
        for number, count in itertools.product(range(runs), slow):
            progress(f"{arm.name}: run {number + 1} of {runs}, {count} slow")
            found[count].append([_felt(capture) for capture in _batch(server.url, count)])
        time.sleep(arms.STATE_FILES_SETTLE_S)
        arms.prove(server, arm, arms.roles(3))
    return found


def _batch(url: str, slow: int) -> Sequence[Capture]:
    """16 requests, evenly spaced; the fourth is slow, and as many after it as there are slow ones."""
    names = [f"other-{time.monotonic_ns()}-{number}" for number in range(STREAMS)]
    for number in range(FIRST_SLOW, FIRST_SLOW + slow):
        names[number] = f"slow-{names[number]}"
    requests = [
        chat_request(f"Question {number}", max_tokens=OUTPUT_TOKENS, ignore_eos=True, request_id=name)
        for number, name in enumerate(names)
    ]
    return checked(run_open_loop(url, requests, [index / RATE for index in range(len(requests))]), audio=True)


def _felt(capture: Capture) -> dict[str, Any]:
    return {
        "slow": str(capture.request.body["request_id"]).startswith("slow"),
        "first_s": ttfp_s(capture),
        "e2e_s": capture.e2e_s,
        "gap_s": max(audio_gaps_s(capture), default=0.0),
        "digest": digest(capture),
    }


def _check_content(found: Mapping[str, Batches]) -> None:
    """Each question has the same answer in every run of every start."""
    batches = [batch for by_count in found.values() for batch in itertools.chain(*by_count.values())]
    if len({tuple(stream["digest"] for stream in batch) for batch in batches}) != 1:
        raise RuntimeError("an answer differs between runs or arms")


def _show(found: Mapping[str, Batches], stage: int) -> None:
    rows: list[list[str]] = []
    for count in found[STOCK.name]:
        for what, share in (("first_s", 0.5), ("first_s", 0.99), ("e2e_s", 0.99), ("gap_s", 0.99)):
            values = [
                quantile((each[what] for batch in found[arm.name][count] for each in batch if not each["slow"]), share)
                for arm in ARMS
            ]
            label = {"first_s": "first audio", "e2e_s": "end to end", "gap_s": "largest gap"}[what]
            rows.append([str(count), f"{label} p{share * 100:.0f}", *(f"{value * 1e3:.0f} ms" for value in values)])
        rows.append([])
    title = f"Whole server, {SLOW_MS:.0f} ms a send at stage {stage}: the others of {STREAMS} streams"
    results.show(title, ("slow", "", *(arm.name for arm in ARMS)), rows)


def main() -> None:
    """Run it."""
    parser = side_by_side.parser("benchmarks.save_queue", benchmarks.save_queue.__doc__)
    parser.add_argument("--runs", type=int, default=4, help="batches of each arm and number; 4")
    parser.add_argument("--slow", type=int, nargs="+", default=[0, 1, 2, 4], help="numbers of slow streams")
    parser.add_argument("--stage", type=int, choices=(0, 1), default=0, help="which is slow: thinker or talker")
    options = parser.parse_args()
    run(options.slow, options.runs, options.stage)


if __name__ == "__main__":
    main()

"""``python -m tests.trust.legs [--streams 1,32]``: do the legs of a first output make a client's time to first packet?

One light server with ``queue_metrics`` is asked by a client on this machine that takes its own times: one request at a
time, while another process keeps the other streams busy, so that nothing but the answer wakes the client. Of each of
its requests, what it waited for the first audio and the first text is compared with the legs that the server saw of it,
each of which the server writes down for this program. All clocks are this machine's.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import statistics
import sys
import tempfile
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from time import sleep
from typing import Any

from rich.console import Console

from benchmarks.rigs import results, server_arms, whole_server
from benchmarks.rigs.arm import Arm
from benchmarks.rigs.captures import run_closed_loop, ttfp_s, ttft_s
from benchmarks.rigs.server import Server
from benchmarks.rigs.side_by_side import guarded, work_folder
from omni_fastpath.tools.ab.capture import Capture, Request, chat_request
from tests.trust import distribution

ARMS = (
    Arm("stock", {"OMNI_FASTPATH_QUEUE_METRICS": "1"}),
    Arm("fastpath", {"OMNI_FASTPATH": "1", "OMNI_FASTPATH_QUEUE_METRICS": "1"}),
)
LEGS = ("way_in", "engines", "queue", "dispatch", "hand_over", "writing")
STEP_MS = {"thinker": 15.0, "talker": 12.0, "code2wav": 8.0}
TOKENS, LOAD_TOKENS = 8, 40
PROBES = 40
"""Requests of the client at each level."""
WARM_S = 8.0
"""Until the other streams are busy, and until they are gone."""
_FILE = "TEST_LEGS_FILE"
_ENTRY_POINTS = "[vllm.general_plugins]\nlegs = tests.trust.legs:arm\n"


def arm() -> None:
    """Write down each first output that arrives in this process: its request's id, its kind and its times."""
    from wrapt import register_post_import_hook

    register_post_import_hook(_write_down, "omni_fastpath.patches.queue_metrics.journey")


def _write_down(module: Any) -> None:
    note_sent = module.Journey.note_sent

    def sent(self: Any, message: Any) -> None:
        taken = [*self.taken]
        note_sent(self, message)
        found = [(first.output, first.times) for first in taken if len(first.times) > len(LEGS)]
        with Path(os.environ[_FILE]).open("a") as file:
            file.writelines(json.dumps([self.request_id, *each]) + "\n" for each in found)

    module.Journey.note_sent = sent


def _requests(name: str, count: int, tokens: int) -> list[Request]:
    names = [f"{name}-{number}-" for number in range(count)]
    return [chat_request(f"Question {each}", max_tokens=tokens, ignore_eos=True, request_id=each) for each in names]


def load(url: str, streams: int) -> None:
    """Keep so many streams busy, until this process is ended."""
    run_closed_loop(url, _requests("load", 100_000, LOAD_TOKENS), streams)


def _probes(server: Server, streams: int) -> list[Capture]:
    loading = multiprocessing.get_context("spawn").Process(target=load, args=(server.url, streams - 1), daemon=True)
    if streams > 1:
        loading.start()
        sleep(WARM_S)
    try:
        return run_closed_loop(server.url, _requests(f"legs-{streams}", PROBES, TOKENS))
    finally:
        if loading.is_alive():
            loading.kill()
            loading.join()
            sleep(WARM_S)  # what is left of its requests is aborted


def _rows(probes: Sequence[Capture], seen: Sequence[tuple[str, str, list[float]]]) -> list[list[str]]:
    """For text and audio: the client's median, the legs' medians, and the medians of what lies outside of them."""
    rows = []
    for output, first_s in (("text", ttft_s), ("audio", ttfp_s)):
        found, legs = [], []
        for probe in probes:
            [times] = [
                times for name, kind, times in seen if kind == output and probe.request.body["request_id"] in name
            ]
            legs.append([end_s - begin_s for begin_s, end_s in pairwise(times)])
            client_s = first_s(probe)
            assert client_s is not None, probe.error
            before_s = times[0] - probe.started_at_s
            outside_s = client_s - (times[-1] - times[0])
            found.append((client_s, outside_s, before_s, outside_s - before_s))
        medians = [statistics.median(each) for each in (*zip(*found, strict=True), *zip(*legs, strict=True))]
        rows.append([output, *(f"{1000 * each:.1f}" for each in medians)])
    return rows


def _server(chosen: Arm, work: Path) -> Server:
    environment = whole_server.environment(chosen, {k: {"base_ms": v} for k, v in STEP_MS.items()}, light=True)
    environment["PYTHONPATH"] = distribution(Path(tempfile.mkdtemp(dir=work)), "legs", _ENTRY_POINTS)
    environment[_FILE] = str(work / "legs.jsonl")
    model = whole_server.model_folder("qwen3_omni")
    return Server(model, whole_server.deploy("qwen3_omni_4x.yaml"), environment=environment, log_path=work / "log")


def _run(chosen: Arm, levels: Sequence[int], console: Console) -> int:
    rows = []
    with work_folder("legs-") as work, _server(chosen, work) as server:
        server_arms.prove(server, chosen, {"api"})
        for streams in levels:
            results.progress(f"{streams} streams")
            probes = _probes(server, streams)
            seen = [json.loads(line) for line in (work / "legs.jsonl").read_text().splitlines()]
            rows += [[str(streams), *row] for row in _rows(probes, seen)]
    columns = ("streams", "output", "client", "client - legs", "before", "after", *LEGS)
    results.show(f"{chosen.name}: medians, ms", columns, rows)
    worst = max(abs(float(row[3])) for row in rows)
    console.print(f"The legs make the client's time to within {worst:.1f} ms in the median, at the worst level.")
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    """Measure; 0, 1 where it could not, 2 for a wrong command line, 130 where it was interrupted."""
    parser = argparse.ArgumentParser(prog="python -m tests.trust.legs", description=__doc__, allow_abbrev=False)
    parser.add_argument("--streams", default="1,32", help="how many requests at a time, one after another: %(default)s")
    parser.add_argument("--arm", default="stock", choices=[each.name for each in ARMS])
    asked = parser.parse_args(argv)
    chosen = next(each for each in ARMS if each.name == asked.arm)
    levels = [int(each) for each in asked.streams.split(",")]
    return guarded("The legs", lambda console: _run(chosen, levels, console))


if __name__ == "__main__":
    sys.exit(main())

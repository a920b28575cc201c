"""``python -m tests.trust.legs [--streams 1,32]``: do the legs of a first output make a client's time to first packet?

One light server with ``queue_metrics`` is asked by a client on this machine that takes its own times: one request at a
time, while another process keeps the other streams busy, so that nothing but the answer wakes the client. Of each of
its requests, what it waited for the first audio and the first text is compared with the legs that the server saw of it,
each of which the server writes down for this program. All clocks are this machine's.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import os
import statistics
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from http.client import HTTPConnection
from itertools import pairwise
from pathlib import Path
from time import monotonic, sleep
from typing import Any

from rich.console import Console

from benchmarks.rigs import results, server_arms, whole_server
from benchmarks.rigs.arm import Arm
from benchmarks.rigs.captures import run_closed_loop
from benchmarks.rigs.server import Server
from benchmarks.rigs.side_by_side import guarded, work_folder
from omni_fastpath.tools.ab.capture import Request, chat_request
from tests.trust import distribution

ARMS = (
    Arm("stock", {"OMNI_FASTPATH_QUEUE_METRICS": "1"}),
    Arm("fastpath", {"OMNI_FASTPATH": "1", "OMNI_FASTPATH_QUEUE_METRICS": "1"}),
)
LEGS = ("way_in", "engines", "queue", "dispatch", "hand_over", "writing")
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


def _request(name: str, tokens: int) -> dict[str, Any]:
    return dict(chat_request(f"Question {name}", max_tokens=tokens, ignore_eos=True, request_id=name).body)


def load(url: str, streams: int) -> None:
    """Keep so many streams busy, until this process is ended."""
    requests = [Request("/v1/chat/completions", _request(f"load-{n}", LOAD_TOKENS)) for n in range(100_000)]
    run_closed_loop(url, requests, streams)


@dataclass(frozen=True)
class Probe:
    """One request of the client that takes times; ``monotonic`` seconds."""

    name: str
    sent_s: float
    first_s: dict[str, float]
    """By the modality of the first packets that have something in them."""


def _probe(port: int, name: str) -> Probe:
    body, first_s = json.dumps(_request(name, TOKENS)), dict[str, float]()
    sent_s = monotonic()
    with contextlib.closing(HTTPConnection("127.0.0.1", port)) as connection:
        connection.request("POST", "/v1/chat/completions", body, {"Content-Type": "application/json"})
        response = connection.getresponse()
        assert response.status == 200
        while line := response.readline():
            now_s = monotonic()
            if line.startswith(b"data: {") and len(first_s) < 2:
                found = json.loads(line[6:])
                if any(choice["delta"].get("content") for choice in found["choices"]):
                    first_s.setdefault(found["modality"], now_s)
    return Probe(name, sent_s, first_s)


def _probes(server: Server, streams: int) -> list[Probe]:
    loading = multiprocessing.get_context("spawn").Process(target=load, args=(server.url, streams - 1), daemon=True)
    if streams > 1:
        loading.start()
        sleep(WARM_S)
    try:
        return [_probe(server.port, f"legs-{streams}-{n}-") for n in range(PROBES)]
    finally:
        if loading.is_alive():
            loading.kill()
            loading.join()
            sleep(WARM_S)  # what is left of its requests is aborted


def _rows(probes: Sequence[Probe], seen: Sequence[tuple[str, str, list[float]]]) -> list[list[str]]:
    """For text and audio: the client's median, the legs' medians, and the medians of what lies outside of them."""
    rows = []
    for output in ("text", "audio"):
        found, legs = [], []
        for probe in probes:
            [times] = [times for name, kind, times in seen if kind == output and probe.name in name]
            legs.append([end_s - begin_s for begin_s, end_s in pairwise(times)])
            client_s, legs_s = probe.first_s[output] - probe.sent_s, times[-1] - times[0]
            found.append((client_s, client_s - legs_s, times[0] - probe.sent_s, probe.first_s[output] - times[-1]))
        medians = [statistics.median(each) for each in (*zip(*found, strict=True), *zip(*legs, strict=True))]
        rows.append([output, *(f"{1000 * each:.1f}" for each in medians)])
    return rows


def _server(chosen: Arm, deploy: str, work: Path) -> Server:
    environment = whole_server.environment(chosen, light=True)
    environment["PYTHONPATH"] = distribution(Path(tempfile.mkdtemp(dir=work)), "legs", _ENTRY_POINTS)
    environment[_FILE] = str(work / "legs.jsonl")
    model = whole_server.model_folder("qwen3_omni")
    return Server(model, whole_server.deploy(deploy), environment=environment, log_path=work / "log")


def _run(chosen: Arm, levels: Sequence[int], deploy: str, console: Console) -> int:
    rows = []
    with work_folder("legs-") as work, _server(chosen, deploy, work) as server:
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
    parser.add_argument("--deploy", default="qwen3_omni_4x.yaml", help="of the simulated device: %(default)s")
    asked = parser.parse_args(argv)
    chosen = next(each for each in ARMS if each.name == asked.arm)
    levels = [int(each) for each in asked.streams.split(",")]
    return guarded("The legs", lambda console: _run(chosen, levels, asked.deploy, console))


if __name__ == "__main__":
    sys.exit(main())

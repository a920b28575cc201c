"""Stock and fastpath answer alike: mixed requests, aborts, bad requests, a stage process that is killed."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import re
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from benchmarks.ab.capture import chat_request
from benchmarks.rigs.captures import run_closed_loop
from benchmarks.trust import faults, kinds, parity
from tests.server.conftest import LIMIT, all_states, as_declared, states

pytestmark = [pytest.mark.server, pytest.mark.timeout(900)]


Observed = SimpleNamespace
"""What one arm's server showed. ``burst`` and ``healthy`` are there for fastpath only."""


def _pid(server: Any, role: str) -> int:
    processes: dict[int, str] = server.processes()
    return next(pid for pid, found in processes.items() if found == role)


def _idle_switches(server: Any) -> dict[str, float]:
    """Voluntary context switches per second of each thread of the idle API server."""
    tasks = Path(f"/proc/{_pid(server, 'api')}/task")

    def read() -> dict[str, int]:
        counts = {}
        for task in tasks.iterdir():
            with contextlib.suppress(OSError):
                line = next(x for x in (task / "status").read_text().splitlines() if x.startswith("voluntary"))
                counts[task.name] = int(line.split()[1])
        return counts

    time.sleep(3)
    before, started = read(), time.monotonic()
    time.sleep(3)
    after, seconds = read(), time.monotonic() - started
    return {task: (after[task] - before[task]) / seconds for task in after if task in before}


def _listening(server: Any) -> tuple[Counter[str], int]:
    """The listening TCP sockets of a server's processes by address, and the number of Unix socket paths."""
    sockets = [each for pid in server.processes() for each in psutil.Process(pid).net_connections("all")]
    paths = {each.laddr for each in sockets if each.family == socket.AF_UNIX and each.laddr}
    return Counter(each.laddr.ip for each in sockets if each.status == psutil.CONN_LISTEN), len(paths)


_SUMMARY = re.compile(r"\[(OmniTiming|Overall Summary|RequestE2EStats|StageRequestStats|TransferEdgeStats)\b")
"""What upstream logs of a request that ended."""


_KILLED = faults.Fault(
    "killed",
    "the only code2wav: SIGKILL",
    faults.World("one of each"),
    faults.signalled("stage2_replica0", signal.SIGKILL),
    hits=tuple(range(faults.STREAMS)),
    differ={"max_tokens": 20_000},
)
"""While all are under way: no answer comes to its end, however late a busy machine begins the last one."""


def _observe(server: Any, overlay: Path | None = None) -> Observed:
    seen = Observed()
    both = ({**kinds.ALONE, **kinds.AUDIO}, kinds.OMNI)
    alone, others = (kinds.asked(each, sum(map(len, each.values())), server.model) for each in both)  # one of each
    seen.asked = alone + others
    seen.left = kinds.asked({**kinds.LEFT, **kinds.STOPPED}, 24, server.model)
    with server:
        seen.pid, seen.listening = _pid(server, "api"), _listening(server)
        # Fewer at a time than are admitted when all are batches of three.
        seen.answers = parity.run(server.url, alone, 1) + parity.run(server.url, others, LIMIT // 3)
        time.sleep(3)  # state files are refreshed every two seconds, metrics by the last cleanup
        seen.summaries = _SUMMARY.findall(server.log_path.read_text(errors="replace"))
        # Before those that are aborted, by their clients or at a stop string: how far they came is a matter of time.
        seen.metrics = parity.counts(parity.scrape(server.url))
        seen.as_far = parity.run(server.url, seen.left, 2)
        if overlay is not None:
            # Twice as many as the server admits. Some of them arrive while it is full.
            long: dict[str, Any] = {"modalities": ("text",), "max_tokens": 500, "ignore_eos": True}
            many = [chat_request(f"{n}", **long) for n in range(2 * LIMIT)]
            seen.burst = run_closed_loop(server.url, many, 2 * LIMIT)
        seen.idle_switches_per_s = _idle_switches(server)
        seen.states, seen.stage_states = states(server), all_states(server, "stage")
        if overlay is not None:
            # From a shell with another runtime folder than the server's.
            doctor = [sys.executable, "-m", "omni_fastpath", "doctor", "--json"]
            seen.healthy = json.loads(subprocess.run(doctor, stdout=subprocess.PIPE, check=False).stdout)
        seen.killed, _ = asyncio.run(faults.ask(server, _KILLED))
    seen.shutdown = server.shutdown
    return seen


def _unlike(fast: Observed, stock: Observed) -> list[str]:
    """The differences between answers, counters and log summaries."""
    found = parity.differences(fast.asked, fast.answers, stock.answers)
    found += [f"{name}: {two}" for name, two in parity.unequal(fast.metrics, stock.metrics).items()]
    return found if sorted(fast.summaries) == sorted(stock.summaries) else [*found, "the summaries in the log"]


@pytest.fixture(scope="module")
def arms(server: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory) -> tuple[Observed, Observed]:
    """A stock server, then a server with every patch on by an overlay YAML.

    Stock is not always equal to itself on a busy machine. If the arms differ, stock gets a second server, and
    fastpath must equal one of the two in everything.
    """
    from omni_fastpath.patches import PATCHES
    from omni_fastpath.tools import overlay
    from tests.server.conftest import DEPLOY

    arguments = parity.OMNI.arguments

    def observe_stock() -> Observed:
        off = {"OMNI_FASTPATH": "0"}
        return _observe(server("qwen3_omni", "qwen3_omni.yaml", environment=off, arguments=arguments))

    stock = observe_stock()
    path = tmp_path_factory.mktemp("overlay") / "fast.yaml"
    switches = [f"{patch.name}=true" for patch in PATCHES if not patch.default_on]
    path.write_text(overlay.build(DEPLOY / "qwen3_omni.yaml", switches, PATCHES, output=path))
    fast = _observe(server("qwen3_omni", path, arguments=arguments), path)
    if unlike := _unlike(fast, stock):
        logging.getLogger(__name__).warning("fastpath differs from the first stock server: %s", "; ".join(unlike))
        stock = observe_stock()
    return stock, fast


def test_the_arms_are_what_they_say(arms: tuple[Observed, Observed]) -> None:
    """Stock has every patch off. Fastpath has each patch in its declared state, and its counters have moved."""
    stock, fast = arms
    assert {entry["state"] for entry in stock.states.values()} == {"off"}
    assert {name: entry["state"] for name, entry in fast.states.items()} == as_declared(every=True)
    engaged = {name: patch["counters"] for name, patch in fast.states.items()}
    assert min(engaged["budgeted_drain"]["items"], engaged["queue_metrics"]["observed"]) > 500
    assert min(engaged["lean_front_end"]["files"], engaged["lean_processing"]["not_built"]) > 50
    found = [{name: patch["state"] for name, patch in each.items()} for each in fast.stage_states]
    for patch in ("nonblocking_dequeue", "budgeted_drain"):
        assert {each[patch] for each in found} == {"not_applicable"}
    assert sorted(each["forward_gate"] for each in found) == ["applied", "not_applicable", "superseded"]
    assert sorted(each["save_queue_cap"] for each in found) == ["applied", "applied", "not_applicable"]
    gated = [each["forward_gate"]["counters"]["multimodal_outputs"] for each in fast.stage_states]
    assert sum(count > 0 for count in gated) == 1
    saved = [each["save_queue_cap"]["counters"]["tasks"] for each in fast.stage_states]
    assert sum(count > 0 for count in saved) == 2


def test_doctor_finds_nothing_while_it_is_well(arms: tuple[Observed, Observed]) -> None:
    """``doctor`` finds all processes of the loaded server and has no warning about it."""
    _, fast = arms
    reporting = [each for each in fast.healthy["processes"] if each["server"] == fast.pid]
    assert len(reporting) == 1 + len(fast.stage_states)
    about = [each for each in fast.healthy["findings"] if each["subject"] == f"server {fast.pid}"]
    # /dev/shm has what other servers left.
    assert [each for each in about if each["severity"] != "info" and each["id"] != "shared-memory"] == []


def test_answers_counters_and_summaries_are_identical(arms: tuple[Observed, Observed]) -> None:
    """Status, headers and every event are equal for requests of every kind, bad ones included.

    So are the counters of requests, tokens and audio in ``/metrics``, and the summaries of requests in the log. If a
    client disconnects, the shorter answer is a prefix of the other arm's, in text and audio.
    """
    stock, fast = arms
    assert _unlike(fast, stock) == []
    assert parity.differences(fast.left, fast.as_far, stock.as_far) == []
    assert [each.ended for each in stock.answers if each.ended] == []
    assert 30 < sum(each.status == 200 for each in stock.answers) < len(stock.asked) - 20
    assert stock.metrics
    assert stock.summaries.count("OmniTiming") > 50


def test_a_burst_is_served_up_to_the_limit(arms: tuple[Observed, Observed]) -> None:
    """Requests over ``--max-num-queued-reqs`` get a 503, and each of them is counted."""
    _, fast = arms
    counters = fast.states["admission_limit"]["counters"]
    refused = [capture for capture in fast.burst if not capture.succeeded]
    assert {(capture.status, capture.error_code) for capture in refused} <= {(503, 503)}
    assert counters["refused"] == len(refused)
    assert 0 < counters["most_at_once"] <= LIMIT


def test_a_killed_stage_fails_its_requests_alike(arms: tuple[Observed, Observed]) -> None:
    """Requests that run when a stage is killed end as on stock, with equal prefixes, and so do later ones."""
    stock, fast = arms
    assert [faults.unlike(*each) for each in zip(stock.killed, fast.killed, strict=True)] == [None] * len(stock.killed)
    assert not any(each.succeeded for each in stock.killed)


def test_nothing_listens_that_did_not(arms: tuple[Observed, Observed]) -> None:
    """Fastpath has as many listening sockets on the same addresses as stock."""
    stock, fast = arms
    assert fast.listening == stock.listening
    assert stock.listening[0]


def test_an_idle_server_sleeps(arms: tuple[Observed, Observed]) -> None:
    """No thread of the idle API server wakes a quarter as often as stock's two polling threads."""
    stock, fast = arms
    assert 4 * max(fast.idle_switches_per_s.values()) < sorted(stock.idle_switches_per_s.values())[-2]


def test_shutdown_is_clean(arms: tuple[Observed, Observed]) -> None:
    """Both servers end on SIGTERM without a SIGKILL, even after a stage was killed."""
    for observed in arms:
        assert observed.shutdown.killed == ()

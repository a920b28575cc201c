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
from typing import Any

import psutil
import pytest

from tests.server.conftest import LIMIT, all_states, as_declared, states
from tests.trust import faults, kinds, parity
from tests.trust.kinds import Asked
from tests.trust.parity import Answer

pytestmark = [pytest.mark.server, pytest.mark.timeout(900)]


class Observed:
    """What one arm's server showed; the last four with fastpath alone."""

    asked: list[Asked]
    answers: list[Answer]
    left: list[Asked]
    as_far: list[Answer]
    metrics: dict[str, float]
    shown: set[tuple[str, str, str, str]]
    summaries: list[str]
    killed: list[Any]
    states: dict[str, Any]
    stage_states: list[dict[str, Any]]
    idle_switches_per_s: dict[str, float]
    shutdown: Any
    pid: int
    burst: list[Any]
    status: dict[str, Any]
    healthy: dict[str, Any]
    listening: tuple[Counter[str], int]


def _burst() -> list[Any]:
    """Twice what the server admits; on any but a very slow machine some come while it is full."""
    from omni_fastpath.tools.ab.capture import chat_request

    return [chat_request(f"{n}", modalities=("text",), max_tokens=500, ignore_eos=True) for n in range(2 * LIMIT)]


_STATE = re.compile(
    r'^omni_fastpath_patch_state\{patch="(.*)",process="(.*)",replica=".*",stage="(.*)",state="(.*)"\} 1.0$'
)


def _shown(scrape: list[str]) -> set[tuple[str, str, str, str]]:
    """Patch, process, stage and state of what a scrape shows."""
    return {(match[1], match[2], match[3], match[4]) for match in map(_STATE.match, scrape) if match}


def _pid(server: Any, role: str) -> int:
    processes: dict[int, str] = server.processes()
    return next(pid for pid, found in processes.items() if found == role)


def _idle_switches(server: Any) -> dict[str, float]:
    """How often each thread of the idle API server goes to sleep, per second; the busiest is what counts."""
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
    time.sleep(6)
    after, seconds = read(), time.monotonic() - started
    return {task: (after[task] - before[task]) / seconds for task in after if task in before}


def _listening(server: Any) -> tuple[Counter[str], int]:
    """Of its whole tree: how many TCP sockets listen on each address, and on how many paths Unix ones."""
    sockets = [each for pid in server.processes() for each in psutil.Process(pid).net_connections("all")]
    paths = {each.laddr for each in sockets if each.family == socket.AF_UNIX and each.laddr}
    return Counter(each.laddr.ip for each in sockets if each.status == psutil.CONN_LISTEN), len(paths)


_SUMMARY = re.compile(r"\[(OmniTiming|Overall Summary|RequestE2EStats|StageRequestStats|TransferEdgeStats)\b")
"""What upstream logs of a request that ended."""


def _command(*arguments: str) -> dict[str, Any]:
    """What one of our commands says as JSON, run from a shell with another runtime folder than the server's."""
    done = subprocess.run(
        [sys.executable, "-m", "omni_fastpath", *arguments, "--json"], capture_output=True, text=True, check=False
    )
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def _findings(server_pid: int, report: dict[str, Any]) -> list[str]:
    """The ids of a report's warnings about a server, but for ``/dev/shm``, which it shares with other servers."""
    about = [each for each in report["findings"] if each["subject"] == f"server {server_pid}"]
    return [each["id"] for each in about if each["severity"] != "info" and each["id"] != "shared-memory"]


def _once(bodies: kinds.Kinds, model: str) -> list[Asked]:
    """A request of each."""
    return kinds.asked(bodies, sum(map(len, bodies.values())), model)


_KILLED = faults.Fault(
    "killed",
    "the only code2wav: SIGKILL",
    faults.World("one of each"),
    faults.signalled("stage2_replica0", signal.SIGKILL),
    hits=tuple(range(faults.STREAMS)),
    differ={"max_tokens": faults.LONG},
)
"""While all are under way, and long before they end."""


def _observe(server: Any, overlay: Path | None = None) -> Observed:
    from benchmarks.rigs.captures import run_closed_loop

    seen = Observed()
    alone, others = (_once(each, server.model) for each in ({**kinds.ALONE, **kinds.AUDIO}, kinds.OMNI))
    seen.asked = alone + others
    seen.left = kinds.asked({**kinds.LEFT, **kinds.STOPPED}, 24, server.model)
    with server:
        seen.pid, seen.listening = _pid(server, "api"), _listening(server)
        # Fewer at a time than are admitted when all are batches of three.
        seen.answers = parity.run(server.url, alone, 1) + parity.run(server.url, others, LIMIT // 3)
        time.sleep(3)  # state files are refreshed every two seconds, metrics by the last cleanup
        seen.summaries = _SUMMARY.findall(server.log_path.read_text(errors="replace"))
        # Before those that are aborted, by their clients or at a stop string: how far they came is a matter of time.
        lines = parity.scrape(server.url)
        seen.metrics, seen.shown = parity.counts(lines), _shown(lines)
        seen.as_far = parity.run(server.url, seen.left, 2)
        if overlay is not None:
            seen.burst = run_closed_loop(server.url, _burst(), 2 * LIMIT)
        seen.idle_switches_per_s = _idle_switches(server)
        seen.states, seen.stage_states = states(server), all_states(server, "stage")
        if overlay is not None:
            seen.status, seen.healthy = _command("status"), _command("doctor")
        seen.killed, _ = asyncio.run(faults.ask(server, _KILLED))
    seen.shutdown = server.shutdown
    return seen


def _unlike(fast: Observed, stock: Observed) -> list[str]:
    """Where answers, counts and summaries disagree."""
    found = parity.differences(fast.asked, fast.answers, stock.answers)
    found += [f"{name}: {two}" for name, two in parity.unequal(fast.metrics, stock.metrics).items()]
    return found if sorted(fast.summaries) == sorted(stock.summaries) else [*found, "the summaries in the log"]


@pytest.fixture(scope="module")
def arms(server: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory) -> tuple[Observed, Observed]:
    """The stock arm, then the fastpath arm switched on by an overlay YAML, as an operator would.

    Stock itself is not always alike on a busy machine, so it gets a second server where the arms differ. Fastpath must
    be as one of the two in everything; nothing of it is asked twice.
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
    """Stock has every patch off; fastpath has all applied where they belong, and engaged."""
    stock, fast = arms
    assert {entry["state"] for entry in stock.states.values()} == {"off"}
    assert {name: entry["state"] for name, entry in fast.states.items()} == as_declared(every=True)
    engaged = {name: patch["counters"] for name, patch in fast.states.items()}
    assert min(engaged["budgeted_drain"]["items"], engaged["queue_metrics"]["observed"]) > 500
    assert engaged["lean_processing"]["messages"] > 500
    assert min(engaged["final_output_wakeup"]["woken"], engaged["lean_processing"]["not_built"]) > 50
    assert min(engaged["lean_front_end"]["files"], engaged["lean_front_end"]["events"]) > 50
    found = [{name: patch["state"] for name, patch in each.items()} for each in fast.stage_states]
    for patch in ("nonblocking_dequeue", "budgeted_drain", "final_output_wakeup"):
        assert {each[patch] for each in found} == {"not_applicable"}
    assert sorted(each["forward_gate"] for each in found) == ["applied", "not_applicable", "superseded"]
    assert sorted(each["save_queue_cap"] for each in found) == ["applied", "applied", "not_applicable"]
    gated = [each["forward_gate"]["counters"]["multimodal_outputs"] for each in fast.stage_states]
    assert sum(count > 0 for count in gated) == 1
    saved = [each["save_queue_cap"]["counters"]["tasks"] for each in fast.stage_states]
    assert sum(count > 0 for count in saved) == 2


def test_one_scrape_shows_the_stages(arms: tuple[Observed, Observed]) -> None:
    """``/metrics`` has the API process's patches as its own and the stages' under their stage; stock has none."""
    stock, fast = arms
    assert stock.shown == set()
    assert len(fast.shown) == len(fast.states) * 4
    assert ("budgeted_drain", "server", "", "applied") in fast.shown
    gates = {stage: state for patch, _, stage, state in fast.shown if patch == "forward_gate" and stage}
    assert gates == {"0": "superseded", "1": "applied", "2": "not_applicable"}


def test_status_shows_every_process(arms: tuple[Observed, Observed]) -> None:
    """``status`` reads the state files of the API server and of each stage, with the states that they have."""
    _, fast = arms
    [shown] = [each["patches"] for each in fast.status["processes"] if each["pid"] == fast.pid]
    assert {name: each["state"] for name, each in shown.items()} == as_declared(every=True)
    assert sum(each["role"] == "stage" for each in fast.status["processes"]) >= len(fast.stage_states)


def test_doctor_finds_nothing_while_it_is_well(arms: tuple[Observed, Observed]) -> None:
    """``doctor`` reports no warning about the loaded server."""
    _, fast = arms
    reporting = [each for each in fast.healthy["processes"] if each["server"] == fast.pid]
    assert len(reporting) == 1 + len(fast.stage_states)
    assert _findings(fast.pid, fast.healthy) == []


def test_answers_are_identical(arms: tuple[Observed, Observed]) -> None:
    """Requests of every kind, bad ones among them, get the same: status, headers, and each event to the byte."""
    stock, fast = arms
    assert parity.differences(fast.asked, fast.answers, stock.answers) == []
    assert [each.ended for each in stock.answers if each.ended] == []
    assert 30 < sum(each.status == 200 for each in stock.answers) < len(stock.asked) - 20


def test_clients_that_leave_have_got_the_same(arms: tuple[Observed, Observed]) -> None:
    """What came on one arm before the client left begins as what came on the other, text and audio."""
    stock, fast = arms
    assert parity.differences(fast.left, fast.as_far, stock.as_far) == []


def test_a_burst_is_served_up_to_the_limit(arms: tuple[Observed, Observed]) -> None:
    """As ``--max-num-queued-reqs`` says; whoever else comes gets a 503, and every one of them is counted."""
    _, fast = arms
    counters = fast.states["admission_limit"]["counters"]
    refused = [capture for capture in fast.burst if not capture.succeeded]
    assert {(capture.status, capture.error_code) for capture in refused} <= {(503, 503)}
    assert counters["refused"] == len(refused)
    assert 0 < counters["most_at_once"] <= LIMIT


def test_metrics_count_the_same(arms: tuple[Observed, Observed]) -> None:
    """The counters of requests, tokens and audio in ``/metrics`` are equal, and none is missing or new."""
    stock, fast = arms
    assert parity.unequal(fast.metrics, stock.metrics) == {}
    assert stock.metrics


def test_the_log_says_the_same_of_each_request(arms: tuple[Observed, Observed]) -> None:
    """Each request's summary stands in the log, whole; they end in an order of their own."""
    stock, fast = arms
    assert stock.summaries.count("OmniTiming") > 50
    assert sorted(fast.summaries) == sorted(stock.summaries)


def test_a_killed_stage_fails_its_requests_alike(arms: tuple[Observed, Observed]) -> None:
    """Requests under way when a stage process is killed end the same way, with prefixes; so do later ones."""
    stock, fast = arms
    assert [faults.unlike(*each) for each in zip(stock.killed, fast.killed, strict=True)] == [None] * len(stock.killed)
    assert not any(each.succeeded for each in stock.killed)


def test_nothing_listens_that_did_not(arms: tuple[Observed, Observed]) -> None:
    """As many sockets, on the same addresses."""
    stock, fast = arms
    assert fast.listening == stock.listening
    assert stock.listening[0]


def test_an_idle_server_sleeps(arms: tuple[Observed, Observed]) -> None:
    """With fastpath no thread of the idle API server wakes a quarter as often as the two of stock's that poll."""
    stock, fast = arms
    assert 4 * max(fast.idle_switches_per_s.values()) < sorted(stock.idle_switches_per_s.values())[-2]


def test_shutdown_is_clean(arms: tuple[Observed, Observed]) -> None:
    """Both servers end by themselves on SIGTERM, even after a stage was killed; nothing has to be killed."""
    for observed in arms:
        assert observed.shutdown.killed == ()

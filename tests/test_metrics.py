"""``/metrics``: the whole tree of a server, each process once, from any of its API processes."""

from __future__ import annotations

import json
import logging
import multiprocessing
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client import CollectorRegistry
from prometheus_client import values as client_values
from prometheus_client.multiprocess import MultiProcessCollector

from omni_fastpath import metrics, process_role, statefile, threads
from omni_fastpath.declare import Counter, Metric, Process, State
from omni_fastpath.ledger import LEDGER, Ledger
from omni_fastpath.metrics import Collector
from tests.fakes.upstream import patch
from tests.tools.made import snapshot

EVERYWHERE = frozenset(Process)
COUNTERS = (Counter("beats", "beats"), Counter("loudest", "the loudest", is_maximum=True))
DRUM = patch("drum", counters=COUNTERS, processes=EVERYWHERE)

LOOKS = frozenset({"open", "os.listdir", "os.scandir"})
"""Python's audit events of whatever reads a file or a folder."""

Sample = dict[str, str]


@pytest.fixture(autouse=True)
def _no_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """This process's own are shown where a test is about them."""
    monkeypatch.setattr(threads, "own", dict)


@pytest.fixture
def ledger() -> Ledger:
    """A ledger of the test's own in which one patch is applied."""
    made = Ledger()
    made.set(DRUM, State.APPLIED, "yes")
    made.named("drum").counters.update(beats=3, loudest=7)
    return made


def scrape(registry: CollectorRegistry) -> list[tuple[str, Sample, float]]:
    """The samples that a scrape shows: name, labels without empty ones, value."""
    samples = (sample for family in registry.collect() for sample in family.samples)
    return [(each.name, {name: text for name, text in each.labels.items() if text}, each.value) for each in samples]


def collected(ledger: Ledger) -> list[tuple[str, Sample, float]]:
    """A scrape of a registry with our collector in it."""
    registry, collector = CollectorRegistry(), Collector(ledger, Process.SERVER)
    registry.register(collector)
    collector.refresh()
    return scrape(registry)


def states(samples: list[tuple[str, Sample, float]]) -> list[tuple[str, ...]]:
    """The states that are 1, as process, stage, replica, patch and state; each as often as it is there."""
    return sorted(
        tuple(labels.get(name, "") for name in ("process", "stage", "replica", "patch", "state"))
        for name, labels, value in samples
        if name == "omni_fastpath_patch_state" and value == 1
    )


def values(samples: list[tuple[str, Sample, float]], name: str, label: str) -> dict[tuple[str, str], float]:
    """Values by process and label."""
    return {(labels["process"], labels[label]): value for each, labels, value in samples if each == name}


Tree = dict[int, tuple[list[int], dict[str, Any]]]
"""State files by process, each with the processes above its own."""


@pytest.fixture
def tree(monkeypatch: pytest.MonkeyPatch) -> Tree:
    """State files of made-up processes, to be filled in; this process's own parent is process 1."""
    made: Tree = {os.getpid(): ([1], described("server", "MainProcess", state="off", counters={"beats": 1}))}
    own = {"started": 1}
    monkeypatch.setattr(statefile, "read_live", lambda: [{**own, **each, "pid": at} for at, (_, each) in made.items()])
    monkeypatch.setattr(process_role, "ancestors", lambda pid: made[pid][0])
    metrics._above.cache_clear()
    return made


def described(
    role: str, name: str, stage: int | None = None, replica: int | None = None, **drum: Any
) -> dict[str, Any]:
    """What a process writes of itself, with one patch."""
    patches = {"drum": {"state": "applied", "counters": {}, **drum}}
    return snapshot(0, role, process_name=name, stage=stage, replica=replica, patches=patches)


def engine(stage: int, replica: int = 0, **drum: Any) -> dict[str, Any]:
    """The engine process of a replica."""
    return described("stage", f"StageEngineCoreProc_stage{stage}_replica{replica}", stage, replica, **drum)


# This process


def test_a_scrape_shows_states_and_counters(ledger: Ledger) -> None:
    """Each patch has its current state and the release that it is served as, and each counter of a server its value."""
    ledger.named("drum").same_as = "0.30.0"
    ledger.set(patch("flute", processes=frozenset({Process.STAGE})), State.NOT_APPLICABLE, "elsewhere")
    applied = {"patch": "drum", "process": "server", "same_as": "0.30.0", "state": "applied"}
    samples = collected(ledger)
    assert samples == [
        ("omni_fastpath_patch_state", applied, 1.0),
        ("omni_fastpath_patch_state", {"patch": "flute", "process": "server", "state": "not_applicable"}, 1.0),
        ("omni_fastpath_events_total", {"patch": "drum", "process": "server", "event": "beats"}, 3.0),
        ("omni_fastpath_greatest", {"patch": "drum", "process": "server", "value": "loudest"}, 7.0),
    ]
    ledger.set(DRUM, State.OFF, "no")
    ledger.named("drum").counters["beats"] = 4
    assert ("server", "", "", "drum", "off") in states(collected(ledger))
    assert values(collected(ledger), "omni_fastpath_events_total", "event") == {("server", "beats"): 4}


# The tree


def test_a_scrape_shows_every_process_of_the_tree_once(ledger: Ledger, tree: Tree) -> None:
    """Engines are shown by stage and replica, workers by the stage of their parent, each with its own values.

    This process's state file, which is older than its ledger, is not used.
    """
    me, worker = os.getpid(), described("worker", "VllmWorker-0", state="not_applicable")
    tree[11] = [me, 1], engine(0, counters={"beats": 5, "loudest": 2})
    tree[12] = [11, me, 1], worker
    tree[21] = [20, me, 1], engine(1, 1, state="superseded", counters={"beats": 6})
    tree[22] = [20, me, 1], worker  # no process above it says a stage
    samples = collected(ledger)
    assert states(samples) == [
        ("StageEngineCoreProc_stage0_replica0", "0", "0", "drum", "applied"),
        ("StageEngineCoreProc_stage1_replica1", "1", "1", "drum", "superseded"),
        ("VllmWorker-0", "", "", "drum", "not_applicable"),
        ("VllmWorker-0", "0", "0", "drum", "not_applicable"),
        ("server", "", "", "drum", "applied"),
    ]
    assert values(samples, "omni_fastpath_events_total", "event") == {
        ("server", "beats"): 3,
        ("StageEngineCoreProc_stage0_replica0", "beats"): 5,
        ("StageEngineCoreProc_stage1_replica1", "beats"): 6,
    }
    assert values(samples, "omni_fastpath_greatest", "value") == {
        ("server", "loudest"): 7,
        ("StageEngineCoreProc_stage0_replica0", "loudest"): 2,
    }


def test_processes_with_equal_labels_make_one_sample(ledger: Ledger, tree: Tree) -> None:
    """Counts are added and maxima compared, because a duplicate sample would invalidate the scrape."""
    for count in (4, 2):
        twin = described("worker", "DiffusionWorker-0", counters={"beats": count, "loudest": count})
        tree[count] = [os.getpid()], twin
    samples = collected(ledger)
    assert values(samples, "omni_fastpath_events_total", "event")["DiffusionWorker-0", "beats"] == 6
    assert values(samples, "omni_fastpath_greatest", "value")["DiffusionWorker-0", "loudest"] == 4
    assert len({(name, tuple(labels.items())) for name, labels, _ in samples}) == len(samples)


def test_another_servers_processes_are_not_shown(ledger: Ledger, tree: Tree) -> None:
    """Neither another server with its stage nor this server's parent process is shown."""
    tree.update({1: ([], described("server", "MainProcess")), 31: ([1], engine(0))})
    assert states(collected(ledger)) == [("server", "", "", "drum", "applied")]


def test_a_child_of_a_script_is_a_server_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only vLLM's own API processes belong to their parent, not any ``multiprocessing`` process."""
    monkeypatch.setattr(multiprocessing, "parent_process", lambda: SimpleNamespace(pid=4711))
    for name, root in (("ApiServer_0", 4711), ("Process-1", os.getpid()), ("ApiServer_0_of_mine", os.getpid())):
        monkeypatch.setattr(multiprocessing, "current_process", lambda name=name: SimpleNamespace(name=name))
        assert metrics._root() == root


def test_threads_of_every_api_process_are_shown(ledger: Ledger, tree: Tree, monkeypatch: pytest.MonkeyPatch) -> None:
    """The current processor time of named threads is shown, but not of stages or threads that have ended."""
    me = os.getpid()
    used = {me: {1: 0.5, 2: 9.0}, 21: {5: 1.5, 6: 2.5}}
    monkeypatch.setattr(threads, "own", lambda: {"front_end": 1, "orchestrator": 3})
    monkeypatch.setattr(
        threads, "used", lambda pid, known: {name: used[pid][at] for name, at in known.items() if at in used[pid]}
    )
    tree[11] = [me, 1], engine(0)
    tree[21] = [me, 1], {**described("server", "ApiServer_0"), "threads": {"front_end": 5, "orchestrator": 6}}
    assert values(collected(ledger), "omni_fastpath_thread_cpu_seconds_total", "thread") == {
        ("server", "front_end"): 0.5,
        ("ApiServer_0", "front_end"): 1.5,
        ("ApiServer_0", "orchestrator"): 2.5,
    }


def test_a_scrape_reads_no_file(ledger: Ledger) -> None:
    """A scrape reads neither state files nor ``/proc``, because both are collected beforehand."""
    statefile.write(described("stage", "StageEngineCoreProc_stage0_replica0"))
    registry, collector = CollectorRegistry(), Collector(ledger, Process.SERVER)
    registry.register(collector)
    seen: list[str] = []
    watching = [True]
    sys.addaudithook(lambda event, _: seen.append(event) if watching and event in LOOKS else None)
    collector.refresh()
    assert {"open", "os.scandir"} <= set(seen) or {"open", "os.listdir"} <= set(seen)
    seen.clear()
    samples = scrape(registry)
    watching.clear()  # a hook stays for the life of the process
    assert states(samples) == [("server", "", "", "drum", "applied")]
    assert seen == []


# What a patch has besides

CYMBAL = patch(
    "cymbal",
    processes=EVERYWHERE,
    metrics=(
        Metric("omni_fastpath_ring_seconds", "How long it rings", labels=("where",), bounds=(0.5, 1.0)),
        Metric("omni_fastpath_hanging", "How many hang"),
    ),
)


def rung(*counts: int, total: float, **labels: str) -> dict[str, Any]:
    """A sample of the histogram."""
    return {"labels": labels, "counts": list(counts), "sum": total}


def test_figures_of_every_process_are_shown(tree: Tree) -> None:
    """Figures have the process's labels unless a sample has its own, and equal labels are added."""
    ledger = Ledger()
    ledger.set(CYMBAL, State.APPLIED, "yes")
    ledger.named("cymbal").figures = lambda: {
        "omni_fastpath_ring_seconds": [
            rung(1, 0, 2, total=7.5, stage="2", replica="1", where="hall"),
            rung(0, 1, 0, total=0.75, stage="2", replica="1", where="hall"),
            rung(1, 2, total=9.0, where="another version's buckets"),
        ],
        "omni_fastpath_unknown": [rung(1, 2, total=9.0)],
    }
    hanging = {"omni_fastpath_hanging": [{"labels": {}, "value": 4}]}
    cymbal = {"state": "applied", "counters": {}, "figures": hanging}
    tree[11] = [os.getpid()], {**engine(1), "patches": {"cymbal": cymbal}}
    samples = [each for each in collected(ledger) if each[0].startswith(("omni_fastpath_ring", "omni_fastpath_ha"))]
    whose = {"process": "server", "stage": "2", "replica": "1", "where": "hall"}
    assert samples == [
        *(
            ("omni_fastpath_ring_seconds_bucket", {**whose, "le": end}, value)
            for end, value in (("0.5", 1.0), ("1.0", 2.0), ("+Inf", 4.0))
        ),
        ("omni_fastpath_ring_seconds_count", whose, 4.0),
        ("omni_fastpath_ring_seconds_sum", whose, 8.25),
        (
            "omni_fastpath_hanging",
            {"process": "StageEngineCoreProc_stage1_replica0", "stage": "1", "replica": "0"},
            4.0,
        ),
    ]


# Nothing breaks a scrape


def test_unreadable_files(ledger: Ledger, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """Unreadable state files are logged once, and this process is shown."""

    def refused() -> list[Any]:
        raise statefile.UnsafeFolderError("a link")

    monkeypatch.setattr(statefile, "read_live", refused)
    collector = Collector(ledger, Process.SERVER)
    for _ in range(2):
        collector.refresh()
        assert [family.name for family in collector.collect() if family.samples]
    told = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert told == ["omni-fastpath: the state files cannot be read, so /metrics shows only this process: a link"]


def test_a_ledger_that_fails(ledger: Ledger, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """If the ledger raises, the scrape has no samples of this package, and the error is logged."""
    collector = Collector(ledger, Process.SERVER)
    collector.refresh()
    assert collector.collect() != []
    monkeypatch.setattr(ledger, "snapshot", lambda: 1 / 0)
    collector.refresh()
    assert collector.collect() == []
    assert "/metrics lacks the patches" in caplog.text


# How it joins

EMBEDDER = """
import json, os, sys

when, folder = sys.argv[1:]
set_it = lambda now: now == when and os.environ.update(PROMETHEUS_MULTIPROC_DIR=folder)
set_it("before the import")
from prometheus_client import REGISTRY, CollectorRegistry, Counter, generate_latest, multiprocess
from omni_fastpath import metrics
from omni_fastpath.declare import Process, State
from omni_fastpath.ledger import LEDGER
from tests.fakes.upstream import patch

set_it("after it")
theirs = Counter("theirs", "theirs", ["any"])
theirs.labels("sample").inc()
LEDGER.set(patch("drum"), State.APPLIED, "yes")
metrics.export(Process.SERVER)
set_it("after the engine")


def shown(*collecting):
    text = "".join(generate_latest(each).decode() for each in collecting)
    return [text.count("\\n" + each) for each in ("theirs_total{", "omni_fastpath_patch_state{")]


ways = {"REGISTRY": shown(REGISTRY)}
if "PROMETHEUS_MULTIPROC_DIR" in os.environ:
    files = CollectorRegistry()
    multiprocess.MultiProcessCollector(files)
    ways |= {"files": shown(files), "both": shown(REGISTRY, files)}
    try:  # Dynamo's first choice
        multiprocess.MultiProcessCollector(REGISTRY)
        ways["one in the other"] = shown(REGISTRY)
    except ValueError:  # it would show theirs twice
        ways["one in the other"] = None
print(json.dumps(ways))
"""


@pytest.mark.parametrize(
    ("when", "times"),
    [
        ("before the import", {"files": 1, "both": 2}),
        ("after it", {"files": 0, "both": 1, "one in the other": 1}),
        ("after the engine", {"files": 0, "both": 1, "one in the other": 1}),
        ("never", {}),
    ],
)
def test_ours_are_wherever_another_packages_are(when: str, times: dict[str, int], tmp_path: Path) -> None:
    """In an embedder's process ours are shown as often as any counter, whenever PROMETHEUS_MULTIPROC_DIR is set."""
    command = [sys.executable, "-c", EMBEDDER, when, str(tmp_path)]
    done = subprocess.run(command, check=True, capture_output=True, text=True, cwd=Path(__file__).parents[1])
    found = {way: counts for way, counts in json.loads(done.stdout).items() if counts is not None}
    assert found == {way: [count, count] for way, count in {"REGISTRY": 1, **times}.items()}


@pytest.mark.upstream
@pytest.mark.parametrize("several", [False, True])
def test_upstreams_endpoint_shows_ours(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, several: bool) -> None:
    """The route that vLLM makes before the patches shows each sample once, beside upstream's own samples."""
    from fastapi import FastAPI
    from fastapi.testclient import TestClient
    from vllm.entrypoints.serve.instrumentator.metrics import attach_router

    registry = CollectorRegistry()
    monkeypatch.setattr("prometheus_client.REGISTRY", registry)
    monkeypatch.setattr("vllm.v1.metrics.prometheus.REGISTRY", registry)
    monkeypatch.setattr(MultiProcessCollector, "collect", vars(MultiProcessCollector)["collect"])  # put back afterwards
    theirs = "from prometheus_client import Counter; Counter('theirs', 'theirs').inc(3)"
    if several:
        monkeypatch.setenv("PROMETHEUS_MULTIPROC_DIR", str(tmp_path))
        in_files: Any = client_values.MultiProcessValue  # as if the variable had been set at the import
        monkeypatch.setattr(client_values, "ValueClass", in_files())
        subprocess.run([sys.executable, "-c", theirs], check=True)
    app = FastAPI()
    attach_router(app)
    client = TestClient(app)
    assert "omni_fastpath" not in client.get("/metrics").text
    monkeypatch.setattr(LEDGER, "_entries", {})
    monkeypatch.setattr(statefile, "BESIDE", [])
    LEDGER.set(DRUM, State.APPLIED, "yes")
    for _ in range(1 + several):
        metrics.export(Process.SERVER)
    answer = client.get("/metrics")
    assert answer.status_code == 200
    assert ("theirs_total 3.0" in answer.text) is several
    line = 'omni_fastpath_patch_state{patch="drum",process="server",replica="",same_as="",stage="",state="applied"} 1.0'
    assert answer.text.splitlines().count(line) == 1

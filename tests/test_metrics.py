"""``/metrics``: the whole tree of a server, each process once, from any of its API processes."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry
from prometheus_client import values as client_values
from prometheus_client.multiprocess import MultiProcessCollector

from omni_fastpath import state, threads
from omni_fastpath.declare import Counter, Process, State
from omni_fastpath.ledger import LEDGER
from omni_fastpath.state import Publisher
from tests.fakes.processes import process
from tests.fakes.upstream import patch
from tests.tools.made import METRICS, snapshot

COUNTERS = (Counter("beats", "beats"), Counter("loudest", "the loudest", is_maximum=True))
DRUM = patch("drum", counters=COUNTERS, metrics=METRICS, processes=frozenset(Process))
FLUTE = patch("flute", processes=frozenset({Process.STAGE}))

ME, PARENT = os.getpid(), os.getppid()

Sample = dict[str, str]


@pytest.fixture(autouse=True)
def tree(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """A ledger of the test's own in which one patch is applied, and the state files of other processes, to be made."""
    made: list[dict[str, Any]] = []
    monkeypatch.setattr(LEDGER, "_entries", {})
    monkeypatch.setattr(threads, "used", lambda: {"front_end": 0.5})
    monkeypatch.setattr(state, "read_live", lambda: made)
    LEDGER.set(DRUM, State.APPLIED, "yes")
    LEDGER.set(FLUTE, State.NOT_APPLICABLE, "elsewhere")
    LEDGER.named("drum").counters.update(beats=3, loudest=7)
    return made


def collected(publisher: Publisher | None = None) -> list[tuple[str, Sample, float]]:
    """The samples that a scrape shows: name, labels without empty ones, value."""
    publisher = publisher or Publisher(Process.SERVER, None)
    publisher._said = publisher.said()
    publisher.refresh()
    registry = CollectorRegistry()
    registry.register(publisher)
    samples = (sample for family in registry.collect() for sample in family.samples)
    return [(each.name, {name: text for name, text in each.labels.items() if text}, each.value) for each in samples]


def shown(samples: list[tuple[str, Sample, float]], name: str, *labels: str) -> list[tuple[Any, ...]]:
    """Values of a family, after these labels, sorted."""
    return sorted((*(of.get(label, "") for label in labels), value) for each, of, value in samples if each == name)


def other(
    pid: int, role: str, name: str, above: list[int], stage: int | None = None, replica: int | None = None, **drum: Any
) -> dict[str, Any]:
    """What another process of the server says, with one patch."""
    record = {"state": "applied", "same_as": "", "counters": {"beats": 0, "loudest": 0}, **drum}
    place = {"above": above, "stage": stage, "replica": replica}
    return snapshot(pid, role, process_name=name, patches={"drum": record}, **place)


def test_a_scrape_shows_states_and_counters() -> None:
    """Each patch has its state and the release that it is served as, each counter of a server its value."""
    LEDGER.named("drum").same_as = "0.30.0"
    applied = {"patch": "drum", "process": "server", "same_as": "0.30.0", "state": "applied"}
    assert collected() == [
        ("omni_fastpath_patch_state", applied, 1.0),
        ("omni_fastpath_patch_state", {"patch": "flute", "process": "server", "state": "not_applicable"}, 1.0),
        ("omni_fastpath_events_total", {"patch": "drum", "process": "server", "event": "beats"}, 3.0),
        ("omni_fastpath_greatest", {"patch": "drum", "process": "server", "value": "loudest"}, 7.0),
        ("omni_fastpath_thread_cpu_seconds_total", {"process": "server", "thread": "front_end"}, 0.5),
    ]


def test_a_scrape_shows_every_process_of_the_tree_once(tree: list[dict[str, Any]]) -> None:
    """Engines are shown by stage and replica, workers by the stage of the engine above them.

    Neither another server with its stage, nor this server's parent, nor this process's own older file is shown.
    """
    engine = "StageEngineCoreProc_stage{}_replica{}".format
    tree += [
        other(ME, "server", "MainProcess", [PARENT], state="off"),
        other(PARENT, "server", "MainProcess", []),
        other(11, "stage", engine(0, 0), [ME, PARENT], 0, 0, counters={"beats": 5, "loudest": 2}),
        other(12, "worker", "VllmWorker-0", [11, ME, PARENT], state="not_applicable"),
        other(21, "stage", engine(1, 1), [20, ME, PARENT], 1, 1, state="superseded"),
        other(22, "worker", "VllmWorker-0", [20, ME, PARENT], state="not_applicable"),  # nothing above it has a stage
        other(31, "stage", engine(0, 0), [PARENT], 0, 0),
    ]
    samples = [each for each in collected() if each[1].get("patch") != "flute"]
    place = ("process", "stage", "replica")
    assert shown(samples, "omni_fastpath_patch_state", *place, "state") == [
        (engine(0, 0), "0", "0", "applied", 1),
        (engine(1, 1), "1", "1", "superseded", 1),
        ("VllmWorker-0", "", "", "not_applicable", 1),
        ("VllmWorker-0", "0", "0", "not_applicable", 1),
        ("server", "", "", "applied", 1),
    ]
    beats = shown(samples, "omni_fastpath_events_total", "process")
    assert [each for each in beats if each[1]] == [(engine(0, 0), 5), ("server", 3)]
    assert shown(samples, "omni_fastpath_greatest", "process")[0] == (engine(0, 0), 2)


@pytest.mark.parametrize(("name", "siblings"), [("ApiServer_0", 1), ("Process-1", 0), ("ApiServer_0_of_mine", 0)])
def test_one_of_several_api_servers_shows_all(tree: list[dict[str, Any]], name: str, siblings: int) -> None:
    """Only vLLM's own API processes belong to their parent, not any ``multiprocessing`` process."""
    publisher = Publisher(Process.SERVER, None)
    publisher._fixed["process_name"] = name
    tree += [{**other(8, "server", "ApiServer_1", [PARENT]), "cpu_s": {"front_end": 1.5, "orchestrator": 2.5}}]
    used = shown(collected(publisher), "omni_fastpath_thread_cpu_seconds_total", "process", "thread")
    theirs = [("ApiServer_1", "front_end", 1.5), ("ApiServer_1", "orchestrator", 2.5)]
    assert used == sorted([*theirs * siblings, (name, "front_end", 0.5)])


def test_equal_labels_make_one_sample(tree: list[dict[str, Any]]) -> None:
    """Counts are added and maxima compared, because a duplicate sample would invalidate the scrape."""
    for count in (4, 2):
        counters = {"beats": count, "loudest": count}
        tree.append(other(count, "worker", "DiffusionWorker-0", [ME], counters=counters))
    samples = collected()
    assert shown(samples, "omni_fastpath_events_total", "process")[0] == ("DiffusionWorker-0", 6)
    assert shown(samples, "omni_fastpath_greatest", "process")[0] == ("DiffusionWorker-0", 4)
    assert len({(name, tuple(labels.items())) for name, labels, _ in samples}) == len(samples)


def test_metrics_of_patches_are_shown(tree: list[dict[str, Any]]) -> None:
    """They have the process's labels unless a sample has its own, and equal labels are added."""
    hall = {"stage": "2", "replica": "1", "where": "hall"}
    LEDGER.named("drum").figures = lambda: {
        "omni_fastpath_ring_seconds": [
            {"labels": hall, "counts": [1, 0, 0, 2], "sum": 7.5},
            {"labels": hall, "counts": [0, 1, 0, 0], "sum": 0.75},
        ]
    }
    hanging = {"omni_fastpath_hanging": [{"labels": {}, "value": 4}]}
    tree.append(other(11, "stage", "engine", [ME], 1, 0, figures=hanging))
    whose, name = {"process": "server", **hall}, "omni_fastpath_ring_seconds"
    ends = (("0.5", 1.0), ("1.0", 2.0), ("4.0", 2.0), ("+Inf", 4.0))
    assert [each for each in collected() if each[0].startswith(("omni_fastpath_ring", "omni_fastpath_ha"))] == [
        *((f"{name}_bucket", {**whose, "le": end}, value) for end, value in ends),
        (f"{name}_count", whose, 4.0),
        (f"{name}_sum", whose, 8.25),
        ("omni_fastpath_hanging", {"process": "engine", "stage": "1", "replica": "0"}, 4.0),
    ]


def test_an_error_breaks_no_scrape(tree: list[dict[str, Any]], caplog: pytest.LogCaptureFixture) -> None:
    """A file that is not as it should be is logged once, and the scrape has nothing of this package."""
    tree.append({"pid": 11})
    assert [collected() for _ in range(2)] == [[], []]
    assert caplog.text.count("/metrics lacks the patches") == 1


# ---- How it joins ----

EMBEDDER = """
import json, os, sys

when, folder = sys.argv[1:]
set_it = lambda now: now == when and os.environ.update(PROMETHEUS_MULTIPROC_DIR=folder)
set_it("before the import")
from prometheus_client import REGISTRY, CollectorRegistry, Counter, generate_latest, multiprocess
from omni_fastpath.declare import Process, State
from omni_fastpath.ledger import LEDGER
from omni_fastpath.state import Publisher
from tests.fakes.upstream import patch

set_it("after it")
theirs = Counter("theirs", "theirs", ["any"])
theirs.labels("sample").inc()
LEDGER.set(patch("drum"), State.APPLIED, "yes")
Publisher(Process.SERVER, None).start()


def shown(*collecting):
    text = "".join(generate_latest(each).decode() for each in collecting)
    return [text.count("\\n" + each) for each in ("theirs_total{", "omni_fastpath_patch_state{")]


ways = {"REGISTRY": shown(REGISTRY)}
if "PROMETHEUS_MULTIPROC_DIR" in os.environ:
    files = CollectorRegistry()
    multiprocess.MultiProcessCollector(files)
    ways["files"] = shown(files)
print(json.dumps(ways))
"""


@pytest.mark.parametrize(
    ("when", "times"), [("before the import", {"files": 1}), ("after it", {"files": 0}), ("never", {})]
)
def test_ours_are_wherever_another_packages_are(when: str, times: dict[str, int], tmp_path: Path) -> None:
    """In an embedder's process ours are shown as often as any counter, whenever PROMETHEUS_MULTIPROC_DIR is set."""
    done = process(sys.executable, "-c", EMBEDDER, when, str(tmp_path))
    assert json.loads(done.stdout) == {way: [count, count] for way, count in {"REGISTRY": 1, **times}.items()}


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
        process(sys.executable, "-c", theirs)
    app = FastAPI()
    attach_router(app)
    client = TestClient(app)
    assert "omni_fastpath" not in client.get("/metrics").text
    publisher = Publisher(Process.SERVER, None)
    publisher._said = publisher.said()
    publisher.refresh()
    for _ in range(1 + several):
        state.export(publisher)
    answer = client.get("/metrics")
    assert answer.status_code == 200
    assert ("theirs_total 3.0" in answer.text) is several
    line = 'omni_fastpath_patch_state{patch="drum",process="server",replica="",same_as="",stage="",state="applied"} 1.0'
    assert answer.text.splitlines().count(line) == 1

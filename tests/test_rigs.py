"""What several benchmarks stand on."""

from __future__ import annotations

import json
import signal
import sys
import tempfile
from pathlib import Path

import pytest

pytest.importorskip("omni_simulated_device")

from benchmarks.rigs import driver, overlays, results, server, whole_server
from benchmarks.rigs import server_arms as serving
from benchmarks.rigs.server import Server, ServerError
from omni_fastpath.tools.ab.arm import Arm
from omni_fastpath.tools.ab.verdict import STARTS


def test_an_arms_line_is_the_last_one_and_a_failure_shows_its_output() -> None:
    """What upstream prints around it does not matter; no line and a failed process are errors."""
    assert driver.last_line('{"a": 1}\nnoise\n{"a": 2}\nnoise\n') == {"a": 2}
    with pytest.raises(RuntimeError, match=r"no JSON line:\nnoise"):
        driver.last_line("noise")
    with pytest.raises(RuntimeError, match="No module named"):
        driver.run_module("benchmarks.rigs.none_of_that_name")


def test_a_result_line_says_where_it_comes_from_and_keeps_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The driver writes an arm's line with what the arm said of itself."""
    monkeypatch.setattr(results, "FOLDER", tmp_path / "new")
    results.save("some", {"figure": 1})
    results.save("some", {"figure": 2, "about": "another moment"})
    first, second = (json.loads(line) for line in (tmp_path / "new" / "some.jsonl").read_text().splitlines())
    assert first["figure"] == 1
    assert first["about"].keys() >= {"commit", "machine", "versions"}
    assert second["about"] == "another moment"


def test_a_server_is_told_its_arm_and_nothing_of_this_shell(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stock is told so, so that it leaves state files; what this shell says is removed."""
    monkeypatch.setenv("OMNI_FASTPATH_BUDGETED_DRAIN", "0")
    mode = {"OMNI_FASTPATH_BUDGETED_DRAIN": None, "VLLM_OMNI_EVENT_DRIVEN_ORCH": "0"}
    stock, fastpath = (serving.environment(Arm("any", values)) for values in ({}, {"OMNI_FASTPATH": "1"}))
    assert stock.items() >= {**mode, "OMNI_FASTPATH": "0"}.items()
    assert fastpath.items() >= {**mode, "OMNI_FASTPATH": "1"}.items()
    assert serving.environment(Arm("any", event_driven=True))["VLLM_OMNI_EVENT_DRIVEN_ORCH"] == "1"
    assert serving.roles(1, 2) == {"api", "stage0_replica0", "stage0_replica1"}


@pytest.mark.parametrize("lives", [True, False])
def test_chunks_stay_while_another_servers_stage_lives(
    lives: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A chunk does not say whose it is; one that a test's own stage has made stays in any case."""
    monkeypatch.setattr(server, "_SHARED_MEMORY", tmp_path)
    monkeypatch.setattr(server, "_a_stage_lives", lambda: lives)
    for name in ("chatcmpl-1_0_0", "shm_sq-1-a_0_0_lockfile.lock"):
        (tmp_path / name).touch()
    assert Server("model", "deploy")._remove_shared_memory() == (() if lives else ("chatcmpl-1_0_0",))
    assert len(list(tmp_path.iterdir())) == (2 if lives else 1)


# ---- Other releases ----


def test_a_release_is_fetched_as_the_table_says() -> None:
    """The oldest first; one that the table does not have is refused."""
    assert overlays.releases()[0] == "0.28.0"
    with pytest.raises(RuntimeError, match=r"0\.99\.0 could not be had: scripts/release\.sh said why \(status 1\)"):
        overlays.fetch("0.99.0")


def test_a_server_of_another_release_has_its_packages_first(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Before what its environment names; one of the installed release gets what it got."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", "outside")
    monkeypatch.setattr(overlays, "installed_release", lambda _: "0.30.0")

    def path(release: str | None, **environment: str) -> str:
        return Server("model", "deploy", environment=environment, release=release).environment()["PYTHONPATH"]

    other = str(overlays.ROOT / ".cache" / "releases" / "0.28.0")
    assert path(None) == path("0.30.0") == "outside"
    assert path("0.28.0") == f"{other}:outside"
    assert path("0.28.0", PYTHONPATH="inside") == f"{other}:inside"


_STANDS_IN = """
import http.server, sys

class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()

if "dies" in sys.argv:
    sys.exit("no such device")
http.server.HTTPServer(("127.0.0.1", int(sys.argv[sys.argv.index("--port") + 1])), Handler).serve_forever()
"""


def test_a_server_is_started_looked_at_and_stopped(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """By what ``omni-fastpath ab`` starts its own with; one that dies says so with the end of its log."""
    script = tmp_path / "stands_in.py"
    script.write_text(_STANDS_IN)
    monkeypatch.setattr(server, "vllm_command", lambda: [sys.executable, str(script)])
    # It removes what is new there at its end, which here may be what tests in another process are using.
    monkeypatch.setattr(server, "_SHARED_MEMORY", tmp_path / "none")
    with Server("model", "deploy") as running:
        assert running.alive()
        assert list(running.processes().values()) == ["api"]
        assert running.snapshots() == {}
    assert running.shutdown is not None
    assert (running.shutdown.killed, running.shutdown.returncode) == ((), -signal.SIGTERM)
    assert not running.alive()
    dying = Server("model", "deploy", arguments=["dies"], log_path=tmp_path / "log")
    with pytest.raises(ServerError, match=r"ended with status 1(?s:.*)no such device"):
        dying.start()
    assert dying.shutdown is not None


# ---- Whole servers ----


def test_a_row_without_a_figure_gets_no_verdict() -> None:
    """And without one of the primary row nothing is judged."""
    names = ("first, ms", "second, ms")
    rows = {("4", name): whole_server.measure_of(4, name) for name in names}
    full = [{"4": dict.fromkeys(names, 1 + place / 10)} for place in range(STARTS)]
    second_only, first_only = ([{"4": {name: start["4"][name]}} for start in full] for name in reversed(names))
    assert set(whole_server.judge(full, full, rows)) == {"first at 4", "second at 4"}
    assert set(whole_server.judge(full, first_only, rows)) == {"first at 4"}
    assert whole_server.judge(second_only, full, rows) == {}


# ---- `omni-fastpath ab` against what is known ----


@pytest.mark.parametrize(
    ("named", "text", "end", "expected"),
    [
        ((), "the same", "the same", 0),
        ((), "the same", "better", 1),
        (("e2el",), "better", "worse", 0),
        (("e2el",), "worse", "worse", 1),
        (("e2el",), "the same", "the same", 1),
    ],
)
def test_what_a_series_finds_is_held_against_what_is_known(
    named: tuple[str, ...], text: str, end: str, expected: int
) -> None:
    """Of a setting against itself nothing but "the same"; of a slower stage what was named, and never first text."""
    from benchmarks.ab.__main__ import _judge

    words = {"median_ttft": text, "p99_ttft": "the same", "e2el": end}
    rows = [{"name": name, "verdict": {"word": word}} for name, word in words.items()]
    assert _judge({"rows": rows, "answers": {"differences": []}}, named) == expected

"""What several benchmarks stand on."""

from __future__ import annotations

import signal
import sys
import tempfile
from pathlib import Path

import pytest

pytest.importorskip("omni_simulated_device")

from benchmarks.rigs import overlays, server
from benchmarks.rigs import server_arms as serving
from benchmarks.rigs.arm import Arm
from benchmarks.rigs.server import Server, ServerError


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

"""What is seen of live servers: each by its own variables, folder, deploy YAML and tree."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from omni_fastpath import state
from omni_fastpath.tools import cli, servers
from omni_fastpath.tools.servers import Server, live_servers
from tests.tools.made import ROOT, snapshot

_SERVER = """
import json, os, sys
from omni_fastpath import process_role, state
own = {"pid": os.getpid(), "started": process_role.started(os.getpid())}
state.write({**json.loads(sys.argv[1]), **own})
print("there", flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize("variables", [{"XDG_RUNTIME_DIR": "theirs"}, {"TMPDIR": "relative"}])
def test_a_server_is_read_from_its_own_folder_and_variables(tmp_path: Path, variables: dict[str, str]) -> None:
    """A server's state folder, also by a relative ``TMPDIR``, and variables are its own."""
    for folder in ("theirs", "relative"):
        (tmp_path / folder).mkdir(mode=0o700)
    runtime = {"XDG_RUNTIME_DIR": str(tmp_path / "theirs") if "XDG_RUNTIME_DIR" in variables else ""}
    environ = {"OMNI_FASTPATH_FLUTE": "1", "PYTHONPATH": str(ROOT), **variables, **runtime}
    told = json.dumps(snapshot(0, source="deploy.yaml"))
    command = (sys.executable, "-c", _SERVER, told, "vllm", "serve", "model", "--omni")
    with subprocess.Popen(command, stdin=-1, stdout=-1, env={**os.environ, **environ}, cwd=tmp_path) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"there\n"
        server = next(each for each in live_servers() if each.pid == process.pid)
        assert [(each["pid"], each["port"]) for each in server.snapshots] == [(process.pid, 8091)]
        assert (server.environ or {})["OMNI_FASTPATH_FLUTE"] == "1"
    assert process.pid not in {each.pid for each in live_servers()}


def test_a_stage_belongs_to_the_server_above_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stage's state file belongs to its parent server, and without one it is shown alone."""
    above = os.getppid()
    files = [snapshot(above), snapshot(os.getpid(), "stage")]
    monkeypatch.setattr(servers, "started", dict)
    monkeypatch.setattr(state, "read_live", lambda _: files)
    assert [[each["pid"] for each in server.snapshots] for server in live_servers()] == [sorted([above, os.getpid()])]
    del files[0]
    assert [server.pid for server in live_servers()] == [os.getpid()]


def used(pid: int, at_s: float, **seconds: float) -> dict[str, Any]:
    """A state file in which threads have used so much."""
    return snapshot(pid, updated=at_s, cpu_s=seconds)


def test_the_busiest_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shares of a core are those between two files of a process, and all threads of a role count."""
    before = [used(10, 0.0, front_end=1.0), used(11, 5.0, front_end=0.0, orchestrator=1.0), used(12, 0.0)]
    after = [
        used(10, 10.0, front_end=6.0, orchestrator=9.0),  # an orchestrator that was not there before
        used(11, 15.0, front_end=7.0, **{"orchestrator": 4.0, "orchestrator-2": 5.0}),
        used(12, 0.0),
    ]
    live = iter((before, after))
    monkeypatch.setattr(servers, "live_servers", lambda: [Server(10, snapshots=tuple(next(live)))])
    monkeypatch.setattr("time.sleep", lambda _: None)
    [server] = servers.watched()
    assert server.busy == pytest.approx({"front_end": 0.7, "orchestrator": 0.3})


def test_nothing_but_the_port_of_a_command_line_is_told(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    """``status`` shows only the port of a command line, never keys or addresses."""
    command = "python3 vllm serve https://me:SECRET@host/model --omni --port=8091 --api-key SECRET"
    monkeypatch.setattr(servers, "live_servers", lambda: [Server(7007, tuple(command.split()), {"HF_TOKEN": "SECRET"})])
    cli.main(["status"])
    out = capsys.readouterr().out
    assert "server 7007 port 8091: OFF, or still starting" in out
    assert "SECRET" not in out


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        ("/opt/venv/bin/python3.11 /opt/venv/bin/vllm serve M --omni", True),
        ("/usr/bin/python3 -X importtime /usr/local/bin/vllm-omni serve M --omni", True),
        ("python -m vllm_omni.entrypoints.cli.main serve M --omni", True),
        ("python3 -X dev -m vllm_omni.entrypoints.openai.api_server --model M", True),
        ("python /opt/lib/vllm_omni/entrypoints/openai/api_server.py M", True),
        ("python -m pytest vllm_omni/entrypoints/openai/api_server.py", False),
        ("/opt/venv/bin/python /opt/venv/bin/vllm serve M", False),
        ("python -m vllm.entrypoints.openai.api_server --model M", False),
        ("timeout 60 python3 /opt/venv/bin/vllm serve M --omni", False),
        ("/opt/venv/bin/python /opt/venv/bin/vllm bench serve --omni --model M", False),
        ("docker run --gpus all vllm/vllm-omni vllm serve M --omni", False),
        ("python /opt/venv/bin/omni-fastpath ab --set x -- vllm serve M --omni", False),
    ],
)
def test_which_command_lines_are_servers(command: str, expected: bool) -> None:
    """A server is Python running vLLM's command line, not a command that has one among its arguments."""
    assert servers._is_server(command.split()) is expected

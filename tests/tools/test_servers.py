"""What is seen of live servers: each by its own variables, folder, deploy YAML and tree."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from omni_fastpath import statefile, threads
from omni_fastpath.tools import cli, servers
from omni_fastpath.tools.servers import Server, live_servers
from tests.tools.made import ROOT, snapshot

_SERVER = """
import json, sys
from omni_fastpath import statefile
statefile.write(json.loads(sys.argv[1]))
print("there", flush=True)
sys.stdin.read()
"""


def test_a_server_is_read_from_its_own_folder_and_variables(tmp_path: Path) -> None:
    """A server's state folder, variables and relative YAML path are its own, not the shell's."""
    folder = tmp_path / "theirs"
    folder.mkdir(mode=0o700)
    environ = {"XDG_RUNTIME_DIR": str(folder), "OMNI_FASTPATH_FLUTE": "1", "PYTHONPATH": str(ROOT)}
    told = json.dumps(snapshot(0, source="deploy.yaml"))
    command = (sys.executable, "-c", _SERVER, told, "vllm", "serve", "model", "--omni")
    with subprocess.Popen(command, stdin=-1, stdout=-1, env={**os.environ, **environ}, cwd=tmp_path) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"there\n"
        server = next(each for each in live_servers() if each.pid == process.pid)
        assert [(each["pid"], each["port"]) for each in server.snapshots] == [(process.pid, 8091)]
        assert server.environ is not None
        assert server.environ["OMNI_FASTPATH_FLUTE"] == "1"
        assert server.deploy_config == Path(f"/proc/{process.pid}/cwd/deploy.yaml")
    assert process.pid not in {each.pid for each in live_servers()}


@pytest.mark.parametrize("variables", [{"TMPDIR": "relative"}, {}])
def test_a_server_is_read_where_it_fell_back(
    tmp_path: Path, variables: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A relative ``TMPDIR`` and a working folder, where nothing else can be written, are the server's own."""
    (tmp_path / "relative").mkdir()
    monkeypatch.setattr(statefile, "_runtime", lambda _: None)
    place = str(tmp_path / variables.get("TMPDIR", ""))
    nowhere_else = (
        f"from omni_fastpath import statefile; statefile._runtime = lambda _: None; tempfile.tempdir={place!r}"
    )
    script = f"import tempfile; {nowhere_else}\n{_SERVER}"
    command = (sys.executable, "-c", script, json.dumps(snapshot(0)), "vllm", "serve", "model", "--omni")
    environ = {**os.environ, "XDG_RUNTIME_DIR": "", "PYTHONPATH": str(ROOT), **variables}
    with subprocess.Popen(command, stdin=-1, stdout=-1, env=environ, cwd=tmp_path) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"there\n"
        server = next(each for each in live_servers() if each.pid == process.pid)
        assert [each["pid"] for each in server.snapshots] == [process.pid]


def test_a_stage_belongs_to_the_server_above_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stage's state file belongs to its parent server, and without one it is shown alone."""
    above = os.getppid()
    files = [{**snapshot(above), "pid": above}, {**snapshot(os.getpid(), "stage"), "pid": os.getpid()}]
    monkeypatch.setattr(servers, "started", dict)
    monkeypatch.setattr(statefile, "read_live", lambda at=None: files)
    assert [[each["pid"] for each in server.snapshots] for server in live_servers()] == [sorted([above, os.getpid()])]
    del files[0]
    assert [server.pid for server in live_servers()] == [os.getpid()]


def test_a_folder_that_is_not_believed_hides_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """An unsafe folder of one server does not hide other servers' state files."""
    ours = {**snapshot(0), "pid": os.getpid()}

    def read_live(at: Path) -> list[dict[str, Any]]:
        if at == statefile.folder():
            raise statefile.UnsafeFolderError("another user's")
        return [ours]

    monkeypatch.setattr(servers, "started", lambda: {1: os.getuid()})
    monkeypatch.setattr(servers, "_facts", lambda _pid: {"environ": {"XDG_RUNTIME_DIR": "/nowhere"}})
    monkeypatch.setattr(statefile, "read_live", read_live)
    assert [each.snapshots for each in live_servers()][-1] == (ours,)


BOTH = {"front_end": 10, "orchestrator": 14}


@pytest.mark.parametrize(
    ("snapshots", "expected"),
    [
        ((snapshot(10, threads=BOTH), snapshot(11, threads=BOTH)), {"front_end": 0.7, "orchestrator": 0.4}),
        ((snapshot(10, threads={**BOTH, "orchestrator-2": 15}),), {"front_end": 0.5, "orchestrator": 0.4}),
        ((snapshot(10, threads={"front_end": 10}), snapshot(12, "stage")), {}),
    ],
)
def test_the_busiest_process(snapshots: Any, expected: dict[str, float], monkeypatch: pytest.MonkeyPatch) -> None:
    """Shares of a core are computed over the real interval, and only if threads of both roles are known."""
    clock = iter((100.0, 101.0, 110.0))
    monkeypatch.setattr(servers, "time", SimpleNamespace(monotonic=lambda: next(clock), sleep=lambda _s: None))
    seconds = {10: [(1.0, 1.0), (6.0, 3.0)], 11: [(0.0, 0.0), (7.0, 4.0)], 12: [(0.0, 0.0)] * 2}

    def used(pid: int, known: dict[str, int]) -> dict[str, float]:
        front_end, orchestrator = seconds[pid].pop(0)
        return {name: {"front_end": front_end}.get(name, orchestrator) for name in known}

    monkeypatch.setattr(threads, "used", used)
    live = [Server(10, snapshots=snapshots)]
    [server] = servers.watched(live, servers.used(live))
    assert server.busy == pytest.approx(expected)


@pytest.mark.parametrize(
    ("arguments", "model", "port"),
    [
        (["serve", "org/model", "--omni", "--port", "8091", "--api-key", "SECRET"], "org/model", 8091),
        (["serve", "--omni", "--model", "org/model", "--auth-token", "SECRET"], "org/model", None),
        (["serve", "https://me:SECRET@host/model", "--omni"], None, None),
        (["serve", "--omni", "--api-key", "SECRET", "org/model"], None, None),
        (["serve", "--omni", "--port", "SECRET"], None, None),
    ],
)
def test_nothing_but_model_and_port_of_a_command_line_is_told(
    arguments: list[str], model: str | None, port: int | None, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    """``status`` shows only model and port of a command line, never keys or tokens."""
    server = Server(7007, ("python3", "vllm", *arguments), {"HF_TOKEN": "SECRET"})
    assert server.summary() == {"pid": 7007, "model": model, "port": port}
    monkeypatch.setattr(servers, "live_servers", lambda **_: [server])
    cli.main(["status"])
    out = capsys.readouterr().out
    assert "7007" in out
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
        ("timeout 60 python3 /opt/venv/bin/vllm serve M --omni", False),
        ("/opt/venv/bin/python /opt/venv/bin/vllm bench serve --omni --model M", False),
        ("docker run --gpus all vllm/vllm-omni vllm serve M --omni", False),
        ("python /opt/venv/bin/omni-fastpath ab --set x -- vllm serve M --omni", False),
    ],
)
def test_which_command_lines_are_servers(command: str, expected: bool) -> None:
    """A server is Python running vLLM's command line, not a command that has one among its arguments."""
    assert servers._is_server(command.split()) is expected

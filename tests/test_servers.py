"""Servers without a state file, found among this user's processes."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import psutil
import pytest

from omni_fastpath.patches import PATCHES
from omni_fastpath.tools import cli, servers
from omni_fastpath.tools.status import status_report


def test_a_client_is_no_server() -> None:
    """``vllm bench serve --omni`` measures one."""
    with _looks_like_a_server("vllm", "bench", "serve", "--omni", "--model", "m") as pid:
        assert pid not in {server["pid"] for server in servers.without_state(())}


def test_what_runs_a_server_or_was_forked_by_it_is_no_other() -> None:
    """``timeout 60 vllm serve ...`` and the server below it are one server, and so are its forked children."""
    sleeps = "import os, sys, time; sys.stdin.read()"
    forks = f"import os; os.fork()\n{sleeps}"
    command = [sys.executable, "-c", forks, "vllm", "serve", "model", "--omni"]
    wrapper = f"import subprocess, sys; subprocess.run({command!r})"
    with subprocess.Popen([sys.executable, "-c", wrapper, "vllm", "serve", "--omni"], stdin=subprocess.PIPE) as process:
        wrapper_and_below: list[psutil.Process] = []
        while len(wrapper_and_below) < 3:
            wrapper_and_below = [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]
        found = {server["pid"] for server in servers.without_state(())}
        assert found & {each.pid for each in wrapper_and_below} == {wrapper_and_below[1].pid}
        for each in wrapper_and_below[1:]:
            each.kill()
        process.communicate()


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        ("/opt/venv/bin/python3.11 /opt/venv/bin/vllm serve M --omni", True),
        ("/usr/bin/python3 -X importtime /usr/local/bin/vllm-omni serve M --omni", True),
        ("python -m vllm_omni.entrypoints.cli.main serve M --omni", True),
        ("python -m vllm.entrypoints.cli.main serve M --omni", True),
        ("python /src/vllm_omni/entrypoints/cli/main.py serve M --omni", True),
        ("/opt/venv/bin/python /opt/venv/bin/vllm serve M", False),
        ("/opt/venv/bin/python /opt/venv/bin/vllm bench serve --omni", False),
        ("docker run --gpus all vllm/vllm-omni vllm serve M --omni", False),
        ("docker run vllm/vllm-omni serve M --omni", False),
        ("ssh box vllm serve M --omni", False),
        ("tmux new -d vllm serve M --omni", False),
        ("python /opt/venv/bin/omni-fastpath ab --set x -- vllm serve M --omni", False),
        ("python deploy.py serve M --omni", False),
    ],
)
def test_which_command_lines_are_servers(command: str, expected: bool) -> None:
    """A Python with vLLM's own command line, and not what has such a line among its arguments."""
    assert servers._is_server(command.split()) is expected


@contextmanager
def _looks_like_a_server(*arguments: str, **variables: str) -> Iterator[int]:
    """A process whose command line is that of a server, asleep."""
    given = arguments or ("vllm", "serve", "model", "--omni")
    command = [sys.executable, "-c", "import sys; sys.stdin.read()", *given]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, env={**os.environ, **variables})
    try:
        yield process.pid
    finally:
        assert process.stdin is not None
        process.stdin.close()
        process.wait(10)


def test_a_server_without_a_state_file_is_named() -> None:
    """It is listed with its own allow-list, and not when its pid is known."""
    with _looks_like_a_server() as pid:
        found = {server["pid"]: server for server in servers.without_state(())}
        assert found[pid]["excluded"] is False
        assert pid not in {server["pid"] for server in servers.without_state({pid})}


@pytest.mark.parametrize(
    ("arguments", "model", "port"),
    [
        (["serve", "org/model", "--omni", "--port", "8091", "--api-key", "SECRET"], "org/model", 8091),
        (["serve", "/models/a b", "--omni", "--port=80", "--hf-token=SECRET"], "/models/a b", 80),
        (["serve", "--omni", "--model", "org/model", "--api-key", "SECRET"], "org/model", None),
        (["serve", "--omni", "--model=org/model", "--port", "1", "--port", "2"], "org/model", 2),
        (["serve", "--omni", "--api-key", "SECRET", "org/model"], None, None),  # what is a value and what is the model?
        (["serve", "--omni", "--port", "SECRET"], None, None),
        (["serve", "--omni", "--port", "--model"], None, None),
        (["serve", "--omni"], None, None),
    ],
)
def test_nothing_but_model_and_port_of_a_command_line_is_told(
    arguments: list[str], model: str | None, port: int | None, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whatever else stands there, a key or a token, is in no output of ``status``."""
    with _looks_like_a_server("vllm", *arguments) as pid:
        [found] = [each for each in servers.without_state(()) if each["pid"] == pid]
        for option in ([], ["--json"]):
            cli.main(["status", *option])
            assert str(pid) in (told := capsys.readouterr().out)
            assert "SECRET" not in told
    assert found.keys() == {"pid", "model", "port", "vllm_plugins", "excluded"}
    assert (found["model"], found["port"]) == (model, port)


@pytest.mark.parametrize(("allowed", "excluded"), [("other", True), ("other,omni_fastpath", False), ("", True)])
@pytest.mark.parametrize("said", ["1", "0"])
def test_a_server_that_leaves_us_out_is_a_problem(allowed: str, excluded: bool, said: str) -> None:
    """The server's own VLLM_PLUGINS counts, not this shell's; an error where something of ours was asked for."""
    with _looks_like_a_server(VLLM_PLUGINS=allowed, OMNI_FASTPATH=said) as pid:
        findings = [each for each in status_report({}, PATCHES)["findings"] if each["subject"] == f"server {pid}"]
        told = [each["severity"] for each in findings if each["id"] == "plugins-leave-us-out"]
        assert told == ["error" if said == "1" else "info"] * excluded

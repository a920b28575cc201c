"""Servers without a state file, found among this user's processes."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from omni_fastpath import cli, servers
from omni_fastpath.patches import PATCHES


@contextmanager
def _looks_like_a_server(**variables: str) -> Iterator[int]:
    """A process whose command line is that of a server, asleep."""
    command = [sys.executable, "-c", "import sys; sys.stdin.read()", "serve", "model", "--omni"]
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
        found = {server["pid"]: server for server in servers.without_state((), "omni_fastpath")}
        assert found[pid]["excluded"] is False
        assert pid not in {server["pid"] for server in servers.without_state({pid}, "omni_fastpath")}


@pytest.mark.parametrize(("allowed", "excluded"), [("other", True), ("other,omni_fastpath", False), ("", True)])
def test_a_server_that_leaves_us_out_is_a_problem(allowed: str, excluded: bool) -> None:
    """The server's own VLLM_PLUGINS counts, not this shell's, and makes the exit code 1."""
    with _looks_like_a_server(VLLM_PLUGINS=allowed) as pid:
        problems = cli.status_report({}, PATCHES)["problems"]
        assert any(f"the server {pid} was started with VLLM_PLUGINS" in problem for problem in problems) is excluded

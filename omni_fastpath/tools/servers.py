"""Servers of this user that have no state file: run as stock, or out of our sight.

A server that nobody asked anything of is invisible by design, and one whose ``VLLM_PLUGINS`` leaves us out cannot say
anything. Both look alike from a shell, so ``status`` names them and what their own environment says. Of a command line
only model and port are taken: what else stands there may be a secret.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil

from omni_fastpath import commandline, entrypoint, processid

_PROGRAMS = ("vllm", "vllm-omni")
_MODULES = ("/cli/main.py", ".entrypoints.cli.main")
"""Of vLLM's command line and vLLM-Omni's, as a file and as ``python -m`` names them."""


def without_state(known: Collection[int]) -> list[dict[str, Any]]:
    """The processes of this user that look like ``vllm serve ... --omni`` and are not among the known pids.

    Each as ``pid``, ``model`` and ``port`` (None where its arguments do not say), ``vllm_plugins`` (its allow-list,
    None when not set) and ``excluded``: whether that list leaves us out.
    """
    found = []
    for process in by_command_line():
        command = process.info["cmdline"]
        if process.pid in known:
            continue
        with contextlib.suppress(psutil.Error):
            allowed = process.environ().get(entrypoint.ALLOW_LIST)
            found.append(
                {
                    "pid": process.pid,
                    "model": _model(command),
                    "port": commandline.port(command),
                    "vllm_plugins": allowed,
                    "excluded": entrypoint.is_left_out(allowed),
                }
            )
    return sorted(found, key=lambda server: int(server["pid"]))


def by_command_line() -> list[psutil.Process]:
    """The processes of this user that look like ``vllm serve ... --omni``; ``info`` has their ``cmdline``."""
    processes = {process.pid: process for process in psutil.process_iter(["cmdline", "uids"])}
    commands = {
        pid: process.info["cmdline"] for pid, process in processes.items() if _is_server(process.info["cmdline"] or [])
    }
    others = _wrappers_and_forks(commands)
    mine = (processes[pid] for pid in commands if pid not in others and processes[pid].info["uids"] is not None)
    return [process for process in mine if process.info["uids"].real == os.getuid()]


def _is_server(command: Sequence[str]) -> bool:
    """A Python that runs vLLM's command line, not what starts one elsewhere or later (``docker run``, ``tmux new``).

    Nor ``vllm bench serve --omni``, which is a client, nor ``omni-fastpath ab ... -- vllm serve``.
    """
    if "serve" not in command or "--omni" not in command:
        return False
    at = command.index("serve")
    if at < 2 or "python" not in Path(command[0]).name.lower() or "--" in command[:at]:
        return False
    program = command[at - 1]
    return Path(program).name in _PROGRAMS or program.endswith(_MODULES)


def _wrappers_and_forks(commands: Mapping[int, Sequence[str]]) -> set[int]:
    """What only looks like a server: ``timeout 60 vllm serve ...`` above one, and the forked children of one."""
    return {
        pid if command == commands[above] else above
        for pid, command in commands.items()
        for above in processid.ancestors(pid)
        if above in commands
    }


def _model(command: Sequence[str]) -> str | None:
    """The argument right after ``serve``, or the value of ``--model``; an argument further on may be anything."""
    first = next(iter(command[command.index("serve") + 1 :]), "-")
    return commandline.value(command, "--model") if first.startswith("-") else first

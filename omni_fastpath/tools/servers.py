"""The running servers of this user, with their command lines, variables and state files.

A server has no state file if no patch is enabled there or its ``VLLM_PLUGINS`` excludes this plugin. Such a server is
found by its command line. Environments and command lines are used here but never shown.
"""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from omni_fastpath import process_role, state
from omni_fastpath.threads import FRONT_END, ORCHESTRATOR

WATCH_S = 2 * state.REFRESH_S + 0.5
"""Seconds between two readings, after which every state file is a new one."""

_PROGRAMS = ("vllm", "vllm-omni")
_MODULES = ("/cli/main.py", ".entrypoints.cli.main")
"""The command lines of vLLM and vLLM-Omni, as files and as ``python -m`` names them."""


@dataclass(frozen=True)
class Server:
    """A running server: ``vllm serve --omni``, or the topmost process with a state file.

    Attributes:
        pid: Its first process.
        command: Its command line, the program first. Empty if it cannot be read.
        environ: Its variables. None if they cannot be read.
        snapshots: The state files of its processes.
        busy: The shares of a core that the threads of ``front_end`` and ``orchestrator`` of its busiest API process
            used. Empty if they were not watched.
    """

    pid: int
    command: tuple[str, ...] = ()
    environ: Mapping[str, str] | None = None
    snapshots: tuple[state.Said, ...] = ()
    busy: Mapping[str, float] = field(default_factory=dict)

    @property
    def subject(self) -> str:
        """The subject of its findings."""
        return f"server {self.pid}"

    @property
    def port(self) -> int | None:
        """The port in its command line, of which nothing else is shown, because it may have passwords and keys."""
        return process_role.port(self.command)


def live_servers() -> list[Server]:
    """The running servers of this user, by process id."""
    mine = [pid for pid, user in started().items() if user == os.getuid()]
    snapshots = _snapshots(mine)
    above = {pid: set(process_role.ancestors(pid)) for pid in {*mine, *snapshots}}
    found = []
    for root in sorted(pid for pid, ancestors in above.items() if ancestors.isdisjoint(above)):
        own = tuple(snapshots[pid] for pid in sorted(snapshots) if pid == root or root in above[pid])
        facts = _facts(root)
        environ = facts.get("environ") or None  # a process that sets its own title overwrites it
        found.append(Server(root, tuple(facts.get("cmdline") or ()), environ, own))
    return found


def watched() -> list[Server]:
    """The same, with the shares of a core that threads used between two readings, which take ``WATCH_S`` in all."""
    before = {each["pid"]: each for server in live_servers() for each in server.snapshots}
    if before:
        time.sleep(WATCH_S)
    found = []
    for server in live_servers():
        shares = [_shares(before[each["pid"]], each) for each in server.snapshots if each["pid"] in before]
        busy = max(shares, key=lambda each: sum(each.values()), default={})
        found.append(dataclasses.replace(server, busy=busy))
    return found


def _shares(before: state.Said, after: state.Said) -> dict[str, float]:
    found, seconds = dict.fromkeys((FRONT_END, ORCHESTRATOR), 0.0), after["updated"] - before["updated"]
    for name, used in after["cpu_s"].items() if seconds > 0 else ():
        found[name.partition("-")[0]] += (used - before["cpu_s"].get(name, used)) / seconds
    return found


def started() -> dict[int, int]:
    """The user ids of all processes, forks included, that run vLLM or vLLM-Omni's API server, by process id."""
    processes = (each for each in psutil.process_iter(["cmdline", "uids"]) if each.info["uids"] is not None)
    return {each.pid: each.info["uids"].real for each in processes if _is_server(each.info["cmdline"] or [])}


def _is_server(command: Sequence[str]) -> bool:
    """Whether Python runs vLLM's command line with ``serve --omni`` here, or the module of vLLM-Omni's API server.

    It does not in ``docker run``, ``tmux new`` or ``omni-fastpath ab ... -- vllm serve``, and ``vllm bench serve
    --omni`` is a client.
    """
    at = next((at for at, word in enumerate(command) if word == "serve" or process_role.is_api_server(word)), 0)
    if at == 0 or "python" not in Path(command[0]).name.lower() or "--" in command[:at]:
        return False
    program = command[at - 1]
    if command[at] != "serve":
        return at == 1 or program == "-m"
    if at == 1 or "--omni" not in command:
        return False
    return Path(program).name in _PROGRAMS or program.endswith(_MODULES)


def _snapshots(pids: Iterable[int]) -> dict[int, state.Said]:
    """The state files of running processes by pid, in the folders of this shell and of these servers."""
    places = state.folders(os.environ, Path("/proc/self/cwd"))
    for pid in pids:
        places += state.folders(_facts(pid).get("environ") or {}, Path(f"/proc/{pid}/cwd"))
    return {each["pid"]: each for each in state.read_live(places)}


def _facts(pid: int) -> dict[str, Any]:
    """Command line and environment of a process. A value is None if it cannot be read. Empty if it has ended."""
    try:
        return psutil.Process(pid).as_dict(["cmdline", "environ"])
    except (psutil.Error, OSError):
        return {}

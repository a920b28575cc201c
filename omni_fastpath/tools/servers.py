"""The running servers of this user, with their command lines, variables and state files.

A server has no state file if no patch is enabled there or its ``VLLM_PLUGINS`` excludes this plugin. Such a server is
found by its command line. Environments and command lines are used here but never shown.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from omni_fastpath import process_role, statefile, threads
from omni_fastpath.declare import State
from omni_fastpath.threads import FRONT_END, ORCHESTRATOR

WATCH_S = 2.0
"""Seconds for which threads are watched. That is enough for shares of a core with two digits."""

_NO_YAML = "environment"
"""The source in a state file if no deploy YAML was read."""
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
            used. Empty if they were not watched, or no state file names such threads.
    """

    pid: int
    command: tuple[str, ...] = ()
    environ: Mapping[str, str] | None = None
    snapshots: tuple[Mapping[str, Any], ...] = ()
    busy: Mapping[str, float] = field(default_factory=dict)

    @property
    def subject(self) -> str:
        """The subject of its findings."""
        return f"server {self.pid}"

    @property
    def is_on(self) -> bool:
        """Whether any patch is on in any of its processes."""
        return any(record["state"] != State.OFF.value for each in self.snapshots for record in each["patches"].values())

    @property
    def deploy_config(self) -> Path | None:
        """The deploy YAML that it has read, or that its command line names, as a path in this process."""
        read = [each["source"] for each in self.snapshots if each["pid"] == self.pid and each["source"] != _NO_YAML]
        named = next(iter(read), None) or process_role.value(self.command, "--deploy-config")
        return None if named is None else Path(f"/proc/{self.pid}/cwd", named)

    def figures(self, metric: str, **labels: str) -> list[Mapping[str, Any]]:
        """The samples of a patch's metric with these labels, from the state files of its processes."""
        records = (record for each in self.snapshots for record in each["patches"].values())
        found = [sample for record in records for sample in record.get("figures", {}).get(metric, ())]
        return [sample for sample in found if labels.items() <= sample["labels"].items()]

    def summary(self) -> dict[str, Any]:
        """Its ``pid``, and ``model`` and ``port`` from its arguments, for ``status``.

        ``model`` is None for an address, which may contain a password.
        """
        starts = (at for at, word in enumerate(self.command, 1) if word == "serve" or process_role.is_api_server(word))
        given = self.command[next(starts, len(self.command)) :]
        first = next(iter(given), "-")
        model = process_role.value(given, "--model") if first.startswith("-") else first
        is_shown = model is not None and not {":", "@", "="} & {*model}
        return {"pid": self.pid, "model": model if is_shown else None, "port": process_role.port(given)}


@dataclass(frozen=True)
class Histogram:
    """The sum of the histograms of several processes.

    Attributes:
        bounds: Upper bounds of the buckets but the last.
        counts: The number of values in each bucket.
        is_recent: Whether only the last minutes are counted.
    """

    bounds: Sequence[float] = ()
    counts: Sequence[int] = ()
    is_recent: bool = False

    @property
    def count(self) -> int:
        """The number of all values."""
        return sum(self.counts)

    def quantile(self, share: float) -> float:
        """A quantile, as Prometheus' ``histogram_quantile`` computes it."""
        rank, below = share * self.count, 0.0
        for lower, upper, count in zip((0.0, *self.bounds), self.bounds, self.counts, strict=False):
            if below + count >= rank:
                return lower + (upper - lower) * (rank - below) / count
            below += count
        return self.bounds[-1]


def histogram(samples: Sequence[Mapping[str, Any]], fewest: int) -> Histogram:
    """The histogram of samples of ``figures.Recent``: of the last minutes if they have enough values, else of all."""
    if not samples:
        return Histogram()
    counts = [sum(bucket) for bucket in zip(*(each["counts"] for each in samples), strict=True)]
    before = [sum(bucket) for bucket in zip(*(each["before"] for each in samples), strict=True)]
    recent = [now - then for now, then in zip(counts, before, strict=True)]
    is_recent = sum(recent) >= fewest
    return Histogram(samples[0]["bounds"], recent if is_recent else counts, is_recent)


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


Used = tuple[float, Mapping[int, Mapping[str, float]]]
"""A time, and the processor time of the threads that each API process names until then."""


def used(live: Sequence[Server]) -> Used:
    """The processor time until now of the threads that these servers' state files name."""
    snapshots = (each for server in live for each in server.snapshots)
    return time.monotonic(), {each["pid"]: threads.used(each["pid"], each.get("threads") or {}) for each in snapshots}


def watched(live: Sequence[Server], since: Used) -> list[Server]:
    """The servers with the shares of a core that their threads used since then. Waits for ``WATCH_S`` in all."""
    began, before = since
    if live:
        time.sleep(max(0.0, began + WATCH_S - time.monotonic()))
    ended, after = used(live)

    def busy(server: Server) -> dict[str, float]:
        pids = (each["pid"] for each in server.snapshots)
        known = [pid for pid in pids if before[pid].keys() == after[pid].keys() >= {FRONT_END, ORCHESTRATOR}]
        shares = [dict.fromkeys((FRONT_END, ORCHESTRATOR), 0.0) for _ in known]
        for pid, share in zip(known, shares, strict=True):
            for name, seconds in after[pid].items():
                share[threads.role(name)] += (seconds - before[pid][name]) / (ended - began)
        return max(shares, key=lambda each: sum(each.values()), default={})

    return [dataclasses.replace(each, busy=busy(each)) for each in live]


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


def _snapshots(pids: Iterable[int]) -> dict[int, Mapping[str, Any]]:
    """The state files of running processes by pid, in the folders of this shell and of these servers."""
    places = statefile.folders(os.environ, Path("/proc/self/cwd"))
    for pid in pids:
        places += statefile.folders(_facts(pid).get("environ") or {}, Path(f"/proc/{pid}/cwd"))
    found: dict[int, Mapping[str, Any]] = {}
    for place in dict.fromkeys(places):
        with contextlib.suppress(OSError):  # a folder that other users can write is ignored
            found |= {each["pid"]: each for each in statefile.read_live(place)}
    return found


def _facts(pid: int) -> dict[str, Any]:
    """Command line and environment of a process. A value is None if it cannot be read. Empty if it has ended."""
    try:
        return psutil.Process(pid).as_dict(["cmdline", "environ"])
    except (psutil.Error, OSError):
        return {}

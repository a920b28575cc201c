"""The live servers of this user: what each was started with, what its state files and its ``/metrics`` say.

A server without a state file has nothing of ours to say: nothing was asked for there, or its ``VLLM_PLUGINS`` leaves
us out; its command line shows that it is there. Environments and command lines are judged here and never shown.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import time
import urllib.request
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from omni_fastpath import process_role, statefile, threads
from omni_fastpath.declare import State
from omni_fastpath.threads import FRONT_END, ORCHESTRATOR

SCRAPE_S, SCRAPES_S = 2.0, 4.0
"""How long a server's ``/metrics`` may take, and those of all servers, seconds: somebody waits for the answer."""

LOOK_S = 2.0
"""How long threads are watched, seconds: for a share of a core to a hundredth."""

_NO_YAML = "environment"
"""What a state file names as its source where no deploy YAML was read."""
_PROGRAMS = ("vllm", "vllm-omni")
_MODULES = ("/cli/main.py", ".entrypoints.cli.main")
"""Of vLLM's command line and vLLM-Omni's, as a file and as ``python -m`` names them."""


@dataclass(frozen=True)
class Server:
    """A live server: ``vllm serve --omni``, or the topmost process with a state file.

    Attributes:
        pid: Its first process.
        command: Its arguments, the program first; empty where they cannot be read.
        environ: What it was started with; None where it cannot be read.
        snapshots: The state files of its tree.
        metrics: Each series of its ``/metrics`` with the sum of its samples; empty where nothing answered.
        busy: Shares of a core that ``front_end`` and ``orchestrator`` of its busiest API process took; empty where
            nobody watched, or no state file names these threads.
    """

    pid: int
    command: tuple[str, ...] = ()
    environ: Mapping[str, str] | None = None
    snapshots: tuple[Mapping[str, Any], ...] = ()
    metrics: Mapping[str, float] = field(default_factory=dict)
    busy: Mapping[str, float] = field(default_factory=dict)

    @property
    def subject(self) -> str:
        """How a finding names it."""
        return f"server {self.pid}"

    @property
    def is_on(self) -> bool:
        """Whether any patch is on in any of its processes."""
        return any(record["state"] != State.OFF.value for each in self.snapshots for record in each["patches"].values())

    @property
    def deploy_config(self) -> Path | None:
        """The deploy YAML that it read, or that its command names, seen from here."""
        read = [each["source"] for each in self.snapshots if each["pid"] == self.pid and each["source"] != _NO_YAML]
        named = next(iter(read), None) or process_role.value(self.command, "--deploy-config")
        return None if named is None else Path(f"/proc/{self.pid}/cwd", named)

    @property
    def model(self) -> str | None:
        """The model's name or path, as its arguments have it."""
        first = next(iter(self._arguments), "-")
        return shown_model(process_role.value(self._arguments, "--model") if first.startswith("-") else first)

    @property
    def _arguments(self) -> Sequence[str]:
        return self.command[self.command.index("serve") + 1 :] if "serve" in self.command else ()

    def figures(self, metric: str, **labels: str) -> list[Mapping[str, Any]]:
        """The samples of a metric of ours with these labels, in the state files of its processes."""
        records = (record for each in self.snapshots for record in each["patches"].values())
        found = [sample for record in records for sample in record.get("figures", {}).get(metric, ())]
        return [sample for sample in found if labels.items() <= sample["labels"].items()]

    def shown(self) -> dict[str, Any]:
        """What ``status`` shows of it: ``pid``, and ``model`` and ``port`` as its arguments name them."""
        return {"pid": self.pid, "model": self.model, "port": process_role.port(self._arguments)}


@dataclass(frozen=True)
class Histogram:
    """What histograms of several processes have together.

    Attributes:
        bounds: Upper ends of the buckets but the last.
        counts: Of each bucket.
        is_recent: Whether the counts are of the last minutes alone.
    """

    bounds: Sequence[float] = ()
    counts: Sequence[int] = ()
    is_recent: bool = False

    @property
    def count(self) -> int:
        """Of all buckets."""
        return sum(self.counts)

    def quantile(self, share: float) -> float:
        """What so many do not exceed, as ``histogram_quantile`` of Prometheus has it."""
        rank, below = share * self.count, 0.0
        for lower, upper, count in zip((0.0, *self.bounds), self.bounds, self.counts, strict=False):
            if below + count >= rank:
                return lower + (upper - lower) * (rank - below) / count
            below += count
        return self.bounds[-1]


def histogram(samples: Sequence[Mapping[str, Any]], fewest: int) -> Histogram:
    """Of samples of ``figures.Recent``: of the last minutes, or of all the time where these have fewer values."""
    if not samples:
        return Histogram()
    counts = [sum(bucket) for bucket in zip(*(each["counts"] for each in samples), strict=True)]
    before = [sum(bucket) for bucket in zip(*(each["before"] for each in samples), strict=True)]
    recent = [now - then for now, then in zip(counts, before, strict=True)]
    is_recent = sum(recent) >= fewest
    return Histogram(samples[0]["bounds"], recent if is_recent else counts, is_recent)


def shown_model(model: str | None) -> str | None:
    """A model's name or path; None for what is no such word, as an address that may hold a password."""
    return model if model is not None and not {":", "@", "="} & {*model} else None


def live_servers(*, scrape: bool = False) -> list[Server]:
    """The live servers of this user, by process id.

    Args:
        scrape: Ask each server whose port its state file names for its ``/metrics``.
    """
    started = by_command_line()
    snapshots = _snapshots([None, *(_facts(pid).get("environ") for pid in started)])
    above = {pid: set(process_role.ancestors(pid)) for pid in {*started, *snapshots}}
    found, until = [], time.monotonic() + SCRAPES_S
    for root in sorted(pid for pid, ancestors in above.items() if ancestors.isdisjoint(above)):
        own = tuple(snapshots[pid] for pid in sorted(snapshots) if pid == root or root in above[pid])
        facts = _facts(root)
        command = tuple(facts.get("cmdline") or ())
        found.append(
            Server(
                pid=root,
                command=command,
                environ=facts.get("environ") or None,  # a process that names itself writes over it
                snapshots=own,
                metrics=_metrics(command, own, until - time.monotonic()) if scrape else {},
            )
        )
    return found


Used = tuple[float, Mapping[int, Mapping[str, float]]]
"""A time, and the seconds that each API process's two threads had been on a processor by then."""


def used(live: Sequence[Server]) -> Used:
    """What the threads that the state files of these servers name have used until now."""
    snapshots = (each for server in live for each in server.snapshots)
    return time.monotonic(), {each["pid"]: threads.used(each["pid"], each.get("threads") or {}) for each in snapshots}


def watched(live: Sequence[Server], since: Used) -> list[Server]:
    """The servers, each with what its threads took of a core since then; waits until that was ``LOOK_S`` ago."""
    began, before = since
    if live:
        time.sleep(max(0.0, began + LOOK_S - time.monotonic()))
    ended, after = used(live)

    def busy(server: Server) -> dict[str, float]:
        pids = (each["pid"] for each in server.snapshots)
        shares = [
            {name: (seconds - before[pid][name]) / (ended - began) for name, seconds in after[pid].items()}
            for pid in pids
            if {FRONT_END, ORCHESTRATOR} == before[pid].keys() == after[pid].keys()
        ]
        return max(shares, key=lambda each: sum(each.values()), default={})

    return [dataclasses.replace(each, busy=busy(each)) for each in live]


def by_command_line() -> list[int]:
    """The processes of this user that look like ``vllm serve ... --omni``, and forks of them."""
    processes = [each.info | {"pid": each.pid} for each in psutil.process_iter(["cmdline", "uids"])]
    mine = (each for each in processes if each["uids"] is not None and each["uids"].real == os.getuid())
    return [each["pid"] for each in mine if _is_server(each["cmdline"] or [])]


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


def _snapshots(environs: Iterable[Mapping[str, str] | None]) -> dict[int, Mapping[str, Any]]:
    """The state files of live processes by pid, in the runtime folders of this shell (None) and of these servers."""
    found: dict[int, Mapping[str, Any]] = {}
    for environ in environs:
        with contextlib.suppress(OSError):  # a folder that is not this user's alone is not believed
            found |= {each["pid"]: each for each in statefile.read_live(statefile.folder(environ))}
    return found


def _facts(pid: int) -> dict[str, Any]:
    """Command line and environment of a process; None for what may not be read, empty where it has ended."""
    try:
        return psutil.Process(pid).as_dict(["cmdline", "environ"])
    except (psutil.Error, OSError):
        return {}


def _metrics(command: Sequence[str], snapshots: Sequence[Mapping[str, Any]], left_s: float) -> dict[str, float]:
    """Of the port that a state file names: another program may have the one of the command line."""
    port = next((each["port"] for each in snapshots if each.get("port")), None)
    host = (process_role.value(command, "--host") or "localhost").strip("[]")
    url = f"http://{f'[{host}]' if ':' in host else host}:{port}/metrics"
    return scrape(url, min(SCRAPE_S, left_s)) if port and left_s > 0 else {}


def scrape(url: str, timeout_s: float = SCRAPE_S) -> dict[str, float]:
    """Ask for the metrics there, past any proxy: each series with the sum of its samples; empty without an answer."""
    from prometheus_client.parser import text_string_to_metric_families  # noqa: PLC0415 - only when asked for

    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    totals: dict[str, float] = {}
    try:
        with contextlib.closing(opener.open(url, timeout=timeout_s)) as answer:
            text = answer.read().decode(errors="replace")
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                totals[sample.name] = totals.get(sample.name, 0.0) + sample.value
    except Exception:  # nothing listens, it is another protocol (HTTPException), or no metrics
        return {}
    return totals

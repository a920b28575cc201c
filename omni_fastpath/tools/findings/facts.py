"""What the rules judge: this installation, and each live server with its own variables, folder and deploy YAML.

A server's environment and arguments are those that it was started with (``/proc/PID/environ`` and ``cmdline``), its
states those of its own runtime folder, which may be another one than this shell's. What cannot be read is None.
"""

from __future__ import annotations

import contextlib
import functools
import os
import re
import time
import urllib.request
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import psutil

from omni_fastpath import commandline, processid, statefile
from omni_fastpath.config import ConfigError, Resolved
from omni_fastpath.declare import Patch, Process, State
from omni_fastpath.deploy_yaml import resolve_file
from omni_fastpath.processid import ProcessId
from omni_fastpath.tools import servers
from omni_fastpath.tools.findings.leftovers import Leftover

_REPORTS = re.compile(
    r"::(StageEngineCoreProc|EngineCore|StageDiffusionProc|DiffusionWorker|VllmWorker|Worker|APIServer)"
)
"""What upstream's processes call themselves that load plugins; their coordinators and helpers do not."""

SCRAPE_S = 10.0
"""What Prometheus itself waits for an answer, unless it is told otherwise (``scrape_timeout``), seconds."""
_ROOTS = (Process.SERVER.value, Process.HEADLESS.value)
_HERE = ("", "0.0.0.0", "::", "[::]", "localhost")  # noqa: S104 - what a server listens on, nothing is opened


@dataclass(frozen=True)
class Member:
    """A process below a server.

    Attributes:
        pid: Its id.
        title: What it calls itself.
        age_s: Since it began, seconds.
    """

    pid: int
    title: str
    age_s: float

    @property
    def loads_plugins(self) -> bool:
        """Whether upstream loads plugins there, by its title."""
        return bool(_REPORTS.search(self.title))


@dataclass(frozen=True)
class Scrape:
    """What a server's ``/metrics`` said.

    Attributes:
        totals: Each series' name with the sum of its samples.
        problem: Why there is nothing, in words; empty where there is.
        timed_out: Whether somebody listens there and did not answer.
    """

    totals: Mapping[str, float] = field(default_factory=dict)
    problem: str = ""
    timed_out: bool = False


@dataclass(frozen=True)
class Server:
    """A live server: ``vllm serve --omni``, with a front end or headless, or a program that runs an engine.

    Attributes:
        pid: Its first process.
        role: Whether it has a front end.
        age_s: Since it began, seconds.
        command: Its arguments, the program first; None where they cannot be read.
        environ: What it was started with; None where it cannot be read.
        cwd: Where its relative paths begin.
        folder: Where its state files belong, by its own variables; None where that is not known.
        folder_problem: Why that folder cannot be used, in words.
        snapshots: The state files of its tree, its own first where it has one.
        unreadable: The processes of its tree, itself among them, whose state file is of another version.
        members: The processes below it.
        scrape: What its ``/metrics`` said; None where nobody asked.
        is_elsewhere: Whether it sees other processes or files than we do, so that its paths are not ours.
    """

    pid: int
    role: Literal["server", "headless"] = "server"
    age_s: float = 0.0
    command: tuple[str, ...] | None = None
    environ: Mapping[str, str] | None = None
    cwd: Path | None = None
    folder: Path | None = None
    folder_problem: str = ""
    snapshots: tuple[Mapping[str, Any], ...] = ()
    unreadable: frozenset[int] = frozenset()
    members: tuple[Member, ...] = ()
    scrape: Scrape | None = None
    is_elsewhere: bool = False

    @property
    def subject(self) -> str:
        """How a finding names it."""
        return f"server {self.pid}"

    @property
    def own(self) -> Mapping[str, Any] | None:
        """The state file of its first process."""
        return next((each for each in self.snapshots if each["pid"] == self.pid), None)

    @property
    def arguments(self) -> tuple[str, ...]:
        """From ``serve`` on; empty where they are not known, or it is another program."""
        command = self.command or ()
        return command[command.index("serve") :] if "serve" in command else ()

    @property
    def is_on(self) -> bool:
        """Whether something of ours is on anywhere in its tree."""
        return any(is_on(each) for each in self.snapshots)

    @property
    def deploy_yaml(self) -> Path | None:
        """Its deploy YAML, by its arguments, else by what it read; None where its files are not ours."""
        if self.is_elsewhere:
            return None
        told = commandline.value(self.arguments, "--deploy-config")
        if told is None and self.own is not None and self.own["source"] != "environment":
            told = self.own["source"]
        if told is None:
            return None
        path = Path(told) if self.cwd is None else self.cwd / told
        try:
            return path if path.is_file() else None
        except OSError:  # it is where this user may not look, or on a file system that does not answer
            return None

    def resolved(self, patches: Sequence[Patch]) -> Resolved | None:
        """What its variables and its deploy YAML come to now; None where its variables are not known.

        Raises:
            ConfigError: A start would be refused.
        """
        if self.environ is None:
            return None
        with _variables(self.environ):  # OmegaConf resolves ``${oc.env:NAME}`` in a YAML, in the server's environment
            return resolve_file(self.deploy_yaml, self.environ, patches)

    def records(self, patch: str) -> list[Mapping[str, Any]]:
        """What its processes say of a patch."""
        return [snapshot["patches"][patch] for snapshot in self.snapshots if patch in snapshot["patches"]]


@dataclass(frozen=True)
class Facts:
    """Everything that the rules see.

    Attributes:
        patches: The declarations.
        environ: This shell's variables.
        report: What ``status`` shows (``omni_fastpath.tools.status``), without findings.
        asked: The patches whose release matters here.
        servers: The live ones of this user.
        stray: State files of live stages and workers above which no server lives.
        folder_problem: Why this shell's runtime folder cannot be used, in words; empty where it can.
        other_namespaces: State files in it that containers on this machine wrote, whether they still run or not.
        leftovers: Files that dead servers left.
        shared_memory_bytes: Size of ``/dev/shm``; 0 where there is none.
        contained: Whether this process namespace is not the machine's own: others may share its ``/dev/shm`` unseen.
        hooks: The hook plugins as this shell finds them (``HookManager.told``); None where nobody loaded them.
    """

    patches: Sequence[Patch]
    environ: Mapping[str, str] = field(default_factory=dict)
    report: Mapping[str, Any] = field(default_factory=dict)
    asked: frozenset[str] = frozenset()
    servers: Sequence[Server] = ()
    stray: Sequence[Mapping[str, Any]] = ()
    folder_problem: str = ""
    other_namespaces: int = 0
    leftovers: Sequence[Leftover] = ()
    shared_memory_bytes: int = 0
    contained: bool = False
    hooks: Mapping[str, Any] | None = None

    @functools.cached_property
    def declared(self) -> Mapping[str, Patch]:
        """The declarations by name."""
        return {patch.name: patch for patch in self.patches}


@contextlib.contextmanager
def _variables(environ: Mapping[str, str]) -> Iterator[None]:
    """This process with another one's environment. Only for a command, which has no other thread to see it."""
    own = dict(os.environ)
    try:
        os.environ.clear()
        os.environ.update(environ)
        yield
    finally:
        os.environ.clear()
        os.environ.update(own)


# ---- Servers ----


def live_servers(
    snapshots: Sequence[Mapping[str, Any]], *, scrape: bool = False
) -> tuple[list[Server], list[Mapping[str, Any]]]:
    """The live servers of this user, and the state files of stages above which none lives.

    Args:
        snapshots: What lies in this shell's runtime folder; that of a server which has another is read here.
        scrape: Ask each server whose port its state file says for its ``/metrics``.
    """
    by_pid: dict[int, Mapping[str, Any]] = {snapshot["pid"]: snapshot for snapshot in snapshots}
    environs: dict[int, Mapping[str, str] | None] = {}
    folders: dict[int, tuple[Path | None, str]] = {}
    unreadable: frozenset[int] = frozenset()
    looks = [process.pid for process in servers.by_command_line()]
    for pid in {*looks, *by_pid}:
        environs[pid] = _environ(pid)
        folders[pid] = _folder(environs[pid])
        found, problem = folders[pid]
        if pid in looks and found is not None:
            try:
                by_pid = {**{each["pid"]: each for each in statefile.read_live(found)}, **by_pid}
                unreadable |= statefile.unreadable(found)
            except OSError as error:
                folders[pid] = (found, problem or str(error))
    roots = _topmost([*looks, *(pid for pid, each in by_pid.items() if each["role"] in _ROOTS)])
    lines = {pid: list(processid.ancestors(pid)) for pid in psutil.pids()}
    trees = {root: sorted(pid for pid, above in lines.items() if root in above) for root in roots}
    known = {pid for root, below in trees.items() for pid in (root, *below)}
    told = []
    for root, below in trees.items():
        states = [by_pid[pid] for pid in (root, *below) if pid in by_pid]
        own = by_pid.get(root)
        environ = environs[root] if root in environs else _environ(root)
        folder, problem = folders.get(root) or _folder(environ)
        told.append(
            Server(
                pid=root,
                role="headless" if own is not None and own["role"] == Process.HEADLESS.value else "server",
                age_s=_age(root),
                command=_command(root),
                environ=environ,
                cwd=_cwd(root),
                folder=folder,
                folder_problem=problem,
                snapshots=tuple(states),
                unreadable=unreadable.intersection((root, *below)).difference(by_pid),
                members=tuple(Member(pid, " ".join(_command(pid) or ()).strip(), _age(pid)) for pid in below),
                scrape=_scrape(root, states) if scrape else None,
                is_elsewhere=processid.is_elsewhere(root),
            )
        )
    stray = [each for pid, each in by_pid.items() if pid not in known]
    return told, [each for each in stray if _lives(each)]  # others have ended since their files were read


def _lives(snapshot: Mapping[str, Any]) -> bool:
    return ProcessId(*(snapshot[name] for name in ("pid", "started", "boot", "namespace"))).alive


def _topmost(pids: Iterable[int]) -> list[int]:
    """Those of the processes above which none of the others is: one of several API servers is no server."""
    every = set(pids)
    return sorted(pid for pid in every if every.isdisjoint(processid.ancestors(pid)))


def _environ(pid: int) -> Mapping[str, str] | None:
    try:
        return psutil.Process(pid).environ() or None  # upstream's processes that name themselves write over it
    except (psutil.Error, OSError):
        return None


def _folder(environ: Mapping[str, str] | None) -> tuple[Path | None, str]:
    if environ is None:
        return None, ""
    try:
        found = statefile.folder(environ)
    except OSError as error:
        return None, str(error)
    try:
        return found, unwritable(found)
    except OSError as error:  # it is where this user may not look
        return found, str(error)


def unwritable(runtime: Path) -> str:
    """Why nobody could write into a runtime folder, in words; empty where one can, or could make it."""
    there = next((each for each in (runtime, *runtime.parents) if each.exists()), runtime)
    if not there.is_dir():
        return f"{there} is no folder"
    if not os.access(there, os.W_OK | os.X_OK):
        return f"{there} cannot be written"
    system = os.statvfs(there)
    if system.f_flag & os.ST_RDONLY:
        return f"{there} is on a file system that is mounted read-only"
    free = system.f_bfree if os.geteuid() == 0 else system.f_bavail
    return f"the file system of {there} is full" if free == 0 and system.f_blocks > 0 else ""


def _command(pid: int) -> tuple[str, ...] | None:
    try:
        return tuple(psutil.Process(pid).cmdline())
    except (psutil.Error, OSError):
        return None


def _cwd(pid: int) -> Path | None:
    try:
        return Path(psutil.Process(pid).cwd())
    except (psutil.Error, OSError):
        return None


def _age(pid: int) -> float:
    try:
        return time.time() - psutil.Process(pid).create_time()
    except (psutil.Error, OSError):
        return 0.0


# ---- /metrics ----


def _scrape(root: int, snapshots: Sequence[Mapping[str, Any]]) -> Scrape:
    port = next((each["port"] for each in snapshots if each.get("port")), None)
    if port is None:
        return Scrape(problem="its state file names no port")
    host = commandline.value(_command(root) or (), "--host") or ""
    return scrape(f"http://{'127.0.0.1' if host in _HERE else host}:{port}/metrics")


def scrape(url: str) -> Scrape:
    """Ask for the metrics there, past any proxy."""
    from prometheus_client.parser import text_string_to_metric_families  # noqa: PLC0415 - only when asked for

    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    totals: dict[str, float] = {}
    try:
        with contextlib.closing(opener.open(url, timeout=SCRAPE_S)) as answer:
            text = answer.read().decode(errors="replace")
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                totals[sample.name] = totals.get(sample.name, 0.0) + sample.value
    except Exception as error:  # nobody listens, it is another protocol (HTTPException), or no metrics
        timed_out = isinstance(getattr(error, "reason", error), TimeoutError)  # urllib's error has the socket's in it
        return Scrape(problem=f"/metrics does not answer: {error}", timed_out=timed_out)
    return Scrape(totals)


def configuration(server: Server, patches: Sequence[Patch]) -> tuple[Resolved | None, str]:
    """What the server's variables and deploy YAML come to now, or why a start would be refused."""
    try:
        return server.resolved(patches), ""
    except ConfigError as refused:
        return None, str(refused)
    except OSError:  # a file of the chain is where nobody can look: nothing is known
        return None, ""


def is_on(snapshot: Mapping[str, Any]) -> bool:
    """Whether something of ours is on in the process of a state file."""
    return any(record["state"] != State.OFF.value for record in snapshot["patches"].values())


def applied(server: Server) -> Iterator[str]:
    """The patches that are applied in any of its processes."""
    names = {
        name
        for snapshot in server.snapshots
        for name, record in snapshot["patches"].items()
        if record["state"] == State.APPLIED.value
    }
    yield from sorted(names)

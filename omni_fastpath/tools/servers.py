"""The live servers of this user: what each was started with, what its state files and its ``/metrics`` say.

A server without a state file is invisible by design where nothing was asked of us, and cannot say anything where its
``VLLM_PLUGINS`` leaves us out; its command line shows that it is there. Its environment and arguments are those that it
was started with. They are judged here and never shown.
"""

from __future__ import annotations

import contextlib
import os
import urllib.request
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from omni_fastpath import process_role, statefile
from omni_fastpath.config import ConfigError, Resolved
from omni_fastpath.declare import Patch, State
from omni_fastpath.deploy_yaml import resolve_file

SCRAPE_S = 10.0
"""How long ``/metrics`` may take, seconds: as long as Prometheus waits for it by default."""

_PROGRAMS = ("vllm", "vllm-omni")
_MODULES = ("/cli/main.py", ".entrypoints.cli.main")
"""Of vLLM's command line and vLLM-Omni's, as a file and as ``python -m`` names them."""
_HERE = ("", "0.0.0.0", "::", "[::]", "localhost")  # noqa: S104 - what a server listens on, nothing is opened


@dataclass(frozen=True)
class Scrape:
    """What a server's ``/metrics`` said: each series' name with the sum of its samples, or why there is nothing."""

    totals: Mapping[str, float] = field(default_factory=dict)
    problem: str = ""


@dataclass(frozen=True)
class Server:
    """A live server: ``vllm serve --omni``, or the topmost process with a state file.

    Attributes:
        pid: Its first process.
        command: Its arguments, the program first; empty where they cannot be read.
        environ: What it was started with; None where it cannot be read.
        cwd: Where its relative paths begin; None where that is not known.
        snapshots: The state files of its tree.
        scrape: What its ``/metrics`` said; None where nobody asked.
        is_elsewhere: Whether it sees other processes or files than we do, so that its paths are not ours.
    """

    pid: int
    command: tuple[str, ...] = ()
    environ: Mapping[str, str] | None = None
    cwd: Path | None = None
    snapshots: tuple[Mapping[str, Any], ...] = ()
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
        return self.command[self.command.index("serve") :] if "serve" in self.command else ()

    @property
    def is_on(self) -> bool:
        """Whether any patch is on in any of its processes."""
        return any(record["state"] != State.OFF.value for each in self.snapshots for record in each["patches"].values())

    @property
    def deploy_yaml(self) -> Path | None:
        """Its deploy YAML, by its arguments, else by what it read; None where its files are not ours."""
        if self.is_elsewhere:
            return None
        said = process_role.value(self.arguments, "--deploy-config")
        if said is None and self.own is not None and self.own["source"] != "environment":
            said = self.own["source"]
        if said is None:
            return None
        path = Path(said) if self.cwd is None else self.cwd / said
        try:
            return path if path.is_file() else None
        except OSError:  # it is where this user may not look
            return None

    def resolved(self, patches: Sequence[Patch]) -> tuple[Resolved | None, str]:
        """What its variables and its deploy YAML come to now, or why a start would be refused."""
        if self.environ is None:
            return None, ""
        try:
            with _variables(self.environ):  # OmegaConf resolves ``${oc.env:NAME}`` in a YAML
                return resolve_file(self.deploy_yaml, self.environ, patches), ""
        except ConfigError as refused:
            return None, str(refused)
        except OSError:  # a file of the chain is where this user may not look
            return None, ""

    def asks(self, patches: Sequence[Patch]) -> bool:
        """Whether its variables or its deploy YAML switch something on, or would be refused."""
        resolved, refusal = self.resolved(patches)
        return bool(refusal) or (resolved is not None and resolved.asked)

    def shown(self) -> dict[str, Any]:
        """What ``status`` shows of it: ``pid``, and ``model`` and ``port`` as its arguments name them."""
        first = next(iter(self.arguments[1:]), "-")
        model = process_role.value(self.arguments, "--model") if first.startswith("-") else first
        return {"pid": self.pid, "model": shown_model(model), "port": process_role.port(self.arguments)}


def shown_model(model: str | None) -> str | None:
    """A model's name or path; None for what is no such word, as an address that may hold a password."""
    return model if model is not None and not {":", "@", "="} & {*model} else None


def live_servers(*, scrape: bool = False) -> list[Server]:
    """The live servers of this user, by process id.

    Args:
        scrape: Ask each server whose port its state file names for its ``/metrics``.
    """
    looks = {process.pid: _read(process.pid, psutil.Process.environ) for process in by_command_line()}
    snapshots = _snapshots([None, *looks.values()])
    above = {pid: _ancestors(pid) for pid in {*looks, *snapshots}}
    roots = [pid for pid, ancestors in above.items() if ancestors.isdisjoint(above)]
    found = []
    for root in sorted(roots):
        own = tuple(snapshots[pid] for pid in sorted(snapshots) if pid == root or root in above[pid])
        command = tuple(_read(root, psutil.Process.cmdline) or ())
        cwd = _read(root, psutil.Process.cwd)
        found.append(
            Server(
                pid=root,
                command=command,
                environ=_read(root, psutil.Process.environ) or None,  # a process that names itself writes over it
                cwd=None if cwd is None else Path(cwd),
                snapshots=own,
                scrape=_scrape(command, own) if scrape and own else None,
                is_elsewhere=_is_elsewhere(root),
            )
        )
    return found


def _snapshots(environs: Iterable[Mapping[str, str] | None]) -> dict[int, Mapping[str, Any]]:
    """The state files of live processes by pid, in the runtime folders of this shell (None) and of these servers."""
    folders: dict[Path, None] = {}
    for environ in environs:
        with contextlib.suppress(OSError):  # a folder that is not this user's alone is not believed
            folders[statefile.folder(environ)] = None
    found: dict[int, Mapping[str, Any]] = {}
    for folder in folders:
        with contextlib.suppress(OSError):
            found |= {each["pid"]: each for each in statefile.read_live(folder)}
    return found


def _is_elsewhere(pid: int) -> bool:
    """Whether a process sees other process ids than this one, or other files: its paths need not mean anything here."""
    try:
        return any(
            Path(f"/proc/{pid}/ns/{kind}").stat().st_ino != Path(f"/proc/self/ns/{kind}").stat().st_ino
            for kind in ("pid", "mnt")
        )
    except OSError:
        return False


def _read(pid: int, what: Any) -> Any:
    """An attribute of a process, by psutil's method; None where it cannot be read."""
    try:
        return what(psutil.Process(pid))
    except (psutil.Error, OSError):
        return None


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


def _ancestors(pid: int) -> set[int]:
    return {each.pid for each in _read(pid, psutil.Process.parents) or ()}


# ---- By command line ----


def by_command_line() -> list[psutil.Process]:
    """The processes of this user that look like ``vllm serve ... --omni``; ``info`` has their ``cmdline``."""
    processes = {process.pid: process for process in psutil.process_iter(["cmdline", "uids"])}
    commands = {pid: each.info["cmdline"] for pid, each in processes.items() if _is_server(each.info["cmdline"] or [])}
    others = set(_wrappers_and_forks(commands))
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


def _wrappers_and_forks(commands: Mapping[int, Sequence[str]]) -> Iterator[int]:
    """What only looks like a server: ``timeout 60 vllm serve ...`` above one, and the forked children of one."""
    for pid, command in commands.items():
        yield from (pid if command == commands[above] else above for above in _ancestors(pid) if above in commands)


# ---- /metrics ----


def _scrape(command: Sequence[str], snapshots: Sequence[Mapping[str, Any]]) -> Scrape:
    port = next((each["port"] for each in snapshots if each.get("port")), None)
    if port is None:
        return Scrape(problem="its state file names no port")
    host = process_role.value(command, "--host") or ""
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
    except Exception as error:  # nothing listens, it is another protocol (HTTPException), or no metrics
        return Scrape(problem=f"/metrics does not answer: {error}")
    return Scrape(totals)

"""Start and stop a real ``vllm serve --omni``, and account for its processes.

Servers are started on a port that was free a moment ago, in a process group of their own, and count as ready only when
health is answered while that very process is alive: a server that is shutting down keeps its port, and would answer for
a new one. Stopping waits for every process of the tree, so that the next server starts on a quiet machine.
"""

import contextlib
import dataclasses
import os
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

import psutil

from benchmarks.ab.serving import Serving, free_port
from benchmarks.ab.states import Snapshot
from benchmarks.rigs import overlays
from omni_fastpath import process_role

READY_TIMEOUT_S = 420.0
STOP_TIMEOUT_S = 45.0

OFFLINE: Mapping[str, str] = {
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "OMP_NUM_THREADS": "1",  # several processes share few cores
}
"""Of every process with upstream in it."""

DEFAULT_ENVIRONMENT: Mapping[str, str] = {**OFFLINE, "OMNI_SIMULATED_DEVICE": "1"}

VLLM = Path(sys.executable).parent / "vllm"
"""The command beside this interpreter; not resolved: a venv's interpreter is a link to another folder."""

_LIGHT_ENGINES = "omni_simulated_device.light.host"
_STAGE_NAME = re.compile(r"stage(\d+)_replica(\d+)")
_SHARED_MEMORY = Path("/dev/shm")  # noqa: S108  (where upstream's connector keeps its chunks)
_CHUNK = re.compile(r"(?!(shm_)?(fl|rs-|sq-|ss-)\d).+_\d+_\d+(_lockfile\.lock)?")
"""A chunk or its lock file, unless of stages that a test or a benchmark runs in its own process: prefix and its id."""


@dataclasses.dataclass(frozen=True)
class Shutdown:
    """How a server ended."""

    seconds: float
    """From SIGTERM until its last process was gone."""
    killed: tuple[str, ...]
    """Processes that had to be killed, as ``role:pid``; empty after a clean stop."""
    leftovers: tuple[str, ...]
    """Chunks that appeared while it ran; they are removed."""


def role(process: psutil.Process) -> str:
    """``api``, ``stage<i>_replica<j>``, ``engines`` (all light ones) or ``helper`` (resource trackers).

    From what the process calls itself.
    """
    try:
        title = " ".join(process.cmdline()) or process.name()
    except psutil.Error:
        return "gone"
    match = _STAGE_NAME.search(title)
    if match:
        return f"stage{match[1]}_replica{match[2]}"
    if _LIGHT_ENGINES in title:
        return "engines"
    return "helper" if "multiprocessing" in title else "api"


class Server:
    """One server as a context manager: ready on entry, gone on exit.

    ``model`` is a folder that `omni_simulated_device.models` wrote (or any model), ``deploy_config`` a deploy YAML.
    ``environment`` wins over `DEFAULT_ENVIRONMENT`, a value of None removes the variable. The log goes to ``log_path``,
    or to the server's own folder, which is kept when the server failed. ``release`` is another one of vllm-omni than is
    installed (`overlays`), which must have been fetched.
    """

    def __init__(
        self,
        model: str | Path,
        deploy_config: str | Path,
        *,
        environment: Mapping[str, str | None] | None = None,
        arguments: Sequence[str] = (),
        log_path: str | Path | None = None,
        release: str | None = None,
    ) -> None:
        self.model = str(model)
        self.deploy_config = str(deploy_config)
        self.shutdown: Shutdown | None = None
        self.start_s: float | None = None
        """Time from start to ready, seconds."""
        self._extra_environment = dict(environment or {})
        self._arguments = list(arguments)
        self._release = release
        self._folder = Path(tempfile.mkdtemp(prefix="omni-serving-"))
        self.log_path = Path(log_path) if log_path is not None else self._folder / "server.log"
        self._own_log = log_path is None
        self.port = 0
        self._child: Serving | None = None
        self._chunks_before: set[str] = set()

    @property
    def url(self) -> str:
        """Base address, without a trailing slash."""
        return f"http://127.0.0.1:{self.port}"

    @property
    def runtime_folder(self) -> Path:
        """The XDG_RUNTIME_DIR of this server and its stages, nobody else's."""
        return self._folder / "runtime"

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop(keep_log=error is not None)

    def environment(self) -> dict[str, str]:
        """The environment the server gets."""
        values: dict[str, str | None] = {
            **os.environ,
            **DEFAULT_ENVIRONMENT,
            "XDG_RUNTIME_DIR": str(self.runtime_folder),
            **self._extra_environment,
        }
        if self._release is not None:
            paths = filter(None, [values.get("PYTHONPATH")])
            values["PYTHONPATH"] = overlays.python_path(self._release, *paths) or None
        return {name: value for name, value in values.items() if value is not None}

    def start(self) -> None:
        """Start the server and wait until it is ready; raise `MeasureError` with the log's tail otherwise."""
        self.runtime_folder.mkdir(mode=0o700)
        self.port = free_port()
        self._chunks_before = _chunks()
        command = [str(VLLM), "serve", self.model, "--omni", "--deploy-config", self.deploy_config]
        command += ["--port", str(self.port), *self._arguments]
        self._child = Serving(
            command=command,
            port=self.port,
            environment=self.environment(),
            log=self.log_path,
            ready_timeout_s=READY_TIMEOUT_S,
            stop_timeout_s=STOP_TIMEOUT_S,
            folder=self._folder,  # not the repository: its folders must not shadow installed modules
        )
        try:
            self._child.start()
        except BaseException:
            self.stop(keep_log=True)
            raise
        self.start_s = self._child.start_s

    def alive(self) -> bool:
        """Whether the API server process still runs."""
        return self._child is not None and self._child.returncode is None

    def processes(self) -> dict[int, str]:
        """Live processes of the tree: pid to role."""
        return {pid: role(process) for pid, process in self._tree().items()}

    def pids(self, role: str) -> list[int]:
        """Live processes with this role."""
        return [pid for pid, name in self.processes().items() if name == role]

    def _tree(self) -> dict[int, psutil.Process]:
        return self._child.tree() if self._child is not None else {}

    def snapshots(self) -> dict[str, Snapshot]:
        """What the state files of its live processes say, by role; ``api:PID`` is a further API process."""
        roles, found = self.processes(), {}
        for path in sorted((self.runtime_folder / "omni-fastpath").glob("*.json")):
            snapshot = Snapshot.model_validate_json(path.read_bytes())
            if snapshot.pid in roles and snapshot.started == process_role.started(snapshot.pid):
                name = roles[snapshot.pid]
                found[name if name not in found else f"{name}:{snapshot.pid}"] = snapshot
        return found

    def stop(self, *, keep_log: bool = False) -> Shutdown | None:
        """SIGTERM the API server, wait for its whole tree, kill what is left; safe to call again."""
        if self._child is None or self.shutdown is not None:
            return self.shutdown
        roles = self.processes()
        begun = time.monotonic()
        self._child.stop()
        killed = tuple(f"{roles.get(pid, 'helper')}:{pid}" for pid in self._child.killed)
        seconds = time.monotonic() - begun
        self.shutdown = Shutdown(seconds, killed, self._remove_chunks())
        if killed:
            print(f"server on port {self.port}: killed {', '.join(killed)} after {seconds:.0f} s", file=sys.stderr)
        if not (keep_log and self._own_log):
            shutil.rmtree(self._folder, ignore_errors=True)
        return self.shutdown

    def _remove_chunks(self) -> tuple[str, ...]:
        """Remove chunks that this server left, and name them.

        None while a stage of another server lives: a chunk does not say whose it is, and a request whose chunk is gone
        stands still for ever.
        """
        removed = []
        for name in sorted(_chunks() - self._chunks_before) if not _a_stage_lives() else ():
            with contextlib.suppress(OSError):  # another user's
                (_SHARED_MEMORY / name).unlink()
                removed.append(name)
        return tuple(removed)


def _chunks() -> set[str]:
    return {path.name for path in _SHARED_MEMORY.iterdir() if _CHUNK.fullmatch(path.name)}


def _a_stage_lives() -> bool:
    """Whether any process is a stage, by the title that upstream gives it."""
    return any((process.info["name"] or "").startswith("VLLM::") for process in psutil.process_iter(["name"]))

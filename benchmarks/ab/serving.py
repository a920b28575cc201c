"""Start the user's server, wait until it is ready, and stop all of its processes.

It gets its own process group. It is ready when ``/health`` is answered on its port, which was free before, while its
first process runs. To stop it, its first process is terminated. Processes that are left after a while are killed.
"""

from __future__ import annotations

import contextlib
import http.client
import os
import re
import signal
import socket
import subprocess
import time
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import psutil

READY_TIMEOUT_S = 1800.0
STOP_TIMEOUT_S = 60.0
_LOG_TAIL_LINES = 40
_POLL_S = 0.25
_KILL_TIMEOUT_S = 10.0
_DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))
"""Requests without a proxy, because the server is on this machine."""


class MeasureError(RuntimeError):
    """A measurement failed. The message has the reason and the end of a log."""


def free_port() -> int:
    """A TCP port that is free at the moment."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def tail(log: Path) -> str:
    """The end of a log, for a message."""
    try:
        lines = [*map(_plain, log.read_text(encoding="utf-8", errors="replace").splitlines()[-_LOG_TAIL_LINES:])]
    except OSError as error:
        lines = [f"({error})"]
    return f"; the end of {log}:\n" + "\n".join(lines)


def _plain(line: str) -> str:
    """The line without control sequences."""
    return re.sub(r"\x1b\[[0-?]*[ -/]*[@-~]|[\x00-\x08\x0b-\x1f\x7f-\x9f]", "", line)


@dataclass(kw_only=True, eq=False)
class Child:
    """A process with all of its descendants.

    Attributes:
        what: Its name in messages.
        command: Its command, which is run without a shell.
        environment: All of its variables.
        log: The file for its output.
        stop_timeout_s: Seconds after which it is killed if it does not end.
        folder: Its working directory. None means this process's.
        killed: The processes that were killed when it was stopped.
    """

    what: str = "server"
    command: Sequence[str]
    environment: Mapping[str, str]
    log: Path
    stop_timeout_s: float = STOP_TIMEOUT_S
    folder: Path | None = None
    killed: tuple[int, ...] = ()
    _process: subprocess.Popen[bytes] | None = field(default=None, init=False)
    _seen: dict[int, psutil.Process] = field(default_factory=dict, init=False)

    def start(self) -> None:
        """Start it. ``stop`` must be called afterwards, also after an exception.

        Raises:
            MeasureError: It cannot be started.
        """
        self.log.parent.mkdir(parents=True, exist_ok=True)
        with self.log.open("wb") as log:
            try:
                self._process = subprocess.Popen(
                    list(self.command),
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    env=self.environment,
                    cwd=self.folder,
                    start_new_session=True,
                )
            except OSError as error:
                raise MeasureError(f"the {self.what} cannot be started: {error}") from error

    @property
    def returncode(self) -> int | None:
        """Its exit status. None while it runs."""
        return None if self._process is None else self._process.poll()

    def tree(self) -> dict[int, psutil.Process]:
        """Its running processes by id. Once seen, a process stays in it after its parent has ended."""
        roots = list(self._seen.values())
        if self._process is not None and self.returncode is None:  # else another process may have its id
            # Only of this one, because each call reads all processes of the machine.
            roots = [self._seen.setdefault(self._process.pid, psutil.Process(self._process.pid))]
        for process in roots:
            with contextlib.suppress(psutil.Error):
                self._seen |= {each.pid: each for each in process.children(recursive=True)}
        self._seen = {pid: process for pid, process in self._seen.items() if _lives(process)}
        return dict(self._seen)

    def wait(self, other: Child) -> int:
        """Wait for its end while another process must run, and return its exit status.

        Raises:
            MeasureError: The other one ended.
        """
        while (status := self.returncode) is None:
            other.check()
            time.sleep(_POLL_S)
        return status

    def check(self) -> None:
        """Check that it is running.

        Raises:
            MeasureError: It has ended. The message has the end of its log.
        """
        if self.returncode is not None:
            raise MeasureError(f"the {self.what} ended with status {self.returncode}{tail(self.log)}")

    def stop(self) -> None:
        """Terminate the first process, wait for all, and kill the rest after a while."""
        if self._process is None:
            return
        left = self.tree()
        if self.returncode is None:
            self._process.terminate()
        deadline = time.monotonic() + self.stop_timeout_s
        while left and time.monotonic() < deadline:
            time.sleep(0.1)
            left = self.tree()
        self.killed = tuple(left)
        for process in left.values():
            with contextlib.suppress(psutil.Error):
                process.kill()
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)  # processes of its group that were started since
        psutil.wait_procs(list(left.values()), timeout=_KILL_TIMEOUT_S)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=_KILL_TIMEOUT_S)


@dataclass(kw_only=True, eq=False)
class Serving(Child):
    """A server on its own port.

    Attributes:
        port: Its port.
        ready_timeout_s: Seconds within which it must be ready.
        start_s: Seconds until it was ready.
    """

    port: int
    ready_timeout_s: float = READY_TIMEOUT_S
    start_s: float = 0.0

    @property
    def url(self) -> str:
        """Base address, without a trailing slash."""
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        """Start it and wait until it is ready. ``stop`` must be called afterwards, also after an exception.

        Raises:
            MeasureError: It cannot be started, ended, or was not ready in time.
        """
        begun = time.monotonic()
        super().start()
        while not healthy(self.url):
            self.check()
            if time.monotonic() > begun + self.ready_timeout_s:
                unanswered = f"{self.url}/health was not answered in {self.ready_timeout_s:g} s"
                raise MeasureError(f"the server was not ready: {unanswered}{tail(self.log)}")
            self.tree()  # remembers children while their parents live
            time.sleep(_POLL_S)
        self.check()
        self.start_s = time.monotonic() - begun


def healthy(url: str) -> bool:
    """Whether ``/health`` is answered."""
    try:
        with _DIRECT.open(f"{url}/health", timeout=5):
            return True
    except (OSError, ValueError, http.client.HTTPException):  # the last: it speaks no HTTP
        return False


def _lives(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.Error):
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    return False

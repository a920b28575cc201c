"""Start a server of the user's, know when that very one is ready, and leave nothing of it behind.

It gets a process group of its own. It counts as ready when health is answered while its first process lives; its port
was free a moment before. Stopping asks its first process, waits for the whole tree, and kills what is left.
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

from omni_fastpath.tools.ab.interrupts import Interrupts

READY_TIMEOUT_S = 1800.0
STOP_TIMEOUT_S = 60.0
LOG_FOLLOWS = "; the end of "
"""Stands between what went wrong and the end of the log."""
_LOG_TAIL_LINES = 40
_LOOK_EVERY_S = 0.25
_KILL_TIMEOUT_S = 10.0
_DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))
"""No proxy of this shell's: the server is beside us."""


class MeasureError(RuntimeError):
    """A measurement could not be made; the message says why, with the end of the log that knows more."""


def free_port() -> int:
    """A TCP port that nothing listens on at this moment."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def tail(log: Path) -> str:
    """The end of a log, for a message."""
    try:
        lines = [*map(_plain, log.read_text(encoding="utf-8", errors="replace").splitlines()[-_LOG_TAIL_LINES:])]
    except OSError as error:
        lines = [f"({error})"]
    return f"{LOG_FOLLOWS}{log}:\n" + "\n".join(lines)


def _plain(line: str) -> str:
    """Without what a terminal would obey."""
    return re.sub(r"\x1b\[[0-?]*[ -/]*[@-~]|[\x00-\x08\x0b-\x1f\x7f-\x9f]", "", line)


@dataclass(kw_only=True, eq=False)
class Child:
    """A process of ours with all that it starts.

    Attributes:
        what: How a message names it.
        command: Its words; no shell sees them.
        environment: All of its variables.
        log: Where its output goes.
        interrupts: The signals that end waiting.
        stop_timeout_s: How long it may take to end before it is killed, seconds.
        folder: Where it runs; None: where we do.
        killed: The processes that had to be killed when it was stopped.
    """

    what: str = "server"
    command: Sequence[str]
    environment: Mapping[str, str]
    log: Path
    interrupts: Interrupts
    stop_timeout_s: float = STOP_TIMEOUT_S
    folder: Path | None = None
    killed: tuple[int, ...] = ()
    _process: subprocess.Popen[bytes] | None = field(default=None, init=False)
    _seen: dict[int, psutil.Process] = field(default_factory=dict, init=False)

    def start(self) -> None:
        """Start it; ``stop`` must follow, whatever happens.

        Raises:
            MeasureError: It cannot be started.
        """
        self.log.parent.mkdir(parents=True, exist_ok=True)
        with self.log.open("wb") as log:
            try:
                self._process = subprocess.Popen(  # noqa: S603 - the user's own command, without a shell
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
        """How it ended; None while it runs."""
        return None if self._process is None else self._process.poll()

    def tree(self) -> dict[int, psutil.Process]:
        """Its live processes by process id, with those that left its group or lost their parent, once seen."""
        roots = list(self._seen.values())
        if self._process is not None and self.returncode is None:  # else its id may be another's
            # Of this one alone: each look goes through all of the machine's processes.
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
            self.interrupts.check()
            time.sleep(_LOOK_EVERY_S)
        return status

    def check(self) -> None:
        """Whether it still runs.

        Raises:
            MeasureError: It ended; with the end of its log.
        """
        if self.returncode is not None:
            raise MeasureError(f"the {self.what} ended with status {self.returncode}{tail(self.log)}")

    def stop(self) -> None:
        """Ask the first process to end, wait for the whole tree, and kill what is left; at once after a signal."""
        if self._process is None:
            return
        left, signals = self.tree(), self.interrupts.count
        if self.returncode is None:
            self._process.terminate()
        deadline = time.monotonic() + self.stop_timeout_s
        while left and time.monotonic() < deadline and self.interrupts.count == signals:
            time.sleep(0.1)
            left = self.tree()
        self.killed = tuple(left)
        for process in left.values():
            with contextlib.suppress(psutil.Error):
                process.kill()
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)  # its group: what was started after the last look
        psutil.wait_procs(list(left.values()), timeout=_KILL_TIMEOUT_S)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=_KILL_TIMEOUT_S)


@dataclass(kw_only=True, eq=False)
class Serving(Child):
    """A server on a port of its own.

    Attributes:
        port: Where it is asked.
        ready_timeout_s: How long it may take to be ready, seconds.
        start_s: From start to ready, seconds.
    """

    port: int
    ready_timeout_s: float = READY_TIMEOUT_S
    start_s: float = 0.0

    @property
    def url(self) -> str:
        """Base address, without a trailing slash."""
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        """Start it and wait until it is ready; ``stop`` must follow, whatever happens.

        Raises:
            MeasureError: It cannot be started, ended, or was not ready in time.
        """
        begun = time.monotonic()
        super().start()
        while not healthy(self.url):
            self.check()
            self.interrupts.check()
            if time.monotonic() > begun + self.ready_timeout_s:
                unanswered = f"{self.url}/health was not answered in {self.ready_timeout_s:g} s"
                raise MeasureError(f"the server was not ready: {unanswered}{tail(self.log)}")
            self.tree()  # remembers children while their parents live
            time.sleep(_LOOK_EVERY_S)
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

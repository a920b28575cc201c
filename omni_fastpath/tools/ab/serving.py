"""Start a server of the user's, know when that very one is ready, and leave nothing of it behind.

It gets a process group of its own. It counts as ready when a process of its tree listens on its port and health is
answered: a server that is shutting down keeps its port, and would answer for a new one. Stopping asks its first
process, waits for the whole tree, and kills what is left.
"""

from __future__ import annotations

import contextlib
import http.client
import os
import signal
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType

import psutil

from omni_fastpath.tools.ab.errors import MeasureError
from omni_fastpath.tools.ab.interrupts import Interrupts

READY_TIMEOUT_S = 1800.0
STOP_TIMEOUT_S = 60.0
LOG_FOLLOWS = "; the end of "
"""Stands between what went wrong and the end of the log."""
_LOG_TAIL_LINES = 40
_LOOK_EVERY_S = 0.25
_REMEMBER_EVERY_S = 3.0
_KILL_TIMEOUT_S = 10.0
_DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))
"""No proxy of this shell's: the server is beside us."""


def tail(log: Path) -> str:
    """The end of a log, for a message."""
    try:
        lines = log.read_text(encoding="utf-8", errors="replace").splitlines()[-_LOG_TAIL_LINES:]
    except OSError as error:
        lines = [f"({error})"]
    return f"{LOG_FOLLOWS}{log}:\n" + "\n".join(lines)


class Child:
    """A process of ours with all that it starts; as a context manager it is gone on exit, whatever happens."""

    def __init__(
        self,
        what: str,
        command: Sequence[str],
        *,
        environment: Mapping[str, str],
        log: Path,
        interrupts: Interrupts,
        stop_timeout_s: float = STOP_TIMEOUT_S,
        folder: Path | None = None,
    ) -> None:
        self.what = what
        self.log = log
        self.killed: tuple[int, ...] = ()
        """The processes that had to be killed when it was stopped."""
        self._folder = folder
        self._command = list(command)
        self._environment = dict(environment)
        self._interrupts = interrupts
        self._stop_timeout_s = stop_timeout_s
        self._process: subprocess.Popen[bytes] | None = None
        self._seen: dict[int, psutil.Process] = {}
        self._stopped = False

    def __enter__(self) -> Child:  # noqa: PYI034 - Self came with 3.11
        self.log.parent.mkdir(parents=True, exist_ok=True)
        with self._interrupts.held(), self.log.open("wb") as log:
            self._interrupts.at_end(self._stop)
            try:
                self._process = subprocess.Popen(  # noqa: S603 - the user's own command, without a shell
                    self._command,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    env=self._environment,
                    cwd=self._folder,
                    start_new_session=True,
                )
            except OSError as error:
                raise MeasureError(f"the {self.what} cannot be started: {error}") from error
            if self._interrupts.hurry:  # it would be raised before anybody could call __exit__
                self._stop()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._interrupts.held():
            self._stop()

    @property
    def returncode(self) -> int | None:
        """How it ended; None while it runs."""
        return None if self._process is None else self._process.poll()

    def tree(self) -> dict[int, psutil.Process]:
        """Its live processes, those that left its group or lost their parent too, by process id."""
        with contextlib.suppress(psutil.Error):
            if self._process is not None and self._process.returncode is None:  # else its id may be another's
                self._seen.setdefault(self._process.pid, psutil.Process(self._process.pid))
        first = self._seen.get(self._process.pid) if self._process is not None else None
        known = [process for process in self._seen.values() if _lives(process)]
        for above in [first] if first in known else known:  # each look goes through the machine's processes
            with contextlib.suppress(psutil.Error):
                for process in above.children(recursive=True):
                    self._seen.setdefault(process.pid, process)
        return {pid: process for pid, process in self._seen.items() if _lives(process)}

    def wait(self, timeout_s: float | None, meanwhile: Sequence[Child] = ()) -> int:
        """Wait for its end, as long as the others live.

        Raises:
            MeasureError: It takes longer, or one of the others ended.
        """
        begun = looked = time.monotonic()
        while (status := self.returncode) is None:
            now = time.monotonic()
            if now > looked + _REMEMBER_EVERY_S:
                self.tree()  # remember children while their parents can still be asked; seldom, beside a load
                looked = now
            for other in meanwhile:
                other.check()
            if timeout_s is not None and now > begun + timeout_s:
                raise MeasureError(f"the {self.what} did not end in {timeout_s:g} s{tail(self.log)}")
            time.sleep(_LOOK_EVERY_S)
        return status

    def check(self) -> None:
        """Whether it still runs.

        Raises:
            MeasureError: It ended; with the end of its log.
        """
        if self.returncode is not None:
            raise MeasureError(f"the {self.what} ended with status {self.returncode}{tail(self.log)}")

    def kill(self) -> None:
        """Kill its process group without asking."""
        if self._process is None:
            return
        self.tree()  # remember whoever left the group
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)

    def _stop(self) -> None:
        if self._process is None or self._stopped:
            return
        self.tree()
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
        begun = time.monotonic()
        while (left := self._left()) and time.monotonic() < begun + self._stop_timeout_s and not self._interrupts.hurry:
            time.sleep(0.1)
        self.killed = tuple(left)
        for process in left.values():
            with contextlib.suppress(psutil.Error):
                process.kill()
        self.kill()  # whoever was started after the last look
        psutil.wait_procs(list(left.values()), timeout=_KILL_TIMEOUT_S)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=_KILL_TIMEOUT_S)
        self._stopped = True

    def _left(self) -> dict[int, psutil.Process]:
        assert self._process is not None
        self._process.poll()  # reaps the first one, which is no zombie of ours then
        return self.tree()


class Serving(Child):
    """A server on a port of its own, ready on entry."""

    def __init__(
        self,
        command: Sequence[str],
        port: int,
        *,
        environment: Mapping[str, str],
        log: Path,
        interrupts: Interrupts,
        ready_timeout_s: float = READY_TIMEOUT_S,
        stop_timeout_s: float = STOP_TIMEOUT_S,
        folder: Path | None = None,
    ) -> None:
        super().__init__(
            "server",
            command,
            environment=environment,
            log=log,
            interrupts=interrupts,
            stop_timeout_s=stop_timeout_s,
            folder=folder,
        )
        self.port = port
        self.start_s = 0.0
        """From start to ready, seconds."""
        self._ready_timeout_s = ready_timeout_s

    @property
    def url(self) -> str:
        """Base address, without a trailing slash."""
        return f"http://127.0.0.1:{self.port}"

    def __enter__(self) -> Serving:  # noqa: PYI034 - Self came with 3.11
        begun = time.monotonic()
        try:
            super().__enter__()
            self._wait_until_ready(begun + self._ready_timeout_s)
        except BaseException:
            self.__exit__(None, None, None)
            raise
        self.start_s = time.monotonic() - begun
        return self

    def _wait_until_ready(self, deadline: float) -> None:
        while time.monotonic() < deadline:
            tree = self.tree()
            if self.returncode is not None:
                status = self.returncode
                raise MeasureError(f"the server ended with status {status} before it was ready{tail(self.log)}")
            if healthy(self.url) and listener(self.port) in (None, *tree, *self.tree()):
                return
            time.sleep(_LOOK_EVERY_S)
        unanswered = f"{self.url}/health was not answered"
        raise MeasureError(f"the server was not ready after {self._ready_timeout_s:g} s: {unanswered}{tail(self.log)}")


def healthy(url: str) -> bool:
    """Whether ``/health`` is answered."""
    try:
        with _DIRECT.open(f"{url}/health", timeout=5) as response:
            return bool(response.status == 200)
    except (urllib.error.URLError, OSError, ValueError, http.client.HTTPException):  # the last: it speaks no HTTP
        return False


def listener(port: int) -> int | None:
    """The process that listens on a port of this machine; None where none is, or none can be seen."""
    with contextlib.suppress(psutil.Error):
        for connection in psutil.net_connections(kind="tcp"):
            here = connection.laddr[1:2] == (port,) and connection.status == psutil.CONN_LISTEN
            if here and connection.pid is not None:
                return int(connection.pid)
    return None


def _lives(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.Error):
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    return False

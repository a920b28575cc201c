"""Start a server of the user's, know when that very one is ready, and leave nothing of it behind.

It gets a process group of its own. It counts as ready when health is answered while its first process lives; its port
was free a moment before. Stopping asks its first process, waits for the whole tree, and kills what is left.
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
from dataclasses import dataclass, field
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


@dataclass(kw_only=True, eq=False)
class Child:
    """A process of ours with all that it starts; as a context manager it is gone on exit, whatever happens.

    Attributes:
        what: How a message names it.
        command: Its words; no shell sees them.
        environment: All of its variables.
        log: Where its output goes.
        interrupts: The signals that must not end a start or a stop halfway.
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
    _stopped: bool = field(default=False, init=False)

    def __enter__(self) -> Child:  # noqa: PYI034 - Self came with 3.11
        self.log.parent.mkdir(parents=True, exist_ok=True)
        with self.interrupts.held(), self.log.open("wb") as log:
            self.interrupts.at_end(self._stop)
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
            if self.interrupts.hurry:  # it would be raised before anybody could call __exit__
                self._stop()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self.interrupts.held():
            self._stop()

    @property
    def returncode(self) -> int | None:
        """How it ended; None while it runs."""
        return None if self._process is None else self._process.poll()

    def tree(self) -> dict[int, psutil.Process]:
        """Its live processes by process id, with those that left its group or lost their parent, once seen."""
        if self._process is None:
            return {}
        if self.returncode is None:  # else its id may be another's
            self._seen.setdefault(self._process.pid, psutil.Process(self._process.pid))
        known = {pid: process for pid, process in self._seen.items() if _lives(process)}
        first = known.get(self._process.pid)
        # Each look goes through all of the machine's processes.
        for above in [first] if first is not None else list(known.values()):
            with contextlib.suppress(psutil.Error):
                known |= {process.pid: process for process in above.children(recursive=True)}
        self._seen |= known
        return {pid: process for pid, process in known.items() if _lives(process)}

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

    def _stop(self) -> None:
        """Ask the first process to end, wait for the whole tree, and kill what is left; once."""
        if self._process is None or self._stopped:
            return
        left = self.tree()
        if self.returncode is None:
            self._process.terminate()
        deadline = time.monotonic() + self.stop_timeout_s
        while left and time.monotonic() < deadline and not self.interrupts.hurry:
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
        self._stopped = True


@dataclass(kw_only=True, eq=False)
class Serving(Child):
    """A server on a port of its own, ready on entry.

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

    def __enter__(self) -> Serving:  # noqa: PYI034 - Self came with 3.11
        begun = time.monotonic()
        try:
            super().__enter__()
            self._wait_until_ready(begun + self.ready_timeout_s)
        except BaseException:
            self.__exit__(None, None, None)
            raise
        self.start_s = time.monotonic() - begun
        return self

    def _wait_until_ready(self, deadline: float) -> None:
        while not healthy(self.url):
            if self.returncode is not None:
                status = self.returncode
                raise MeasureError(f"the server ended with status {status} before it was ready{tail(self.log)}")
            if time.monotonic() > deadline:
                unanswered = f"{self.url}/health was not answered in {self.ready_timeout_s:g} s"
                raise MeasureError(f"the server was not ready: {unanswered}{tail(self.log)}")
            self.tree()
            time.sleep(_LOOK_EVERY_S)
        self.check()


def healthy(url: str) -> bool:
    """Whether ``/health`` is answered."""
    try:
        with _DIRECT.open(f"{url}/health", timeout=5) as response:
            return bool(response.status == 200)
    except (urllib.error.URLError, OSError, ValueError, http.client.HTTPException):  # the last: it speaks no HTTP
        return False


def _lives(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.Error):
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    return False

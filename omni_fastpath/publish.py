"""Making the ledger visible outside the process: the state file that ``status`` and the server's metrics read.

Nothing here may disturb serving: whatever goes wrong is logged once, and the server goes on.
"""

from __future__ import annotations

import atexit
import contextlib
import itertools
import multiprocessing
import os
import re
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from omni_fastpath import __version__, commandline, statefile
from omni_fastpath.declare import Process, State
from omni_fastpath.ledger import LEDGER, logger
from omni_fastpath.releases import vllm_omni_release, vllm_release

REFRESH_S = 2.0
"""How stale a counter in the state file may be, and how soon a lost file is back, seconds."""

_STAGE_PROCESS = re.compile(r"_stage(\d+)_replica(\d+)")


def stage_and_replica() -> tuple[int | None, int | None]:
    """Which stage and which of its replicas this process was spawned for; None for each that it does not know.

    Upstream names an engine process after them (``StageEngineCoreProcManager``), and hands them to a diffusion process
    as arguments (``StageDiffusionProcManager``), which the process object keeps. Workers know neither.
    """
    process = multiprocessing.current_process()
    match = _STAGE_PROCESS.search(process.name)
    if match:
        return int(match[1]), int(match[2])
    arguments = getattr(process, "_kwargs", {})
    stage, replica = arguments.get("omni_stage_id"), arguments.get("omni_replica_id")
    return (stage, replica) if isinstance(stage, int) and isinstance(replica, int) else (None, None)


class Publisher:
    """Writes this process's state file.

    After every change of a state; and unless every patch is off, every ``REFRESH_S`` when counters moved or the file is
    gone: a cleaner of temporary files or a user's logout takes it, and a look from outside must find this process.

    Args:
        process: The kind of process this is.
        source: Where the configuration came from, for display.
        hooks: Tells the hook plugins (``HookManager.told``); None where none were looked for.
    """

    def __init__(
        self, process: Process, source: str | None, *, hooks: Callable[[], Mapping[str, Any]] | None = None
    ) -> None:
        self._process = process
        self._source = source
        self._hooks = hooks
        serves = process is Process.SERVER and commandline.is_serve(sys.argv[1:])
        self._port = commandline.port(sys.argv[1:]) if serves else None
        self._pid = os.getpid()
        # Looked up once: they do not change while a process lives, and the file is written every few seconds.
        vllm, vllm_omni = vllm_release(), vllm_omni_release()
        self._releases = {
            "omni_fastpath": __version__,
            "vllm": str(vllm) if vllm is not None else None,
            "vllm_omni": vllm_omni.version if vllm_omni is not None else None,
        }
        self._lock = threading.Lock()
        self._numbers = itertools.count(1)
        self._newest = 0
        self._stage, self._replica = stage_and_replica()
        self._last: dict[str, Any] = {}
        self._path: Path | None = None
        self._refreshing = False
        self._ended = threading.Event()
        self._complained = False

    def start(self) -> None:
        """Write the file now and keep it true; remove it at exit."""
        self.write()
        LEDGER.listen(lambda *_: self.write())
        atexit.register(self._remove)

    def update(self, source: str | None) -> None:
        """The configuration was read again, perhaps from elsewhere."""
        if source != self._source:
            self._source = source
            self._last = {}
        self.write()

    def write(self) -> None:
        """Write the file if anything changed since it was written, or it is not where it belongs."""
        if os.getpid() != self._pid:
            return  # a forked child's: it has inherited the parent's file, and perhaps a lock that nobody will open
        # Not under the lock: what a patch shows may fail, which is reported, and a report comes here again.
        number = next(self._numbers)
        patches = LEDGER.snapshot()
        with self._lock:
            if number < self._newest:
                return  # what is written was looked up after this call began, and has all that it was to tell
            self._newest = number
            try:
                now = self._now(patches)
                if now != self._last or self._is_lost():
                    self._write(now)
            except Exception as error:
                self._complain("the state file cannot be written, status will not show this", error)
            if any(entry["state"] != State.OFF.value for entry in patches.values()):
                self._keep_fresh()

    def _now(self, patches: Mapping[str, Any]) -> dict[str, Any]:
        return {
            "patches": patches,
            "hooks": None if self._hooks is None else self._hooks(),
        }

    def _is_lost(self) -> bool:
        # The folder may have changed too: /run/user/UID comes and goes with a user's sessions.
        path = statefile.path()
        return path != self._path or not path.exists()

    def _write(self, now: dict[str, Any]) -> None:
        path = statefile.write(
            {
                "role": self._process.value,
                "process_name": multiprocessing.current_process().name,
                "stage": self._stage,
                "replica": self._replica,
                "port": self._port,
                **self._releases,
                "updated": time.time(),
                "source": self._source,
                **now,
            }
        )
        before, self._path, self._last = self._path, path, now
        if before is not None and before != path:
            before.unlink(missing_ok=True)

    def _keep_fresh(self) -> None:
        """Where nothing is on, nobody looks for counters, and no thread is needed."""
        if not self._refreshing:
            try:
                threading.Thread(target=self._refresh, name="omni-fastpath-state", daemon=True).start()
            except RuntimeError as error:  # a limit of processes, or the interpreter ends
                self._complain("status will show old counters of this process", error)
            else:
                self._refreshing = True

    def _complain(self, what: str, error: Exception) -> None:
        if not self._complained:
            self._complained = True
            logger.warning("omni-fastpath: %s: %s", what, error)

    def _refresh(self) -> None:
        while not self._ended.wait(REFRESH_S):
            self.write()

    def _remove(self) -> None:
        if os.getpid() != self._pid or self._path is None:  # a forked child inherits the handler, not the file
            return
        self._ended.set()  # else the thread may find the file gone and write it once more
        with contextlib.suppress(OSError):  # at exit there is nobody left to tell, and readers delete it
            self._path.unlink()

"""Making the ledger visible outside the process: the state file that ``status`` and the server's metrics read.

Nothing here disturbs serving: what goes wrong is logged once, and the server goes on.
"""

from __future__ import annotations

import atexit
import contextlib
import multiprocessing
import os
import re
import sys
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from omni_fastpath import __version__, process_role, statefile
from omni_fastpath.declare import Process, State
from omni_fastpath.ledger import LEDGER, warn_once
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
        serves = process is Process.SERVER and process_role.is_serve(sys.argv[1:])
        stage, replica = stage_and_replica()
        vllm, vllm_omni = vllm_release(), vllm_omni_release()
        # Looked up once: these do not change while a process lives, and the file is written every few seconds.
        self._fixed = {
            "role": process.value,
            "process_name": multiprocessing.current_process().name,
            "stage": stage,
            "replica": replica,
            "port": process_role.port(sys.argv[1:]) if serves else None,
            "omni_fastpath": __version__,
            "vllm": str(vllm) if vllm is not None else None,
            "vllm_omni": vllm_omni.version if vllm_omni is not None else None,
        }
        self._source = source
        self._hooks = hooks
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._last: dict[str, Any] = {}
        self._path: Path | None = None
        self._refreshing = False
        self._ended = threading.Event()

    def start(self) -> None:
        """Write the file now and keep it true; remove it at exit."""
        LEDGER.listen(lambda *_: self.write())
        atexit.register(self._remove)
        self.write()

    def update(self, source: str | None) -> None:
        """The configuration was read again, perhaps from elsewhere."""
        self._source = source
        self.write()

    def write(self) -> None:
        """Write the file if anything changed since it was written, or it is not where it belongs.

        What another thread's call has overtaken is put right by the next refresh.
        """
        if os.getpid() != self._pid:
            return  # a forked child has inherited the parent's file, and perhaps a lock that is never released
        try:
            # Not under the lock: a patch whose figures fail reports that, and a report comes here again.
            hooks = None if self._hooks is None else self._hooks()
            now = {"source": self._source, "patches": LEDGER.snapshot(), "hooks": hooks}
            with self._lock:
                self._write(now)
        except Exception as error:
            warn_once(f"the state file cannot be written, status will not show this: {error}")
        self._keep_fresh()

    def _write(self, now: dict[str, Any]) -> None:
        path, before = statefile.path(), self._path
        # The folder may have changed too: /run/user/UID comes and goes with a user's sessions.
        if now == self._last and path == before and path.exists():
            return
        self._path, self._last = statefile.write({**self._fixed, **now}), now
        if before is not None and before != path:
            before.unlink(missing_ok=True)

    def _keep_fresh(self) -> None:
        """Start the refreshing thread, unless every patch is off: then no counter moves."""
        with self._lock:
            if self._refreshing or all(entry.state is State.OFF for entry in LEDGER):
                return
            threading.Thread(target=self._refresh, name="omni-fastpath-state", daemon=True).start()
            self._refreshing = True

    def _refresh(self) -> None:
        while not self._ended.wait(REFRESH_S):
            self.write()

    def _remove(self) -> None:
        if os.getpid() != self._pid or self._path is None:  # a forked child inherits the handler, not the file
            return
        self._ended.set()  # else the thread may find the file gone and write it once more
        with contextlib.suppress(OSError):
            self._path.unlink()

"""A server that is not asked to stop."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path

from benchmarks.rigs.server import Server, Shutdown

_STOP_S = 10.0


class KilledServer(Server):
    """A server that is killed instead of asked to stop, once everything is measured.

    A clean stop of six stage processes takes 22 to 28 seconds on two cores, a fifth of the run. How servers stop is
    tested elsewhere. Here the group is killed, and what it would have cleaned up is removed: shared memory by the
    harness, sockets with the server's own temporary folder.
    """

    def __init__(
        self, model: Path, deploy: Path, *, temporary: Path, log: Path, values: Mapping[str, str | None]
    ) -> None:
        temporary.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._temporary = temporary
        super().__init__(model, deploy, environment=values, log_path=log, stop_timeout_s=_STOP_S)

    def stop(self, *, keep_log: bool = False) -> Shutdown | None:
        """Kill the server's process group; then as the harness does."""
        if self._child is not None and self.shutdown is None:
            self._child.kill()
        try:
            return super().stop(keep_log=keep_log)
        finally:
            shutil.rmtree(self._folder, ignore_errors=True)
            shutil.rmtree(self._temporary, ignore_errors=True)

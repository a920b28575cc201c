"""What ended requests left in shared memory. There is no thread and no clock in here."""

from __future__ import annotations

import contextlib
import os
import re
import stat
from collections.abc import Container, Iterable
from multiprocessing import resource_tracker
from pathlib import Path
from threading import Lock

FOLDER = Path("/dev/shm")  # noqa: S108 - where upstream's connector puts chunks
GRACE_S = 5.0
"""Age of an end and of a file before it is removed. A stage may need so long to get the abort, or to complete a put."""
KEEP_S = 300.0
"""How long after its end a request's chunks are looked for. A stage may still be sending."""
MOST_REQUESTS = 10_000
_NAME = re.compile(r"(?P<lock>shm_)?(?P<request>.+)_\d+_\d+(?(lock)_lockfile\.lock)", re.DOTALL)
"""The name of a chunk, or of its lock file: the external id of a request, the stage that sent it, and a number. Clients
may choose the id, so it may have any character but a slash."""
_TRACKABLE = re.compile(r"[\w.-]+", re.ASCII)
"""Names that Python's tracker takes: its messages are lines of ASCII with colons."""


class Leftovers:
    """Ended requests, and the removal of their files. Several threads may note, and one removes.

    Args:
        counters: Where removed ``chunks`` and ``lock_files`` are counted.
        folder: Where the chunks are.
    """

    def __init__(self, counters: dict[str, int], folder: Path = FOLDER) -> None:
        self._counters, self._folder = counters, folder
        self._lock = Lock()
        self._ended: dict[str, tuple[float, Container[str]]] = {}  # the earliest first

    def note_ended(self, requests: Iterable[str], live: Container[str], now: float) -> None:
        """Note that requests have ended.

        Args:
            requests: Their external ids.
            live: The external ids of the requests that live, now and later.
            now: Seconds since the epoch, as the times of files.
        """
        with self._lock:
            for request in requests:
                self._ended.pop(request, None)
                self._ended[request] = now, live
            while len(self._ended) > MOST_REQUESTS:
                del self._ended[next(iter(self._ended))]

    def remove(self, now: float) -> None:
        """Remove the files of requests that ended a while ago and do not live again."""
        with contextlib.suppress(OSError), os.scandir(self._folder) as files:
            for file in files:
                name = _NAME.fullmatch(file.name)
                ended_s, live = self._ended.get(name["request"] if name else "", (now, ()))
                if name is None or now - ended_s < GRACE_S:
                    continue
                with contextlib.suppress(OSError):  # it was read meanwhile
                    found = file.stat(follow_symlinks=False)
                    is_old = now - found.st_mtime >= GRACE_S and stat.S_ISREG(found.st_mode)
                    # Checked last: an id that comes back only now has no file of this age.
                    if is_old and name["request"] not in live:
                        Path(file.path).unlink()
                        self._counters["lock_files" if name["lock"] else "chunks"] += 1
                        # Python's tracker of the stages that were spawned here has the names of their chunks, and would
                        # warn at the end. It is told the name first, because it complains about one that it has not.
                        if not name["lock"] and _TRACKABLE.fullmatch(file.name):
                            resource_tracker.register(f"/{file.name}", "shared_memory")
                            resource_tracker.unregister(f"/{file.name}", "shared_memory")

    def forget(self, before: float) -> bool:
        """Forget the requests that ended before this time. Returns whether one is left."""
        with self._lock:
            while self._ended and next(iter(self._ended.values()))[0] < before:
                del self._ended[next(iter(self._ended))]
            return bool(self._ended)

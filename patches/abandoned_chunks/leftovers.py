"""What ended requests left in shared memory. There is no thread and no clock in here."""

from __future__ import annotations

import contextlib
import os
import re
import stat
from collections import OrderedDict
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
_LOCK_FILE = re.compile(r"shm_(.+_\d+_\d+)_lockfile\.lock")
_CHUNK = re.compile(r"(.+)_\d+_\d+")
"""The name of a chunk: the external id of a request, the stage that sent it, and a number."""


class Leftovers:
    """Ended requests, and the removal of their files. Several threads may note, and one removes.

    Args:
        folder: Where the chunks are.

    Attributes:
        chunks: Number of removed chunks.
        lock_files: Number of removed lock files.
        nbytes: Size of the removed chunks.
    """

    def __init__(self, folder: Path = FOLDER) -> None:
        self.chunks = self.lock_files = self.nbytes = 0
        self._folder = folder
        self._lock = Lock()
        self._ended: OrderedDict[str, tuple[float, Container[str]]] = OrderedDict()

    def note_ended(self, requests: Iterable[str], live: Container[str], now: float) -> None:
        """Note that requests have ended.

        Args:
            requests: Their external ids.
            live: The external ids of the requests that live, now and later.
            now: Seconds since the epoch, as the times of files.
        """
        with self._lock:
            for request in requests:
                self._ended[request] = now, live
                self._ended.move_to_end(request)
            while len(self._ended) > MOST_REQUESTS:
                self._ended.popitem(last=False)

    def remove(self, now: float) -> None:
        """Remove the files of requests that ended a while ago and do not live again."""
        with contextlib.suppress(OSError), os.scandir(self._folder) as files:
            for file in files:
                lock_file = _LOCK_FILE.fullmatch(file.name)
                name = _CHUNK.fullmatch(file.name if lock_file is None else lock_file[1])
                ended_s, live = self._ended.get("" if name is None else name[1], (now, ()))
                if now - ended_s >= GRACE_S:
                    with contextlib.suppress(OSError):  # it was read meanwhile
                        found = file.stat(follow_symlinks=False)
                        is_old = now - found.st_mtime >= GRACE_S and stat.S_ISREG(found.st_mode)
                        # Checked last: an id that comes back only now has no file of this age.
                        if is_old and name is not None and name[1] not in live:
                            self._unlink(file.name, None if lock_file else found.st_size)

    def forget(self, before: float) -> bool:
        """Forget the requests that ended before this time. Returns whether one is left."""
        with self._lock:
            while self._ended and next(iter(self._ended.values()))[0] < before:
                self._ended.popitem(last=False)
            return bool(self._ended)

    def _unlink(self, name: str, nbytes: int | None) -> None:
        """Unlink a lock file, or a chunk of this size."""
        (self._folder / name).unlink()
        if nbytes is None:
            self.lock_files += 1
            return
        self.chunks += 1
        self.nbytes += nbytes
        # Otherwise it warns at the server's end, and keeps the name until then. It has the names of all stages that
        # were spawned here. Of others it has none, and gets none.
        resource_tracker.register(f"/{name}", "shared_memory")
        resource_tracker.unregister(f"/{name}", "shared_memory")

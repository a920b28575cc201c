"""Chunks in shared memory that the next stage has not fetched.

The receiver unlinks a segment when it has read it, chunks of a stream in their order; nobody tells the sender. Looking
is a system call, so the save threads do it, never the scheduler's; few are needed, since what is gone comes first.
"""

from __future__ import annotations

import os
import threading
import time
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

FOLDER = "/dev/shm"  # noqa: S108 - where POSIX shared memory is on Linux; upstream's connector looks there too
LOOK_S = 1.0
"""Between two looks where no limit is near. Each system call gives the interpreter's lock away: with ten looks a second
at 128 streams a chunk cost 7 % more processor time."""
NEAR_LOOK_S = 0.1
"""The same while half of the bytes are used up."""
WANTED_LOOK_S = 0.002
"""The same while the scheduler holds a stream for what was not fetched, as often as it schedules."""
ABANDONED_S = 60.0
"""Time after a stream's end after which nobody is held for chunks that were not fetched: their receiver may be gone.
They are counted for as long as they exist."""

_MANY = 64
"""Chunks of a stream from which on each send looks at it where no limit says so."""


def size_of(name: str) -> int:
    """Bytes of a segment; 0 when it is not there (any more)."""
    try:
        return os.stat(f"{FOLDER}/{name}").st_size  # noqa: PTH116 - as below
    except FileNotFoundError:
        return 0


def _is_there(name: str) -> bool:
    return os.path.exists(f"{FOLDER}/{name}")  # noqa: PTH110 - a quarter of the time of a Path


class Book:
    """Upstream's own list of the segments that a connector put, from which it takes out those that are gone.

    Args:
        connector: A ``SharedMemoryConnector``, whose ``put`` is pinned.
    """

    def __init__(self, connector: Any) -> None:
        self._connector = connector

    @property
    def transferred(self) -> int:
        """Bytes that were put so far."""
        return int(self._connector._metrics["bytes_transferred"])

    def names(self) -> list[str]:
        """Segments that were put and may be there still."""
        with self._connector._pending_keys_lock:
            return list(self._connector._pending_keys)


@dataclass(slots=True)
class _Segments:
    waiting: deque[tuple[str, int]] = field(default_factory=deque)
    nbytes: int = 0
    ended_s: float | None = None
    is_abandoned: bool = False


class Chunks:
    """The unfetched chunks of one sender.

    Args:
        gone: Told a stream, how many of its chunks count no longer, and whether they were fetched.
        abandoned: Told how many chunks were given up.
        look_at: Count of a stream from which on each send looks at it, so that nobody is held for chunks long gone.
    """

    def __init__(
        self,
        gone: Callable[..., None],
        abandoned: Callable[[int], None],
        look_at: int | None = None,
    ) -> None:
        self.nbytes = 0
        """Bytes of all segments that exist, as of the last look."""
        self.abandoned_nbytes = 0
        """Those of them that nobody is held for."""
        self._gone = gone
        self._abandoned = abandoned
        self._look_at = look_at or _MANY
        self._streams: dict[str, _Segments] = {}
        self._lock = threading.Lock()
        self._last_look_s = 0.0
        self._next_look_s = 0.0

    def put(self, stream: str, name: str, size: int) -> bool:
        """A send of this stream left a segment of that name and so many bytes; whether it was not counted yet."""
        with self._lock:
            segments = self._streams.get(stream)
            if segments is None:
                segments = self._streams[stream] = _Segments()
            elif segments.ended_s is not None:
                # A new request has an old one's external id: what was counted is gone, under names that come again.
                self._forget(stream, segments)
                segments.ended_s = None
            if segments.waiting and segments.waiting[-1][0] == name:
                return False
            segments.waiting.append((name, size))
            segments.nbytes += size
            self._count(segments, size)
            if len(segments.waiting) >= self._look_at:
                self._drop_fetched(stream, segments)
            return True

    def ended(self, stream: str) -> None:
        """The stream sends nothing more; its chunks were unlinked or wait for their receiver."""
        with self._lock:
            segments = self._streams.get(stream)
            if segments is not None:
                segments.ended_s = time.monotonic()
                self._drop_fetched(stream, segments)

    def adopt(self, names: Iterable[str], is_live: Callable[[str], bool], came: Callable[[str], None]) -> None:
        """Count segments that were put before anybody counted them here.

        Args:
            names: Of the segments; some may be gone, some are counted.
            is_live: Whether more may be sent of a stream.
            came: Told the stream of each that is counted from now on.
        """
        self.look_now()
        self.end_those_without(is_live)
        found = [(*name.rsplit("_", 2), name) for name in names]
        for stream, _, _, name in sorted(found, key=lambda each: (each[0], int(each[2]))):
            if self.knows(stream, name):
                continue
            size = size_of(name)
            if size and self.put(stream, name, size):
                came(stream)
                if not is_live(stream):
                    self.ended(stream)

    def knows(self, stream: str, name: str) -> bool:
        """Whether a segment is counted."""
        segments = self._streams.get(stream)
        return segments is not None and any(each == name for each, _ in segments.waiting)

    def end_those_without(self, is_live: Callable[[str], bool]) -> None:
        """Streams of which nothing more will be sent have ended."""
        with self._lock:
            now = time.monotonic()
            for stream, segments in self._streams.items():
                if segments.ended_s is None and not is_live(stream):
                    segments.ended_s = now

    def want(self, within_s: float) -> bool:
        """Look so soon after the last look; whether it is time already and a save thread should be woken for it."""
        self._next_look_s = min(self._next_look_s, self._last_look_s + within_s)
        return bool(self._streams) and time.monotonic() >= self._next_look_s

    def look(self, now: float) -> None:
        """Look at every stream if it is time to; called by the lanes, which never wait for it."""
        if now < self._next_look_s or not self._streams or not self._lock.acquire(blocking=False):
            return
        try:
            for stream in list(self._streams):
                segments = self._streams[stream]
                self._drop_fetched(stream, segments)
                if segments.ended_s is not None and now - segments.ended_s > ABANDONED_S and segments.waiting:
                    self._abandon(stream, segments)
            self._last_look_s = time.monotonic()
            self._next_look_s = self._last_look_s + LOOK_S
        finally:
            self._lock.release()

    def look_now(self) -> None:
        """Look at every stream, whenever that was done last."""
        self._next_look_s = 0.0
        self.look(time.monotonic())

    def _drop_fetched(self, stream: str, segments: _Segments) -> None:
        waiting = segments.waiting
        gone = bisect_left(
            range(len(waiting)), 1, key=lambda place: _is_there(waiting[place][0])
        )  # in order, as they came
        for _ in range(gone):
            _, size = waiting.popleft()
            segments.nbytes -= size
            self._count(segments, -size)
        if gone and not segments.is_abandoned:
            self._gone(stream, gone, fetched=True)
        if not waiting:
            del self._streams[stream]

    def _count(self, segments: _Segments, size: int) -> None:
        self.nbytes += size
        if segments.is_abandoned:
            self.abandoned_nbytes += size

    def _abandon(self, stream: str, segments: _Segments) -> None:
        """Nobody is held for them any more; they stay counted, and are looked for."""
        if not segments.is_abandoned:
            segments.is_abandoned = True
            self.abandoned_nbytes += segments.nbytes
            self._abandoned(len(segments.waiting))
            self._gone(stream, len(segments.waiting), fetched=False)

    def _forget(self, stream: str, segments: _Segments) -> None:
        if not segments.is_abandoned:
            self._gone(stream, len(segments.waiting), fetched=False)
        self._count(segments, -segments.nbytes)
        segments.is_abandoned = False
        segments.waiting.clear()
        segments.nbytes = 0
